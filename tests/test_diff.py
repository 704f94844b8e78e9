"""``vime diff`` finds the first thing in which two runs differ, and nothing where they do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vime.cli import main
from vime.observe.diff import Comparison, compare
from vime.observe.metrics import ObserveError, Recorder
from vime.observe.tensors import first_index
from vime.rollout.dumps import Head, write_dump
from vime.rollout.outcome import Outcome
from vime.sample import Group, Sample, Task, VersionSpan
from vime.store.shared_memory import SharedMemoryStore

Change = Callable[[int, dict[str, Any]], None]


def make_run(folder: Path, steps: int = 3, change: Change = lambda *_: None, speed: float = 1.0) -> Path:
    """A run as it lies on disk: ``change(step, values)`` alters what is about to be written."""
    recorder = Recorder(folder)
    (folder / "config.toml").write_text(f'[run]\ndir = "{folder}"\n[trainer]\nlearning_rate = 1e-6\n')
    store = SharedMemoryStore(folder / "store")
    for step in range(steps + 1):
        if step:
            write_step(folder, step, recorder, store, change, speed)
        row = {"split": "eval", "set": "test", "group": 0, "task": "e0", "prompt": "?", "response": "no", "reward": 0.0}
        recorder.samples(step, [row])
        recorder.log("eval", step, {"eval/test/pass@1": 0.5})
    recorder.close()
    return folder


def write_step(
    folder: Path, step: int, recorder: Recorder, store: SharedMemoryStore, change: Change, speed: float
) -> None:
    values = {"response": "answer", "reward": 1.0, "tokens": [5, 6, 7, 8], "logprob": -0.5, "loss": 0.25, "weight": 1.0}
    change(step, values)
    sample = Sample(
        [1, 2], values["tokens"], [values["logprob"]] * 4, (VersionSpan(0, 0, 4),), "stop", values["response"],
        reward=values["reward"],
    )  # fmt: skip
    group = Group(10 + step, Task("t", ({"role": "user", "content": "?"},)), [sample])
    store.put(f"g{10 + step}", group.samples)
    outcome = Outcome.of(group, None)
    write_dump(folder, Head(step, step - 1, speed), [outcome], store)
    state = folder / "checkpoints" / f"step-{step:06d}" / "state"
    state.mkdir(parents=True)
    tensors = {
        "policy.weight.norm.weight": torch.full((2, 3), values["weight"]),
        "policy.exp_avg.norm.weight": torch.full((2, 3), values["weight"] / 2),
    }
    save_file(tensors, state / "rank-00000-of-00001.safetensors")
    recorder.samples(step, outcome.log_rows)
    recorder.log("step", step, {"train/loss": values["loss"], "time/step": speed, "train/tokens_per_s": speed})


def at(step: int, **changed: Any) -> Change:
    def change(now: int, values: dict[str, Any]) -> None:
        if now == step:
            values.update(changed)

    return change


def compared(folder: Path, change: Change, rtol: float = 0.0, **other: Any) -> Comparison:
    return compare(make_run(folder / "a"), make_run(folder / "b", change=change, speed=2.0, **other), rtol)


def test_runs_that_differ_in_speed_and_folder_alone_are_equal(tmp_path: Path) -> None:
    found = compared(tmp_path, lambda *_: None)
    assert found.equal and not found.config and not found.alone
    assert found.sentence == "The runs are equal in all that both recorded, up to step 3."


def test_a_response_that_differs_is_named_by_group_and_token_where_there_are_dumps(tmp_path: Path) -> None:
    found = compared(tmp_path, at(2, response="anther", tokens=[5, 6, 9, 8]))
    assert found.sentence == (
        "The runs are equal up to step 1; in step 2 the samples of group 12 differ first (sample 0, response token 2: 7 / 9)."
    )
    assert found.dump and (found.dump[1].index, found.dump[1].one, found.dump[1].other) == ([0, 2], 7, 9)
    assert found.sample and found.sample.what == "response character 2: 'swer' / 'ther'"
    assert found.sample.one and found.sample.one["response"] == "answer"


def test_without_dumps_it_is_named_by_its_text(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b", change=at(1, response="answers"))
    shutil.rmtree(one / "dumps")
    sentence = compare(one, other).sentence
    assert sentence == (
        "The runs part at the start; in step 1 the samples of group 11 differ first (response character 6: '' / 's')."
    )


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"loss": 0.5}, "in step 2 train/loss differs first (0.25 / 0.5)."),
        ({"logprob": -0.25}, "in step 2 the samples of group 12 differ first (sample 0, logprobs 0: -0.5 / -0.25)."),
        ({"tokens": [5, 6, 7, 7]}, "differ first (sample 0, response token 3: 8 / 7)."),
        ({"weight": 1.5}, "policy.weight.norm.weight differs first ([0, 0]: 1 / 1.5; at most by 0.5)."),
    ],
)
def test_what_differs_is_named_with_its_place_and_values(
    tmp_path: Path, changed: dict[str, Any], sentence: str
) -> None:
    found = compared(tmp_path, at(2, **changed))
    assert found.sentence.startswith("The runs are equal up to step 1; in step 2") and found.sentence.endswith(sentence)


def test_a_reward_that_differs_is_named(tmp_path: Path) -> None:
    found = compared(tmp_path, at(3, reward=0.5))
    assert found.sample and found.sample.what == "reward 1.0 / 0.5"
    assert "in step 3 the rows of group 13 differ first" in found.sentence


def test_the_cause_comes_before_its_effects(tmp_path: Path) -> None:
    found = compared(tmp_path, at(2, loss=0.5, weight=2.0, tokens=[1, 1, 1, 1], response="?"))
    assert found.metrics and found.sample and found.dump
    assert "response token 0: 5 / 1" in found.sentence


def test_an_evaluation_belongs_after_its_step(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    lines = (other / "samples.jsonl").read_text().splitlines()
    changed = [line.replace('"no"', '"yes"') if '"step": 2' in line else line for line in lines]
    (other / "samples.jsonl").write_text("\n".join(changed) + "\n")
    assert compare(one, other).sentence == (
        "The runs are equal up to step 2; in the evaluation of step 2 the evaluation samples of group 0 differ first "
        "(response character 0: 'no' / 'yes')."
    )


def test_a_tolerance_passes_over_rounding_in_numbers_dumps_and_weights(tmp_path: Path) -> None:
    change = at(2, loss=0.25 * (1 + 1e-6), logprob=-0.5 * (1 + 1e-6), weight=1 + 1e-6)
    found = compared(tmp_path, change, rtol=1e-5)
    assert found.equal and found.inexact == 1
    assert found.sentence == "The runs are equal within 1e-05 in all that both recorded, up to step 3."
    assert not compare(tmp_path / "a", tmp_path / "b", 1e-8).equal


def test_options_that_differ_are_told_and_are_no_difference_of_what_the_runs_did(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    (other / "config.toml").write_text((other / "config.toml").read_text().replace("1e-6", "2e-6") + "threads = 2\n")
    found = compare(one, other)
    assert found.equal
    assert found.config == [("trainer.learning_rate", 1e-6, 2e-6), ("trainer.threads", "(not set)", 2)]


def test_what_only_one_run_has_is_told_and_does_not_count(tmp_path: Path) -> None:
    found = compared(tmp_path, lambda *_: None, steps=2)
    assert found.equal and found.alone == [f"steps after 2: only in {tmp_path}/a"]
    assert found.sentence.endswith("up to step 2.")


def test_checkpoints_of_other_numbers_of_ranks_are_not_compared_and_that_is_told(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a", 1), make_run(tmp_path / "b", 1)
    state = other / "checkpoints" / "step-000001" / "state"
    (state / "rank-00000-of-00001.safetensors").rename(state / "rank-00000-of-00002.safetensors")
    assert compare(one, other).alone == ["the checkpoints of step 1 are of other numbers of ranks: not compared"]


def test_weights_are_named_before_the_moments_that_follow_from_them(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a", 1), make_run(tmp_path / "b", 1)
    file = other / "checkpoints" / "step-000001" / "state" / "rank-00000-of-00001.safetensors"
    state = load_file(file)
    state["policy.exp_avg.norm.weight"][1, 2] += 1
    save_file(state, file)
    assert "policy.exp_avg.norm.weight differs first ([1, 2]: 0.5 / 1.5" in compare(one, other).sentence


def test_arrays_of_other_lengths_differ_where_the_shorter_ends_and_nan_equals_nan() -> None:
    nan = np.array([np.nan, 1.0], np.float32)
    assert first_index(nan, nan.copy(), 0.0) is None
    assert first_index(nan, np.array([np.nan, 1.0, 2.0], np.float32), 0.0) == (2,)
    assert first_index(np.zeros((2, 3, 1)), np.zeros((4, 3, 1)), 0.0) == (2, 0, 0)


def test_the_exit_code_is_0_for_equal_1_for_different_2_for_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, third = (
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b"),
        make_run(tmp_path / "c", change=at(1, loss=1.0)),
    )
    assert main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out.endswith("The runs are equal in all that both recorded, up to step 3.\n")
    assert main(["diff", str(one), str(third)]) == 1
    assert "train/loss" in capsys.readouterr().out
    assert main(["diff", str(one), str(tmp_path / "nowhere")]) == 2
    assert "nowhere holds no metrics.jsonl; name the folder of a run" in capsys.readouterr().err
    assert main(["diff", str(one), str(other), "--rtol", "-1"]) == 2
    with pytest.raises(ObserveError):
        compare(one, tmp_path)


def test_json_holds_all_that_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b", change=at(2, tokens=[5, 6, 7, 7], loss=9.0))
    assert main(["diff", str(one), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is False and found["dump"][0] == 2 and found["dump"][1]["index"] == [0, 3]
    assert found["metrics"][0] == {
        "kind": "step", "step": 2, "name": "train/loss", "one": 0.25, "other": 9.0, "relative": pytest.approx(8.75 / 9),
    }  # fmt: skip
    assert found["sentence"].startswith("The runs are equal up to step 1")
