"""What the time of every sample goes to, written as it happens to a run's ``trace.jsonl``; ``vime trace`` makes a page of it.

One line a row, times in seconds after the last ``run`` row:

    ["run", Unix time, version of vime]              the process began
    ["begin", sample, time, group, number, task]     a generate call; ``sample`` counts them
    ["span", sample, phase, start, end, where, tokens, [queue, prefill]]
    ["end", sample, time, prompt tokens, response tokens, oldest and newest version, finish, reward]
    ["fail", sample, time, cause]
    ["group", group, start, end, filtered]           all its samples have ended
    ["batch", time, step, groups]                    they went to the trainer
    ["phase", name, step, start, end]                of the loop; once with end null as it begins
    ["load", time, {server: [running, waiting, queue, prefill, decode]}]     the last three are sums since its start

What a sample spends in no span is its generate function's own: tools, the environment, and the wait for the event loop. The
hooks (``note``, ``sample``, ...) find the trace in a context variable and do nothing where there is none.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from vime import __version__

if TYPE_CHECKING:
    from vime.rollout.admission import Load
    from vime.sample import Sample

TRACE = "trace.jsonl"
FLUSH_ROWS, FLUSH_S = 1000, 1.0
"""Rows are encoded and written together: when there are so many, or the first that comes after so long."""
now = time.monotonic  # the clock of the event loop

_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)
_sample: ContextVar[int] = ContextVar("sample", default=0)


class Trace:
    """The file of one process of a run; goes on with what lies there."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self._rows: list[tuple[Any, ...]] = []
        self._flushed = self._zero = now()
        self._encoder = msgspec.json.Encoder()
        self.samples = 0
        self.row("run", time.time(), __version__)

    def at(self, moment: float) -> float:
        """A moment of ``now`` as it is written."""
        return round(moment - self._zero, 4)

    def row(self, *row: Any) -> None:
        self._rows.append(row)
        if len(self._rows) >= FLUSH_ROWS or now() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        rows, self._rows, self._flushed = self._rows, [], now()
        self._file.write(self._encoder.encode_lines(rows))
        self._file.flush()

    def offset(self) -> int:
        """Length of the file in bytes."""
        self.flush()
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self.flush()
        self._file.close()


def rewind(path: Path, offset: int) -> None:
    """Cuts the file to its length at a checkpoint. It may be gone: no run needs it."""
    if path.exists() and path.stat().st_size > offset:
        os.truncate(path, offset)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Trace]:
    """Inside, the hooks of this task, and of those it starts, write to the file."""
    trace = Trace(path)
    token = _trace.set(trace)
    try:
        yield trace
    finally:
        _trace.reset(token)
        trace.close()


class sample:
    """Around a generate call and its rewards; ``made`` are its samples, once there are any."""

    def __init__(self, group: str, number: int, task: str) -> None:
        self.group, self.number, self.task = group, number, task
        self.made: Sequence[Sample] = ()

    def __enter__(self) -> Self:
        self.trace = _trace.get()
        if self.trace:
            self.trace.samples += 1
            self.id = self.trace.samples
            self.token = _sample.set(self.id)
            self.trace.row("begin", self.id, self.trace.at(now()), self.group, self.number, self.task)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self.trace:
            return
        _sample.reset(self.token)
        moment = self.trace.at(now())
        if error or not self.made:
            self.trace.row("fail", self.id, moment, str(error)[:300] or type(error).__name__)
            return
        first, last = self.made[0], self.made[-1]
        versions = [span.version for one in self.made for span in one.versions]
        tokens = sum(len(one.response_ids) for one in self.made)
        oldest, newest = min(versions, default=None), max(versions, default=None)
        facts = len(first.prompt_ids), tokens, oldest, newest, last.finish_reason, last.reward
        self.trace.row("end", self.id, moment, *facts)


def note(phase: str, start: float, where: str = "", tokens: int = 0, split: Sequence[float] = ()) -> None:
    """The sample that is being made spent the time from ``start`` until now so. ``split``: seconds of it that the server says
    were queue and prefill."""
    if (number := _sample.get()) and (trace := _trace.get()):
        span(trace, number, phase, start, now(), where, tokens, split)


def note_call(pool: str, asked: float, began: float, where: str) -> None:
    """A call of a worker: it waited until ``began`` and ran until now."""
    if (number := _sample.get()) and (trace := _trace.get()):
        began = max(asked, began)
        span(trace, number, f"{pool} queue", asked, began)
        span(trace, number, pool, began, now(), where)


def span(
    trace: Trace,
    number: int,
    phase: str,
    start: float,
    end: float,
    where: str = "",
    tokens: int = 0,
    split: Sequence[float] = (),
) -> None:
    trace.row("span", number, phase, trace.at(start), trace.at(end), where, tokens, split)


def group(name: str, start: float, filtered: str | None) -> None:
    """All samples of the group have ended."""
    if trace := _trace.get():
        trace.row("group", name, trace.at(start), trace.at(now()), filtered)


def batch(step: int, groups: Sequence[str]) -> None:
    """The groups go to the trainer, for ``step``."""
    if trace := _trace.get():
        trace.row("batch", trace.at(now()), step, groups)


@contextlib.contextmanager
def phase(name: str, step: int) -> Iterator[None]:
    """Inside, the loop is at ``name`` of ``step``."""
    trace, start = _trace.get(), now()
    if trace:
        trace.row("phase", name, step, trace.at(start), None)
    yield
    if trace:
        trace.row("phase", name, step, trace.at(start), trace.at(now()))


def loads(found: Mapping[str, Load]) -> None:
    """What the servers say of themselves, by URL."""
    if found and (trace := _trace.get()):
        said = {place(url): (load.running, load.waiting, *load.spent) for url, load in found.items()}
        trace.row("load", trace.at(now()), said)


def place(url: str) -> str:
    """What a server is called in the trace."""
    return url.rpartition("://")[2]
