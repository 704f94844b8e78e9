"""The driver's own work beside its event loop: files, and what takes Python long."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
THREADS = ThreadPoolExecutor(8, "vime")
"""Apart from those of ``asyncio.to_thread``: hundreds of generate functions may keep these busy."""
SWITCH_S = 0.0005
"""Seconds for which a thread that computes keeps the interpreter: the loop gives it away with every call of the system, several
for each response, and waited for Python's 5 ms each time."""


async def beside(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Result:
    """What ``function`` returns, called in a thread."""
    return await asyncio.get_running_loop().run_in_executor(THREADS, partial(function, *arguments, **options))


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """Inside, what computes in a thread gives way to the event loop soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
