"""Functions run on several ranks: processes of a gloo group, forked from one that has imported torch and transformers."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.splits"])


def member(rank: int, ranks: int, meeting: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        return function(rank, *arguments)
    finally:
        dist.destroy_process_group()


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on each of the ranks; what each has raised, together."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, CONTEXT) as pool:
        waiting = [pool.submit(member, rank, ranks, f"{folder}/meeting", function, arguments) for rank in range(ranks)]
        if faults := [fault for one in waiting if isinstance(fault := one.exception(), Exception)]:
            raise ExceptionGroup("ranks have failed", faults)
        return [one.result() for one in waiting]
