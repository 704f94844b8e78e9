"""The list of servers of a run that goes on, in its folder, and the wishes of ``vime servers`` to change it.

The driver writes ``servers.json`` and reads ``servers.wishes``; the command does it the other way round. Both are gone when
the run is.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

WRITE_EVERY_S = 2.0
STALE_S = 20.0  # a driver that goes on writes ten times as often
ANSWER_S = 60.0  # an added server may make a router necessary


class RosterError(Exception):
    """No run goes on in the folder, or its driver does not answer."""


@dataclass(frozen=True)
class Wish:
    what: Literal["add", "remove"]
    url: str


class Roster:
    """The driver's side."""

    def __init__(self, folder: Path) -> None:
        self.listing, self.wishes = folder / "servers.json", folder / "servers.wishes"
        self.read, self.answers, self.written = 0, list[str](), 0.0
        self.writing = threading.Lock()
        self.close()

    def wished(self) -> list[Wish]:
        """What was wished since the last call."""
        if not self.wishes.exists():
            return []
        lines = self.wishes.read_text().splitlines()[self.read :]
        self.read += len(lines)
        return [Wish(**json.loads(line)) for line in lines]

    def write(self, version: int, servers: Sequence[Mapping[str, Any]], now: bool = False) -> None:
        """``answers`` has one for each wish that was read. On a disk that is busy with a checkpoint it takes up to a second."""
        if not now and time.monotonic() - self.written < WRITE_EVERY_S:
            return
        self.written = time.monotonic()
        listed = {"time": time.time(), "version": version, "answers": self.answers, "servers": list(servers)}
        draft = self.listing.with_suffix(".draft")
        with self.writing:
            draft.write_text(json.dumps(listed))
            draft.rename(self.listing)

    def close(self) -> None:
        with self.writing:
            for file in (self.listing, self.wishes):
                file.unlink(missing_ok=True)


def read_roster(run_dir: Path) -> dict[str, Any]:
    """The newest list; RosterError where no driver writes it."""
    try:
        listed = json.loads((run_dir / "servers.json").read_text())
    except FileNotFoundError:
        raise RosterError(f"{run_dir} holds no servers.json: no training run goes on there") from None
    if (age := time.time() - listed["time"]) > STALE_S:
        raise RosterError(f"the run in {run_dir} was last heard of {age:.0f} s ago; is it still there?")
    return listed


def wish(run_dir: Path, wanted: Wish) -> str:
    """Tells the run's driver and returns its answer."""
    read_roster(run_dir)
    with (run_dir / "servers.wishes").open("ab") as file:
        file.write(json.dumps({"what": wanted.what, "url": wanted.url}).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        number = (run_dir / "servers.wishes").read_bytes()[: file.tell()].count(b"\n")
    deadline = time.monotonic() + ANSWER_S
    while len(answers := read_roster(run_dir)["answers"]) < number:
        if time.monotonic() > deadline:
            raise RosterError(f"the run in {run_dir} did not answer in {ANSWER_S:.0f} s")
        time.sleep(0.2)
    return answers[number - 1]
