"""Whole runs of ``vime train`` in seconds: a server that only says random tokens, with the real trainer or a quick one."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from benchmarks import stand_in
from vime.cluster.local import free_port
from vime.config.sections import Config
from vime.debug import ReplayJob, dumps_for, for_replay, open_replay
from vime.job import Job, open_job
from vime.loop import train
from vime.observe.live import LiveView
from vime.training.client import Trainer

BYTES = 256  # the tiny tokenizer's ids of single bytes
LETTER = 64  # its id of "a"


class Server(stand_in.Server):
    """A stand-in whose tokens the tiny models know: any bytes, or under the versions in ``good`` lower-case letters only."""

    def __init__(self, ms_per_token: float = 0.0, good: Collection[str] = ()) -> None:
        self.good, self.version = good, "default"
        super().__init__(mean_tokens=8, ms_per_token=ms_per_token)

    def body(self, tokens: int) -> bytes:
        ids = [LETTER if self.version in self.good else self.rng.randrange(BYTES) for _ in range(tokens)]
        content = [{"token_id": token, "logprob": -5.5} for token in ids]
        choice = {"index": 0, "finish_reason": "length", "token_ids": ids, "logprobs": {"content": content}}
        return stand_in.compact({"choices": [choice]})[:-3]


class QuickTrainer(Trainer):
    """Learns nothing, in no time and no process; it notes what it was started with, and how often it was to learn."""

    began: Path | None = None
    steps = 0

    async def start(self, model: Path, state: Path | None = None, say: Callable[[str], None] = lambda _: None) -> None:
        self.began = state

    async def memory(self) -> str:
        return ""

    async def train(self, updates: list[Any], total_steps: int) -> dict[str, Any]:
        self.steps += 1
        return {"metrics": {}, "advantages": []}

    async def logprobs(self, rows: list[dict[str, list[int]]]) -> list[list[float]]:
        return [[-5.5] * len(row["response_ids"]) for row in rows]

    async def export(self, folder: Path, dtype: str) -> None:
        folder.mkdir(parents=True)

    async def save(self, folder: Path, model: bool = True) -> None:
        (folder / "model").mkdir()

    async def saved(self) -> None:
        pass


class QuickJob(Job):
    def make_trainer(self, session: aiohttp.ClientSession) -> Trainer:
        return QuickTrainer(self.engine, session, self.run_dir, self.store.folder)


class QuickReplay(ReplayJob):
    make_trainer = QuickJob.make_trainer


@contextlib.asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    port = free_port()
    task = asyncio.create_task(stand_in.serve(port, server.handle))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        task.cancel()


def configuration(folder: Path, model: Path, **sections: dict[str, Any]) -> Config:
    """Sums of letters: a reward that differs from response to response."""
    for name, count in (("train", 6), ("held_out", 3), ("other", 2)):
        rows = [{"prompt": f"{name} {number}", "answer": "x"} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reward = folder / "lower.py"
    reward.write_text("def share(task, response):\n    return sum('a' <= c <= 'z' for c in response) / 8\n")
    tree: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "steps": 3},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"source": str(folder / "train.jsonl")},
        "reward": {"function": f"{reward}:share", "workers": 1, "timeout_s": 600},
        "rollout": {"groups": 3, "samples_per_group": 4, "max_tokens": 8},
        "trainer": {
            "learning_rate": 1e-3,
            "threads": 1,
            "device": "cpu",
            "schedule": "cosine",
            "start_timeout_s": 1500,
        },
        "weights": {"probe_max_mean_diff": 1e9, "probe_prompts": 1},
        "log": {"dump_every": 1},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return Config.model_validate(tree)


def quiet_view(steps: int = 3) -> tuple[LiveView, io.StringIO]:
    out = io.StringIO()
    return LiveView("test", steps, Console(file=out, width=200)), out


async def whole_run(
    config: Config, server: Server, kind: type[Job] = Job, resume: bool = False, meanwhile: Callable[[Job], Any] = id
) -> tuple[Job, str]:
    """The run to its end, and the lines it said; ``meanwhile`` is called with the job once it is open."""
    view, out = quiet_view(config.run.steps)
    async with serving(server) as url:
        served = config.model_copy(update={"inference": config.inference.model_copy(update={"urls": [url]})})
        with view:
            async with open_job(served, view, resume, kind) as job:
                meanwhile(job)
                await train(job)
                job.finish()
    return job, out.getvalue()


async def replay(
    config: Config, given: Path, start: Path | None = None, resume: bool = False, kind: type[ReplayJob] = ReplayJob
) -> tuple[ReplayJob, str]:
    config, (view, out) = for_replay(config), quiet_view()
    with view:
        async with open_replay(kind(config, view, dumps_for(config, given)), resume, start) as job:
            await train(job)
            job.finish()
    return job, out.getvalue()
