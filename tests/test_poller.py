"""What servers say of their load: read from real metrics, kept apart from what an update does, summed up a step."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vime.cluster import open_files
from vime.config.load import ConfigError
from vime.inference.client import InferenceError
from vime.inference.limiter import Limiter
from vime.inference.load import parse_load
from vime.inference.poller import LoadPoller
from vime.observe.lag import LoopLag
from vime.rollout.admission import START, Admission, Load

TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 12.0
vllm:num_requests_running{engine="1",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 0.0
vllm:num_requests_waiting{engine="1",model_name="policy"} 7.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="policy",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.5
vllm:num_preemptions_total{engine="0",model_name="policy"} 1.0
vllm:num_preemptions_total{engine="1",model_name="policy"} 1.0e+02
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.796e+09
vllm:cache_config_info{block_size="16",hash_block_size="None",mamba_block_size="8",num_gpu_blocks="100"} 1.0
"""


class Told:
    """A server that tells what the test says, or fails."""

    def __init__(self, url: str, *loads: Load | None) -> None:
        self.url, self.loads = url, list(loads)

    async def load(self, timeout_s: float) -> Load:
        told = self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]
        if told is None:
            raise InferenceError("down")
        return told


def busy(preemptions: int = 0, running: int = 8) -> Load:
    return Load(running, 2, 0.5, preemptions, 1 << 20)


def test_the_load_is_the_sum_of_the_engines_and_the_fullest_of_their_caches() -> None:
    assert parse_load(TEXT.encode()) == Load(running=15, waiting=7, kv_use=0.5, preemptions=101, kv_tokens=1600)


def test_metrics_without_a_servers_load_are_refused_with_the_fix() -> None:
    text = TEXT.replace("vllm:kv_cache_usage_perc", "other")
    with pytest.raises(ValueError, match="no vllm:kv_cache_usage_perc; start the server without --disable-log-stats"):
        parse_load(text.encode())


def test_an_update_under_running_requests_does_not_lower_the_cap(run: Any, fleets: Any) -> None:
    server = fleets("tied").servers[0]
    limiter, admission = Limiter(START), Admission(1000, 200)
    sampling = {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0}

    async def play() -> tuple[dict[str, float], int]:
        poller = LoadPoller(lambda: [server], limiter, admission)
        await poller.look()

        async def ask() -> None:
            async with limiter:
                await server.generate([1, 2, 3], sampling, 60, 0)

        asked = [asyncio.create_task(ask()) for _ in range(8)]
        while not (await server.load(5)).running:
            await asyncio.sleep(0.01)
        with poller.updating():
            await server.pause()
            await poller.look()
            await server.resume()
        await asyncio.gather(*asked)
        await poller.look()
        return poller.metrics(), admission.cap

    metrics, cap = run(play())
    assert metrics["servers/preemptions"] > 0  # the pause gave up what was computed
    assert cap == START


def told(poller: LoadPoller, looks: int) -> dict[str, float]:
    async def look() -> dict[str, float]:
        for _ in range(looks):
            await poller.look()
        return poller.metrics()

    return asyncio.run(look())


def test_metrics_are_of_the_looks_since_they_were_last_asked_for() -> None:
    servers = [Told("a", busy(0), busy(3), busy(5, running=4)), Told("b", None, busy(40), Load(0, 0, 0.0, 0, 1 << 20))]
    poller = LoadPoller(lambda: servers, Limiter(9), Admission(1000, 200))  # type: ignore[arg-type,return-value]
    assert told(poller, 3) == {
        "servers/cap": poller.limiter.cap,
        "servers/running": (16 + 4) / 2,
        "servers/waiting": (4 + 2) / 2,
        "servers/kv_use_max": 0.5,
        "servers/preemptions": 5,
        "servers/idle_fraction": 1 / 4,
    }
    assert told(poller, 1)["servers/preemptions"] == 0


def test_servers_that_do_not_answer_leave_the_cap_as_it_is() -> None:
    poller = LoadPoller(lambda: [Told("a", None)], Limiter(START), Admission(1000, 200))  # type: ignore[arg-type,list-item,return-value]
    assert told(poller, 5) == {"servers/cap": START}


def test_what_blocks_the_event_loop_is_seen() -> None:
    async def play() -> list[float]:
        lag = LoopLag()
        with lag.measured():
            await asyncio.sleep(0.02)
            deadline = asyncio.get_running_loop().time() + 0.2
            while asyncio.get_running_loop().time() < deadline:
                pass
            await asyncio.sleep(0.02)
        return lag.take()

    assert max(asyncio.run(play())) >= 150


def test_more_requests_than_this_process_may_open_connections_are_refused(monkeypatch: Any) -> None:
    raised = []
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: (1024, 5000))
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert open_files.connections_allowed("auto") == open_files.connections_allowed(4744) == 4744
    assert raised == [(5000, 5000)] * 2
    with pytest.raises(ConfigError, match=r"rollout.concurrency = 4745: .*may open 5000 files; raise .*<= 4744"):
        open_files.connections_allowed(4745)
