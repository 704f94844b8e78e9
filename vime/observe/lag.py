"""How long the event loop keeps what is due waiting: whatever blocks it, this sees it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator

PERIOD_S = 0.01
"""Seconds between two measurements: what blocks for less than this is found by chance only, and does no harm."""
SWITCH_S = 0.0005
"""Seconds for which a thread that computes beside the loop keeps the interpreter: the loop gives it away with every call of the
system, several for each response, and waited for Python's 5 ms each time."""


class LoopLag:
    """Sleeps again and again and notes how much later than due it wakes, in milliseconds."""

    def __init__(self) -> None:
        self.lags: list[float] = []

    async def _measure(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.note(1000 * (loop.time() - due))

    def note(self, late: float) -> None:
        self.lags.append(late)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Inside, the running loop is measured, and threads beside it give way to it."""
        task, before = asyncio.create_task(self._measure()), sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            yield
        finally:
            sys.setswitchinterval(before)
            task.cancel()

    def take(self) -> list[float]:
        """The lags since this was asked last; at least one, if only 0."""
        taken, self.lags = self.lags or [0.0], []
        return taken
