"""Checkpoints: one folder each, whole or not there; the newest and the best are kept.

A folder holds ``model/`` (a Hugging Face folder, float32), the optimizer, ``trainer.json``, ``state.json`` (step, data
cursor with the prompts in flight, lengths of the append-only files, random state) and the configuration. It is written
under a temporary name, flushed to disk, then renamed: a half-written one is never chosen.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any


class CheckpointError(Exception):
    """There is nothing to resume from, or it does not fit; the message says what and what to do."""


def flush(folder: Path) -> None:
    """Forces every file and folder below ``folder`` to the disk."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Checkpoints:
    """The ``checkpoints`` folder of a run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

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

    def draft(self, step: int) -> Path:
        """An empty temporary folder to write checkpoint ``step`` into."""
        draft = self.path(step).with_suffix(".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        return draft

    def commit(self, step: int, state: dict[str, Any], config: str) -> Path:
        """Completes the draft of ``step``, makes it the newest checkpoint and removes those no longer kept."""
        draft, target = self.draft_path(step), self.path(step)
        (draft / "config.toml").write_text(config)
        (draft / "state.json").write_text(json.dumps(state))
        flush(draft)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        flush_folder(self.folder)
        self.prune(state.get("best_step"))
        return target

    def draft_path(self, step: int) -> Path:
        return self.path(step).with_suffix(".tmp")

    def prune(self, best: int | None) -> None:
        for step in self.steps()[: -self.keep]:
            if step != best:
                shutil.rmtree(self.path(step), ignore_errors=True)
        for left in self.folder.glob("step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)


def flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def read_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "state.json").read_text())
