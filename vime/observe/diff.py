"""``vime diff``: where two runs part. Configurations first, then what both recorded, by step, in the order it comes about.

Of a step: the batch (samples, and dumps where both runs have them), the numbers of training, the checkpoint, the evaluation.
What only one of the two recorded is told and does not count; neither does what differs by nature (NATURAL).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vime.config.compare import differing
from vime.observe.metrics import CONFIG, METRICS, SAMPLES, Metrics, ObserveError, read_run
from vime.observe.tensors import Difference, differing_checkpoint, differing_dump, steps_below

NATURAL = ("time/", "checkpoint/", "servers/", "driver/", "weights/probe", "rollout/seconds", "reward/worker_restarts")
RATES = ("tokens_per_s", "memory_peak_gib")
"""Names that begin or end so are of the machine, or of another sampling than the run's (the probe's)."""
BATCH, TRAINING, CHECKPOINT, EVALUATION = range(4)
"""What comes about in a step, in this order."""
Place = tuple[int, int]
"""(step, one of these)."""
TOLD = 10  # lines of a kind


class Row(msgspec.Struct):
    """What of a sample's line is compared, and where it belongs."""

    step: int
    split: str
    group: int
    prompt: Any
    response: str
    reward: float | None
    task: str = ""
    set: str = ""

    @property
    def place(self) -> Place:
        return self.step, BATCH if self.split == "train" else EVALUATION


@dataclass(frozen=True)
class MetricDifference:
    """A number that is not the same; ``relative`` is the difference by the larger of the two."""

    kind: str
    step: int
    name: str
    one: float | None
    other: float | None
    relative: float


@dataclass(frozen=True)
class SampleDifference:
    """The first sample of ``place`` that is not the same, ``number`` counted within its group; None where a run has no more."""

    place: Place
    group: int
    number: int
    one: dict[str, Any] | None
    other: dict[str, Any] | None
    what: str


@dataclass
class Comparison:
    """All that was found. ``sentence`` says the end of it."""

    runs: tuple[str, str]
    rtol: float
    common: int = 0  # the last step that both have
    config: list[tuple[str, Any, Any]] = field(default_factory=list)
    metrics: list[MetricDifference] = field(default_factory=list)
    inexact: int = 0  # numbers that are not exactly equal, those within the tolerance included
    alone: list[str] = field(default_factory=list)  # what only one run recorded
    sample: SampleDifference | None = None
    dump: tuple[int, Difference] | None = None
    checkpoint: tuple[int, Difference] | None = None
    sentence: str = ""

    @property
    def equal(self) -> bool:
        return not (self.metrics or self.sample or self.dump or self.checkpoint)


def compare(one: Path, other: Path, rtol: float = 0.0) -> Comparison:
    """Reads both runs; ObserveError where there is none."""
    for folder in (one, other):
        if not (folder / METRICS).exists():
            raise ObserveError(f"{folder} holds no {METRICS}; name the folder of a run (run.dir)")
    found = Comparison((str(one), str(other)), rtol)
    texts = [(folder / CONFIG).read_text() if (folder / CONFIG).exists() else "" for folder in (one, other)]
    found.config = differing(*texts)
    compare_metrics(found, one, other)
    found.sample = first_sample(one, other, found.common)
    for step in steps_below(one / "dumps", other / "dumps", last_of_interest(found)):
        if difference := differing_dump(one, other, step, rtol):
            found.dump = step, difference
            break
    for step in steps_below(one / "checkpoints", other / "checkpoints", last_of_interest(found)):
        difference, note = differing_checkpoint(one, other, step, rtol)
        found.alone += [note] if note else []
        if difference:
            found.checkpoint = step, difference
            break
    found.sentence = sentence(found)
    return found


def last_of_interest(found: Comparison) -> int:
    """The step in which the runs are known to part: what is large is not read beyond it."""
    return min((step for (step, _), _ in parting(found)), default=found.common)


def natural(name: str) -> bool:
    return name.startswith(NATURAL) or name.endswith(RATES)


def compare_metrics(found: Comparison, one: Path, other: Path) -> None:
    """Every number of both, step by step."""
    runs = read_run(one), read_run(other)
    ends = [max((step for step, _ in [*run.steps, *run.evals]), default=0) for run in runs]
    found.common = min(ends)
    if ends[0] != ends[1]:
        found.alone.append(f"steps after {found.common}: only in {found.runs[ends[1] > ends[0]]}")
    names: tuple[set[str], set[str]] = set(), set()
    for kind in ("eval", "step"):
        mine, theirs = (dict(run.evals if kind == "eval" else run.steps) for run in runs)
        for step in sorted(mine.keys() & theirs.keys()):
            names[0].update(mine[step].keys() - theirs[step].keys())
            names[1].update(theirs[step].keys() - mine[step].keys())
            compare_record(found, kind, step, mine[step], theirs[step])
    for run, only in zip(found.runs, names, strict=True):
        if told := sorted(name for name in only if not natural(name)):
            found.alone.append(f"metrics only in {run}: {', '.join(told)}")
    found.metrics.sort(key=place_of)  # stable: in a record they stay in their order


def compare_record(found: Comparison, kind: str, step: int, one: Metrics, other: Metrics) -> None:
    for name, value in one.items():
        if name not in other or natural(name) or value == (theirs := other[name]):
            continue
        found.inexact += 1
        relative = math.inf
        if value is not None and theirs is not None:
            relative = abs(value - theirs) / max(abs(value), abs(theirs))
        if relative > found.rtol:
            found.metrics.append(MetricDifference(kind, step, name, value, theirs, relative))


def place_of(one: MetricDifference) -> Place:
    return one.step, EVALUATION if one.kind == "eval" else TRAINING


def rows(run: Path) -> Iterator[Row]:
    """The samples of a run, as far as they are compared. A last line without its newline is still being written."""
    decoder = msgspec.json.Decoder(Row)
    if not (run / SAMPLES).exists():
        return
    with (run / SAMPLES).open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield decoder.decode(line)


def digests(run: Path, last: int) -> dict[Place, int]:
    """One number for all samples of each place, up to a step: a long run's texts are not held in memory."""
    found: dict[Place, int] = {}
    for row in rows(run):
        if row.step <= last:
            found[row.place] = hash(
                (found.get(row.place), row.set, row.group, repr(row.prompt), row.response, row.reward)
            )
    return found


def first_sample(one: Path, other: Path, last: int) -> SampleDifference | None:
    """The first sample that differs in prompt, response or reward."""
    mine, theirs = digests(one, last), digests(other, last)
    place = min((place for place in mine.keys() & theirs.keys() if mine[place] != theirs[place]), default=None)
    if place is None:
        return None
    pairs = [[row for row in rows(run) if row.place == place] for run in (one, other)]
    counts: dict[tuple[str, int], int] = {}
    for number in range(max(map(len, pairs))):
        a, b = (listed[number] if number < len(listed) else None for listed in pairs)
        row = a or b
        assert row
        within = counts[row.set, row.group] = counts.get((row.set, row.group), -1) + 1
        if a != b:
            told = [None if one is None else msgspec.to_builtins(one) for one in (a, b)]
            return SampleDifference(place, row.group, within, told[0], told[1], different_part(a, b))
    raise AssertionError("their digests differ, so some sample does")


def different_part(one: Row | None, other: Row | None) -> str:
    """In words, what of the two is not the same."""
    if one is None or other is None:
        return "one run has no more of them"
    if (one.set, one.group) != (other.set, other.group):
        return f"group {one.group} / {other.group}"
    if one.prompt != other.prompt:
        return f"prompt of task {one.task} / {other.task}"
    if one.response != other.response:
        at = next((i for i, (a, b) in enumerate(zip(one.response, other.response, strict=False)) if a != b), None)
        at = min(len(one.response), len(other.response)) if at is None else at
        return f"response character {at}: {one.response[at : at + 12]!r} / {other.response[at : at + 12]!r}"
    return f"reward {one.reward} / {other.reward}"


def parting(found: Comparison) -> Iterable[tuple[Place, str]]:
    """Every first difference with its place, what shows it most exactly first."""
    if found.dump:
        step, difference = found.dump
        yield (step, BATCH), str(difference)
    if sample := found.sample:
        what = "the samples" if sample.place[1] == BATCH else "the evaluation samples"
        yield sample.place, f"{what} of group {sample.group} differ first ({sample.what})"
    if found.metrics:
        first = found.metrics[0]
        yield place_of(first), f"{first.name} differs first ({first.one} / {first.other})"
    if found.checkpoint:
        step, difference = found.checkpoint
        yield (step, CHECKPOINT), str(difference)


def sentence(found: Comparison) -> str:
    """Where the runs part, in one sentence."""
    parts = list(parting(found))
    if not parts:
        within = f" within {found.rtol:g}" if found.inexact else ""
        return f"The runs are equal{within} in all that both recorded, up to step {found.common}."
    (step, stage), text = min(parts, key=lambda part: part[0])  # of the same place the first: the most exact
    where = f"the evaluation of step {step}" if stage == EVALUATION else f"step {step}"
    if (step, stage) <= (1, CHECKPOINT):
        return f"The runs part at the start; in {where} {text}."
    return f"The runs are equal up to step {step if stage == EVALUATION else step - 1}; in {where} {text}."


def side_by_side(sample: SampleDifference, runs: tuple[str, str]) -> Table:
    table = Table(title=f"step {sample.place[0]}, group {sample.group}, sample {sample.number}")
    table.add_column("")
    for run in runs:
        table.add_column(run, ratio=1)
    for name in ("task", "prompt", "response", "reward"):
        cells = [Text(str(row[name])) if row else Text("-") for row in (sample.one, sample.other)]
        table.add_row(name, *cells)
    return table


def show(found: Comparison, console: Console) -> None:
    """Options, numbers, the first sample, what only one run has, and the sentence."""
    if found.config:
        table = Table("option", *found.runs, title="options that differ")
        for option, *values in found.config:
            table.add_row(option, *(Text(str(value)) for value in values))
        console.print(table)
    if found.metrics:
        table = Table("step", "metric", *found.runs, "relative", title="numbers that differ, the first step first")
        for metric in found.metrics[:TOLD]:
            step = f"{metric.step} (eval)" if metric.kind == "eval" else str(metric.step)
            table.add_row(step, metric.name, str(metric.one), str(metric.other), f"{metric.relative:.2g}")
        console.print(table)
    if found.inexact:
        console.print(f"{found.inexact} numbers differ, {len(found.metrics)} by more than {found.rtol:g} of the larger")
    if found.sample:
        console.print(side_by_side(found.sample, found.runs))
    for line in found.alone:
        console.print(Text(line))
    console.print(Text(found.sentence))


def as_json(found: Comparison) -> dict[str, Any]:
    """For ``--json``."""
    tree: dict[str, Any] = msgspec.to_builtins(found)
    for metric in tree["metrics"]:
        metric["relative"] = metric["relative"] if math.isfinite(metric["relative"]) else None
    return {"equal": found.equal, **tree}
