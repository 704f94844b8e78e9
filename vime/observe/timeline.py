"""A run's ``trace.jsonl`` read again: every sample with what its time went to, and what that comes to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vime.observe.metrics import ObserveError, read_lines
from vime.observe.trace import TRACE

MOST_SAMPLES = 20_000
"""on one page, unless steps are named: the newest"""
RESUME_GAP_S = 2.0
"""between the last row of a process and the first of the one that resumed the run; how long nothing ran is of no interest"""
LEAST_GAP_S = 0.001
"""of a sample's time outside all spans that is shown as its own"""
AHEAD = ("rollout", "train")  # phases that run while the number of steps is still that of the step before

PHASES = {
    "queue": "queue: admission, gate",
    "server queue": "queue of the server",
    "prefill": "prefill",
    "decode": "decode",
    "generate": "at the server",
    "failed": "requests that failed",
    "own": "tools, own code",
    "reward queue": "waiting for a reward worker",
    "reward": "reward",
    "score": "reference, teacher",
    "group": "waiting for its group",
    "batch": "waiting for the batch",
    "training": "training",
}
"""What a sample's time goes to, in the order of its life; a pool of other workers adds its own two."""

AT_SERVER = ("server queue", "prefill", "decode", "generate", "failed", "score")


class Span(NamedTuple):
    phase: str
    start: float
    end: float
    where: str = ""
    tokens: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Traced:
    """One generate call. ``end`` is that of its reward, None where the process ended first; ``over`` that of its spans."""

    group: str
    number: int
    task: str
    begin: float
    end: float | None = None
    spans: list[Span] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    oldest: int | None = None
    newest: int | None = None
    finish: str = ""
    reward: float | None = None
    fault: str = ""
    step: int | None = None

    @property
    def evaluation(self) -> bool:
        return self.group.startswith("eval-")

    @property
    def over(self) -> float:
        return max([self.end or self.begin, *(span.end for span in self.spans)])

    @property
    def seconds(self) -> float:
        """Until it was made and scored."""
        return (self.over if self.end is None else self.end) - self.begin

    @property
    def server(self) -> str:
        """Where it was longest."""
        return max(
            (span for span in self.spans if span.tokens), key=lambda span: span.seconds, default=Span("", 0, 0)
        ).where

    @property
    def staleness(self) -> int | None:
        """Versions that its oldest token is behind the step that trains it, or did at its end without one."""
        if self.evaluation or self.oldest is None or self.step is None:
            return None
        return self.step - 1 - self.oldest


class Phase(NamedTuple):
    """Of the loop; ``end`` None where the process ended first."""

    name: str
    step: int
    start: float
    end: float | None


@dataclass
class Timeline:
    """``looks`` are the servers' loads: [time, running, waiting, queue, prefill, decode] by server; ``resumes`` the times at
    which another process went on."""

    samples: list[Traced] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    looks: dict[str, list[list[float]]] = field(default_factory=dict)
    resumes: list[float] = field(default_factory=list)
    started: float = 0.0  # Unix time
    end: float = 0.0

    def steps(self) -> list[int]:
        return sorted({one.step for one in self.samples if one.step is not None})


class _Reader:
    def __init__(self) -> None:
        self.made = Timeline()
        self.shift = 0.0
        self.open: dict[int, Traced] = {}
        self.groups: dict[str, tuple[float, str | None]] = {}
        self.batches: dict[str, tuple[float, int]] = {}

    def at(self, moment: float) -> float:
        moment += self.shift
        self.made.end = max(self.made.end, moment)
        return moment

    def take(self, row: list[Any]) -> None:
        getattr(self, f"_{row[0]}")(*row[1:])

    def _run(self, unix: float, _: str) -> None:
        self.cut()
        if self.made.started:
            self.shift = self.made.end + RESUME_GAP_S
            self.made.resumes.append(self.shift)
        self.made.started = self.made.started or unix

    def _begin(self, number: int, moment: float, group: str, of: int, task: str) -> None:
        self.open[number] = one = Traced(group, of, task, self.at(moment))
        self.made.samples.append(one)

    def _span(
        self, number: int, phase: str, start: float, end: float, where: str, tokens: int, split: Sequence[float]
    ) -> None:
        if not (one := self.open.get(number)):  # it ended before this call of it did
            return
        start, end = self.at(start), self.at(end)
        for name, seconds in zip(("server queue", "prefill"), split, strict=False):
            one.spans.append(Span(name, start, min(start + seconds, end), where))
            start, phase = one.spans[-1].end, "decode"
        one.spans.append(Span(phase, start, end, where, tokens))

    def _end(self, number: int, moment: float, *facts: Any) -> None:
        one = self.open.pop(number)
        one.end = self.at(moment)
        one.prompt_tokens, one.tokens, one.oldest, one.newest, one.finish, one.reward = facts

    def _fail(self, number: int, moment: float, cause: str) -> None:
        one = self.open.pop(number)
        one.end, one.fault = self.at(moment), cause

    def _group(self, name: str, _: float, end: float, filtered: str | None) -> None:
        self.groups[name] = self.at(end), filtered

    def _batch(self, moment: float, step: int, groups: list[str]) -> None:
        self.batches |= dict.fromkeys(groups, (self.at(moment), step))

    def _phase(self, name: str, step: int, start: float, end: float | None) -> None:
        phases, step = self.made.phases, step + (name in AHEAD)
        begun = Phase(name, step, self.at(start), None)
        if end is None:
            phases.append(begun)
        else:
            phases[phases.index(begun)] = begun._replace(end=self.at(end))

    def _load(self, moment: float, said: dict[str, list[float]]) -> None:
        for server, numbers in said.items():
            self.made.looks.setdefault(server, []).append([self.at(moment), *numbers])

    def cut(self) -> None:
        """What the process had open is over."""
        for one in self.open.values():
            one.fault = "not finished: the process ended, or is still at it"
            one.spans.append(Span("own", one.over, self.made.end))
        self.open = {}

    def finish(self) -> Timeline:
        self.cut()
        trained = {phase.step: phase.end or self.made.end for phase in self.made.phases if phase.name == "train"}
        evals = [phase for phase in self.made.phases if phase.name == "eval"]
        for one in self.made.samples:
            one.spans = with_gaps(one)
            if one.evaluation:
                one.step = next((p.step for p in evals if p.start <= one.begin <= (p.end or math.inf)), None)
            elif one.end is not None and not one.fault:
                self._wait(one, trained)
        return self.made

    def _wait(self, one: Traced, trained: dict[int, float]) -> None:
        """What comes after it was made."""
        ended, filtered = self.groups.get(one.group, (self.made.end, None))
        one.spans.append(Span("group", one.over, max(one.over, ended)))
        if filtered:
            one.finish = f"{one.finish}; its group was filtered: {filtered}"
        elif one.group in self.groups:
            shipped, one.step = self.batches.get(one.group, (self.made.end, None))
            one.spans.append(Span("batch", ended, max(ended, shipped)))
            if one.step in trained:
                one.spans.append(Span("training", shipped, max(shipped, trained[one.step])))


def with_gaps(one: Traced) -> list[Span]:
    """The spans, and between them "own" for the time in none, by their start."""
    spans, covered = [], one.begin
    for span in sorted(one.spans, key=lambda span: span.start):
        if span.start - covered > LEAST_GAP_S:
            spans.append(Span("own", covered, span.start))
        if span.seconds > 0 or span.tokens:
            spans.append(span)
        covered = max(covered, span.end)
    if one.end is not None and one.end - covered > LEAST_GAP_S:
        spans.append(Span("own", covered, one.end))
    return spans


def read_timeline(run_dir: Path) -> Timeline:
    """The whole trace of a run, which may go on or have broken; ObserveError where there is none."""
    path = run_dir / TRACE
    if not path.exists():
        raise ObserveError(
            f"{path} is missing: name the folder of a run (run.dir), made with log.trace = true, which is the default"
        )
    reader = _Reader()
    for row in read_lines(path):
        reader.take(row)  # type: ignore[arg-type]
    return reader.finish()


def window(whole: Timeline, first: int | None = None, last: int | None = None) -> Timeline:
    """Its part of steps ``first`` to ``last``; else the newest steps that MOST_SAMPLES fit in. Evaluations belong to the step
    after which they were made, samples that nothing was trained on to the time of those that are shown."""
    steps = whole.steps()
    if first is None and len(whole.samples) <= MOST_SAMPLES:
        return whole
    if first is None:
        counts = [sum(one.step == step for one in whole.samples) for step in steps]
        kept = 1
        while kept < len(steps) and sum(counts[-kept - 1 :]) <= MOST_SAMPLES:
            kept += 1
        chosen = set(steps[-kept:])
    else:
        chosen = {step for step in steps if first <= step <= (last if last is not None else first)}
    if not chosen:
        raise ObserveError(
            f"the trace has no sample of the steps {first} to {last}; it has {steps[0]} to {steps[-1]}"
            if steps
            else "the trace has no sample that was trained on; leave --steps out"
        )
    mine = [one for one in whole.samples if one.step in chosen]
    start, end = min(one.begin for one in mine), max(one.over for one in mine)
    samples = [one for one in whole.samples if one.step in chosen or (one.step is None and start <= one.begin <= end)]
    return Timeline(
        samples,
        [phase for phase in whole.phases if phase.start < end and (phase.end or whole.end) > start],
        {server: [look for look in looks if start <= look[0] <= end] for server, looks in whole.looks.items()},
        [moment for moment in whole.resumes if start <= moment <= end],
        whole.started,
        end,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """By the nearest rank, of sorted values."""
    return values[min(len(values) - 1, max(0, math.ceil(share * len(values)) - 1))]


class Spent(NamedTuple):
    """What samples spent in one phase; quantiles are over those that were in it, ``slowest`` is one of them."""

    phase: str
    samples: int
    total: float
    p50: float
    p90: float
    p99: float
    slowest: Traced
    longest: float


def spent(samples: Iterable[Traced]) -> list[Spent]:
    """By phase, in the order of a sample's life."""
    found: dict[str, list[tuple[float, int, Traced]]] = {}
    for index, one in enumerate(samples):
        sums: dict[str, float] = {}
        for span in one.spans:
            sums[span.phase] = sums.get(span.phase, 0.0) + span.seconds
        for phase, seconds in sums.items():
            found.setdefault(phase, []).append((seconds, index, one))
    rows = []
    for phase in sorted(found, key=lambda phase: list(order(found)).index(phase)):
        ranked = sorted(found[phase])
        values = [seconds for seconds, _, _ in ranked]
        p50, p90, p99 = (percentile(values, share) for share in (0.5, 0.9, 0.99))
        rows.append(Spent(phase, len(values), sum(values), p50, p90, p99, ranked[-1][2], values[-1]))
    return rows


def order(phases: Iterable[str]) -> dict[str, str]:
    """All known phases, and those found that pools of other names made, with their titles."""
    known = list(PHASES.items())
    place = list(PHASES).index("reward queue")
    others = [(name, name) for name in phases if name not in PHASES]
    return dict([*known[:place], *others, *known[place:]])


class StepRow(NamedTuple):
    """``tail`` is from the end of 95 % of the batch's samples to that of the last."""

    step: int
    samples: int
    seconds: dict[str, float]
    tail: float
    staleness: float
    stalest: int
    slowest: Traced


def step_rows(timeline: Timeline) -> list[StepRow]:
    by_step: dict[int, list[Traced]] = {}
    for one in timeline.samples:
        if one.step is not None and not one.evaluation:
            by_step.setdefault(one.step, []).append(one)
    seconds: dict[int, dict[str, float]] = {}
    for phase in timeline.phases:
        of_step = seconds.setdefault(phase.step, {})
        of_step[phase.name] = of_step.get(phase.name, 0.0) + (phase.end or timeline.end) - phase.start
    rows = []
    for step, samples in sorted(by_step.items()):
        ends = sorted(one.begin + one.seconds for one in samples)
        behind = [one.staleness or 0 for one in samples]
        slowest = max(samples, key=lambda one: one.seconds)
        tail = ends[-1] - percentile(ends, 0.95)
        rows.append(
            StepRow(step, len(samples), seconds.get(step, {}), tail, sum(behind) / len(behind), max(behind), slowest)
        )
    return rows


class Place(NamedTuple):
    """A server or a worker: calls, their tokens and seconds, the longest; share of the looks that found it idle; means of what a
    request spent in the server's queue, prefill and decode, by its own count, None where it is not known."""

    name: str
    calls: int
    tokens: int
    seconds: float
    p50: float
    longest: float
    idle: float | None = None
    running: float | None = None
    phases: tuple[float, ...] = ()


def places(timeline: Timeline, servers: bool) -> list[Place]:
    """The servers, or the workers."""
    calls: dict[str, list[Span]] = {name: [] for name in timeline.looks} if servers else {}
    for span in (span for one in timeline.samples for span in one.spans):
        if span.where and (span.tokens > 0 if servers else span.phase not in AT_SERVER):
            calls.setdefault(span.where, []).append(span)
    rows = []
    for name, spans in sorted(calls.items()):
        times = sorted(span.seconds for span in spans)
        p50, longest = (percentile(times, 0.5), times[-1]) if times else (0.0, 0.0)
        row = Place(name, len(spans), sum(span.tokens for span in spans), sum(times), p50, longest)
        if looks := timeline.looks.get(name):
            idle = sum(not look[1] and not look[2] for look in looks) / len(looks)
            spent = tuple(after - before for before, after in zip(looks[0][3:], looks[-1][3:], strict=True))
            row = row._replace(idle=idle, running=sum(look[1] for look in looks) / len(looks), phases=spent)
        rows.append(row)
    return rows


def trainer_idle(timeline: Timeline) -> float | None:
    """Share of the loop's time in which nothing was trained; None where there was no loop."""
    closed = [(phase, (phase.end or timeline.end)) for phase in timeline.phases]
    if not any(phase.name == "train" for phase, _ in closed):
        return None
    whole = max(end for _, end in closed) - min(phase.start for phase, _ in closed)
    return 1 - sum(end - phase.start for phase, end in closed if phase.name == "train") / whole if whole else None
