"""Threads and files by asyncio alone."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import typing

T = typing.TypeVar("T")

_loop: contextvars.ContextVar[asyncio.AbstractEventLoop] = contextvars.ContextVar("loop")


async def offload(func: typing.Callable[..., T], *args: typing.Any) -> T:
    """The function's result, computed in a thread that knows the caller's context."""
    loop = asyncio.get_running_loop()
    context = contextvars.copy_context()
    context.run(_loop.set, loop)
    return await loop.run_in_executor(None, functools.partial(context.run, func, *args))


def call_back(func: typing.Callable[..., typing.Awaitable[T]], *args: typing.Any) -> T:
    """From such a thread: what the coroutine function returns in the event loop."""

    async def run() -> T:
        return await func(*args)

    return asyncio.run_coroutine_threadsafe(run(), _loop.get()).result()


class File:
    """A file whose methods run in threads."""

    def __init__(self, file: typing.IO[typing.Any]) -> None:
        self._file = file

    async def read(self, size: int = -1) -> typing.Any:
        return await offload(self._file.read, size)

    async def seek(self, offset: int) -> int:
        return await offload(self._file.seek, offset)

    async def __aenter__(self) -> File:
        return self

    async def __aexit__(self, *args: object) -> None:
        await offload(self._file.close)


async def open_file(path: typing.Any, mode: str = "r") -> File:
    return File(await offload(open, path, mode))
