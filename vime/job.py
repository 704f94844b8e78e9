"""A training job's parts and its state: made from the configuration, opened and closed as one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from vime.beside import beside, giving_way
from vime.cluster import cpu
from vime.cluster.open_files import connections_allowed
from vime.config.algorithms import warnings
from vime.config.load import ConfigError
from vime.config.nearest import nearest
from vime.config.sections import Config
from vime.data.journal import Journal
from vime.data.load import known_tasks, load_data, make_cursor
from vime.functions import FunctionError, user_function
from vime.inference.commands import on_gpu
from vime.inference.fleet import Fleet, scoring_server
from vime.inference.poller import LoadPoller
from vime.inference.requests import Requests
from vime.inference.roster import Roster
from vime.inference.rounds import Rounds
from vime.observe.garbage import Garbage
from vime.observe.lag import LoopLag
from vime.observe.live import LiveView
from vime.rewards.scoring import Rewards
from vime.rollout.admission import Admission
from vime.rollout.dumps import Head, remove_later, write_dump
from vime.rollout.evaluate import evaluate
from vime.rollout.generate import Context, load_generate
from vime.rollout.outcome import Outcome, rollout_metrics
from vime.rollout.scheduler import Scheduler
from vime.run import Run, load_tokenizer
from vime.sample import Task
from vime.slime.batch import collected
from vime.slime.driver import Hooks
from vime.slime.hooks import wrong_hooks
from vime.slime.parts import make_hooks, make_scheduler, open_rewards, scoring, with_source
from vime.slime.rollout import evaluated_by
from vime.slime.sources import PromptSource
from vime.tools.calls import Tools
from vime.weights.adapters import AdapterChannel
from vime.weights.channel import CHANNELS
from vime.weights.probe import Probe
from vime.weights.sync import Sync, Unchanged


def check_functions(config: Config) -> None:
    """Refuses a function of the user's that cannot be loaded or called, before anything starts."""
    check_generate(config.rollout.generate, "rollout.generate", config)
    named = {"advantage": (config.algorithm.advantage, 1), "objective": (config.algorithm.objective, 2)}
    for option, (name, arguments) in named.items():
        if ":" in name:
            try:
                user_function(name, arguments)
            except FunctionError as error:
                raise ConfigError(f"algorithm.{option}: {error}") from None
    if faults := wrong_hooks(config):
        raise ConfigError("\n".join(faults))


def check_generate(name: str, where: str, config: Config) -> None:
    try:
        load_generate(name, config.rollout.generate_timeout_s)
    except FunctionError as error:
        raise ConfigError(f"{where}: {error}") from None


def check_tasks(config: Config, tasks: Iterable[Task], response_keys: Sequence[str] = ()) -> None:
    """Refuses tasks whose generate function cannot be loaded, or without the given responses that ``response_keys`` names."""
    checked: set[str] = set()
    for task in tasks:
        if task.generate and task.generate not in checked:
            check_generate(task.generate, f"task {task.id}: its generate function", config)
            checked.add(task.generate)
        for key in response_keys:
            if not isinstance(task.metadata.get(key), str):
                raise ConfigError(
                    f"data.response_keys: task {task.id} has no text {key!r}{nearest(key, [*task.metadata])}"
                )


def make_context(
    config: Config, fleet: Fleet, rewards: Rewards, tools: Tools, tokenizer: Any, hooks: Hooks | None = None
) -> Context:
    rollout = config.rollout
    score, group_score = scoring(rewards, hooks)
    return Context(
        requests=Requests(
            fleet.front,
            fleet.gate,
            rollout,
            Rounds(fleet.front, config.run.seed) if config.run.deterministic else None,
        ),
        tokenizer=tokenizer,
        score=score,
        group_score=group_score,
        call_tool=tools.call,
        sampling={
            "temperature": rollout.temperature,
            "max_tokens": rollout.max_tokens,
            "stop_token_ids": rollout.stop_token_ids,
        },
        response_keys=tuple(config.data.response_keys),
        routed=config.algorithm.router_replay == "server",
        slime=hooks,
    )


def make_poller(context: Context, fleet: Fleet) -> LoadPoller:
    requests = context.requests
    admission = Admission(requests.maximum, requests.section.max_tokens)
    return LoadPoller(lambda: fleet.serving, requests.limiter, admission)


async def add_scorers(context: Context, config: Config, session: aiohttp.ClientSession) -> Context:
    """The context with the servers of the reference and the teacher, where they are given by URL."""
    urls = {"reference": config.reference.url, "teacher": config.teacher.url}
    found = {name: await scoring_server(url, session, config) for name, url in urls.items() if url}
    return dataclasses.replace(context, scorers=found)


class Job(Run):
    """A run of ``vime train``."""

    kind = "train"
    journal_file = "journal.jsonl"

    def __init__(self, config: Config, view: LiveView, started: float) -> None:
        super().__init__(config, config, view, started)
        self.config = config
        self.syncs_before = 0  # of the runs that this one resumes
        self.meters: list[Callable[[], dict[str, float]]] = []
        """what its parts have measured since they were asked last"""
        self.evaluation: tuple[int, asyncio.Task[tuple[dict[str, float], list[dict[str, Any]]]]] | None = None
        """the evaluation under way: the step whose weights it measures, and its task"""

    # The parts, set by ``open_job``.
    fleet: Fleet
    poller: LoadPoller
    lag: LoopLag
    garbage: Garbage
    sync: Sync | Unchanged
    scheduler: Scheduler
    rewards: Rewards
    tools: Tools
    context: Context
    journal: Journal
    eval_tasks: dict[str, list[Task]]
    prompt_source: PromptSource

    @property
    def version(self) -> int:
        """The weights' version is the number of steps that made them."""
        return self.step

    @property
    def steps(self) -> int:
        return self.config.run.steps

    @property
    def optimizer_steps(self) -> int:
        return self.steps * self.config.algorithm.updates

    def show_progress(self, done: int, total: int) -> None:
        self.view.phase("rollout", f"{done}/{total} groups")

    @property
    def default_metric(self) -> str:
        return f"eval/{next(iter(self.config.eval.sets), '')}/pass@1"

    def make_sync(self) -> Sync | Unchanged:
        config = self.config
        kind = AdapterChannel if config.lora.by_adapter else CHANNELS[config.weights.channel]
        channel = kind(config, self.trainer, self.fleet, self.memory / "weights")
        prompts = [self.context.prompt_ids(task) for task in self.cursor.first(config.weights.probe_prompts)]
        return Sync(config, self.fleet, channel, Probe(config, self.trainer, prompts), self.poller.updating)

    async def dump(self, batch: list[Outcome]) -> None:
        """Writes the batch to disk before it is trained, where it is the turn of this step."""
        every, step = self.config.log.dump_every, self.step + 1
        if every and step % every == 0:
            with self.clock("dump"):
                head = Head(step, self.scheduler.batch_version, self.scheduler.seconds)
                await beside(write_dump, self.run_dir, head, batch, self.store)

    async def evaluate(self, names: list[str], last: bool = False) -> bool:
        """Evaluates these sets, one after the other; with eval.background only begins to, but for the last. True where a
        checkpoint of the step is, or may turn out to be, the best."""
        if not names:
            return False
        await self.evaluated()  # one at a time
        self.owed = names
        self.evaluation = self.step, asyncio.create_task(self._evaluate(names))
        if self.config.eval.background and not last:
            return any(self.best_metric.startswith(f"eval/{name}/") for name in names)
        return await self.evaluated()

    async def _evaluate(self, names: list[str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        tasks = {name: self.eval_tasks[name] for name in names}
        hooks = self.context.slime
        if hooks is not None and "eval" in hooks:
            return await evaluated_by(hooks, self, names)
        if not (adapter := self.fleet.front.adapter):
            return await evaluate(self.config, tasks, self.context)
        context = dataclasses.replace(self.context, requests=self.context.requests.naming(adapter))
        assert isinstance(self.sync, Sync)
        with self.sync.keeping(adapter):
            return await evaluate(self.config, tasks, context)

    async def evaluated(self) -> bool:
        """Waits for the evaluation that is under way, if any, and notes it; True where the best metric improved."""
        if self.evaluation is None:
            return False
        step, task = self.evaluation
        with self.clock("eval"):
            metrics, rows = await task
        self.evaluation = None
        await beside(self.recorder.samples, step, rows)
        hooks = self.context.slime
        unsent = await hooks.log_evaluation(self, step, metrics) if hooks is not None else ()
        return self.note_evaluation(step, metrics, unsent)

    async def let_evaluation_end(self) -> None:
        """Before servers get other weights: an evaluation under way ends, unless it names its adapter. It is not waited for
        while no server serves: what is left of it would wait for the weights that come."""
        if self.evaluation is None:
            return
        _, task = self.evaluation
        if not self.config.lora.by_adapter:
            with self.clock("eval"):
                while not task.done() and self.fleet.gate.is_open:
                    await asyncio.wait({task}, timeout=1.0)
        if task.done():
            await self.evaluated()

    async def collect(self) -> list[Outcome]:
        """The step's batch, after the functions of [slime] that look at batches."""
        batch = await self.scheduler.collect(self.show_progress)
        hooks = self.context.slime
        return batch if hooks is None else await collected(hooks, self, batch)

    async def save(self, last: bool) -> None:
        """A checkpoint holds what the evaluations of earlier steps came to."""
        if self.evaluation and self.evaluation[0] < self.step:
            await self.evaluated()
        await super().save(last)

    def state(self) -> dict[str, Any]:
        state = super().state()
        state["offsets"]["journal.jsonl"] = self.journal.offset()
        return state | {
            "version": self.version,
            "syncs": self.syncs_before + self.sync.count,
        }

    def held(self) -> Collection[int]:
        return self.scheduler.ready.keys()

    async def add_to(self, draft: Path) -> None:
        await self.scheduler.save(draft / "ready")

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        state = super().restore(checkpoint)
        self.syncs_before = state["syncs"]
        remove_later(self.run_dir, self.step)
        return state

    async def record_batch(self, batch: list[Outcome]) -> None:
        """Logs the step that has ended with its batch."""
        version, seconds = self.scheduler.batch_version, self.scheduler.seconds
        self.metrics |= await beside(rollout_metrics, batch, version, seconds)
        for measured in self.meters:
            self.metrics |= measured()
        if failed := self.metrics.get("rollout/failed_samples"):  # a replay makes none
            self.view.message(f"note: {failed:.0f} samples failed; the last: {self.scheduler.last_error}")
        self.metrics["driver/lag_max_ms"] = max(self.lag.take())
        kept = [row for one in batch for row in one.log_rows]
        self.recorder.samples(self.step, kept[: self.config.log.samples_per_step])
        self.record()
        self.garbage.between_steps()

    def summary(self) -> dict[str, Any]:
        """What the run came to, for ``summary.json``."""

        def mean(name: str) -> float | None:
            return self.total(name) / len(self.history) if self.history else None

        metric = self.default_metric
        seconds_rollout, seconds_train = self.total("rollout/seconds"), self.total("time/train")
        return {
            "task": ", ".join(section.source for section in self.config.data.members.values()),
            "model": self.config.model.path,
            "dtype": self.config.model.dtype,
            "steps": self.step,
            "eval_before": self.evals[0][1].get(metric) if self.evals else None,
            "eval_after": self.evals[-1][1].get(metric) if self.evals else None,
            "eval_prompts": self.evals[0][1].get(metric.replace("pass@1", "prompts")) if self.evals else None,
            "reward_first": self.history[0]["reward/mean"] if self.history else None,
            "reward_last": self.history[-1]["reward/mean"] if self.history else None,
            "logprob_abs_diff_mean": mean("train/logprob_abs_diff_mean"),
            "logprob_abs_diff_max": max((s.get("train/logprob_abs_diff_max", 0.0) for s in self.history), default=None),
            "rollout_tokens_per_s": self.total("rollout/response_tokens") / seconds_rollout
            if seconds_rollout
            else None,
            "train_tokens_per_s": self.total("train/packed_tokens") / seconds_train if seconds_train else None,
            "train_memory_peak_gib": max((s.get("train/memory_peak_gib", 0.0) for s in self.history), default=None),
            "seconds_total": self.seconds_before + time.monotonic() - self.started,
            "weight_syncs": self.syncs_before + self.sync.count,
            "weight_probe_failures": self.sync.failures,  # one ends the run, or the use of a server that joins
            "server_restarts": self.total("servers/restarts"),
        }


@contextlib.asynccontextmanager
async def open_job(config: Config, view: LiveView, resume: bool, kind: type[Job] = Job) -> AsyncIterator[Job]:
    """Makes all parts, starts servers and trainer side by side, and closes everything whatever happens."""
    job = kind(config, view, time.monotonic())
    checkpoint = job.prepare_folder(resume)
    check_functions(config)
    connections_allowed(config.rollout.concurrency)
    slow = config.model.dtype == "bfloat16" and not on_gpu() and not cpu.computes_bfloat16()
    for line in [*warnings(config), *([f"{cpu.SLOW}; {cpu.FIX}"] if slow else [])]:
        view.message(f"note: {line}")
    prompts, job.eval_tasks = load_data(config)
    known = known_tasks(prompts)
    check_tasks(config, known, config.data.response_keys)
    held_out = [task for tasks in job.eval_tasks.values() for task in tasks]
    check_tasks(config, held_out)
    job.tokenizer = load_tokenizer(config.model.path)
    hooks = make_hooks(config, job.run_dir / "logs")
    job.cursor = with_source(make_cursor(config, prompts), config, hooks)
    if checkpoint:
        job.restore(checkpoint)
    async with job.opened(bool(checkpoint)) as session, contextlib.AsyncExitStack() as stack:
        job.journal = Journal(job.run_dir / job.journal_file)
        stack.callback(job.journal.close)
        view.phase("starting", "the workers of rewards and tools")
        job.rewards = await stack.enter_async_context(
            open_rewards(config, job.run_dir / "logs", [*known, *held_out], hooks)
        )
        job.tools = await stack.enter_async_context(Tools(config.tools, job.run_dir / "logs"))
        roster = Roster(job.run_dir)
        stack.callback(roster.close)
        fleet = job.fleet = Fleet(config, session, job.run_dir / "logs", roster)
        fleet.say = view.message
        stack.push_async_callback(fleet.stop)
        view.phase("starting", "vLLM and the trainer")
        await asyncio.gather(
            fleet.start(lambda text: view.phase("starting", text)),
            start_trainer(job, Path(config.model.path), checkpoint),
        )
        job.context = await add_scorers(
            make_context(config, fleet, job.rewards, job.tools, job.tokenizer, hooks), config, session
        )
        job.poller = await stack.enter_async_context(make_poller(job.context, fleet))
        job.lag = LoopLag()
        stack.enter_context(job.lag.measured())
        stack.enter_context(giving_way())
        job.garbage = stack.enter_context(Garbage())
        stack.enter_context(job.garbage.looked_for())
        job.scheduler = make_scheduler(job)
        stack.push_async_callback(job.scheduler.close)
        job.meters = [job.scheduler.counts, job.rewards.counts, job.tools.counts, job.poller.metrics, fleet.metrics]
        if hooks is not None:
            job.meters.append(lambda: hooks.metrics(job.scheduler))
        if checkpoint:
            job.scheduler.restore(checkpoint / "ready")
        job.sync = job.make_sync()
        if config.inference.urls:
            stack.push_async_callback(job.sync.close)
        stack.callback(lambda: job.evaluation and job.evaluation[1].cancel())
        async with fleet.watched(job.sync.join), job.running():
            yield job


async def start_trainer(job: Job, model: Path, checkpoint: Path | None) -> None:
    """Starts the ranks and says how much memory they will take."""
    await job.trainer.start(model, checkpoint)
    job.view.message(await job.trainer.memory())
