"""Settings of all tests; tiny models, real vLLM servers (one a model kind) and one event loop, shared by the session."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import settings

from tests.tiny import make_config, make_model
from vime.inference.fleet import Fleet

# A busy machine is no fault of the example: no deadline. Nothing is written beside the tests: no database. The same examples
# each time: a run fails for what was changed.
settings.register_profile("vime", deadline=None, database=None, derandomize=True, max_examples=60)
settings.load_profile("vime")


SERVERS = (
    "adapters",
    "algorithms",
    "conversation",
    "examples",
    "fleet",
    "fleet_faults",
    "poller",
    "rollout",
    "weights",
)
SLOW = ("train", "deterministic", "splits", "trainer", "shards", "served_models", "engine_invariance", "supervised")


def name_of(nodeid: str) -> str:
    return Path(nodeid.split("::", maxsplit=1)[0]).stem.removeprefix("test_")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker is given a file in one piece, and those that share real servers, of 3 GB each, as if they were one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "servers" if name_of(nodeid) in SERVERS else name_of(nodeid)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that both workers end together."""
    items.sort(key=lambda item: (*SERVERS, *SLOW, name_of(item.nodeid)).index(name_of(item.nodeid)))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``models(kind, seed)``: the folder of a tiny model, made once."""
    root = tmp_path_factory.mktemp("models")

    def folder(kind: str, seed: int = 0) -> Path:
        target = root / f"{kind}-{seed}"
        return target if target.exists() else make_model(target, kind, seed)

    return folder


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """``run(coroutine)`` on the session's one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def session(run: Any) -> Iterator[aiohttp.ClientSession]:
    async def open_session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    opened = run(open_session())
    yield opened
    run(opened.close())


async def serving(fleet: Fleet) -> None:
    """Started, and taking requests with the weights of its model's folder."""
    await fleet.start()
    for member in fleet.members:
        await fleet.admit(member)


@pytest.fixture(scope="session")
def fleets(
    run: Any, session: aiohttp.ClientSession, models: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Fleet]]:
    """``fleets(kind)``: a real vLLM server of the tiny model of that kind. The tied one runs till the end, the others until
    another of them is asked for."""
    started: dict[str, Fleet] = {}
    assert name_of(os.environ["PYTEST_CURRENT_TEST"]) in SERVERS

    def fleet(kind: str) -> Fleet:
        if kind not in started:
            for other in {*started} - {"tied"} if kind != "tied" else ():
                run(started.pop(other).stop())
            started[kind] = Fleet(make_config(models(kind)), session, tmp_path_factory.mktemp(f"logs-{kind}"))
            run(serving(started[kind]))
        return started[kind]

    yield fleet
    for one in started.values():
        run(one.stop())
