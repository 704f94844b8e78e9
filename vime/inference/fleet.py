"""All servers of a run, started here or given by URL, and the router in front of several; kept serving while the run goes on.

What falls is taken out of the router and started again. A server takes requests only once it has joined: it holds the
published weights and they were proved on it (``weights/sync``).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from vime.beside import beside
from vime.cluster.local import Process, ProcessError, free_port
from vime.config.sections import Config
from vime.config.shape import vocabulary
from vime.inference.client import (
    COMPLETIONS,
    NEEDED_FOR_ADAPTERS,
    InferenceError,
    Server,
)
from vime.inference.commands import MODEL_NAME, check_all_flags, server_command, server_env
from vime.inference.gate import Gate
from vime.inference.life import Life, Limits, State
from vime.inference.part import Part
from vime.inference.roster import Roster
from vime.inference.router import Router

LOOK_EVERY_S = 0.5


class Member(Part):
    """A vLLM server. It is ``prepared`` once it has been asked what it offers."""

    def __init__(self, name: str, server: Server, limits: Limits, launch: Callable[[], Process] | None) -> None:
        self.server = server
        self.prepared = False  # since it was started
        self.losses = 0  # how often it has fallen: what was begun with it before does not hold for what it is since
        super().__init__(name, limits, server.answer, launch)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Not looked at meanwhile: its engine answers nothing else while it loads weights."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False
            self.life = self.life.excused(time.monotonic())


Join = Callable[[Member], Awaitable[None]]


class Fleet:
    """``front`` is where requests go while ``gate`` is open: the router, or the only server. With a ``roster`` servers are
    added and removed while the run goes on."""

    def __init__(
        self, config: Config, session: aiohttp.ClientSession, log_dir: Path, roster: Roster | None = None
    ) -> None:
        self.config, self.session, self.log_dir, self.roster = config, session, log_dir, roster
        section = config.inference
        self.limits = Limits(
            section.start_timeout_s, section.health_timeout_s, section.max_restarts, section.restart_window_minutes * 60
        )
        self.members: list[Member] = []
        self.router: Router | None = None
        self.salt = secrets.token_hex(8) if config.rollout.in_flight == "keep_cache" else None
        self.front = self._server("")
        self.gate = Gate()
        self.say: Callable[[str], None] = lambda _: None
        self._routing = asyncio.Lock()
        self._restarts_told = 0
        self._up_at = time.monotonic()

    @property
    def servers(self) -> list[Server]:
        """Those that weights can be given to."""
        return [member.server for member in self.ready]

    @property
    def serving(self) -> list[Server]:
        """Those that requests go to."""
        return [member.server for member in self.members if member.serving]

    @property
    def ready(self) -> list[Member]:
        return [member for member in self.members if member.life.up and member.prepared]

    @property
    def parts(self) -> list[Part]:
        return [*self.members, *([self.router] if self.router else [])]

    async def start(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Returns when every server answers and can be used; ProcessError with the end of the log of one that does not."""
        known = check_all_flags(self.config)
        section = self.config.inference
        self.members = [self._given(url) for url in section.urls] or [
            self._ours(index, known) for index in range(section.servers)
        ]
        started = time.monotonic()
        for member in self.members:
            while member.life.state is State.STARTING:
                member.life = await member.look()
                if member.life.state in (State.DOWN, State.GONE):
                    raise member.error()
                progress(f"waiting for {member.server.url} ({time.monotonic() - started:.0f} s)")
                await asyncio.sleep(0.25)
            await self._prepare(member)
        await self._connect()

    def _server(self, url: str) -> Server:
        server = Server(url, self.session, self.config.inference.control_timeout_s, MODEL_NAME)
        server.salt = self.salt
        server.vocabulary = vocabulary(self.config.model.path)
        return server

    def _given(self, url: str) -> Member:
        return Member(f"server {url}", self._server(url), self.limits, None)

    def _ours(self, index: int, known: list[str]) -> Member:
        port, name = free_port(), f"vLLM server {index}"
        command, log = server_command(self.config, port, index, known), self.log_dir / f"vllm-{index}.log"
        env = server_env(self.config, index)
        server = self._server(f"http://127.0.0.1:{port}")
        return Member(name, server, self.limits, lambda: Process(name, command, log, env))

    async def _prepare(self, member: Member) -> None:
        """What a server that has just started is asked and told; InferenceError where it cannot be used."""
        if member.prepared:
            return
        server = member.server
        server.adapter = None
        server.bases.clear()
        await check_server(server, self.config)
        self.front.model = server.model
        if not self.config.lora.by_adapter:
            await server.init_weight_transfer({})
        member.prepared = True

    async def _connect(self) -> None:
        """A router, once there are several servers; and where requests go."""
        if len(self.members) > 1 and self.router is None:
            self.router = Router(self.config, self.session, self.log_dir / "router.log", self.limits)
            while self.router.life.state is State.STARTING:
                await self._look_at_router(self.router)
                await asyncio.sleep(0.1)
            if not self.router.serving:
                raise self.router.error()
        self.front.url = self.router.url if self.router else self.members[0].server.url
        await self._route()

    @contextlib.asynccontextmanager
    async def watched(self, join: Join) -> AsyncIterator[None]:
        """Keeps everything running inside the block, which ends with ProcessError where that can no longer be done."""
        block = asyncio.current_task()
        watch = asyncio.create_task(self._watch(join))

        def end_block(_: asyncio.Task[None]) -> None:
            if block:
                block.cancel()

        watch.add_done_callback(end_block)
        try:
            yield
        except BaseException:
            if block and watch.done() and not watch.cancelled() and (error := watch.exception()):
                block.uncancel()
                raise error from None
            raise
        finally:
            watch.remove_done_callback(end_block)
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self, join: Join) -> None:
        """A look at every part twice a second; one that is being restarted or joins keeps nothing else waiting."""
        looks: dict[Part, asyncio.Task[None]] = {}
        try:
            while True:
                for part in self.parts:
                    if (running := looks.get(part)) and running.done():
                        running.result()
                    if part not in looks or looks[part].done():
                        looks[part] = asyncio.create_task(self._look(part, join))
                self._give_up()
                if self.roster:
                    await self._consult(self.roster)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            for running in looks.values():
                running.cancel()
            await asyncio.gather(*looks.values(), return_exceptions=True)

    async def _look(self, part: Part, join: Join) -> None:
        if isinstance(part, Member):
            await self._look_at_member(part, join)
        elif isinstance(part, Router):
            await self._look_at_router(part)

    async def _look_at_member(self, member: Member, join: Join) -> None:
        await self.change(member, await member.look())
        if not await self._route():
            return  # first the router must have heard of it
        if member.life.state is State.GONE:
            await member.stop()
        elif member.life.state is State.DOWN and member.life.ours:
            await member.restart()
        elif member.life.state is State.WAITING:
            try:
                await self._prepare(member)
            except InferenceError as error:
                await self.change(member, member.life.fell(f"cannot be used: {error}", time.monotonic()))
            else:
                await join(member)

    async def _look_at_router(self, router: Router) -> None:
        await self.change(router, await router.look())
        if router.life.state is State.DOWN:
            await router.restart()
        if router.life.state is State.WAITING:
            await self.change(router, router.life.proved(time.monotonic()))

    async def change(self, part: Part, life: Life) -> None:
        """Takes up a part's next state: the router, the gate and the user hear of it."""
        before, part.life = part.life, life
        if life.state is before.state:
            return
        if before.state is State.SERVING:
            self.gate.disturbances += 1
        if life.state in (State.DOWN, State.GONE):
            if isinstance(part, Member):
                part.prepared, part.losses = False, part.losses + 1
            await self._route()
            self.say(f"{part.name} {life.reason}; {self._consequence(part)}")
        elif life.state is State.SERVING:
            await self._route()
            if life.falls:
                self.say(f"{part.name} serves again")

    async def admit(self, member: Member) -> None:
        """Requests go to it from now on."""
        await self.change(member, member.life.proved(time.monotonic()))

    def _consequence(self, part: Part) -> str:
        again = "it is not used again" if part.life.state is State.GONE else ""
        again = again or ("it is started again" if part.life.ours else "it is used again once it answers")
        return again if self.gate.is_open else f"{again}; requests wait"

    async def _route(self) -> bool:
        """Requests go to the servers that serve, and to no other; False where the router has not heard that yet."""
        async with self._routing:
            serving = frozenset(member.server.url for member in self.members if member.serving)
            if self.router is None:
                self.gate.usable(bool(serving))
                return True
            self.gate.usable(self.router.serving and bool(self.router.workers & serving))
            agreed = self.router.life.up and await self.router.route(serving)
            self.gate.usable(self.router.serving and bool(self.router.workers & serving))
            return agreed

    def _give_up(self) -> None:
        """ProcessError where requests could only wait for ever."""
        if self.router and self.router.life.state is State.GONE:
            raise self.router.error()
        if all(member.life.state is State.GONE for member in self.members):
            raise ProcessError("no server is left:\n" + "\n".join(str(member.error()) for member in self.members))
        now, limit = time.monotonic(), self.config.inference.outage_timeout_s
        if any(member.life.up or member.life.ours for member in self.members):
            self._up_at = now
        if now - self._up_at > limit:
            raise ProcessError(f"no server has answered for {limit:.0f} s (inference.outage_timeout_s)")

    async def _consult(self, roster: Roster) -> None:
        """Carries out what was wished and writes who serves."""
        wishes = roster.wished()
        for wish in wishes:
            answer = await (self._add(wish.url) if wish.what == "add" else self._remove(wish.url))
            roster.answers.append(answer)
            self.say(answer)
        servers = [row(member) for member in self.members]
        await beside(roster.write, self.front.version, servers, now=bool(wishes))

    def _find(self, url: str) -> Member | None:
        return next((member for member in self.members if member.server.url == url.rstrip("/")), None)

    async def _add(self, url: str) -> str:
        if self.config.run.deterministic:
            return f"server {url} is not added: run.deterministic needs one server, which the run starts itself"
        if known := self._find(url):
            if known.life.state is not State.GONE or known.life.ours:
                return f"{known.name} is {known.life.state} already"
            self.members.remove(known)
        self.members.append(self._given(url))
        await self._connect()
        return f"server {url} is added; it takes requests once it holds the weights and they are proved"

    async def _remove(self, url: str) -> str:
        member = self._find(url)
        if member is None or member.life.state is State.GONE:
            return f"{url} is none of the run's servers"
        if all(other is member or other.life.state is State.GONE for other in self.members):
            return f"{member.name} is the only one left: add another before you remove it"
        await self.change(member, member.life.dismissed("was removed", time.monotonic()))
        return f"{member.name} is removed"

    def metrics(self) -> dict[str, float]:
        """Of the time since the last call: restarts, and seconds without a server; and how many serve now."""
        restarts = sum(part.restarts for part in self.parts)
        since, self._restarts_told = restarts - self._restarts_told, restarts
        return {
            "servers/serving": sum(member.serving for member in self.members),
            "servers/known": sum(member.life.state is not State.GONE for member in self.members),
            "servers/restarts": since,
            "servers/outage_s": self.gate.outage_s(),
        }

    async def stop(self) -> None:
        await asyncio.gather(*(part.stop() for part in self.parts))


def row(member: Member) -> dict[str, Any]:
    """One line of the roster."""
    return {
        "name": member.name,
        "url": member.server.url,
        "state": str(member.life.state),
        "since_s": time.monotonic() - member.life.since,
        "version": member.server.version if member.serving else None,
        "falls": len(member.life.falls),
        "reason": member.life.reason,
    }


async def check_server(server: Server, config: Config) -> None:
    """Asks a server what it offers and under which name; InferenceError where the run cannot use it."""
    if config.lora.by_adapter:
        server.needed = NEEDED_FOR_ADAPTERS
    await server.learn_paths()
    server.model = await server.model_name()
    rollout = config.rollout
    stale = rollout.max_staleness and rollout.in_flight in ("recompute", "keep_cache") and not config.lora.by_adapter
    if stale and not server.tells_versions:
        raise InferenceError(
            f"{server.url} does not say which weights made which token (vLLM 0.26): with rollout.max_staleness = "
            f'{rollout.max_staleness} and rollout.in_flight = "{rollout.in_flight}" tokens would bear the wrong version; '
            'set rollout.in_flight to "abort" or "finish", or max_staleness to 0'
        )


async def given_server(url: str, session: aiohttp.ClientSession, config: Config) -> Server:
    """A server that runs already and is to sample; raises InferenceError where it cannot."""
    server = Server(url, session, config.inference.control_timeout_s, MODEL_NAME)
    await check_server(server, config)
    return server


async def scoring_server(url: str, session: aiohttp.ClientSession, config: Config) -> Server:
    """A server that runs already and only scores responses; raises InferenceError where it cannot."""
    server = Server(url, session, config.inference.control_timeout_s)
    server.needed = (COMPLETIONS,)
    await server.learn_paths()
    server.model = await server.model_name()
    return server
