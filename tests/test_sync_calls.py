"""Control calls of a sync to servers whose engine dies under them, each server a real HTTP server of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.tiny import make_config
from vime.inference import client
from vime.inference.alive import while_it_lives
from vime.inference.client import InferenceError, Server
from vime.weights.probe import Probe

CONTROL_S = 60.0


@contextlib.asynccontextmanager
async def served(session: Any, *routes: web.RouteDef) -> AsyncIterator[Server]:
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield Server(f"http://127.0.0.1:{runner.addresses[0][1]}", session, CONTROL_S, "m")
    finally:
        await runner.cleanup()


async def outcome(session: Any, ends_after_s: float | None, health: Any, silent_s: float | None = None) -> float:
    """Seconds until the call to pause has ended; ``ends_after_s`` None: it never is answered."""

    async def pause(request: web.Request) -> web.Response:
        await asyncio.sleep(CONTROL_S if ends_after_s is None else ends_after_s)
        return web.json_response({})

    started = time.monotonic()
    async with served(session, web.post("/pause", pause), web.get("/health", health)) as server:
        await while_it_lives(server, lambda server: server.pause("recompute", None), silent_s)
    return time.monotonic() - started


async def dead(request: web.Request) -> web.Response:
    raise web.HTTPServiceUnavailable


async def cut(request: web.Request) -> web.Response:
    assert request.transport
    request.transport.close()
    return web.Response()


async def hangs(request: web.Request) -> web.Response:
    await asyncio.sleep(CONTROL_S)
    return web.Response()


async def well(request: web.Request) -> web.Response:
    return web.Response()


@pytest.mark.parametrize("health", [dead, cut])
def test_a_call_to_a_dead_engine_ends_with_its_server_s_word(health: Any, run: Any, session: Any) -> None:
    started = time.monotonic()
    with pytest.raises(InferenceError, match="no longer answers"):
        run(outcome(session, None, health))
    assert time.monotonic() - started < CONTROL_S / 2


@pytest.mark.parametrize("health", [well, hangs])
def test_a_call_that_takes_its_time_is_waited_for(health: Any, run: Any, session: Any) -> None:
    assert run(outcome(session, 1.5, health)) >= 1.5


def test_a_server_that_says_nothing_is_given_up_where_silence_is_a_sign(
    run: Any, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LOOK_TIMEOUT_S", 0.2)
    started = time.monotonic()
    with pytest.raises(InferenceError, match=r"has not answered for 1 s \(inference.health_timeout_s\)"):
        run(outcome(session, None, hangs, silent_s=1))
    assert time.monotonic() - started < CONTROL_S / 2
    assert run(outcome(session, 2.5, well, silent_s=1)) >= 2.5, "one that answers is waited for"


def test_a_server_that_hangs_in_its_proof_has_not_answered(
    run: Any, session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this it is waited for as long as for the longest response, and as often as one is asked again."""
    monkeypatch.setattr(client, "LOOK_TIMEOUT_S", 0.2)
    probe = Probe(make_config(tmp_path, inference={"health_timeout_s": 1}), None, [[1, 2]])  # type: ignore[arg-type]

    async def proof() -> Any:
        async with served(session, web.post(client.GENERATE, hangs), web.get("/health", hangs)) as server:
            return await probe.prove(1, [server])

    started = time.monotonic()
    (result,) = run(proof())
    assert isinstance(result, InferenceError) and "has not answered for 1 s" in str(result)
    assert time.monotonic() - started < CONTROL_S / 2
