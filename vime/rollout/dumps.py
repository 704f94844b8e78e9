"""Dumps: batches as the trainer gets them, on disk, to be trained once more (``vime train --debug train``) or compared.

A folder a step, ``step-NNNNNN``, whole or not there: ``batch.json`` (step, version of the weights that the batch trains, seconds
its making took), ``groups.json`` (all groups without their tokens: rows, rewards, versions, texts), a file of payloads for each
group that is trained on, and the run's ``config.toml``. The form of groups and payloads is a checkpoint's.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vime.rollout.outcome import Outcome, read_groups, write_groups
from vime.store.shared_memory import SharedMemoryStore

BATCH = "batch.json"  # written last: a folder with it is whole
FOLDER = "dumps"  # of a run


class DumpError(Exception):
    """There is no dump where one was named, or it cannot be trained; the message says what and what to do."""


class Head(msgspec.Struct, forbid_unknown_fields=True):
    """``batch.json``."""

    step: int
    version: int
    seconds: float


@dataclass(frozen=True)
class Dump:
    """Where the batch of a step lies."""

    path: Path
    step: int


def write_dump(run_dir: Path, head: Head, batch: Sequence[Outcome], store: SharedMemoryStore) -> Path:
    """Writes the batch of a step, whose payloads lie in the store, in place of an older dump of the same step."""
    target = run_dir / FOLDER / f"step-{head.step:06d}"
    draft = target.with_suffix(".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    write_groups(draft, batch, store)
    shutil.copyfile(run_dir / "config.toml", draft / "config.toml")
    (draft / BATCH).write_text(json.dumps(msgspec.to_builtins(head)))
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    return target


def dumps_in(folder: Path) -> list[Dump]:
    """The dumps in a run's folder or its folder of dumps, in order."""
    named = [*folder.glob("step-*"), *(folder / FOLDER).glob("step-*")]
    whole = [path for path in named if re.fullmatch(r"step-\d+", path.name) and (path / BATCH).exists()]
    return sorted((Dump(path, int(path.name[5:])) for path in whole), key=lambda dump: dump.step)


def find_dumps(given: Path) -> list[Dump]:
    """One dump, whatever its folder is called, or all of a folder; DumpError where there is none."""
    found = [Dump(given, read_head(given).step)] if (given / BATCH).exists() else dumps_in(given)
    if not found:
        what = "holds no dump" if given.exists() else "does not exist"
        raise DumpError(
            f"{given} {what}; name RUN/{FOLDER}, or RUN/{FOLDER}/step-NNNNNN, of a run that had log.dump_every over 0"
        )
    return found


def remove_later(run_dir: Path, step: int) -> None:
    """Removes the dumps of steps after this one, which will be taken again."""
    for dump in dumps_in(run_dir):
        if dump.step > step:
            shutil.rmtree(dump.path)


def read_head(dump: Path) -> Head:
    try:
        return msgspec.json.decode((dump / BATCH).read_bytes(), type=Head)
    except (OSError, msgspec.DecodeError) as error:
        raise DumpError(f"{dump / BATCH} cannot be read: {error}") from None


def read_dump(dump: Path, store: SharedMemoryStore) -> list[Outcome]:
    """The batch, whose payloads then lie in the store."""
    try:
        return read_groups(dump, store)
    except (OSError, msgspec.DecodeError) as error:
        raise DumpError(f"{dump} cannot be read: {error}") from None
