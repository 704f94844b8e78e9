"""``vime doctor``: whether this machine, and a configuration on it, can run, before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "fault"]
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and, where it is not well, what to do."""

    part: str
    verdict: Verdict
    found: str
    fix: str = ""


def ok(part: str, found: str) -> Finding:
    return Finding(part, "ok", found)


def judged(part: str, found: str, bad: object, fix: str, verdict: Verdict = "fault") -> Finding:
    """``verdict`` with the fix where it is ``bad``, else ok."""
    return Finding(part, verdict, found, fix) if bad else ok(part, found)


def guarded(part: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What the look finds; a look that fails is a fault, and the others go on."""
    try:
        yield from look()
    except Exception as error:  # whatever a user's function, model or data may raise
        text = str(error)
        known = type(error).__module__.startswith("vime.")
        yield Finding(part, "fault", text if known and text else f"{type(error).__name__}: {text}")


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.0f} MiB"
