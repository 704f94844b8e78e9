"""What every run has, whatever its loop: the step, what was measured, the best evaluation, checkpoints, the report."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import aiohttp

from vime import __version__
from vime.beside import beside
from vime.checkpoint import CheckpointError, Checkpoints, flush, read_state
from vime.config.load import ConfigError, dump
from vime.config.sections import Config
from vime.config.supervised import Supervised
from vime.data.cursor import PromptCursor
from vime.inference.client import open_session
from vime.observe import trace
from vime.observe.live import LiveView
from vime.observe.metrics import METRICS, Recorder, read_run, rewind
from vime.observe.report import write_report
from vime.store import STORES, SharedMemoryStore
from vime.training.client import Trainer

RUN_FILES = (
    "samples.jsonl",
    "journal.jsonl",
    trace.TRACE,
    "trace.html",
    "summary.json",
    "report.html",
    "config.toml",
    "config.json",
)


def load_tokenizer(model: str) -> Any:
    """The model folder's tokenizer; ConfigError where it has no chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    if not tokenizer.chat_template:
        raise ConfigError(f"model.path = {model!r}: its tokenizer has no chat template; add chat_template.jinja")
    return tokenizer


class Run:
    """State of a run in one place: the step, what has been measured of the current step, of all steps, of evaluations."""

    kind: str  # the command that makes it

    # Set when the run is opened.
    trainer: Trainer
    store: SharedMemoryStore
    cursor: PromptCursor[Any]
    recorder: Recorder
    trace: trace.Trace | None = None
    unlock: Callable[[], object]
    tokenizer: Any

    def __init__(self, config: Config | Supervised, engine: Config, view: LiveView, started: float) -> None:
        """``engine`` is the configuration as the trainer gets it."""
        self.settings, self.engine, self.view, self.started = config, engine, view, started
        self.run_dir = Path(config.run.dir)
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", config.checkpoint.keep)
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.history: list[dict[str, float]] = []
        self.evals: list[tuple[int, dict[str, float]]] = []
        self.best: tuple[float, int] | None = None
        self.seconds_before = 0.0  # of the runs that this one resumes
        self.stop_requested = False
        self.unsent: tuple[str, ...] = ()  # beginnings of the step's metrics that sinks do not get
        # evaluation sets of this step that are not measured yet
        self.owed = list(config.eval.sets) if config.eval.at_start else []

    @property
    def steps(self) -> int:
        """The number of the run's last step."""
        raise NotImplementedError

    @property
    def optimizer_steps(self) -> int:
        """Of the whole run: what the learning-rate schedule spans."""
        return self.steps

    @property
    def best_metric(self) -> str:
        """What decides which checkpoint is the best."""
        return self.settings.checkpoint.best_metric or self.default_metric

    @property
    def default_metric(self) -> str:
        raise NotImplementedError

    @contextlib.contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Adds the time inside to the step's ``time/PHASE``, in seconds, and shows the phase."""
        if phase != "step":
            self.view.phase(phase)
        started = time.perf_counter()
        with trace.phase(phase, self.step) if phase != "step" else contextlib.nullcontext():
            yield
        self.metrics[f"time/{phase}"] = self.metrics.get(f"time/{phase}", 0.0) + time.perf_counter() - started

    def due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def due_sets(self, last: bool) -> list[str]:
        """Evaluation sets to measure after this step: those whose interval it is, after the last one all."""
        section = self.settings.eval
        return [
            name
            for name, one in section.sets.items()
            if last or self.due(section.every if one.every is None else one.every)
        ]

    def is_last(self) -> bool:
        """Whether the run ends with this step: all are done, time is up, or an interrupt came. Ask once a step."""
        limit = self.settings.run.time_limit_minutes
        late = limit is not None and time.monotonic() - self.started > limit * 60
        return self.step >= self.steps or late or self.stop_requested

    def note_evaluation(self, step: int, metrics: dict[str, float], unsent: tuple[str, ...] = ()) -> bool:
        """Records the evaluation of a step's weights; True where the best metric improved. Sinks get no ``unsent``."""
        self.owed = []
        self.evals.append((step, metrics))
        self.recorder.log("eval", step, metrics, unsent)
        self.view.update("eval", step, metrics)
        name = self.best_metric
        if name not in metrics:
            if any(name in earlier for _, earlier in self.evals):  # its set is not due now
                return False
            raise ConfigError(f"checkpoint.best_metric = {name!r} is not measured; measured: {', '.join(metrics)}")
        sign = -1 if name.endswith("/loss") else 1
        improved = self.best is None or sign * metrics[name] > sign * self.best[0]
        if improved:
            self.best = (metrics[name], step)
        return improved

    def record(self) -> None:
        """Logs the step that has ended and starts measuring the next. A checkpoint's time counts to the step after it."""
        self.history.append(self.metrics)
        self.recorder.log("step", self.step, self.metrics, self.unsent)
        self.unsent = ()
        self.view.update("step", self.step, self.metrics)
        self.metrics = {}

    async def save(self, last: bool) -> None:
        """Takes a checkpoint of this step, trainer, cursor, files' lengths, configuration, which is then written in the
        background; first the one before must be."""
        with self.clock("checkpoint"):
            await self.checkpoints.written()
            draft = self.checkpoints.draft(self.step, self.state(), dump(self.settings))
            await self.add_to(draft)
            model = last or (self.settings.checkpoint.model and not self.engine.lora.rank)
            await self.trainer.save(draft, model)
            self.checkpoints.write(self.step, self.saved(draft / "model" if model else None), self.note_written)

    async def saved(self, model: Path | None) -> None:
        """Waits for the trainer's part of a checkpoint and completes its model's folder. The files that the checkpoint has the
        lengths of are on the disk before it is."""
        await self.trainer.saved()
        if model:
            await beside(self.complete, model)
        await beside(flush, *self.run_dir.glob("*.jsonl"))

    def note_written(self, seconds: float) -> None:
        """Of the step that goes on, not of the one that was saved."""
        self.metrics["checkpoint/write_s"] = seconds

    def held(self) -> Collection[int]:
        """Groups whose prompts need not come again after a resume: what was made of them is in the checkpoint."""
        return ()

    async def add_to(self, draft: Path) -> None:
        """Writes what a checkpoint holds beside the state and the trainer's part."""

    def complete(self, model: Path) -> None:
        """Adds to a model's folder what the trainer does not know of."""
        for name, content in self.tokenizer_files.items():
            (model / name).parent.mkdir(parents=True, exist_ok=True)
            (model / name).write_bytes(content)

    @cached_property
    def tokenizer_files(self) -> dict[str, bytes]:
        """By path in a model's folder. To make them takes a tenth of a second, in which nothing else can happen."""
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the trainer's own; JSON."""
        return {
            "vime": __version__,
            "kind": self.kind,
            "step": self.step,
            "cursor": self.cursor.state(self.held()),
            "offsets": self.recorder.offsets(),
            "traced": self.trace.offset() if self.trace else 0,
            "evals": self.evals,
            "owed": self.owed,
            "best": self.best,
            "best_step": self.best[1] if self.best else None,
            "seconds": self.seconds_before + time.monotonic() - self.started,
        }

    def restore(self, checkpoint: Path) -> dict[str, Any]:
        """Takes up the state of a checkpoint and returns it; the append-only files go back to its lengths."""
        state = read_state(checkpoint)
        if state["kind"] != self.kind:
            raise CheckpointError(f"{checkpoint} was made by vime {state['kind']}; resume it with that command")
        if state["step"] >= self.steps:
            raise CheckpointError(
                f"{checkpoint} is at step {state['step']} of run.steps = {self.steps}: nothing is left to do; "
                "raise it with --run.steps N"
            )
        adapted = (checkpoint / "adapter").exists()
        if adapted != bool(self.engine.lora.rank):
            raise CheckpointError(
                f"{checkpoint} holds {'an' if adapted else 'no'} adapter and lora.rank is {self.engine.lora.rank}; set lora.rank "
                "to the run's, or start another"
            )
        self.step = state["step"]
        self.evals = [(step, metrics) for step, metrics in state["evals"]]
        self.owed = [name for name in state.get("owed", []) if name in self.settings.eval.sets]
        self.best = tuple(state["best"]) if state["best"] else None  # type: ignore[assignment]
        self.seconds_before = state["seconds"]
        self.cursor.load(state["cursor"])
        rewind(self.run_dir, state["offsets"])
        trace.rewind(self.run_dir / trace.TRACE, state.get("traced", 0))
        self.history = [
            {name: value for name, value in metrics.items() if value is not None}
            for _, metrics in read_run(self.run_dir).steps
        ]
        return state

    def total(self, name: str) -> float:
        """A metric's sum over all steps."""
        return sum(step.get(name, 0.0) for step in self.history)

    def summary(self) -> dict[str, Any]:
        """What the run came to, for ``summary.json``."""
        raise NotImplementedError

    def finish(self) -> Path:
        """Writes ``summary.json`` and ``report.html``; returns the report's path."""
        (self.run_dir / "summary.json").write_text(json.dumps(self.summary(), indent=2) + "\n")
        return write_report(self.run_dir)

    def heed_interrupts(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.request_stop, asyncio.current_task())

    def request_stop(self, main: asyncio.Task[Any] | None) -> None:
        """The first interrupt ends the run after the step, checkpoint and all; the second ends it now."""
        if self.stop_requested and main:
            self.checkpoints.give_up()
            main.cancel()
        self.stop_requested = True
        self.view.message("stopping after this step, with a checkpoint; interrupt again to stop now")

    def prepare_folder(self, resume: bool) -> Path | None:
        """The checkpoint to resume from, or None after making sure that no earlier run is overwritten. From here on the folder is
        this run's alone."""
        if resume:
            self.checkpoints.latest()  # where there is none, no folder is made
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.lock()
        if resume:
            return self.checkpoints.latest()
        if self.checkpoints.steps():
            raise CheckpointError(
                f"{self.run_dir} holds a run with checkpoints; go on with it by --resume, or name another folder with "
                "--run.dir DIR, or remove it"
            )
        others = [path for path in self.run_dir.iterdir() if path.name != "logs-eval"]
        if others and not (self.run_dir / METRICS).exists():
            raise CheckpointError(
                f"{self.run_dir} holds other files and no run; name another folder with --run.dir DIR"
            )
        (self.run_dir / METRICS).write_bytes(b"")  # first: with it the folder is a run's, however this start ends
        for name in RUN_FILES:  # of a run that never came to a checkpoint: nothing in it can be resumed
            (self.run_dir / name).unlink(missing_ok=True)
        for name in ("logs", "tensorboard", "checkpoints", "dumps"):
            shutil.rmtree(self.run_dir / name, ignore_errors=True)
        return None

    def lock(self) -> None:
        """Keeps other processes out of the folder until ``unlock`` or the end of this one; CheckpointError where one is in it."""
        folder = os.open(self.run_dir, os.O_RDONLY)  # which children do not inherit
        self.unlock = weakref.finalize(self, os.close, folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.unlock()
            raise CheckpointError(
                f"another process trains in {self.run_dir}; wait for its end, stop it, or name another folder with --run.dir DIR"
            ) from None
        except OSError as error:
            self.view.message(
                f"note: {self.run_dir} cannot be locked ({error.strerror}); see to it that no other process trains in it"
            )

    @property
    def memory(self) -> Path:
        """The run's own folder in the memory-backed file system."""
        digest = hashlib.sha256(bytes(self.run_dir.absolute())).hexdigest()[:16]
        return Path(self.engine.weights.dir, f"vime-{self.run_dir.name[:40]}-{digest}")

    @contextlib.asynccontextmanager
    async def opened(self, resumed: bool) -> AsyncIterator[aiohttp.ClientSession]:
        """Folder, records, store and the trainer's handle, which is not started; all closed whatever happens."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.unlock)
            (self.run_dir / "config.toml").write_text(dump(self.settings))
            shutil.rmtree(self.memory, ignore_errors=True)
            stack.callback(shutil.rmtree, self.memory, ignore_errors=True)
            self.recorder = Recorder(
                self.run_dir, self.settings.log.sinks, self.run_dir.name, self.settings.model_dump(), append=resumed
            )
            stack.callback(self.recorder.close)
            if self.settings.log.trace:
                self.trace = stack.enter_context(trace.opened(self.run_dir / trace.TRACE))
            session = await stack.enter_async_context(open_session())
            self.store = STORES[self.engine.store.kind](self.memory / "store")
            self.trainer = self.make_trainer(session)
            stack.push_async_callback(self.trainer.stop)
            yield session

    def make_trainer(self, session: aiohttp.ClientSession) -> Trainer:
        return Trainer(self.engine, session, self.run_dir, self.memory / "store")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside, the loop runs: interrupts are heeded, and what breaks it is told by its cause."""
        _ = self.tokenizer_files  # before the loop runs
        self.heed_interrupts()
        watch = asyncio.create_task(self.watch_checkpoints(asyncio.current_task()))
        try:
            yield
        except BaseException:
            await self.checkpoints.settle()  # the run has broken, but what it saved is good
            self.trainer.check()  # a rank that ended is the cause; what it broke is not
            if self.checkpoints.failed:
                await self.checkpoints.written()
            raise
        finally:
            watch.cancel()

    async def watch_checkpoints(self, main: asyncio.Task[Any] | None) -> None:
        """Cancels the run when a checkpoint cannot be written; ``running`` then says why."""
        while True:
            await asyncio.sleep(1.0)
            if self.checkpoints.failed and main:
                main.cancel()
                return
