"""Calls to a server that may die or hang under them, and would then be left unanswered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from vime.inference.client import InferenceError, Server
from vime.inference.fleet import LOOK_EVERY_S
from vime.inference.life import Answer

T = TypeVar("T")


async def while_it_lives(server: Server, call: Callable[[Server], Awaitable[T]], silent_s: float | None) -> T:
    """What the call gives, or InferenceError once the server says that its engine is dead, or says nothing for ``silent_s``.

    None where silence is no sign: a server answers nothing while it loads weights.
    """

    async def its_end() -> str:
        heard = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            answer, now = await server.answer(), time.monotonic()
            if answer is Answer.NO:
                return "no longer answers"
            if answer is Answer.YES:
                heard = now
            elif silent_s is not None and now - heard > silent_s:
                return f"has not answered for {silent_s:.0f} s (inference.health_timeout_s)"

    calling, watching = asyncio.ensure_future(call(server)), asyncio.ensure_future(its_end())
    try:
        await asyncio.wait([calling, watching], return_when=asyncio.FIRST_COMPLETED)
        if not calling.done():
            raise InferenceError(f"{server.url} {watching.result()}")
        return await calling
    finally:
        calling.cancel()
        watching.cancel()
