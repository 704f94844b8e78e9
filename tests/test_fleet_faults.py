"""Two real servers behind the router, killed and stopped under requests: nothing fails, and what comes back is proved first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_config
from vime.cli import main
from vime.cluster import supervise
from vime.cluster.local import Process
from vime.config.sections import Config
from vime.inference.fleet import Fleet
from vime.inference.life import State
from vime.inference.requests import Requests
from vime.inference.roster import Roster
from vime.training.client import Trainer
from vime.weights.channel import SharedMemoryChannel
from vime.weights.probe import Probe
from vime.weights.sync import Sync

PROMPTS = [[10, 20, 30, 40, 50], [7, 8, 9], list(range(60, 90))]
SAMPLING = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0}
DEADLINE_S = 2400.0  # of a fault to be mended: two servers start, on a machine that does other things


def child_of(process: Process | None) -> int:
    """The program itself, below its supervisor."""
    assert process
    return supervise.children(process._popen.pid)[0]


def engine_of(process: Process | None) -> int:
    """The engine's own process, below the API server."""
    for pid in supervise.children(child_of(process)):
        if "EngineCore" in Path(f"/proc/{pid}/comm").read_text() + Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise AssertionError("no engine")


class Setting:
    """Servers of one model, a trainer that holds another, and a stream of requests."""

    def __init__(self, config: Config, session: Any, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.fleet = Fleet(config, session, folder / "logs", Roster(folder))
        self.said: list[str] = []
        self.fleet.say = self.said.append
        self.trainer = Trainer(config, session, folder, folder / "store")
        channel = SharedMemoryChannel(config, self.trainer, self.fleet, folder / "weights")
        self.sync = Sync(config, self.fleet, channel, Probe(config, self.trainer, PROMPTS))
        self.requests = Requests(self.fleet.front, self.fleet.gate, config.rollout)
        self.version = 0

    async def start(self, other: Path) -> None:
        await asyncio.gather(self.fleet.start(), self.trainer.start(other))

    async def send(self) -> dict[str, float]:
        """As a step does; the trainer's weights stay the same, their number does not."""
        async with self.sync.lock:
            self.version += 1
            return await self.sync.send(self.version)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}; said: {self.said}"
            await asyncio.sleep(0.05)

    def all_serve(self) -> bool:
        members = [member for member in self.fleet.members if member.life.state is not State.GONE]
        return all(member.serving for member in members) and self.fleet.gate.is_open

    @contextlib.asynccontextmanager
    async def under_load(self, requests: int = 6) -> AsyncIterator[None]:
        """Requests, always so many, which all succeed with tokens of the trainer's weights."""
        ending = asyncio.Event()
        rows: list[tuple[list[int], list[int], list[float]]] = []

        async def ask(number: int) -> None:
            while not ending.is_set():
                prompt = PROMPTS[number % len(PROMPTS)]
                made = await self.requests.generate(prompt, SAMPLING, f"g{number}")
                assert made.finish_reason == "length" and made.versions[-1].version <= self.version
                rows.append((prompt, made.token_ids, made.logprobs))

        async with self.fleet.watched(self.sync.join):
            await self.until(self.all_serve, "all serve")
            asking = [asyncio.create_task(ask(number)) for number in range(requests)]
            try:
                await self.until(lambda: len(rows) > requests, "the first responses")
                yield
                await self.until(self.all_serve, "all serve again")
                ending.set()
                await asyncio.wait_for(asyncio.gather(*asking), DEADLINE_S)
            finally:
                for task in asking:
                    task.cancel()
        last = rows[-40:]
        mine = await self.trainer.logprobs([{"prompt_ids": p, "response_ids": ids} for p, ids, _ in last])
        for (_, _, theirs), ours in zip(last, mine, strict=True):
            assert theirs == pytest.approx(ours, abs=1e-4)


@pytest.fixture(scope="module")
def setting(run: Any, session: Any, models: Any, tmp_path_factory: Any) -> Iterator[Setting]:
    config = make_config(
        models("tied"),
        inference={"servers": 2, "health_timeout_s": 30, "start_timeout_s": 1800, "max_restarts": 9},
        rollout={"request_timeout_s": 2400, "retries": 0, "concurrency": 64},
    )
    made = Setting(config, session, tmp_path_factory.mktemp("faults"))
    try:
        run(made.start(models("tied", 1)))
        run(made.send())
        yield made
    finally:
        run(made.fleet.stop())
        run(made.trainer.stop())


def test_no_request_fails_and_all_servers_serve_proved_weights_again(setting: Setting, run: Any) -> None:
    """An engine is killed while it takes weights: the sync is of the other, who goes on. Then the router is killed, and before
    the first is back the engine of the other hangs: requests wait."""
    first, second = setting.fleet.members

    async def scenario() -> None:
        async with setting.under_load():
            assert setting.fleet.router
            sending = asyncio.create_task(setting.send())
            await setting.until(lambda: first.busy, "the sync begins")
            os.kill(engine_of(first.process), signal.SIGKILL)
            assert (await sending)["weights/probe_abs_diff_max"] < 1e-4
            await setting.until(lambda: not first.serving, "the fleet notices")
            assert second.server.version == setting.version and second.serving
            os.kill(child_of(setting.fleet.router.process), signal.SIGKILL)
            await setting.until(lambda: not setting.fleet.gate.is_open, "the gate closes")
            await setting.until(lambda: setting.fleet.gate.is_open, "the router serves again")
            os.kill(engine_of(second.process), signal.SIGSTOP)
            await setting.until(lambda: second.life.state is State.DOWN, "the fleet notices the silence")
            assert "has not answered for" in second.life.reason
        assert {server.version for server in setting.fleet.servers} == {setting.version}

    run(scenario())


def test_a_server_is_added_used_only_with_the_right_weights_and_removed(
    setting: Setting, run: Any, fleets: Any, models: Any, capfd: Any
) -> None:
    url = fleets("tied").servers[0].url
    channel: Any = setting.sync.channel

    async def servers(*words: str) -> str:
        capfd.readouterr()
        assert await asyncio.to_thread(main, ["servers", str(setting.folder), *words]) == 0
        return capfd.readouterr().out

    async def scenario() -> None:
        async with setting.under_load():
            await setting.send()
            right, channel.published = channel.published, models("tied")  # a spoilt update that loads
            assert "is added" in await servers("--add", url)
            added = setting.fleet.members[-1]
            await setting.until(lambda: added.life.state is State.GONE, "its probe fails")
            assert f"version {setting.version} is not what {url} serves" in added.life.reason
            channel.published = right
            await servers("--add", url)
            added = setting.fleet.members[-1]
            await setting.until(lambda: added.serving, "it has joined")
            assert await servers() and (await setting.send())["weights/probe_abs_diff_max"] < 1e-4
            assert "is removed" in await servers("--remove", url)
            assert "is none of the run's servers" in await servers("--remove", url)
            await setting.send()
            assert await added.server.weight_version() == str(setting.version - 1), "it is left alone"
        assert len(setting.fleet.servers) == 2

    run(scenario())
