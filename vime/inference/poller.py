"""Asks the servers for their load, all the time, and has the cap on requests in flight follow it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Self

from vime.inference.client import InferenceError, Server
from vime.inference.limiter import Limiter
from vime.observe import trace
from vime.rollout.admission import Admission, Demand, Load

PERIOD_S = 1.0
"""Seconds between two looks: a cache fills in tens of them, and a look costs a server some milliseconds."""
TIMEOUT_S = 5.0
"""Deadline of one look; a server that answers later changes nothing."""


class LoadPoller:
    """Looks at the servers as long as it is entered, ``servers()`` being those that serve at the time.

    ``metrics`` tells what was seen since it was asked last.
    """

    def __init__(self, servers: Callable[[], Sequence[Server]], limiter: Limiter, admission: Admission) -> None:
        self.servers, self.limiter, self.admission = servers, limiter, admission
        self.updates = 0  # begun and ended: odd while the weights are updated
        self.seen: list[dict[str, Load]] = []  # by server; the first look is the last of the step before

    async def __aenter__(self) -> Self:
        await self.look()
        self.task = asyncio.create_task(self._look_on())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()

    async def look(self) -> None:
        servers, updates = self.servers(), self.updates
        answers = await asyncio.gather(*(self._ask(server) for server in servers))
        loads = {server.url: load for server, load in zip(servers, answers, strict=True) if load}
        self.seen.append(loads)
        trace.loads(loads)
        if updates != self.updates or updates % 2:  # paused servers are not measured
            return
        limiter = self.limiter
        self.admission.observe(len(servers), loads, Demand(limiter.peak, limiter.waiting, limiter.ended))
        limiter.peak, limiter.cap = limiter.inside, self.admission.cap

    async def _ask(self, server: Server) -> Load | None:
        try:
            return await server.load(TIMEOUT_S)
        except InferenceError:
            return None

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, the servers' weights are updated: what they tell is no measure of their load."""
        self.updates += 1
        try:
            yield
        finally:
            self.updates += 1
            self.admission.updated(self.limiter.inside, self.limiter.ended)

    def metrics(self) -> dict[str, float]:
        """Cap; requests that ran and waited in all servers, on average; the fullest KV cache; preemptions, those for an update
        of the weights included; share of the looks, over servers and time, that found a server with nothing to do."""
        looks = [loads for loads in self.seen[1:] if loads]
        before, self.seen = self.seen[:1], self.seen[-1:]
        told = [load for loads in looks for load in loads.values()]
        found = {"servers/cap": float(self.limiter.cap)}
        if not told:
            return found
        pairs = zip([*before, *looks], looks, strict=False)
        return found | {
            "servers/running": fmean(sum(load.running for load in loads.values()) for loads in looks),
            "servers/waiting": fmean(sum(load.waiting for load in loads.values()) for loads in looks),
            "servers/kv_use_max": max(load.kv_use for load in told),
            "servers/preemptions": float(sum(preemptions(*pair) for pair in pairs)),
            "servers/idle_fraction": fmean(load.idle for load in told),
        }


def preemptions(before: dict[str, Load], after: dict[str, Load]) -> int:
    """How many there were between two looks."""
    told = [(before[url], load) for url, load in after.items() if url in before]
    return sum(max(0, load.preemptions - earlier.preemptions) for earlier, load in told)
