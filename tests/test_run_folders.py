"""The folder of a run: of one process at a time, and begun again where no run came of it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import multiprocessing
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny import make_config
from vime.checkpoint import CheckpointError, Checkpoints
from vime.cluster.local import Process
from vime.job import Job
from vime.observe.metrics import ObserveError

TAKEN = "another process trains in .*run; wait for its end, stop it, or name another folder with --run.dir DIR"


def job_in(folder: Path, said: list[str] | None = None, **sections: Any) -> Any:
    view: Any = SimpleNamespace(phase=lambda *_: None, message=(said if said is not None else []).append)
    config = make_config(folder, run={"dir": str(folder / "run")}, weights={"dir": str(folder)}, **sections)
    job: Any = Job(config, view, 0.0)
    job.make_trainer = lambda session: SimpleNamespace(stop=lambda: asyncio.sleep(0))
    return job


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def open_job_in(folder: Path, **sections: Any) -> None:
    """From its start to its end, without a step between."""

    async def open_and_close() -> None:
        async with job.opened(False):
            pass

    job = job_in(folder, **sections)
    job.prepare_folder(resume=False)
    asyncio.run(open_and_close())


def hold(folder: Path, held: Any) -> None:
    job = job_in(folder)
    job.prepare_folder(resume=False)
    held.set()
    time.sleep(600)


@pytest.fixture
def no_trackio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_a_process_trains_in_is_refused_and_left_as_it_is(tmp_path: Path, resume: bool) -> None:
    first = job_in(tmp_path)
    first.prepare_folder(resume=False)
    for name in ("journal.jsonl", "metrics.jsonl", "samples.jsonl"):
        (tmp_path / "run" / name).write_text("{}\n")
    if resume:
        checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 1)
        checkpoints.draft(1, {}, "")
        checkpoints.commit(1)
    before = files(tmp_path / "run")
    with pytest.raises(CheckpointError, match=TAKEN):
        job_in(tmp_path).prepare_folder(resume)
    assert files(tmp_path / "run") == before and "journal.jsonl" in before
    first.unlock()
    assert job_in(tmp_path).prepare_folder(resume) == (checkpoints.path(1) if resume else None)


@pytest.mark.usefixtures("no_trackio")
def test_a_folder_is_free_when_its_run_was_closed_or_could_not_be_opened(tmp_path: Path) -> None:
    open_job_in(tmp_path)
    with pytest.raises(ObserveError):
        open_job_in(tmp_path, log={"sinks": ["trackio"]})
    open_job_in(tmp_path)


def test_a_folder_is_free_when_its_process_was_killed_whatever_that_had_started(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")  # it has imported all
    held = forked.Event()
    holder = forked.Process(target=hold, args=(tmp_path, held))
    holder.start()
    try:
        assert held.wait(60)
        with pytest.raises(CheckpointError, match=TAKEN):
            job_in(tmp_path).prepare_folder(resume=False)
    finally:
        holder.kill()
        holder.join()
    job = job_in(tmp_path)
    job.prepare_folder(resume=False)

    async def child() -> None:
        sleeping = Process("sleeping", ["sleep", "60"], tmp_path / "sleeping.log")
        job.unlock()
        job_in(tmp_path).prepare_folder(resume=False)
        assert sleeping.exit_code is None
        await sleeping.kill()

    asyncio.run(child())


def test_a_file_system_without_locks_is_gone_on_with_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said: list[str] = []
    assert job_in(tmp_path, said).prepare_folder(resume=False) is None
    assert said == [
        f"note: {tmp_path}/run cannot be locked (No locks available); see to it that no other process trains in it"
    ]


@pytest.mark.usefixtures("no_trackio")
def test_a_start_that_failed_is_begun_again(tmp_path: Path) -> None:
    with pytest.raises(ObserveError, match="run: pip install trackio"):
        open_job_in(tmp_path, log={"sinks": ["trackio"]})
    assert (tmp_path / "run" / "config.toml").exists()
    (tmp_path / "run" / "wandb_id").write_text("left by a sink")
    open_job_in(tmp_path)


def test_a_folder_of_other_files_is_refused_and_one_with_logs_of_an_evaluation_is_not(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs-eval").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text("mine")
    with pytest.raises(CheckpointError, match="holds other files and no run"):
        job_in(tmp_path).prepare_folder(resume=False)
    assert (tmp_path / "run" / "config.toml").read_text() == "mine"
    (tmp_path / "run" / "config.toml").unlink()
    assert job_in(tmp_path).prepare_folder(resume=False) is None


def test_a_resume_of_what_is_not_there_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        job_in(tmp_path).prepare_folder(resume=True)
    assert not (tmp_path / "run").exists()


def test_two_runs_never_share_a_folder_in_memory_and_a_long_path_has_one(tmp_path: Path) -> None:
    places = ("a/b-c", "a-b/c", "a-/b", "a/-b", "x" * 200 + "/" + "y" * 200)
    folders = {job_in(tmp_path / place).memory for place in places}
    assert len(folders) == len(places) and all(len(folder.name) < 200 for folder in folders)
