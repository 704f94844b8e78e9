"""How long the event loop keeps what is due waiting: whatever blocks it, this sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

PERIOD_S = 0.01
"""Seconds between two measurements: what blocks for less than this is found by chance only, and does no harm."""


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
        """Inside, the running loop is measured."""
        task = asyncio.create_task(self._measure())
        try:
            yield
        finally:
            task.cancel()

    def take(self) -> list[float]:
        """The lags since this was asked last; at least one, if only 0."""
        taken, self.lags = self.lags or [0.0], []
        return taken
