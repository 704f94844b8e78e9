"""Checkpoints: one folder each, whole or not there; the newest and the best are kept.

A folder holds ``state/`` (the trainer's shards), ``trainer.json``, ``state.json`` (step, data cursor with the prompts in
flight, lengths of the append-only files, random state), the configuration, and ``model/`` (a Hugging Face folder) where it
was asked for. It is written under a temporary name, flushed to disk, then renamed: a half-written one is never chosen.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from vime.beside import beside


class CheckpointError(Exception):
    """There is nothing to resume from, or it does not fit; the message says what and what to do."""


def flush(*paths: Path) -> None:
    """Forces files and folders, but not what is in the folders, to the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Checkpoints:
    """The ``checkpoints`` folder of a run; one checkpoint at a time is written into it in the background."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.writing: asyncio.Task[None] | None = None

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, ascending."""
        names = (path.name for path in self.folder.glob("step-*") if (path / "state.json").exists())
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name))

    def latest(self) -> Path:
        """The newest whole checkpoint; CheckpointError where there is none."""
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self.folder} holds no checkpoint; start the run without --resume")
        return self.path(steps[-1])

    def draft(self, step: int, state: dict[str, Any], config: str) -> Path:
        """A temporary folder to write checkpoint ``step`` into, holding the run's state and its configuration."""
        draft = self.draft_path(step)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        (draft / "config.toml").write_text(config)
        (draft / "state.json").write_text(json.dumps(state))
        return draft

    def commit(self, step: int) -> Path:
        """Makes the draft of ``step`` the newest checkpoint and removes those no longer kept."""
        draft, target = self.draft_path(step), self.path(step)
        flush(*draft.rglob("*"), draft)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        flush(self.folder)
        self.prune(read_state(target).get("best_step"))
        return target

    def write(self, step: int, trainer: Coroutine[Any, Any, None], note: Callable[[float], None]) -> None:
        """Commits the draft of ``step`` in the background when the trainer's part is there; ``note`` gets the seconds."""

        async def write() -> None:
            started = time.perf_counter()
            await trainer
            await beside(self.commit, step)
            note(time.perf_counter() - started)

        self.writing = asyncio.create_task(write())

    @property
    def failed(self) -> bool:
        """Whether the checkpoint begun last could not be written; ``written`` says why."""
        task = self.writing
        return task is not None and task.done() and not task.cancelled() and task.exception() is not None

    async def settle(self) -> None:
        """Returns when the checkpoint begun last is final, or has failed."""
        if self.writing is not None:
            await asyncio.wait({self.writing})

    async def written(self) -> None:
        """Returns when the checkpoint begun last is final; raises what kept it from that."""
        await self.settle()
        if self.writing is not None:
            self.writing.result()

    def give_up(self) -> None:
        """What is being written is not waited for."""
        if self.writing is not None:
            self.writing.cancel()

    def draft_path(self, step: int) -> Path:
        return self.path(step).with_suffix(".tmp")

    def prune(self, best: int | None) -> None:
        for step in self.steps()[: -self.keep]:
            if step != best:
                shutil.rmtree(self.path(step), ignore_errors=True)
        for left in self.folder.glob("step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)


def read_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "state.json").read_text())
