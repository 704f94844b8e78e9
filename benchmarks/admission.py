"""Throughput under the cap that follows the servers' load, against fixed caps: one real vLLM server of a tiny random model.

    python -m benchmarks.admission [--seconds S]

Responses of 16 to 400 tokens, always more of them wanted than are in flight. Once with a KV cache that holds all that the
server runs at once, once with one that holds about 60 responses. Prints tokens a second, as ratios to the best fixed cap,
and preemptions for each hundred responses. A cap is measured after as long again of warming up.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tests.tiny import make_config, make_model
from vime.inference.fleet import Fleet
from vime.inference.poller import LoadPoller
from vime.inference.requests import Requests
from vime.rollout.admission import Admission

BUILD = Path(__file__).resolve().parents[1] / "build/admission"
CAPS: tuple[int | str, ...] = (8, 32, 128, 512, "auto")
WANTED = 600
MOST_TOKENS = 400
FLAGS = {"max-model-len": 512, "max-num-seqs": 128}
CACHES = {"ample cache": {}, "small cache": {"num-gpu-blocks-override": 480}}  # blocks of 32 tokens


@dataclass
class Count:
    """What has come back."""

    responses: int = 0
    tokens: int = 0


async def ask(requests: Requests, count: Count, rng: random.Random) -> None:
    """One response after the other, for ever."""
    while True:
        prompt = [rng.randrange(256) for _ in range(32)]
        sampling = {"max_tokens": rng.randint(16, MOST_TOKENS), "ignore_eos": True, "temperature": 1.0}
        completion = await requests.generate(prompt, sampling)
        count.responses += 1
        count.tokens += len(completion.token_ids)


async def measure(fleet: Fleet, cap: int | str, seconds: float) -> tuple[float, float, int]:
    """Tokens a second, preemptions a hundred responses, and the cap at the end."""
    section = fleet.config.rollout.model_copy(update={"concurrency": cap, "max_tokens": MOST_TOKENS})
    requests, count, rng = Requests(fleet.front, fleet.gate, section), Count(), random.Random(0)
    requests.limiter.cap = requests.maximum
    server = fleet.servers[0]
    async with AsyncExitStack() as stack:
        if cap == "auto":
            admission = Admission(requests.maximum, MOST_TOKENS)
            await stack.enter_async_context(LoadPoller(lambda: fleet.servers, requests.limiter, admission))
        asked = [asyncio.create_task(ask(requests, count, rng)) for _ in range(WANTED)]
        await asyncio.sleep(seconds)
        before, started, load = Count(count.responses, count.tokens), time.perf_counter(), await server.load(60)
        await asyncio.sleep(seconds)
        tokens_per_s = (count.tokens - before.tokens) / (time.perf_counter() - started)
        preemptions = (await server.load(60)).preemptions - load.preemptions
        responses = count.responses - before.responses
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    while (await server.load(60)).running:
        await asyncio.sleep(0.2)
    return tokens_per_s, 100 * preemptions / max(1, responses), requests.limiter.cap


async def main(seconds: float) -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    model = make_model(BUILD / "model", "tied")
    print(
        "| KV cache | cap | tokens/s | to the best fixed cap | preemptions a hundred responses |\n|---|---|---|---|---|"
    )
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for name, flags in CACHES.items():
            fleet = Fleet(make_config(model, vllm={**FLAGS, **flags}), session, BUILD / name)
            try:
                await fleet.start()
                await fleet.admit(fleet.members[0])
                found = {cap: await measure(fleet, cap, seconds) for cap in CAPS}
            finally:
                await fleet.stop()
            best = max(found[cap][0] for cap in CAPS if cap != "auto")
            for cap, (speed, preempted, last) in found.items():
                shown = f"auto (at the end {last})" if cap == "auto" else cap
                print(f"| {name} | {shown} | {speed:,.0f} | {speed / best:.2f} | {preempted:.1f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    asyncio.run(main(parser.parse_args().seconds))
