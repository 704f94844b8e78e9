"""Whether requests may be sent now, and how often a server was lost under them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator


class Gate:
    """Open while a server serves. ``disturbances`` counts what may have broken requests that were on their way."""

    def __init__(self, usable: bool = False) -> None:
        self.disturbances = 0
        self._usable, self._held = usable, False
        self._open = asyncio.Event()
        self._closed_at: float | None = None
        self._closed_s = 0.0
        self._set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def passed(self) -> None:
        """Returns once the gate is open. The fleet ends the run where it can never open again."""
        await self._open.wait()

    def usable(self, usable: bool) -> None:
        """Whether there is a server to send requests to."""
        if self._usable != usable:
            now = time.monotonic()
            self._closed_s += now - self._closed_at if usable and self._closed_at else 0.0
            self._closed_at = None if usable else now
            self._usable = usable
        self._set()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is sent meanwhile."""
        self._held = True
        self._set()
        try:
            yield
        finally:
            self._held = False
            self._set()

    def outage_s(self) -> float:
        """Seconds without a usable server since the last call."""
        now = time.monotonic()
        running = now - self._closed_at if self._closed_at else 0.0
        self._closed_at = now if self._closed_at else None
        total, self._closed_s = self._closed_s + running, 0.0
        return total

    def _set(self) -> None:
        (self._open.set if self._usable and not self._held else self._open.clear)()
