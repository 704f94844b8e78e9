"""Settings of all tests; tiny models, real vLLM servers (one a model kind) and one event loop, shared by the session."""

from __future__ import annotations

import asyncio
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
    """``fleets(kind)``: a real vLLM server of the tiny model of that kind, started once, stopped at the end."""
    started: dict[str, Fleet] = {}

    def fleet(kind: str) -> Fleet:
        if kind not in started:
            started[kind] = Fleet(make_config(models(kind)), session, tmp_path_factory.mktemp(f"logs-{kind}"))
            run(serving(started[kind]))
        return started[kind]

    yield fleet
    for one in started.values():
        run(one.stop())
