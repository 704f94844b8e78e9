"""Each example's own configuration, run for two short steps with a tiny model on the shared server."""

from __future__ import annotations

import json
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from vime.cli import main
from vime.data.journal import account

Prepare = Callable[[Path, str], list[str]]
"""makes what an example needs in a folder, given the tiny model's; returns the overrides that name it"""


def guess_the_number(folder: Path, model: str) -> list[str]:
    rows = runpy.run_path("examples/guess-the-number/make_rows.py")["rows"](8)
    for name, part in (("rows", rows[1:]), ("test", rows[:1])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return [f"--data.source={folder}/rows.jsonl", f"--eval.sets.games.source={folder}/test.jsonl"]


FEW = ["--data.size=40", "--eval.sets.test.size=2", "--rollout.filter=none"]
EXAMPLES: dict[str, Prepare] = {
    "async": lambda folder, model: FEW,
    "distillation": lambda folder, model: [*FEW, f"--teacher.path={model}"],
    "guess-the-number": guess_the_number,
    "mismatch-study": lambda folder, model: ["--data.size=40", "--algorithm.corrections.tis.high=2"],
    "mixture": lambda folder, model: [
        *(f"--data.mixture.{name}.size=20" for name in ("sums", "counting", "reasoning")),
        *(f"--eval.sets.{name}.size=2" for name in ("sums", "counting", "reasoning")),
    ],
    "own-reward": lambda folder, model: [],
}


def train(name: str, folder: Path, model: str, url: str, *more: str) -> list[dict[str, Any]]:
    """Two steps of the example's configuration, by the tiny model on its server; the metrics of each."""
    tree = tomllib.loads(Path(f"examples/{name}/config.toml").read_text())
    tree.pop("vllm", None)  # the server runs already
    (folder / "config.toml").write_text(tomli_w.dumps(tree))
    overrides = [
        f"--run.dir={folder}/run",
        "--run.steps=2",
        f"--model.path={model}",
        "--model.dtype=float32",
        f'--inference.urls=["{url}"]',
        "--rollout.groups=2",
        "--rollout.samples_per_group=2",
        "--rollout.max_tokens=60",
        "--trainer.threads=1",
        "--checkpoint.every=0",
        *more,
    ]
    assert main(["train", str(folder / "config.toml"), *overrides]) == 0
    counted = account(folder / "run" / "journal.jsonl")
    assert counted["trained"] == 4 and not counted["twice"] and not counted["open"]
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2]
    return [line["metrics"] for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains(name: str, fleets: Any, models: Any, tmp_path: Path) -> None:
    model = str(models("tied"))
    train(name, tmp_path, model, fleets("tied").servers[0].url, *EXAMPLES[name](tmp_path, model))


def test_the_example_of_a_judge_trains_on_what_a_model_behind_a_url_says(
    fleets: Any, models: Any, tmp_path: Path
) -> None:
    """The tiny model judges itself by its own server."""
    url = fleets("tied").servers[0].url
    overrides = [
        f"--reward.parts.judge.options.url={url}/v1",
        "--reward.parts.judge.options.max_tokens=16",  # of one byte each
        "--reward.workers=1",
        "--rollout.max_tokens=12",
        "--eval.sets.held_out.size=2",
    ]
    steps = train("llm-judge", tmp_path, str(models("tied")), url, *overrides)
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    scores = [row["reward_parts"]["judge"] for row in rows]
    assert scores and all(score * 9 == round(score * 9) and 0 <= score <= 1 for score in scores)
    assert all(row["reward"] == row["reward_parts"]["judge"] + row["reward_parts"]["sentence"] / 2 for row in rows)
    assert all(step["rollout/failed_samples"] == 0 for step in steps)
