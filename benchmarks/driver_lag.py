"""How long the driver's event loop blocks with thousands of trajectories in flight.

    python -m benchmarks.driver_lag [--trajectories N] [--tokens MEAN] [--ms-per-token MS] [--steps N]

A whole run of ``vime train``, with its journal, store, rewards, metrics, live view and checkpoints, whose server and
trainer are stand-ins (``stand_in.py``) in processes of their own, on cores of their own: what is measured is the driver.
Prints the lag of the event loop and the trajectories a second. It needs the tokenizer in models/smollm2.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from statistics import median, quantiles

from rich.console import Console

import vime.run
from benchmarks import stand_in
from vime.cluster.local import Process, free_port
from vime.cluster.open_files import connections_allowed
from vime.config.sections import Config
from vime.job import open_job
from vime.loop import train
from vime.observe.lag import LoopLag
from vime.observe.live import LiveView
from vime.training.client import Trainer

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/driver-lag"
STAND_IN = [sys.executable, stand_in.__file__]
PROMPT_WORDS = 200
SAMPLES_PER_GROUP = 8


class OwnLag(LoopLag):
    """The lag, and as much of it as this thread computed: the rest, it waited for a core that others had."""

    def __init__(self) -> None:
        super().__init__()
        self.own: list[float] = []
        self.cpu = 0.0

    def note(self, late: float) -> None:
        super().note(late)
        before, self.cpu = self.cpu, time.thread_time()
        self.own.append(min(late, 1000 * (self.cpu - before)))


class StandInTrainer(Trainer):
    """The real client of a trainer that only takes its time."""

    seconds_per_step = 5.0

    def command(self, config_file: Path, port: int) -> list[str]:
        return [*STAND_IN, "trainer", str(port), str(self.seconds_per_step)]


def configuration(given: argparse.Namespace, url: str) -> Config:
    data = BUILD / "data.jsonl"
    with data.open("w") as file:
        for number in range(2 * given.trajectories):
            words = " ".join(f"word{(number * 31 + place * 17) % 997}" for place in range(PROMPT_WORDS))
            file.write(json.dumps({"prompt": f"{number}: {words}", "answer": str(number)}) + "\n")
    return Config.model_validate(
        {
            "run": {"dir": str(BUILD / "run"), "steps": given.steps},
            "model": {"path": str(given.tokenizer)},
            "data": {"source": str(data)},
            "reward": {"function": "last_number"},
            "rollout": {
                "groups": given.trajectories * 3 // 4 // SAMPLES_PER_GROUP,  # two batches are more than are in flight
                "samples_per_group": SAMPLES_PER_GROUP,
                "max_tokens": 16 * given.tokens,
                "max_staleness": 1,
                "concurrency": given.trajectories,
            },
            "inference": {"urls": [url]},
            "checkpoint": {"every": 1},
        }
    )


@contextlib.asynccontextmanager
async def server(given: argparse.Namespace) -> AsyncIterator[str]:
    port = free_port()
    command = [*STAND_IN, "server", str(port), str(given.tokens), str(given.ms_per_token)]
    process = Process("stand-in server", command, BUILD / "server.log")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await process.stop()


def apart() -> Callable[[], None]:
    """Halves the cores: processes that are begun from now on get one half, this one, when the answer is called, the other."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    os.sched_setaffinity(0, cores[half:])

    def take() -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores[: half or 1])

    return take


async def measure(given: argparse.Namespace) -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    connections_allowed(given.trajectories)  # the stand-in inherits the raised limit
    vime.run.Trainer = StandInTrainer  # type: ignore[misc]
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    take_cores = apart()
    async with server(given) as url:
        config = configuration(given, url)
        with LiveView("driver lag", config.run.steps, screen) as view:
            async with open_job(config, view, resume=False) as job:
                job.poller.admission.each = given.trajectories  # at once, not by growing from turnover to turnover
                take_cores()
                lag, started, cpu = OwnLag(), time.perf_counter(), time.process_time()
                with lag.measured():
                    await train(job)
                seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    print(table(lag, job.history, seconds, cpu))


def spread(lags: list[float]) -> str:
    by_quantile = quantiles(lags, n=1000)
    return f"p50 {median(lags):.1f}, p99 {by_quantile[989]:.1f}, p99.9 {by_quantile[998]:.1f}, max {max(lags):.1f}"


def table(lag: OwnLag, history: list[dict[str, float]], seconds: float, cpu: float) -> str:
    samples, tokens = (sum(step[f"rollout/{name}"] for step in history) for name in ("samples", "response_tokens"))
    in_flight = max(step.get("servers/running", 0.0) for step in history)
    each = [f"{step['driver/lag_max_ms']:.0f}" for step in history]
    return (
        f"in flight (mean of a step, at most)   {in_flight:,.0f}\n"
        f"event-loop lag, ms                    {spread(lag.take())}\n"
        f"  of it computing                     {spread(lag.own[1:])}\n"
        f"  max of each step                    {', '.join(each)}\n"
        f"trajectories a second                 {samples / seconds:,.0f}\n"
        f"response tokens a second              {tokens / seconds:,.0f}\n"
        f"driver's share of one core            {cpu / seconds:.0%}\n"
        f"driver's memory, peak                 {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=10_000, help="in flight at once")
    parser.add_argument("--tokens", type=int, default=600, help="of a response, on average")
    parser.add_argument("--ms-per-token", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "models/smollm2")
    asyncio.run(measure(parser.parse_args()))
