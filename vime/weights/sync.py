"""Every server gets the trainer's weights and is proved before requests go to it: all at a sync, one alone when it joins."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from vime.config.sections import Config
from vime.inference.alive import while_it_lives
from vime.inference.client import Adapter, InferenceError, Server
from vime.inference.fleet import Fleet, Member
from vime.inference.life import Answer
from vime.weights.adapters import AdapterChannel
from vime.weights.channel import SharedMemoryChannel
from vime.weights.probe import Probe, ProbeError, ProbeResult

ENDED = ("abort", "finish")  # values of rollout.in_flight under which no response goes on through a sync
DRAIN_S = 2.0  # for the last responses of paused servers to arrive
VERDICT_S = 2.0  # an engine that died in an update is noticed by its server within this


Takers = dict[Member, int]
"""Servers that take weights, with their losses when they began."""


class Unchanged:
    """No weights are sent: every server serves those that it was started with, as ``vime train --debug rollout`` does."""

    count = failures = 0

    def __init__(self, fleet: Fleet | None) -> None:
        self.fleet = fleet
        self.lock = asyncio.Lock()

    async def send(self, version: int) -> dict[str, float]:
        for member in self.fleet.ready if self.fleet else []:
            await self.join(member)
        return {}

    async def join(self, member: Member) -> None:
        assert self.fleet
        await self.fleet.admit(member)

    async def close(self) -> None:
        """Nothing is left on servers."""


class Sync:
    """``lock`` is held while the trainer's weights are not those published, from training to the end of the sync. A sync is
    made inside ``updating()``."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        channel: SharedMemoryChannel | AdapterChannel,
        probe: Probe,
        updating: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.fleet, self.channel, self.probe, self.updating = fleet, channel, probe, updating
        self.in_flight = config.rollout.in_flight
        self.pause_s = config.rollout.request_timeout_s if self.in_flight == "finish" else None
        self.lock = asyncio.Lock()
        self.version: int | None = None  # published and synced
        self.count = 0

    @property
    def failures(self) -> int:
        """Probes that failed."""
        return self.probe.failures

    def keeping(self, adapter: Adapter) -> contextlib.AbstractContextManager[None]:
        """Inside, that version of the adapter can be asked, whatever is sent meanwhile."""
        assert isinstance(self.channel, AdapterChannel)
        return self.channel.keeping(adapter)

    async def close(self) -> None:
        await self.channel.close()

    async def send(self, version: int) -> dict[str, float]:
        """Publishes, syncs, proves; times in seconds and the differences of the proof.

        A server that fails is out until it has been restarted and has joined. InferenceError where all refused the update
        and are well: the update is at fault. ProbeError where a server serves other weights.
        """
        with self.updating():
            return await self._send(version)

    async def _send(self, version: int) -> dict[str, float]:
        times = {"publish": time.perf_counter()}
        await self.channel.publish(version)
        with self.fleet.gate.held() if self.channel.pauses else contextlib.nullcontext():
            times["sync"] = time.perf_counter()
            taken = await self._give(self._now(self.fleet.ready), version, at_sync=True)
            times["probe"] = time.perf_counter()
            proofs = await self._prove(version, taken)
            times["end"] = time.perf_counter()
        self.fleet.front.version = self.version = version  # though no server may serve now: one that joins takes it
        self.count += 1
        await self.channel.tidy()
        moments = list(times.values())
        return {f"time/{name}": b - a for name, a, b in zip(times, moments, moments[1:], strict=False)} | differences(
            proofs
        )

    async def join(self, member: Member) -> None:
        """One server gets what is published and is proved, where the trainer still holds that; else a sync will do it.

        Wrong weights end that server's use for good.
        """
        if self.lock.locked() or self.version is None:
            return
        async with self.lock:
            try:
                await self._prove(self.version, await self._give(self._now([member]), self.version))
            except ProbeError as error:
                await self.fleet.change(member, member.life.dismissed(str(error), time.monotonic()))

    def _now(self, members: Sequence[Member]) -> Takers:
        return {member: member.losses for member in members}

    async def _give(self, members: Takers, version: int, at_sync: bool = False) -> Takers:
        """Those that have taken what is published and run again; the others have fallen."""
        with contextlib.ExitStack() as stack:
            for member in members:
                stack.enter_context(member.updating())
            if self.channel.pauses:
                members = await self._each(members, lambda server: server.pause(self.in_flight, self.pause_s))
                if at_sync and self.in_flight in ENDED:
                    await self._drained()
                self.fleet.front.version = version
            taken = await self._each(members, self.channel.take, loads=True, verdict=at_sync)
            if self.channel.pauses:
                taken = await self._each(taken, Server.resume)
        for member in taken:
            member.server.version = version
        return taken

    async def _each(
        self, members: Takers, call: Callable[[Server], Awaitable[None]], loads: bool = False, verdict: bool = False
    ) -> Takers:
        """Those on which the call went well; the others fall. ``loads``: they answer nothing else meanwhile; ``verdict``: a
        failure of all is raised if all are well."""
        silent_s = None if loads else self.fleet.limits.silent_s
        calls = (while_it_lives(member.server, call, silent_s) for member in members)
        results = await asyncio.gather(*calls, return_exceptions=True)
        failures = {m: r for m, r in zip(members, results, strict=True) if isinstance(r, BaseException)}
        for error in failures.values():
            if not isinstance(error, InferenceError):
                raise error
        if verdict and failures and len(failures) == len(members):
            await asyncio.sleep(VERDICT_S)
            if all([await member.server.answer() is Answer.YES for member in members]):
                raise next(iter(failures.values()))
        for member, error in failures.items():
            await self._fell(member, members[member], f"failed: {error}")
        return {m: losses for m, losses in members.items() if m not in failures and m.losses == losses}

    async def _fell(self, member: Member, losses: int, reason: str) -> None:
        """Unless it has fallen already, and is perhaps being started again."""
        if member.losses == losses:
            await self.fleet.change(member, member.life.fell(reason, time.monotonic()))

    async def _drained(self) -> None:
        """The last responses of paused servers have arrived, where they were to end."""
        deadline = time.monotonic() + DRAIN_S
        while self.fleet.front.in_flight.total() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def _prove(self, version: int, members: Takers) -> list[ProbeResult]:
        """The proofs of those that serve now; one that did not answer has fallen."""
        results = await self.probe.prove(version, [member.server for member in members])
        proved = []
        for (member, losses), result in zip(members.items(), results, strict=True):
            if isinstance(result, InferenceError):
                await self._fell(member, losses, f"failed its probe: {result}")
            elif member.losses == losses:
                proved.append((member, result))
        if proved:
            self.fleet.front.version, self.fleet.front.adapter = version, proved[0][0].server.adapter
        for member, _ in proved:
            if member.losses == members[member]:
                await self.fleet.admit(member)
        return [result for _, result in proved]


def differences(proofs: Sequence[ProbeResult]) -> dict[str, float]:
    """Of all servers; each has sampled as many tokens."""
    if not proofs:
        return {}
    return {
        "weights/probe_abs_diff_mean": sum(proof.mean for proof in proofs) / len(proofs),
        "weights/probe_abs_diff_max": max(proof.max for proof in proofs),
    }
