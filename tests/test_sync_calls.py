"""Control calls of a sync to servers whose engine dies under them, each server a real HTTP server of the test's own."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from vime.inference.client import InferenceError, Server
from vime.weights.sync import while_it_lives

CONTROL_S = 60.0


async def outcome(session: Any, ends_after_s: float | None, health: Any) -> float:
    """Seconds until the call to pause has ended; ``ends_after_s`` None: it never is answered."""

    async def pause(request: web.Request) -> web.Response:
        await asyncio.sleep(CONTROL_S if ends_after_s is None else ends_after_s)
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.post("/pause", pause), web.get("/health", health)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server = Server(f"http://127.0.0.1:{runner.addresses[0][1]}", session, CONTROL_S, "m")
    started = time.monotonic()
    try:
        await while_it_lives(server, lambda server: server.pause("recompute", None))
    finally:
        await runner.cleanup()
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
