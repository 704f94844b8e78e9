"""A training job's parts and its state: made from the configuration, opened and closed as one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from vime import __version__
from vime.checkpoint import CheckpointError, Checkpoints, read_state
from vime.config.load import ConfigError, dump
from vime.config.nearest import nearest
from vime.config.sections import Config, DataSet
from vime.data.cursor import PromptCursor
from vime.data.journal import Journal
from vime.data.sources import distinct, load_tasks, split_held_out
from vime.functions import FunctionError, user_function
from vime.inference.server import Fleet, scoring_server
from vime.observe.live import LiveView
from vime.observe.metrics import Recorder, rewind
from vime.observe.report import write_report
from vime.rewards import load_rewards
from vime.rollout.collect import Collector, Outcome, rollout_metrics
from vime.rollout.evaluate import evaluate
from vime.rollout.generate import Context
from vime.sample import Task
from vime.store.shared_memory import SharedMemoryStore
from vime.training.client import Trainer
from vime.weights.channel import CHANNELS, Probe, SharedMemoryChannel


def tasks_of(section: DataSet) -> list[Task]:
    return load_tasks(
        section.source,
        size=section.size,
        seed=section.seed,
        options=section.options,
        prompt_key=section.prompt_key,
        answer_key=section.answer_key,
        system=section.system,
        template=section.template,
    )


def load_held_out(config: Config) -> dict[str, list[Task]]:
    """The evaluation sets by name, each prompt once."""
    return {name: distinct(tasks_of(section)) for name, section in config.eval.sets.items()}


def load_data(config: Config) -> tuple[list[Task], dict[str, list[Task]]]:
    """Training tasks, without any prompt of an evaluation set, and the evaluation sets by name."""
    held_out = load_held_out(config)
    return split_held_out(tasks_of(config.data), [t for tasks in held_out.values() for t in tasks]), held_out


def check_functions(config: Config) -> None:
    """Refuses an advantage or objective of the user's that cannot be loaded or called, before anything starts."""
    named = {"advantage": (config.algorithm.advantage, 1), "objective": (config.algorithm.objective, 2)}
    for option, (name, arguments) in named.items():
        if ":" in name:
            try:
                user_function(name, arguments)
            except FunctionError as error:
                raise ConfigError(f"algorithm.{option}: {error}") from None


def check_responses(config: Config, tasks: list[Task]) -> None:
    """Refuses tasks without the given responses that data.response_keys names."""
    for key in config.data.response_keys:
        for task in tasks:
            if not isinstance(task.metadata.get(key), str):
                raise ConfigError(
                    f"data.response_keys: task {task.id} has no text {key!r}{nearest(key, [*task.metadata])}"
                )


def load_tokenizer(config: Config) -> Any:
    """The model folder's tokenizer; ConfigError where it has no chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.path = {config.model.path!r}: its tokenizer has no chat template; add chat_template.jinja"
        )
    return tokenizer


def make_context(config: Config, fleet: Fleet, tokenizer: Any) -> Context:
    rollout = config.rollout
    return Context(
        servers=fleet.servers,
        tokenizer=tokenizer,
        reward=load_rewards(config.reward),
        sampling={
            "temperature": rollout.temperature,
            "max_tokens": rollout.max_tokens,
            "stop_token_ids": rollout.stop_token_ids,
        },
        request_timeout_s=rollout.request_timeout_s,
        reward_timeout_s=config.reward.timeout_s,
        retries=rollout.retries,
        slots=asyncio.Semaphore(rollout.concurrency),
        response_keys=tuple(config.data.response_keys),
    )


async def add_scorers(context: Context, config: Config, session: aiohttp.ClientSession) -> Context:
    """The context with the servers of the reference and the teacher, where they are given by URL."""
    urls = {"reference": config.reference.url, "teacher": config.teacher.url}
    found = {name: await scoring_server(url, session, config) for name, url in urls.items() if url}
    return dataclasses.replace(context, scorers=found)


class Job:
    """State of a run in one place: the step, the parts, what has been measured of the current step."""

    def __init__(self, config: Config, view: LiveView, started: float) -> None:
        self.config, self.view, self.started = config, view, started
        self.run_dir = Path(config.run.dir)
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", config.checkpoint.keep)
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.history: list[dict[str, float]] = []
        self.evals: list[tuple[int, dict[str, float]]] = []
        self.best: tuple[float, int] | None = None
        self.seconds_before, self.syncs_before = 0.0, 0  # of the runs that this one resumes
        self.stop_requested = False

    # The parts, set by ``open_job``.
    trainer: Trainer
    channel: SharedMemoryChannel
    probe: Probe
    collector: Collector
    cursor: PromptCursor
    context: Context
    recorder: Recorder
    journal: Journal
    eval_tasks: dict[str, list[Task]]

    @property
    def version(self) -> int:
        """The weights' version is the number of steps that made them."""
        return self.step

    @property
    def optimizer_steps(self) -> int:
        """Of the whole run: what the learning-rate schedule spans."""
        return self.config.run.steps * self.config.algorithm.updates

    @contextlib.contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Adds the time inside to the step's ``time/PHASE``, in seconds, and shows the phase."""
        if phase != "step":
            self.view.phase(phase)
        started = time.perf_counter()
        yield
        self.metrics[f"time/{phase}"] = self.metrics.get(f"time/{phase}", 0.0) + time.perf_counter() - started

    def show_progress(self, done: int, total: int) -> None:
        self.view.phase("rollout", f"{done}/{total} groups")

    def due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def is_last(self) -> bool:
        """Whether the run ends with this step: all are done, time is up, or an interrupt came. Ask once a step."""
        limit = self.config.run.time_limit_minutes
        late = limit is not None and time.monotonic() - self.started > limit * 60
        return self.step >= self.config.run.steps or late or self.stop_requested

    async def evaluate(self) -> bool:
        """Evaluates all sets; True where the best metric improved."""
        if not self.config.eval.sets:
            return False
        with self.clock("eval"):
            metrics, rows = await evaluate(self.config, self.eval_tasks, self.context_now())
        self.evals.append((self.step, metrics))
        self.recorder.log("eval", self.step, metrics)
        self.recorder.samples(self.step, rows)
        self.view.update("eval", self.step, metrics)
        name = self.config.checkpoint.best_metric or f"eval/{next(iter(self.config.eval.sets))}/pass@1"
        if name not in metrics:
            raise ConfigError(f"checkpoint.best_metric = {name!r} is not measured; measured: {', '.join(metrics)}")
        improved = self.best is None or metrics[name] > self.best[0]
        if improved:
            self.best = (metrics[name], self.step)
        return improved

    def context_now(self) -> Context:
        return dataclasses.replace(self.context, version=self.version)

    async def save(self) -> None:
        """Writes a checkpoint of this step: trainer, cursor, files' lengths, configuration."""
        with self.clock("checkpoint"):
            draft = self.checkpoints.draft(self.step)
            await self.trainer.save(draft)
            self.context.tokenizer.save_pretrained(draft / "model")
            state = {
                "vime": __version__,
                "step": self.step,
                "version": self.version,
                "cursor": self.cursor.state(),
                "offsets": {**self.recorder.offsets(), "journal.jsonl": self.journal.offset()},
                "evals": self.evals,
                "history": self.history,
                "best": self.best,
                "best_step": self.best[1] if self.best else None,
                "syncs": self.syncs_before + len(self.probe.results),
                "seconds": self.seconds_before + time.monotonic() - self.started,
            }
            await asyncio.to_thread(self.checkpoints.commit, self.step, state, dump(self.config))

    def restore(self, checkpoint: Path) -> None:
        """Takes up the state of a checkpoint; the append-only files go back to its lengths."""
        state = read_state(checkpoint)
        if state["step"] >= self.config.run.steps:
            raise CheckpointError(
                f"{checkpoint} is at step {state['step']} of run.steps = {self.config.run.steps}: nothing is left to do; "
                "raise it with --run.steps N"
            )
        self.step = state["step"]
        self.evals = [(step, metrics) for step, metrics in state["evals"]]
        self.history = state["history"]
        self.best = tuple(state["best"]) if state["best"] else None  # type: ignore[assignment]
        self.seconds_before, self.syncs_before = state["seconds"], state["syncs"]
        self.cursor.load(state["cursor"])
        rewind(self.run_dir, state["offsets"])

    def record(self, batch: list[Outcome]) -> None:
        """Logs the step that has ended and starts measuring the next. A checkpoint's time counts to the step after it."""
        self.metrics |= rollout_metrics(batch, self.collector.failed_samples, self.metrics["time/rollout"])
        if self.config.algorithm.mask_stale:
            self.metrics["rollout/stale_tokens_masked"] = self.collector.stale_tokens
        self.history.append(self.metrics)
        self.recorder.log("step", self.step, self.metrics)
        kept = [row for one in batch for row in one.log_rows]
        self.recorder.samples(self.step, kept[: self.config.log.samples_per_step])
        self.view.update("step", self.step, self.metrics)
        self.metrics = {}

    def summary(self) -> dict[str, Any]:
        """What the run came to, for ``summary.json``."""

        def total(name: str) -> float:
            return sum(step.get(name, 0.0) for step in self.history)

        def mean(name: str) -> float | None:
            return total(name) / len(self.history) if self.history else None

        metric = f"eval/{next(iter(self.config.eval.sets), '')}/pass@1"
        seconds_train = total("time/train")
        return {
            "task": self.config.data.source,
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
            "rollout_tokens_per_s": total("rollout/response_tokens") / total("time/rollout") if self.history else None,
            "train_tokens_per_s": total("train/packed_tokens") / seconds_train if seconds_train else None,
            "seconds_total": self.seconds_before + time.monotonic() - self.started,
            "weight_syncs": self.syncs_before + len(self.probe.results),
            "weight_probe_failures": self.probe.failures,  # one ends the run
        }

    def finish(self) -> Path:
        """Writes ``summary.json`` and ``report.html``; returns the report's path."""
        (self.run_dir / "summary.json").write_text(json.dumps(self.summary(), indent=2) + "\n")
        return write_report(self.run_dir)


RUN_FILES = (
    "metrics.jsonl",
    "samples.jsonl",
    "journal.jsonl",
    "summary.json",
    "report.html",
    "config.toml",
    "config.json",
)


def prepare_folder(job: Job, resume: bool) -> Path | None:
    """The checkpoint to resume from, or None after making sure that no earlier run is overwritten."""
    if resume:
        return job.checkpoints.latest()
    if job.checkpoints.steps():
        raise CheckpointError(
            f"{job.run_dir} holds a run with checkpoints; go on with it by --resume, or name another folder with "
            "--run.dir DIR, or remove it"
        )
    if job.run_dir.exists() and not (job.run_dir / "journal.jsonl").exists() and any(job.run_dir.iterdir()):
        raise CheckpointError(f"{job.run_dir} holds other files and no run; name another folder with --run.dir DIR")
    for name in RUN_FILES:  # of a run that never came to a checkpoint: nothing in it can be resumed
        (job.run_dir / name).unlink(missing_ok=True)
    for name in ("logs", "tensorboard", "checkpoints"):
        shutil.rmtree(job.run_dir / name, ignore_errors=True)
    return None


@contextlib.asynccontextmanager
async def open_job(config: Config, view: LiveView, resume: bool) -> AsyncIterator[Job]:
    """Makes all parts, starts servers and trainer side by side, and closes everything whatever happens."""
    job = Job(config, view, time.monotonic())
    checkpoint = prepare_folder(job, resume)
    check_functions(config)
    train_tasks, job.eval_tasks = load_data(config)
    check_responses(config, train_tasks)
    tokenizer = load_tokenizer(config)
    job.cursor = PromptCursor(train_tasks, config.run.seed)
    if checkpoint:
        job.restore(checkpoint)
    job.run_dir.mkdir(parents=True, exist_ok=True)
    (job.run_dir / "config.toml").write_text(dump(config))
    memory = Path(config.weights.dir, f"vime-{job.run_dir.absolute().as_posix().strip('/').replace('/', '-')}")
    shutil.rmtree(memory, ignore_errors=True)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        job.recorder = Recorder(
            job.run_dir, config.log.sinks, job.run_dir.name, config.model_dump(), append=bool(checkpoint)
        )
        stack.callback(job.recorder.close)
        job.journal = Journal(job.run_dir / "journal.jsonl")
        stack.callback(job.journal.close)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        fleet = Fleet(config, session, job.run_dir / "logs")
        stack.push_async_callback(fleet.stop)
        store = SharedMemoryStore(memory / "store")
        job.trainer = Trainer(config, session, job.run_dir, store.folder)
        stack.push_async_callback(job.trainer.stop)
        model = checkpoint / "model" if checkpoint else Path(config.model.path)
        view.phase("starting", "vLLM and the trainer")
        await asyncio.gather(
            fleet.start(lambda text: view.phase("starting", text)), job.trainer.start(model, checkpoint)
        )
        job.context = await add_scorers(make_context(config, fleet, tokenizer), config, session)
        job.collector = Collector(config, job.context, job.cursor, job.journal, store)
        job.channel = CHANNELS[config.weights.channel](config, job.trainer, fleet.servers, memory / "weights")
        prompts = [job.context.prompt_ids(task) for task in train_tasks[: config.weights.probe_prompts]]
        job.probe = Probe(config, job.trainer, fleet.servers, prompts)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, request_stop, job, asyncio.current_task())
        watch = asyncio.create_task(watch_processes(fleet, asyncio.current_task()))
        stack.callback(watch.cancel)
        try:
            yield job
        except BaseException:
            fleet.check()  # a server or a rank that ended is the cause; what it broke is not
            job.trainer.check()
            raise


def request_stop(job: Job, main: asyncio.Task[Any] | None) -> None:
    """The first interrupt ends the run after the step, checkpoint and all; the second ends it now."""
    if job.stop_requested and main:
        main.cancel()
    job.stop_requested = True
    job.view.message("stopping after this step, with a checkpoint; interrupt again to stop now")


async def watch_processes(fleet: Fleet, main: asyncio.Task[Any] | None) -> None:
    """Cancels the run when a server or the router ends; ``fleet.check`` then says which and why."""
    while True:
        await asyncio.sleep(1.0)
        if any(process.exit_code is not None for process in fleet.processes) and main:
            main.cancel()
            return
