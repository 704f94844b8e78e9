"""Checkpoints: whole or not there; the newest and the best stay."""

from pathlib import Path
from typing import Any

import pytest

from vime.checkpoint import CheckpointError, Checkpoints, read_state


def commit(checkpoints: Checkpoints, step: int, **state: Any) -> Path:
    draft = checkpoints.draft(step)
    (draft / "model").mkdir()
    (draft / "model" / "weights").write_text(f"weights of {step}")
    return checkpoints.commit(step, {"step": step, **state}, "[run]\n")


def test_a_committed_checkpoint_holds_what_was_drafted_its_state_and_its_configuration(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    path = commit(checkpoints, 3, cursor={"drawn": 5})
    assert path == checkpoints.latest() == tmp_path / "step-000003"
    assert read_state(path) == {"step": 3, "cursor": {"drawn": 5}}
    assert (path / "model" / "weights").read_text() == "weights of 3"
    assert (path / "config.toml").read_text() == "[run]\n"


def test_the_newest_is_chosen_by_number_not_by_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in (999_999, 1_000_000, 20):
        commit(checkpoints, step)
    assert checkpoints.steps() == [20, 999_999, 1_000_000]
    assert read_state(checkpoints.latest())["step"] == 1_000_000


def test_a_half_written_checkpoint_is_never_chosen(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    commit(checkpoints, 1)
    draft = checkpoints.draft(2)
    (draft / "state.json").write_text("{}")  # killed between the last write and the rename
    assert checkpoints.steps() == [1]
    (tmp_path / "step-000003").mkdir()  # no state.json: not ours
    assert checkpoints.latest() == checkpoints.path(1)


def test_a_draft_starts_empty_whatever_a_crash_left(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    (checkpoints.draft(2) / "left").write_text("half")
    assert list(checkpoints.draft(2).iterdir()) == []


def test_the_next_commit_removes_what_crashes_left(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.draft(1)
    commit(checkpoints, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_the_newest_n_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        commit(checkpoints, step)
    assert checkpoints.steps() == [3, 4]


def test_the_best_is_kept_beside_the_newest_n(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 1)):
        commit(checkpoints, step, best_step=best)
    assert checkpoints.steps() == [1, 3, 4]
    commit(checkpoints, 5, best_step=3)
    assert checkpoints.steps() == [3, 4, 5]


def test_a_best_among_the_newest_counts_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        commit(checkpoints, step, best_step=3)
    assert checkpoints.steps() == [2, 3]


def test_committing_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    commit(checkpoints, 4, turn=1)
    (checkpoints.path(4) / "only-in-the-first").touch()
    path = commit(checkpoints, 4, turn=2)
    assert checkpoints.steps() == [4]
    assert read_state(path)["turn"] == 2
    assert not (path / "only-in-the-first").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004"]


@pytest.mark.parametrize("made", [True, False])
def test_without_a_checkpoint_the_message_names_the_folder_and_the_next_step(tmp_path: Path, made: bool) -> None:
    folder = tmp_path / "checkpoints"
    if made:
        Checkpoints(folder, keep=1).draft(1)
    with pytest.raises(CheckpointError, match=f"{folder} holds no checkpoint; start the run without --resume"):
        Checkpoints(folder, keep=1).latest()
