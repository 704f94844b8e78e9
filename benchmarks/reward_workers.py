"""Calls of a short reward in worker processes, beside a thread of this process for each call; needs no model and no GPU.

    python benchmarks/reward_workers.py [--calls 10000] [--workers 2] [--bytes 1000]

Calls come in ones and twos, as responses do, until all wait or are done. Printed are calls a second, this process's own CPU time
a call, how late a timer of the event loop fires meanwhile, and the time of one call when no other is made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from vime.config.sections import RewardSection
from vime.rewards.scoring import Rewards
from vime.sample import Task

FUNCTIONS = """
import asyncio
def plain(task, response): return len(response)
async def coroutine(task, response):
    await asyncio.sleep(0)
    return len(response)
"""
TICK_S = 0.002

Score = Callable[[Task, str], Awaitable[Any]]


async def in_thread(task: Task, response: str) -> float:
    """The same reward in a thread of its own."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[float] = loop.create_future()
    threading.Thread(target=lambda: loop.call_soon_threadsafe(result.set_result, float(len(response)))).start()
    return await result


async def timers(late: list[float]) -> None:
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(TICK_S)
        late.append(time.perf_counter() - begin - TICK_S)


async def measure(name: str, score: Score, calls: int, size: int) -> None:
    task, response = Task("t", ({"role": "user", "content": "?" * size},), "y"), "x" * size
    await asyncio.gather(*(score(task, response) for _ in range(300)))  # all workers have started
    late: list[float] = []
    watch = asyncio.create_task(timers(late))
    begin, cpu, made = time.perf_counter(), time.process_time(), []
    for number in range(calls):
        made.append(asyncio.ensure_future(score(task, response)))
        if number % 2:
            await asyncio.sleep(0)
    await asyncio.gather(*made)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    watch.cancel()
    alone = []
    for _ in range(200):
        begin = time.perf_counter()
        await score(task, response)
        alone.append(time.perf_counter() - begin)
    cuts = quantiles(late, n=100)
    print(
        f"{name:28s} {calls / seconds:10,.0f} {cpu / calls * 1e6:12.0f} {cuts[49] * 1e3:9.1f} {cuts[98] * 1e3:7.1f} "
        f"{max(late) * 1e3:7.1f} {median(alone) * 1e6:12.0f}"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=1000, help="of the prompt and of the response")
    given = parser.parse_args()
    print(
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {given.calls} calls, {given.bytes} bytes, ", end=""
    )
    print(f"{given.workers} workers")
    print(
        f"{'':28s} {'calls/s':>10s} {'CPU us/call':>12s} {'lag p50':>9s} {'p99':>7s} {'max ms':>7s} {'one call us':>12s}"
    )
    await measure("a thread a call", in_thread, given.calls, given.bytes)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(asyncio.CancelledError):
        Path(folder, "functions.py").write_text(FUNCTIONS)
        for kind in ("plain", "coroutine"):
            section = RewardSection(function=f"{folder}/functions.py:{kind}", workers=given.workers)
            async with Rewards(section, Path(folder)) as rewards:
                await measure(f"workers, {kind}", rewards.score, given.calls, given.bytes)


if __name__ == "__main__":
    asyncio.run(main())
