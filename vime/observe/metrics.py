"""The files of a run: every number and sample, written once, wound back on a resume, and read again.

``metrics.jsonl`` and ``samples.jsonl`` are the truth. TensorBoard's events are derived from the first and made anew on
a resume, so that no curve holds a step twice. Optional sinks get the same numbers and can never stop a training run.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import time
import tomllib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
TENSORBOARD = "tensorboard"
CONFIG = "config.toml"
SUMMARY = "summary.json"
PROJECT = "vime"
"""Project name under which W&B and trackio file the run."""
KINDS = ("step", "eval")
SAMPLES_KEPT = 512
"""Rows of one step that are read back: a report shows a few, and a step of thousands must not fill the memory."""

Metrics = Mapping[str, float | None]
"""A record's numbers by name; None where the number wasn't finite."""

logger = logging.getLogger(__name__)


class ObserveError(Exception):
    """A run's records cannot be written or wound back; the message names the thing and the next step."""


class Sink(Protocol):
    """Where numbers go besides the files. The runs of W&B and trackio have this shape already."""

    def log(self, metrics: dict[str, Any], step: int) -> Any: ...

    def finish(self) -> Any: ...


class TensorBoard:
    """Scalars for TensorBoard, through tensorboard's own writer: needs neither torch nor tensorflow."""

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))

    def log(self, metrics: Mapping[str, float], step: int, wall_time: float | None = None) -> None:
        """Writes one event with all ``metrics``; ``wall_time`` in Unix seconds, now if not given."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        moment = time.time() if wall_time is None else wall_time
        self._writer.add_event(Event(wall_time=moment, step=step, summary=Summary(value=values)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _import(sink: str) -> ModuleType:
    """The sink's module, which is named like the sink; raises ObserveError where it is not installed."""
    try:
        return importlib.import_module(sink)
    except ImportError as error:
        raise ObserveError(
            f"sink {sink!r} is asked for and cannot be imported ({error}); run: pip install {sink}"
        ) from error


def _wandb(run_dir: Path, name: str, config: dict[str, Any], append: bool) -> Sink:
    """A W&B run whose id lies in the run folder, so that a resumed run continues the same curves."""
    wandb = _import("wandb")
    id_file = run_dir / "wandb_id"
    if not (append and id_file.exists()):
        id_file.write_text(uuid.uuid4().hex)
    run_id = id_file.read_text()
    run: Sink = wandb.init(project=PROJECT, name=name, config=config, dir=str(run_dir), id=run_id, resume="allow")
    return run


def _trackio(run_dir: Path, name: str, config: dict[str, Any], append: bool) -> Sink:
    """A trackio run; trackio resumes by name."""
    resume = "allow" if append else "never"
    run: Sink = _import("trackio").init(project=PROJECT, name=name, config=config, resume=resume)
    return run


SINKS: dict[str, Callable[[Path, str, dict[str, Any], bool], Sink]] = {"wandb": _wandb, "trackio": _trackio}
"""A new sink is one function and one line here."""


class Recorder:
    """Writes all metrics and samples of one run folder. One process owns it; it isn't safe to share between threads.

    ``sinks`` are names of ``SINKS``. With ``append`` the records continue what lies in the folder (after ``rewind``);
    without it a folder that holds records is refused. Raises ObserveError: unknown or missing sink, records in the way.
    """

    def __init__(
        self,
        run_dir: Path,
        sinks: Sequence[str] = (),
        name: str = "",
        config: dict[str, Any] | None = None,
        append: bool = False,
    ) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        if not append:
            _refuse_old_records(run_dir)
        self._sinks = _open_sinks(sinks, run_dir, name or run_dir.resolve().name, config or {}, append)
        self._files: dict[str, IO[bytes]] = {file: (run_dir / file).open("ab") for file in (METRICS, SAMPLES)}
        self._tensorboard = _fresh_tensorboard(run_dir)
        self._newest = 0  # step

    def log(self, kind: str, step: int, metrics: Mapping[str, float], unsent: tuple[str, ...] = ()) -> None:
        """Records ``metrics`` (flat names such as "reward/mean") of one "step" or "eval"; further sinks do not get those whose
        names begin with one of ``unsent``.

        A number that isn't finite is null in the file, for JSON has no NaN, is left out of the sinks, and is warned of.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        for name in [name for name in numbers if name not in finite]:
            logger.warning("%s %d: %s is %s; recorded as null", kind, step, name, numbers[name])
        nullable = {name: finite.get(name) for name in numbers}
        self._write(METRICS, [{"kind": kind, "step": step, "time": time.time(), "metrics": nullable}])
        self._tensorboard.log(finite, step)
        self._tensorboard.flush()
        self._newest = newest = max(step, self._newest)  # W&B takes no number of an earlier step than its last
        sent = {name: value for name, value in finite.items() if not name.startswith(unsent)}
        for sink_name in list(self._sinks):
            self._attempt(sink_name, lambda sink: sink.log(dict(sent), step=newest))

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends sample ``rows`` (JSON-serialisable) of ``step``; each row gets the step under "step"."""
        self._write(SAMPLES, [{**row, "step": step} for row in rows])

    def offsets(self) -> dict[str, int]:
        """Lengths in bytes of the files: what a checkpoint keeps for ``rewind``."""
        return {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}

    def close(self) -> None:
        """Closes files and sinks; may be called twice."""
        for file in self._files.values():
            file.close()
        self._tensorboard.close()
        for name in list(self._sinks):
            self._attempt(name, lambda sink: sink.finish())
        self._sinks.clear()

    def _write(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = (json.dumps(_valid(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        # A model can emit half of a surrogate pair, which UTF-8 cannot hold: "replace" keeps the row.
        self._files[name].write("".join(lines).encode("utf-8", "replace"))
        self._files[name].flush()

    def _attempt(self, name: str, action: Callable[[Sink], Any]) -> None:
        """Runs ``action`` on a sink; a sink that fails is dropped with a warning, for the files hold everything."""
        try:
            action(self._sinks[name])
        except Exception as error:
            del self._sinks[name]
            logger.warning("sink %s failed and is dropped, the files go on: %s: %s", name, type(error).__name__, error)


def rewind(run_dir: Path, offsets: Mapping[str, int]) -> None:
    """Cuts the run's files to ``offsets`` (bytes) of the checkpoint that is resumed, so that nothing appears twice.

    A file that ``offsets`` does not name is left alone. Raises ObserveError, before any file is cut, where a file is
    missing or shorter than its offset.
    """
    for name, offset in offsets.items():
        path = Path(run_dir) / name
        length = path.stat().st_size if path.exists() else 0
        if length < offset:
            raise ObserveError(
                f"{path} has {length} bytes, the checkpoint was saved at {offset}: it is not the file of this "
                f"checkpoint or was cut since; restore it or resume an earlier checkpoint"
            )
    for name, offset in offsets.items():
        path = Path(run_dir) / name
        if path.exists():
            os.truncate(path, offset)


def _refuse_old_records(run_dir: Path) -> None:
    for name in (METRICS, SAMPLES):
        path = run_dir / name
        if path.exists() and path.stat().st_size:
            raise ObserveError(f"{path} already holds records; resume that run or name another run folder")


def _open_sinks(
    names: Sequence[str], run_dir: Path, run_name: str, config: dict[str, Any], append: bool
) -> dict[str, Sink]:
    for name in names:
        if name not in SINKS:
            raise ObserveError(f"unknown sink {name!r}; known: {', '.join(SINKS)}")
    return {name: SINKS[name](run_dir, run_name, config, append) for name in names}


def _fresh_tensorboard(run_dir: Path) -> TensorBoard:
    """A TensorBoard writer that starts with what metrics.jsonl holds; older event files are replaced."""
    folder = run_dir / TENSORBOARD
    for stale in folder.glob("events.out.tfevents.*"):
        stale.unlink()
    board = TensorBoard(folder)
    with (run_dir / METRICS).open("rb") as lines:
        for line in lines:
            record = json.loads(line)
            known = {name: value for name, value in record["metrics"].items() if value is not None}
            board.log(known, record["step"], record["time"])
    board.flush()
    return board


def _valid(value: Any) -> Any:
    """``value`` with every float that JSON cannot hold replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _valid(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(item) for item in value]
    return value


@dataclass(frozen=True)
class Run:
    """A run folder. ``steps`` and ``evals`` are ordered by step and hold each step once; absent files read as empty."""

    folder: Path
    steps: list[tuple[int, Metrics]]
    evals: list[tuple[int, Metrics]]
    started: float
    ended: float
    """Times (Unix seconds) of the first and the last record; 0 without records."""
    config_text: str
    config: dict[str, Any]
    summary: dict[str, Any]


@dataclass
class StepSamples:
    """Sample rows of one step of a split."""

    step: int
    rows: list[dict[str, Any]] = field(default_factory=list)


def read_run(run_dir: Path) -> Run:
    """Reads a run folder. Raises FileNotFoundError if there is none; a torn last line of a live run is passed over."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} is not a run folder; name the folder that holds {METRICS}")
    merged: dict[str, dict[int, dict[str, float | None]]] = {"step": {}, "eval": {}}
    times = []
    for record in read_lines(run_dir / METRICS):
        merged.setdefault(record["kind"], {}).setdefault(record["step"], {}).update(record["metrics"])
        times.append(record["time"])
    config_text = _text(run_dir / CONFIG)
    return Run(
        folder=run_dir,
        steps=sorted(merged["step"].items()),
        evals=sorted(merged["eval"].items()),
        started=min(times, default=0.0),
        ended=max(times, default=0.0),
        config_text=config_text,
        config=_toml(config_text),
        summary=json.loads(_text(run_dir / SUMMARY) or "{}"),
    )


def read_lines(path: Path) -> Iterable[dict[str, Any]]:
    """The JSON lines of ``path``, none if it is missing. A last line without its newline is still being written."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)


def first_and_last_samples(run_dir: Path) -> dict[str, tuple[StepSamples, StepSamples]]:
    """For each split the rows of its first and of its last step; the same object twice where there is one step."""
    ends: dict[str, tuple[StepSamples, StepSamples]] = {}
    for row in read_lines(run_dir / SAMPLES):
        step, split = row["step"], row["split"]
        first, last = ends.setdefault(split, (StepSamples(step),) * 2)
        if step > last.step:
            last = StepSamples(step)
        if step < first.step:
            first = StepSamples(step)
        for end in {id(end): end for end in (first, last)}.values():
            if end.step == step and len(end.rows) < SAMPLES_KEPT:
                end.rows.append(row)
        ends[split] = (first, last)
    return ends


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _toml(text: str) -> dict[str, Any]:
    """The config, empty where a person has broken it by hand: the report shows its text all the same."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}
