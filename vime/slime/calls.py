"""Calls of the user's functions from the driver: each with a deadline, and off the event loop unless it is a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

from vime.functions import cause_of, told_to_end
from vime.workers.child import is_coroutine_function


class HookError(Exception):
    """A function of ``[slime]`` failed, was late, or returned what cannot be used; the message names it and the cause."""


async def in_thread(call: Callable[[], Any]) -> Any:
    """The call's result, from a thread that does not hold up the end of the process, should it never return."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():  # the caller may have given up
            set_it(value)

    def report(set_it: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
            loop.call_soon_threadsafe(settle, set_it, value)

    def run() -> None:
        try:
            value = call()
        except BaseException as error:
            if isinstance(error, StopIteration):  # which a future does not take
                error = RuntimeError("it raised StopIteration")
            report(future.set_exception, error)
        else:
            report(future.set_result, value)

    threading.Thread(target=run, daemon=True).start()
    return await future


async def call(option: str, timeout_s: float, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The function's result; HookError where it raised or took over ``timeout_s``."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            if is_coroutine_function(function):
                return await function(*arguments, **named)
            result = await in_thread(lambda: function(*arguments, **named))
            return await result if inspect.isawaitable(result) else result
    except asyncio.CancelledError:
        if told_to_end():
            raise
        raise HookError(f"slime.{option} failed: it cancelled itself") from None
    except Exception as error:
        if deadline.expired():
            raise HookError(f"slime.{option} took over {timeout_s:g} s") from None
        raise HookError(f"slime.{option} failed: {cause_of(error)}") from error
