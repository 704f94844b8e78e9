"""Requests for responses: no more at once than servers can take, asked again after a server's failure."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from vime.cluster.open_files import connections_allowed
from vime.config.sections import Rollout
from vime.inference.client import Adapter, Completion, InferenceError, Late, RequestRefused, Server
from vime.inference.gate import Gate
from vime.inference.limiter import Limiter
from vime.inference.rounds import Key, Rounds
from vime.observe import trace
from vime.rollout.admission import START

Answer = TypeVar("Answer")
SETTLE_S = 1.5  # by then the fleet has noticed that a server or the router ended (fleet.LOOK_EVERY_S, several times)
LOST_LIMIT = 20  # a request under which servers were lost so often is likely what they end of


class Requests:
    """Where responses come from: ``front``, the router or the only server, while the gate is open. ``limiter`` bounds the
    requests in flight, by ``maximum`` at most. All name ``adapter`` if there is one, else what the front serves."""

    def __init__(self, front: Server, gate: Gate, section: Rollout, rounds: Rounds | None = None) -> None:
        self.front, self.gate, self.section, self.rounds = front, gate, section, rounds
        self.adapter: Adapter | None = None
        self.begun: int | None = None  # the version of the first response that was asked for
        self.maximum = connections_allowed(section.concurrency)
        self.limiter = Limiter(min(START, self.maximum))

    @property
    def version(self) -> int:
        """Of the weights that are asked."""
        return self.adapter.version if self.adapter else self.front.version

    def naming(self, adapter: Adapter) -> Requests:
        """The same, but for the adapter that is named."""
        other = copy.copy(self)
        other.adapter = adapter
        return other

    def of_group(self) -> Requests:
        """The same, for one group: ``begun`` is the group's."""
        other = copy.copy(self)
        other.begun = None
        return other

    async def made(self, call: Callable[[], Awaitable[Answer]], late_again: bool = True) -> Answer:
        """The answer to a request, which waits for a free slot and the gate, and is made again after a failure.

        ``rollout.retries`` times, not counting failures about which the fleet was disturbed: a server that was lost is
        no fault of the request. A refused request is not made again, nor without ``late_again`` one that was late by itself.
        """
        failed = lost = 0
        while True:
            asked = trace.now()
            await self.gate.passed()
            async with self.limiter if self.rounds is None else contextlib.nullcontext():  # a round is all there are
                await self.gate.passed()  # it may have been closed while others went first
                trace.note("queue", asked)
                disturbances = self.gate.disturbances
                try:
                    return await call()
                except RequestRefused:
                    raise
                except InferenceError as error:
                    cause = error
            await asyncio.sleep(SETTLE_S * 2**failed)
            if self.gate.disturbances != disturbances:
                lost += 1
            elif late_again or not isinstance(cause, Late):
                failed += 1
            else:
                raise cause
            if failed > self.section.retries or lost > LOST_LIMIT:
                raise cause

    def expect(self, responses: int) -> None:
        """So many responses are begun; each of them says when it has ended (``ended``)."""
        if self.rounds:
            self.rounds.expect(responses)

    def ended(self) -> None:
        if self.rounds:
            self.rounds.leave()

    async def generate(
        self, prompt_ids: list[int], sampling: dict[str, Any], key: Key = ("", 0), routed: bool = False
    ) -> Completion:
        """One response. ``key`` is its session, which keeps a group on one server, whose cache holds its prompt, and its number
        there."""
        timeout = self.section.request_timeout_s

        async def call() -> Completion:
            asked = trace.now()
            async with self.rounds.turn(key) if self.rounds else contextlib.nullcontext() as priority:
                if self.rounds:
                    trace.note("queue", asked)
                if self.begun is None:
                    self.begun = self.version
                return await self.front.generate(prompt_ids, sampling, timeout, key[0], routed, priority, self.adapter)

        try:
            return await self.made(call, late_again=False)  # of two tries the shorter would be kept
        except Late as error:
            raise Late(f"{error} (rollout.request_timeout_s)") from None

    async def score(self, server: Server, prompt_ids: list[int], response_ids: list[int]) -> list[float]:
        """Log-probability of each response token under another model, by the server that serves it."""
        return await self.made(lambda: server.score(prompt_ids, response_ids, self.section.request_timeout_s))
