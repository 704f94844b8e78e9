"""One half of ``vime train`` at a time. The loop is the same; the half that is not there is a part that does nothing.

``--debug rollout``: servers serve the model's own weights, groups are made, scored, filtered and logged, and nothing is learned.
``--debug train``: a trainer learns from dumped batches, exactly as the run that dumped them did; there are no servers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from vime.checkpoint import CheckpointError, read_state
from vime.config.compare import differing
from vime.config.load import dump
from vime.config.sections import Config
from vime.config.shape import vocabulary
from vime.data.journal import Journal
from vime.job import Job, check_functions, start_trainer
from vime.observe.garbage import Garbage
from vime.observe.lag import LoopLag
from vime.observe.live import LiveView
from vime.rollout.dumps import Dump, DumpError, find_dumps, read_dump, read_head
from vime.rollout.outcome import Outcome, stored_keys
from vime.run import load_tokenizer
from vime.training.client import Trainer
from vime.weights.sync import Unchanged


class NoTrainer(Trainer):
    """Learns nothing, and is no process."""

    async def start(self, model: Path, state: Path | None = None, say: Callable[[str], None] = lambda _: None) -> None:
        pass

    async def memory(self) -> str:
        return f"rollout only: the weights are those of {self.config.model.path}"

    async def train(self, updates: list[Any], total_steps: int) -> dict[str, Any]:
        return {"metrics": {}, "advantages": []}


class HalfJob(Job):
    """What both halves lack: evaluations, a journal, syncs; and what their summaries tell."""

    journal_file = os.devnull
    told: tuple[str, ...] = ("task", "model", "dtype", "steps", "reward_first", "reward_last", "seconds_total")

    def __init__(self, config: Config, view: LiveView, started: float) -> None:
        super().__init__(config, view, started)
        self.owed = []

    def due_sets(self, last: bool) -> list[str]:
        return []

    def make_sync(self) -> Unchanged:
        return Unchanged(self.fleet)

    def summary(self) -> dict[str, Any]:
        return {name: value for name, value in super().summary().items() if name in self.told}


def for_rollout(config: Config) -> Config:
    """In a folder of its own. With weights that stay nothing is ahead of anything."""
    rollout = config.rollout.model_copy(update={"max_staleness": 0})
    run = config.run.model_copy(update={"dir": f"{config.run.dir}-rollout"})
    return config.model_copy(update={"rollout": rollout, "run": run})


class RolloutJob(HalfJob):
    """Groups by the weights of model.path, version 0 for good. There is nothing to resume, so it keeps no checkpoint."""

    kind = "train --debug rollout"
    told = (*HalfJob.told, "rollout_tokens_per_s", "server_restarts")

    @property
    def version(self) -> int:
        return 0

    def make_trainer(self, session: aiohttp.ClientSession) -> Trainer:
        return NoTrainer(self.engine, session, self.run_dir, self.store.folder)

    @contextlib.contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        with super().clock(phase) if phase != "train" else contextlib.nullcontext():
            yield

    async def save(self, last: bool) -> None:
        pass


class Replay:
    """Dumped batches in the scheduler's place, and in the cursor's: which comes next is told by the job's step."""

    ready: dict[int, Outcome] = {}  # noqa: RUF012  there never is one

    def __init__(self, job: ReplayJob, dumps: Sequence[Dump]) -> None:
        self.job, self.dumps = job, dumps
        self.seconds, self.batch_version = 0.0, 0

    async def collect(self, progress: Callable[[int, int], None]) -> list[Outcome]:
        """The first batch after the job's step, which becomes the one before it: there may be gaps between dumps."""
        dump = next(dump for dump in self.dumps if dump.step > self.job.step)
        head = read_head(dump.path)
        self.job.step, self.batch_version, self.seconds = head.step - 1, head.version, head.seconds
        batch = read_dump(dump.path, self.job.store)
        progress(len(batch), len(batch))
        return batch

    def trained(self, batch: list[Outcome], step: int) -> None:
        pass

    def state(self, held: Sequence[int]) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass

    async def save(self, folder: Path) -> None:
        pass


def for_replay(config: Config) -> Config:
    """In a folder of its own, without dumps of what is dumped already."""
    log = config.log.model_copy(update={"dump_every": 0})
    run = config.run.model_copy(update={"dir": f"{config.run.dir}-replay"})
    return config.model_copy(update={"log": log, "run": run})


def dumps_for(config: Config, given: Path) -> list[Dump]:
    """The dumps in ``given`` up to run.steps."""
    found = find_dumps(given)
    chosen = [dump for dump in found if dump.step <= config.run.steps]
    if not chosen:
        raise DumpError(
            f"{found[0].path} is of a step after run.steps = {config.run.steps}; raise it with --run.steps N"
        )
    return chosen


class ReplayJob(HalfJob):
    """A trainer that learns from ``dumps``."""

    kind = "train --debug train"
    told = (
        *HalfJob.told,
        "train_tokens_per_s",
        "train_memory_peak_gib",
        "logprob_abs_diff_mean",
        "logprob_abs_diff_max",
    )

    def __init__(self, config: Config, view: LiveView, dumps: Sequence[Dump]) -> None:
        super().__init__(config, view, time.monotonic())
        self.dumps = dumps
        self.cursor = self.scheduler = Replay(self, self.dumps)  # type: ignore[assignment]
        self.sync = Unchanged(None)

    @property
    def steps(self) -> int:
        return self.dumps[-1].step

    @property
    def optimizer_steps(self) -> int:
        return self.config.run.steps * self.config.algorithm.updates

    async def collect(self) -> list[Outcome]:
        """What was dumped had been through the functions of [slime]."""
        return await self.scheduler.collect(self.show_progress)

    def check_dumps(self) -> None:
        """Refuses dumps that the trainer could not take, before it is started, by the first of them; tells what is different."""
        first = self.dumps[0].path
        batch = read_dump(first, self.store)
        payloads = [self.store.get(row.key, row.index) for outcome in batch for row in outcome.rows]
        size = vocabulary(self.config.model.path)
        most = max((int(ids.max()) for p in payloads for ids in (p.prompt_ids, p.response_ids)), default=0)
        if most >= size:
            raise DumpError(
                f"{first} holds token {most} and {self.config.model.path} knows {size} tokens; set model.path to a "
                "model of the family that sampled it"
            )
        needs = {
            "reference.url": (self.config.reference.url, "reference"),
            "teacher.url": (self.config.teacher.url, "teacher"),
            'algorithm.router_replay = "server"': (self.config.algorithm.router_replay == "server", "experts"),
        }
        for option, (given, name) in needs.items():
            if given and any(getattr(payload, name) is None for payload in payloads):
                raise DumpError(f"{first} was made without {option}, whose values it lacks; remove the option")
        self.store.drop(stored_keys(batch))
        for option, was, now in differing((first / "config.toml").read_text(), dump(self.config)):
            self.view.message(f"note: {option} was {was} in the run that dumped, is {now}")

    def begin_at(self, start: Path | None) -> None:
        """At the step before the first dump: with the trainer's state of that step's checkpoint ``start``, or with a model
        that has not learned yet."""
        self.step = self.dumps[0].step - 1
        if start is None and self.step:
            self.view.message(
                f"note: the first dump is of step {self.step + 1} and training begins with model.path and new moments; "
                f"--from CHECKPOINT takes up what step {self.step} left"
            )
        if start and not (start / "state.json").exists():
            raise CheckpointError(f"{start} is no checkpoint; name RUN/checkpoints/step-{self.step:06d}")
        if start and (held := read_state(start)["step"]) != self.step:
            raise CheckpointError(
                f"{start} is of step {held} and the first dump of step {self.step + 1}; name the checkpoint of step {self.step}"
            )


@contextlib.asynccontextmanager
async def open_replay(job: ReplayJob, resume: bool, start: Path | None) -> AsyncIterator[ReplayJob]:
    """Starts the trainer of a replay, and closes everything whatever happens."""
    check_functions(job.config)
    job.tokenizer = load_tokenizer(job.config.model.path)
    if not resume:
        job.begin_at(start)
    checkpoint = job.prepare_folder(resume)
    if checkpoint:
        job.restore(checkpoint)
    async with job.opened(bool(checkpoint)), contextlib.AsyncExitStack() as stack:
        job.check_dumps()
        job.journal = Journal(job.run_dir / job.journal_file)
        stack.callback(job.journal.close)
        job.view.phase("starting", "the trainer")
        await start_trainer(job, Path(job.config.model.path), checkpoint or start)
        job.lag = LoopLag()
        stack.enter_context(job.lag.measured())
        job.garbage = stack.enter_context(Garbage())
        async with job.running():
            yield job
