"""The worker process: runs the user's functions for the driver, plain ones one at a time, or coroutines side by side.

    python -m vime.workers.child SOCKET MEMORY_MB plain|concurrent

Wire: JSON lines over the socket whose descriptor it inherits. First ``{name: {"maker": "module:function", "options": {}}}``,
answered by ``{"coroutines": [name, ...]}`` or ``{"error": text}``; nothing else comes before that. Then calls ``{"id": number,
"function": name, "arguments": [...]}``, answered in any order by ``{"id": number, "result": JSON}`` or ``{"id": number, "error":
text, "exhausted": whether memory ran out}``; and to a concurrent worker ``{"cancel": number}``, answered at once by
``{"id": number, "cancelled": true}``. It ends when the socket does.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import inspect
import json
import os
import resource
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

LINE_BYTES = 2**28
"""of a call at most"""
RESULT_BYTES = 2**20
"""of a result at most: the driver reads it on its event loop"""
ERROR_CHARACTERS = 2000

Functions = dict[str, Callable[..., Any]]
Message = dict[str, Any]


def main() -> None:
    descriptor, memory_mb, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.set_inheritable(descriptor, False)  # not for what the functions start
    restrict(memory_mb)
    with socket.socket(fileno=descriptor) as channel:
        wire = channel.makefile("rwb")
        wanted = json.loads(wire.readline())
        try:
            functions = {name: load(one["maker"], one["options"]) for name, one in wanted.items()}
            answer: Message = {"coroutines": [name for name, f in functions.items() if is_coroutine_function(f)]}
        except MemoryError:
            answer = {"error": f"memory_mb = {memory_mb} is too little to load {', '.join(wanted)}; raise it"}
        except BaseException as error:
            answer = {"error": str(error) or described(error)}
        wire.write(encoded(answer))
        wire.flush()
        if "error" in answer:
            return
        if kind == "concurrent":
            asyncio.run(serve_concurrently(channel, functions))
        else:
            serve(wire, functions)


def restrict(memory_mb: int) -> None:
    """Bounds what this process may do to the machine.

    RLIMIT_DATA counts private memory that can be written, unlike RLIMIT_AS, in which a library's reservations (several times
    what it uses) count too. Memory shared with other processes is not counted; where that fills the machine the kernel ends
    this process first.
    """
    limit, given = memory_mb * 2**20, resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if given == resource.RLIM_INFINITY else min(limit, given)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # some containers do not let it be written
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.enable()  # a segmentation fault shows in the log where it was
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def load(maker: str, options: dict[str, Any]) -> Callable[..., Any]:
    """What ``module:function`` makes of the options: a function of JSON arguments with a JSON result."""
    module, _, name = maker.partition(":")
    made: Callable[..., Any] = getattr(importlib.import_module(module), name)(**options)
    return made


def is_coroutine_function(function: Any) -> bool:
    """Also of an object with an async ``__call__``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def encoded(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def described(error: BaseException) -> str:
    """The error in words; its traceback goes to the log."""
    traceback.print_exception(error)
    if isinstance(error, SystemExit):
        return f"it called exit({error.code})"[:ERROR_CHARACTERS]
    if isinstance(error, asyncio.CancelledError):
        return "it cancelled itself"
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")[:ERROR_CHARACTERS]
    except Exception:  # its own __str__ raises
        return type(error).__name__


def failure(number: int, error: BaseException) -> bytes:
    return encoded({"id": number, "error": described(error), "exhausted": isinstance(error, MemoryError)})


def success(number: int, result: Any) -> bytes:
    answer = encoded({"id": number, "result": result})
    if len(answer) > RESULT_BYTES:
        raise ValueError(f"its result has {len(answer)} bytes as JSON; at most {RESULT_BYTES} can be returned")
    return answer


def serve(wire: Any, functions: Functions) -> None:
    """One call at a time, on the main thread, until the driver closes the socket."""
    with asyncio.Runner() as runner:
        for line in wire:
            call = json.loads(line)
            try:
                result = functions[call["function"]](*call["arguments"])
                if inspect.isawaitable(result):  # of a plain function that returns a coroutine
                    result = runner.run(awaited(result))
                answer = success(call["id"], result)
            except BaseException as error:
                answer = failure(call["id"], error)
            wire.write(answer)
            wire.flush()


async def awaited(result: Awaitable[Any]) -> Any:
    return await result


async def serve_concurrently(channel: socket.socket, functions: Functions) -> None:
    """All calls at once, until the driver closes the socket."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=LINE_BYTES)
    running: dict[int, asyncio.Task[None]] = {}

    async def one(call: Message) -> None:
        number = call["id"]
        try:
            answer = success(number, await functions[call["function"]](*call["arguments"]))
        except BaseException as error:
            if number not in running:  # cancelled by the driver
                return
            answer = failure(number, error)
        if running.pop(number, None):
            writer.write(answer)

    async for line in reader:
        call = json.loads(line)
        if "cancel" in call:
            if task := running.pop(call["cancel"], None):
                task.cancel()
            writer.write(encoded({"id": call["cancel"], "cancelled": True}))
        else:
            running[call["id"]] = asyncio.create_task(one(call))
    os._exit(0)  # without waiting for coroutines that will not be cancelled


if __name__ == "__main__":
    main()
