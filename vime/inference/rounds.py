"""Requests in rounds, for runs that must sample the same tokens each time (``run.deterministic``).

What a server samples depends on which requests it computes together, in which order, and on its random state. So requests wait
until every response that is being made asks for one; then the server, paused and with a new seed, gets them all, in a fixed
order of priority, and is resumed when it has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable

from vime.inference.client import InferenceError, Server

Key = tuple[str, int]
"""A response: its group's session, and its number there."""
LOOK_EVERY_S = 0.01
SETTLE_S = 0.3


class Rounds:
    """``expected`` responses are being made; those in ``waiting`` are at a request."""

    def __init__(self, server: Server, seed: int, settle_s: float = SETTLE_S) -> None:
        self.server, self.seed, self.settle_s = server, seed, settle_s
        self.expected = 0
        self.waiting: dict[Key, asyncio.Future[int]] = {}
        self.number = 0  # of the round among those since responses were last expected
        self._answered = 0
        self._round: asyncio.Task[None] | None = None

    def expect(self, responses: int) -> None:
        """So many responses are begun, each of which ends with ``leave``."""
        self.expected += responses
        self.number = 0

    def leave(self) -> None:
        self.expected -= 1
        self._begin()

    @contextlib.asynccontextmanager
    async def turn(self, key: Key) -> AsyncIterator[int]:
        """Waits for the round; the priority of the request that is made inside, and that must be answered there."""
        future = self.waiting[key] = asyncio.get_running_loop().create_future()
        try:
            self._begin()
            yield await future
        finally:
            self.waiting.pop(key, None)
            self._answered += 1

    def _begin(self) -> None:
        if self.waiting and len(self.waiting) == self.expected:
            turns, self.waiting = self.waiting, {}
            self._round = asyncio.create_task(self._run(turns))

    async def _run(self, turns: dict[Key, asyncio.Future[int]]) -> None:
        try:
            keys = sorted(turns)
            await self.server.pause()
            await self._until(
                lambda held: not held, "those of the round before were answered"
            )  # it may count them still
            await self.server.seed_sampling(self._seed(keys[0]))
            self.number += 1
            self._answered = 0
            for priority, key in enumerate(keys):
                turns[key].set_result(priority)
            await self._until(lambda held: held + self._answered >= len(keys), f"{len(keys)} were sent")  # or refused
            await asyncio.sleep(self.settle_s)  # the server counts a request before its engine has it
            await self.server.resume()
        except InferenceError as error:
            for future in turns.values():
                if not future.done():
                    future.set_exception(error)

    async def _until(self, reached: Callable[[int], bool], what: str) -> None:
        """Returns when the number of requests that the server counts is as it should be; InferenceError after its deadline."""
        deadline = asyncio.get_running_loop().time() + self.server.timeout_s
        while not reached(held := await self.server.held_requests()):
            if asyncio.get_running_loop().time() > deadline:
                raise InferenceError(
                    f"{self.server.url} holds {held} requests after {self.server.timeout_s:.0f} s; {what}"
                )
            await asyncio.sleep(LOOK_EVERY_S)

    def _seed(self, first: Key) -> int:
        text = f"{self.seed}:{self.server.version}:{first}:{self.number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
