"""``run.deterministic``: a run that was interrupted and resumed is, bit for bit, the one that was not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.test_train import ROOT, lines, write_job

MEASURED = (
    "time/",
    "checkpoint/",
    "servers/",
    "driver/",
    "rollout/seconds",
    "weights/probe",
)  # not of what was trained
RATES = ("tokens_per_s", "memory_peak_gib", "mfu")


def train(command: list[str], *words: str) -> None:
    done = subprocess.run(
        [*command, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def whole_and_resumed(models: Any, tmp_path_factory: Any) -> tuple[Path, Path]:
    """Folders of the same run: of three steps at once, and of one and then two more."""
    folder = tmp_path_factory.mktemp("deterministic")
    command = write_job(folder, models("tied"), steps=3)[:-2]
    command += [
        "--run.deterministic=true",
        "--inference.servers=1",
        "--trainer.ranks=1",
        "--rollout.filter=zero_variance",
        "--eval.every=1",
    ]
    train(command, "--run.dir", str(folder / "whole"))
    train(command, "--run.dir", str(folder / "resumed"), "--run.steps=1")
    train(command, "--run.dir", str(folder / "resumed"), "--resume")
    return folder / "whole", folder / "resumed"


def test_samples_are_identical(whole_and_resumed: tuple[Path, Path]) -> None:
    whole, resumed = (lines(folder / "samples.jsonl") for folder in whole_and_resumed)
    assert len(whole) > 12 and whole == resumed


def test_losses_and_all_that_is_measured_of_the_run_are_identical(whole_and_resumed: tuple[Path, Path]) -> None:
    def measured(folder: Path) -> dict[tuple[str, int, str], float]:
        return {
            (entry["kind"], entry["step"], name): value
            for entry in lines(folder / "metrics.jsonl")
            for name, value in entry["metrics"].items()
            if not name.startswith(MEASURED) and not name.endswith(RATES)
        }

    whole, resumed = map(measured, whole_and_resumed)
    assert {name: (value, resumed.get(name)) for name, value in whole.items() if resumed.get(name) != value} == {}
    assert whole.keys() == resumed.keys()
    assert all(whole["step", step, "train/logprob_abs_diff_max"] < 1e-4 for step in (1, 2, 3))


def test_weights_and_optimizer_are_identical(whole_and_resumed: tuple[Path, Path]) -> None:
    whole, resumed = (folder / "checkpoints" / "step-000003" for folder in whole_and_resumed)
    (file,) = (path.name for path in (whole / "state").iterdir())
    one, other = load_file(whole / "state" / file), load_file(resumed / "state" / file)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    cursors = [json.loads((folder / "state.json").read_text())["cursor"] for folder in (whole, resumed)]
    assert cursors[0] == cursors[1]
