"""How many of something run at once: a bound that can move while others wait for it."""

from __future__ import annotations

import asyncio
from collections import deque

BURST = 16
"""Slots given out in one turn of the event loop: a request takes a fraction of a millisecond to send, and nothing else
happens in a turn until all that were admitted in it are on their way."""


class Limiter:
    """``async with limiter``: at most ``cap`` inside at once, the others wait in order.

    ``peak`` is the most that were inside since it was last set, ``ended`` counts those that have left. A lower cap drives
    nobody out. Entering and leaving cost the same whether ten wait or ten thousand.
    """

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self.inside = self.peak = self.ended = self.waiting = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._opening = False

    @property
    def cap(self) -> int:
        return self._cap

    @cap.setter
    def cap(self, cap: int) -> None:
        self._cap = cap
        self._open_later()

    async def __aenter__(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self.waiting += 1
        self._open_later()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.waiting -= 1
            else:  # it was let in and cancelled in the same turn of the loop
                self._leave()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._leave()
        self.ended += 1

    async def passed(self) -> None:
        """Waits to be let in and leaves again: of a limiter of one, so many as wait pass one in a turn of the event loop."""
        async with self:
            pass

    def _leave(self) -> None:
        self.inside -= 1
        self._open_later()

    def _open_later(self) -> None:
        if not self._opening and self.waiting:
            self._opening = True
            asyncio.get_running_loop().call_soon(self._open)

    def _open(self) -> None:
        """Lets in the next few; the rest in the turns of the loop that follow."""
        self._opening = False
        for _ in range(BURST):
            while self._queue and self._queue[0].done():  # cancelled
                self._queue.popleft()
            if not self._queue or self.inside >= self._cap:
                return
            self._queue.popleft().set_result(None)
            self.waiting -= 1
            self.inside += 1
            self.peak = max(self.peak, self.inside)
        self._open_later()
