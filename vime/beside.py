"""The driver's own work beside its event loop: files, and what takes Python long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
THREADS = ThreadPoolExecutor(8, "vime")
"""Apart from those of ``asyncio.to_thread``: hundreds of generate functions may keep these busy."""


async def beside(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Result:
    """What ``function`` returns, called in a thread."""
    return await asyncio.get_running_loop().run_in_executor(THREADS, partial(function, *arguments, **options))
