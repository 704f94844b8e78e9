"""The numbers of a run, read back and digested: what the live view and the report both show. Draws nothing.

A metric that a record does not have is absent from a series. One that was recorded as null, since it wasn't finite, is
NaN there, which a curve shows as a gap.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vime.observe.metrics import Metrics, Run, StepSamples

Point = tuple[float, float]
"""(step, value)."""
SampleRow = dict[str, Any]
SECRET = re.compile(r'(?im)^(\s*[\w.-]*(?:api_?key|secret|password|hf_token|auth_?token|access_?token)\s*=\s*)".+$')


@dataclass(frozen=True)
class Change:
    """One eval metric over a run: ``eval_set``, ``metric`` without its prefix, and its first, last and best value."""

    eval_set: str
    metric: str
    points: list[Point]
    prompts: int | None

    @property
    def before(self) -> float:
        return self.points[0][1]

    @property
    def after(self) -> float | None:
        """None while there has been one eval only."""
        return self.points[-1][1] if len(self.points) > 1 else None

    @property
    def best(self) -> Point | None:
        """(step, value), the lowest of a loss; None where neither more nor less is better."""
        if self.metric == "loss":
            return min(self.points, key=lambda point: (point[1], point[0]))
        better = self.metric.startswith(("pass@", "reward", "accuracy"))
        return max(self.points, key=lambda point: (point[1], -point[0])) if better else None

    @property
    def better(self) -> bool | None:
        """Whether the last value is better than the first; None where neither is, or it cannot be said."""
        if self.best is None or self.after is None or self.after == self.before:
            return None
        return (self.after > self.before) != (self.metric == "loss")

    @property
    def difference(self) -> str:
        """After minus before, in percentage points for fractions."""
        if self.after is None:
            return "-"
        change = self.after - self.before
        return f"{100 * change:+.1f} pts" if is_fraction(self.metric) else f"{change:+.3g}"


@dataclass(frozen=True)
class Chart:
    """What a report charts: metrics of the step records, with their labels. ``band`` is half the width of a band."""

    title: str
    lines: tuple[tuple[str, str], ...]
    band: str = ""
    log: bool = False


CHARTS = (
    Chart("Reward", (("reward/mean", "mean ± std"),), band="reward/std"),
    Chart(
        "Response length, tokens", (("rollout/response_tokens_mean", "mean"), ("rollout/response_tokens_max", "max"))
    ),
    Chart(
        "Truncated responses, groups without signal",
        (("rollout/truncated_fraction", "truncated"), ("reward/zero_variance_fraction", "zero variance")),
    ),
    Chart("Entropy", (("train/entropy", "nats per token"),)),
    Chart("KL of sampling and training policy", (("train/kl", "KL"),)),
    Chart("Clip fraction", (("train/clip_fraction", "clipped"),)),
    Chart("Gradient norm", (("train/grad_norm", "norm"),)),
    Chart(
        "Log-probability, trainer against server",
        (
            ("train/logprob_abs_diff_mean", "mean"),
            ("train/logprob_abs_diff_max", "max"),
            ("weights/probe_abs_diff_mean", "probe mean"),
            ("weights/probe_abs_diff_max", "probe max"),
        ),
        log=True,
    ),
    Chart("Throughput, tokens/s", (("rollout/tokens_per_s", "rollout"), ("train/tokens_per_s", "train"))),
    Chart("Staleness, versions", (("rollout/staleness_mean", "mean"), ("rollout/staleness_max", "max"))),
    Chart("Loss", (("train/loss", "loss"),)),
    Chart("Pairs ranked right", (("train/accuracy", "accuracy"),)),
    Chart("Learning rate", (("train/lr", "lr"),)),
)
CHARTED = {name for chart in CHARTS for name, _ in chart.lines} | {"reward/std"}


@dataclass(frozen=True)
class Phase:
    """Seconds that one phase took over the run. ``share`` is of the sum of all phases."""

    name: str
    mean: float
    median: float
    total: float
    share: float


def series(records: Iterable[tuple[int, Metrics]], name: str) -> list[Point]:
    """The values of ``name`` by step, NaN for null; a record without the metric has no point."""
    return [(step, finite_or_nan(metrics[name])) for step, metrics in records if name in metrics]


def finite_or_nan(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan


def names(records: Iterable[tuple[int, Metrics]]) -> list[str]:
    """All metric names, in order of first appearance."""
    return list(dict.fromkeys(name for _, metrics in records for name in metrics))


def thin(points: Sequence[Point], limit: int, peaks: bool = False) -> list[Point]:
    """At most ``limit`` points: each stands for neighbouring ones, with their mean (``peaks``: their maximum).

    The step is the middle one's. NaN counts only where a whole neighbourhood is NaN.
    """
    size = math.ceil(len(points) / limit)
    if size <= 1:
        return list(points)
    thinned = []
    for start in range(0, len(points), size):
        chunk = points[start : start + size]
        values = [value for _, value in chunk if math.isfinite(value)]
        pick = max if peaks else statistics.fmean
        thinned.append((chunk[len(chunk) // 2][0], pick(values) if values else math.nan))
    return thinned


def curve(records: Iterable[tuple[int, Metrics]], name: str, limit: int) -> list[Point]:
    """The thinned series of ``name``; a maximum and a gradient norm keep their peaks."""
    return thin(series(records, name), limit, peaks=name.endswith(("_max", "grad_norm")))


def changes(evals: Iterable[tuple[int, Metrics]]) -> list[Change]:
    """One Change per eval set and metric ("eval/<set>/<metric>"), pass@k first within a set; nulls are passed over."""
    points: dict[tuple[str, str], dict[int, float]] = {}
    for step, metrics in evals:
        for name, value in metrics.items():
            prefix, _, rest = name.partition("/")
            eval_set, _, metric = rest.rpartition("/")
            if prefix == "eval" and value is not None and math.isfinite(value):
                points.setdefault((eval_set, metric), {})[step] = value
    sets = list(dict.fromkeys(eval_set for eval_set, _ in points))
    keys = sorted(points, key=lambda key: (sets.index(key[0]), not key[1].startswith("pass@")))
    return [
        Change(eval_set, metric, sorted(points[eval_set, metric].items()), _prompts(points, eval_set))
        for eval_set, metric in keys
        if metric != "prompts"
    ]


def _prompts(points: Mapping[tuple[str, str], Mapping[int, float]], eval_set: str) -> int | None:
    counts = points.get((eval_set, "prompts"))
    return int(counts[max(counts)]) if counts else None


def phases(steps: Sequence[tuple[int, Metrics]]) -> dict[str, list[Point]]:
    """Seconds per phase and step, 0 where a step lacks it. "other" is what ``time/step`` has beyond them."""
    found = [name for name in names(steps) if name.startswith("time/") and name not in ("time/step", "time/other")]
    table: dict[str, list[Point]] = {name.removeprefix("time/"): [] for name in found}
    other: list[Point] = []
    for step, metrics in steps:
        seconds = {name: max(0.0, metrics.get(name) or 0.0) for name in found}
        for name in found:
            table[name.removeprefix("time/")].append((step, seconds[name]))
        other.append((step, max(0.0, (metrics.get("time/step") or 0.0) - sum(seconds.values()))))
    if any(value > 0 for _, value in other):
        table["other"] = other
    return table


def phase_table(steps: Sequence[tuple[int, Metrics]]) -> list[Phase]:
    """The phases of ``steps``, longest first. Mean and median are over the steps in which the phase ran."""
    ran = {name: [value for _, value in points if value > 0] for name, points in phases(steps).items()}
    whole = sum(sum(values) for values in ran.values())
    rows = [
        Phase(name, statistics.fmean(values), statistics.median(values), sum(values), sum(values) / whole)
        for name, values in ran.items()
        if values
    ]
    return sorted(rows, key=lambda phase: -phase.total)


def is_fraction(name: str) -> bool:
    """Whether a metric is a fraction by its name, to be shown in percent."""
    last = name.rpartition("/")[2]
    return last.startswith("pass@") or last.endswith(("fraction", "accuracy"))


def show(name: str, value: float | None) -> str:
    """``value`` of the metric ``name`` as a person reads it, "-" where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    if is_fraction(name):
        return f"{100 * value:.1f}%"
    return duration(value) if name.startswith("time/") else number(value)


def number(value: float) -> str:
    """Three significant digits, with k, M or G from ten thousand up."""
    size = abs(value)
    if size >= 10_000:
        unit, scale = ("k", 1e3) if size < 1e6 else ("M", 1e6) if size < 1e9 else ("G", 1e9)
        return f"{number(value / scale)}{unit}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Such as "0.42s", "12.3s", "3m07s", "1h02m", "2d03h"."""
    if seconds == 0:
        return "0s"
    if seconds < 59.95:
        return f"{seconds:.2f}s" if seconds < 1 else f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


def ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round values (1, 2 or 5 times a power of ten) between ``low`` and ``high``."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    stride = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / stride - 1e-9), math.floor(high / stride + 1e-9)
    return [round(index * stride, 12) for index in range(first, last + 1)]


def latest(points: Sequence[Point]) -> float:
    """The last finite value, NaN if there is none."""
    return next((value for _, value in reversed(points) if math.isfinite(value)), math.nan)


@dataclass(frozen=True)
class Line:
    """A series to draw. ``name`` is the metric whose way its values read; ``spread`` is the half width of a band."""

    label: str
    name: str
    points: list[Point]
    spread: dict[float, float] = field(default_factory=dict)

    def half(self, step: float) -> float:
        """Half the band's width at ``step``, 0 without a band."""
        value = self.spread.get(step, 0.0)
        return value if math.isfinite(value) else 0.0

    def reach(self) -> list[float]:
        """All finite values, with the edges of the band."""
        held = [(value, self.half(step)) for step, value in self.points if math.isfinite(value)]
        return [value + sign * half for value, half in held for sign in (-1, 1)]


class Scale:
    """From steps and values to places in a chart, as shares (0 to 1) of its width and height.

    ``low`` and ``high`` bound the values, in powers of ten where ``log`` is set.
    """

    def __init__(self, steps: Sequence[float], values: Sequence[float], log: bool) -> None:
        self.log = log
        self.first, self.last = min(steps), max(steps)
        scaled = [math.log10(value) for value in values if value > 0] if log else list(values)
        low, high = (min(scaled), max(scaled)) if scaled else (0.0, 1.0)
        if log:
            low, high = math.floor(low), math.ceil(high)
        elif 0 <= low < 0.5 * high:
            low = 0.0
        if high <= low:
            margin = 1.0 if log else abs(low) * 0.1 or 0.5
            low, high = low - margin, high + margin
        air = 0.0 if log else 0.04 * (high - low)
        self.low, self.high = low - (air if low else 0.0), high + air

    def across(self, step: float) -> float:
        span = self.last - self.first
        return (step - self.first) / span if span else 0.5

    def up(self, value: float) -> float | None:
        """None for what the scale cannot hold: NaN, or a value that isn't positive on a log scale."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return None
        return ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)

    def levels(self) -> list[float]:
        """About five round values for grid lines."""
        if not self.log:
            return ticks(self.low, self.high, 5)
        stride = max(1, math.ceil((self.high - self.low) / 5))
        return [10.0**power for power in range(int(self.low), int(self.high) + 1, stride)]

    def unbroken(self, points: Sequence[Point]) -> list[list[Point]]:
        """``points`` cut into runs where the scale cannot hold a value."""
        runs: list[list[Point]] = [[]]
        for point in points:
            if self.up(point[1]) is None:
                runs.append([])
            else:
                runs[-1].append(point)
        return [run for run in runs if run]


def shareable(config_text: str) -> str:
    """The config without the values of keys that hold secrets, for a report is a thing to send around."""
    return SECRET.sub(r'\1"(hidden)"', config_text)


def setting(run: Run, key: str) -> str:
    """The run's "name" or "model" as the summary or the config has it, whether plain or in a section; "" if neither."""
    for source in (run.summary, run.config, run.config.get("run", {})):
        value = source.get(key)
        if isinstance(value, dict):
            value = next((value[part] for part in ("name", "path", "id") if value.get(part)), None)
        if value:
            return str(value)
    return ""


def title(run: Run) -> str:
    """The run's name, the folder's where none is given."""
    return setting(run, "name") or run.folder.resolve().name


def pairs(first: StepSamples, last: StepSamples, limit: int) -> list[tuple[SampleRow, SampleRow | None]]:
    """Rows of the first step beside rows of the last: of the same task where both steps had it, else in file order.

    At most ``limit`` pairs, one for a group. The second is None if the run has one step.
    """
    befores, afters = _by_group(first), _by_group(last) if last is not first else []
    paired = []
    for row in befores:
        same = next((other for other in afters if other["task"] == row["task"]), None)
        if same is not None:
            afters.remove(same)
        paired.append((row, same))
    paired.sort(key=lambda pair: pair[1] is None)
    return [(row, same or (afters.pop(0) if afters else None)) for row, same in paired[:limit]]


def _by_group(samples: StepSamples) -> list[SampleRow]:
    return list({row["group"]: row for row in reversed(samples.rows)}.values())[::-1]
