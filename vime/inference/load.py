"""What servers say of their load, read from the text of their ``/metrics``. Imports no network."""

from __future__ import annotations

import re

from vime.rollout.admission import Load

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USE, PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"
CACHE = "vllm:cache_config_info"
SPENT = tuple(f"vllm:request_{phase}_time_seconds_sum" for phase in ("queue", "prefill", "decode"))
SAMPLE = re.compile(
    rf"^({RUNNING}|{WAITING}|{KV_USE}|{PREEMPTIONS}|{CACHE}|{'|'.join(SPENT)}){{(.*)}} (\S+)", re.MULTILINE
)
"""A line of the Prometheus text format: name{labels} value. There is one a name and engine (data-parallel rank)."""
BLOCKS, BLOCK_SIZE = re.compile(r'\bnum_gpu_blocks="(\d+)"'), re.compile(r'\bblock_size="(\d+)"')


def parse_load(metrics: bytes) -> Load:
    """The load of a vLLM server, all engines together; ValueError where the text does not tell it."""
    found: dict[str, list[float]] = {RUNNING: [], WAITING: [], KV_USE: [], PREEMPTIONS: []}
    kv_tokens, spent = 0, dict.fromkeys(SPENT, 0.0)
    for name, labels, value in SAMPLE.findall(metrics.decode()):
        if name in spent:
            spent[name] += float(value)
        elif name != CACHE:
            found[name].append(float(value))
        elif (blocks := BLOCKS.search(labels)) and (size := BLOCK_SIZE.search(labels)):
            kv_tokens += int(blocks[1]) * int(size[1])
    if missing := [name for name, values in found.items() if not values]:
        raise ValueError(f"the metrics hold no {', '.join(missing)}; start the server without --disable-log-stats")
    return Load(
        int(sum(found[RUNNING])),
        int(sum(found[WAITING])),
        max(found[KV_USE]),
        int(sum(found[PREEMPTIONS])),
        kv_tokens,
        tuple(spent.values()),
    )
