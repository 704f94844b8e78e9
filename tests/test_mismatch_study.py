"""examples/mismatch-study: its script reads what runs measured, and its README names right configurations."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vime.config.load import dump, load
from vime.observe.metrics import Recorder

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "examples" / "mismatch-study"
MEASURED = [
    {
        "train/logprob_abs_diff_mean": 0.01,
        "train/logprob_abs_diff_max": 0.25,
        "train/mismatch_kl": 2e-4,
        "reward/mean": 0.1,
    },
    {
        "train/logprob_abs_diff_mean": 0.03,
        "train/logprob_abs_diff_max": 0.5,
        "train/mismatch_kl": 4e-4,
        "reward/mean": 0.4,
    },
]


def study(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(STUDY / "study.py"), *words]
    environment = {"PYTHONPATH": str(ROOT), "COLUMNS": "160", "PATH": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    """Names a folder that passes for a model's."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return ["--model.path", str(tmp_path / "model")]


def make_run(folder: Path, words: list[str]) -> str:
    """The study's run of two steps, as it lies on disk; the second was filtered whole."""
    recorder = Recorder(folder)
    config = load(STUDY / "config.toml", ["--run.dir", str(folder), *words])
    (folder / "config.toml").write_text(dump(config))
    for step, metrics in enumerate(MEASURED, 1):
        recorder.log("step", step, metrics)
    recorder.log("step", 3, {"reward/mean": 0.5})
    recorder.close()
    return str(folder)


@pytest.fixture
def runs(tmp_path: Path, model: list[str]) -> list[str]:
    plain = make_run(tmp_path / "bfloat16-none", model)
    corrected = ["--model.dtype", "float32", "--algorithm.corrections.tis.high", "2"]
    return [plain, make_run(tmp_path / "float32-tis", [*model, *corrected])]


def test_the_table_says_what_the_runs_measured(runs: list[str]) -> None:
    done = study(*runs)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in done.stdout.splitlines() if "→" in line]
    measured = ["3", "2.00e-02", "5.00e-01", "3.00e-04", "-", "0.100 → 0.500"]
    assert rows == [
        ["bfloat16-none", "bfloat16", "none", *measured],
        ["float32-tis", "float32", "tis", *measured],
    ]


def test_the_page_shows_a_curve_of_every_run_and_loads_nothing(runs: list[str], tmp_path: Path) -> None:
    done = study(*runs, "--page", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 4 and all(page.count(name) >= 4 for name in ("bfloat16-none", "float32-tis"))
    assert not re.search(r"https?://", page)


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    done = study(str(tmp_path))
    assert done.returncode == 2 and f"{tmp_path} holds no metrics.jsonl; name the folder of a run" in done.stderr


def test_every_run_of_the_readme_is_a_right_configuration(model: list[str]) -> None:
    text = (STUDY / "README.md").read_text()
    options = re.findall(r"\$run-\w+(.*)", text)
    assert len(options) == 3
    for dtype in ("bfloat16", "float32"):
        for words in options:
            given = ["--model.dtype", dtype, *model, *words.split()]
            assert load(STUDY / "config.toml", given).model.dtype == dtype
