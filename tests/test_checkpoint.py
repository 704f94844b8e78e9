"""Checkpoints: whole or not there; the newest and the best stay; what the background cannot write ends the run."""

import asyncio
import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

import tests.stand_in_runs
from tests.stand_in_runs import QuickJob, Server, configuration, whole_run
from tests.tiny import make_config
from vime.beside import SWITCH_S
from vime.checkpoint import CheckpointError, Checkpoints, read_state
from vime.inference import roster
from vime.job import Job
from vime.loop import train
from vime.rollout.outcome import Outcome
from vime.training.client import TrainerError


def commit(checkpoints: Checkpoints, step: int, **state: Any) -> Path:
    draft = checkpoints.draft(step, {"step": step, **state}, "[run]\n")
    (draft / "model").mkdir()
    (draft / "model" / "weights").write_text(f"weights of {step}")
    return checkpoints.commit(step)


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
    checkpoints.draft(2, {}, "")  # killed between the last write and the rename
    assert checkpoints.steps() == [1]
    (tmp_path / "step-000003").mkdir()  # no state.json: not ours
    assert checkpoints.latest() == checkpoints.path(1)


def test_a_draft_starts_anew_whatever_a_crash_left(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    (checkpoints.draft(2, {}, "") / "left").write_text("half")
    assert {path.name for path in checkpoints.draft(2, {}, "").iterdir()} == {"state.json", "config.toml"}


def test_the_next_commit_removes_what_crashes_left(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.draft(1, {}, "")
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
        Checkpoints(folder, keep=1).draft(1, {}, "")
    with pytest.raises(CheckpointError, match=f"{folder} holds no checkpoint; start the run without --resume"):
        Checkpoints(folder, keep=1).latest()


class Writing:
    """A trainer whose part of a checkpoint is written when it is told to be, or fails."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.go_on = fault, asyncio.Event()

    async def save(self, folder: Path, model: bool) -> None:
        pass

    async def saved(self) -> None:
        await self.go_on.wait()
        if self.fault:
            raise TrainerError(self.fault)


def job_at(folder: Path, step: int, trainer: Writing) -> Job:
    view: Any = SimpleNamespace(phase=lambda *_: None, message=lambda _: None)
    job: Any = Job(make_config(folder, run={"dir": str(folder)}), view, 0.0)
    job.step, job.trainer = step, trainer
    job.cursor = SimpleNamespace(state=lambda held: {"drawn": 5})
    job.scheduler = SimpleNamespace(ready={}, save=AsyncMock())
    job.recorder = SimpleNamespace(offsets=lambda: {"metrics.jsonl": 10 * job.step})
    job.journal, job.sync = SimpleNamespace(offset=lambda: 7), SimpleNamespace(count=0)
    job.tokenizer = SimpleNamespace(save_pretrained=lambda _: None)
    return job


def test_the_state_is_of_the_moment_of_the_save_and_the_next_save_waits(tmp_path: Path) -> None:
    async def saves() -> None:
        trainer = Writing()
        job = job_at(tmp_path, 1, trainer)
        await job.save(last=False)
        job.step, job.evals = 2, [(2, {"late": 1.0})]
        following = asyncio.create_task(job.save(last=False))
        await asyncio.sleep(0.05)
        assert job.checkpoints.steps() == [] and not following.done()
        trainer.go_on.set()
        await following
        state = read_state(job.checkpoints.path(1))
        assert (state["step"], state["evals"], state["offsets"]["metrics.jsonl"]) == (1, [], 10)
        assert job.metrics["checkpoint/write_s"] >= 0.05
        await job.checkpoints.written()
        assert job.checkpoints.steps() == [1, 2]

    asyncio.run(saves())


def test_a_checkpoint_that_cannot_be_written_stops_the_run_in_the_middle_of_a_step(tmp_path: Path) -> None:
    async def run() -> None:
        trainer = Writing("the checkpoint could not be written: rank 1: no space left")
        job = job_at(tmp_path, 1, trainer)
        await job.save(last=False)
        step = asyncio.create_task(asyncio.sleep(60))
        watch = asyncio.create_task(job.watch_checkpoints(step))
        trainer.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await step
        await watch
        assert job.checkpoints.failed and job.checkpoints.steps() == []
        with pytest.raises(TrainerError, match="rank 1: no space left"):
            await job.checkpoints.written()

    asyncio.run(run())


def test_the_second_interrupt_gives_up_what_is_being_written(tmp_path: Path) -> None:
    async def run() -> None:
        job = job_at(tmp_path, 1, Writing())
        await job.save(last=True)
        step = asyncio.create_task(job.checkpoints.written())
        for _ in range(2):
            await asyncio.sleep(0)
            job.request_stop(step)
        with pytest.raises(asyncio.CancelledError):
            await step
        await job.checkpoints.settle()
        assert not job.checkpoints.failed and job.checkpoints.steps() == []

    asyncio.run(run())


def test_a_resumed_run_has_the_numbers_of_all_its_steps(models: Any, tmp_path: Path) -> None:
    sections = {"checkpoint": {"every": 1}, "log": {"dump_every": 0}}
    config = configuration(tmp_path, models("tied"), run={"dir": str(tmp_path / "run"), "steps": 2}, **sections)
    first, _ = asyncio.run(whole_run(config, Server(), QuickJob))
    longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 3})})
    resumed, _ = asyncio.run(whole_run(longer, Server(), QuickJob, resume=True))
    assert resumed.history[:2] == first.history and len(resumed.history) == 3
    assert resumed.summary()["reward_first"] == first.history[0]["reward/mean"]
    assert "history" not in read_state(resumed.checkpoints.latest())  # it would be written anew again and again


def test_what_was_trained_is_in_the_store_no_more(models: Any, tmp_path: Path) -> None:
    left = []

    class Looking(QuickJob):
        async def record_batch(self, batch: list[Outcome]) -> None:
            left.extend(self.store.folder.iterdir())
            await super().record_batch(batch)

    asyncio.run(whole_run(configuration(tmp_path, models("tied")), Server(), Looking))
    assert left == []


def test_files_that_it_has_the_lengths_of_are_on_the_disk_before_it_is_and_the_event_loop_does_not_wait_for_them(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, bool]] = []
    fsync = os.fsync

    def noting(handle: int) -> None:
        flushed.append(
            (Path(os.readlink(f"/proc/self/fd/{handle}")).name, threading.current_thread() is threading.main_thread())
        )
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noting)
    config = configuration(
        tmp_path, models("tied"), run={"dir": str(tmp_path / "run"), "steps": 1}, checkpoint={"every": 1}
    )
    job, _ = asyncio.run(whole_run(config, Server(), QuickJob))
    state = read_state(job.checkpoints.latest())
    names = [name for name, _ in flushed]
    renamed = names.index("checkpoints")  # the folder, after the checkpoint in it has its name
    assert {*state["offsets"], "trace.jsonl", "state.json"} <= {*names[:renamed]}
    assert not [name for name, on_loop in flushed if on_loop]


def test_the_event_loop_removes_nothing_and_renames_nothing_on_a_disk_while_it_trains(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is busy with a checkpoint takes a second for a rename, gigabytes of shared memory as long to go."""
    training, seen, on_loop = threading.Event(), list[Path](), list[Path]()

    def noting(place: Any, name: str) -> None:
        call = getattr(place, name)

        def noted(path: Any, *more: Any, **options: Any) -> Any:
            if training.is_set() and Path(path).exists() and (name == "rmtree" or tmp_path in Path(path).parents):
                seen.append(Path(path))
                if threading.current_thread() is threading.main_thread():
                    on_loop.append(Path(path))
            return call(path, *more, **options)

        monkeypatch.setattr(place, name, noted)

    async def trained(job: Job) -> None:
        training.set()
        await train(job)
        training.clear()

    noting(shutil, "rmtree")
    noting(os, "rename")
    monkeypatch.setattr(tests.stand_in_runs, "train", trained)
    monkeypatch.setattr(roster, "WRITE_EVERY_S", 0.0)
    sections = {"checkpoint": {"every": 1, "keep": 1}, "eval": {"every": 1}}
    asyncio.run(whole_run(configuration(tmp_path, models("tied"), **sections), Server(), QuickJob))
    assert {"step-000001", "step-000001.tmp", "servers.draft", "v000001"} <= {path.name for path in seen}
    assert on_loop == []


def test_generate_functions_that_keep_all_of_asyncios_threads_busy_do_not_hold_up_the_driver(
    models: Any, tmp_path: Path
) -> None:
    """Its own threads also give way to the event loop sooner than Python's do."""
    over, before = threading.Event(), sys.getswitchinterval()

    def keep_busy(job: Job) -> None:
        assert sys.getswitchinterval() == SWITCH_S < before
        for _ in range(64):
            asyncio.get_running_loop().run_in_executor(None, over.wait, 600)

    async def run() -> None:
        sections = {"checkpoint": {"every": 1}, "eval": {"every": 1}}
        config = configuration(tmp_path, models("tied"), **sections)
        try:
            job, _ = await asyncio.wait_for(whole_run(config, Server(), QuickJob, meanwhile=keep_busy), 300)
        finally:
            over.set()
        assert job.checkpoints.steps()[-1] == job.step == 3

    asyncio.run(run())
    assert sys.getswitchinterval() == before
