"""Whether two sets of measurements agree: single numbers by a test of equivalence, curves by bands. Pure arithmetic.

Equivalence, not the absence of a significant difference: few or noisy samples must not pass for agreement. Two one-sided
t-tests (Schuirmann 1987), told as a confidence interval: all of it inside the tolerance passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Literal

from pydantic import Field

from forksync.section import Section

CONFIDENCE = 0.95
"""Of each of the two one-sided tests."""


class Tolerance(Section):
    """How far the fork's number may be from the reference's: ``absolute + relative * |reference|``."""

    absolute: float = Field(default=0.0, ge=0)
    relative: float = Field(default=0.0, ge=0)
    better: Literal["", "lower", "higher"] = ""
    """Where one direction is better, only the other one is held against the fork."""
    inside: float = Field(default=0.95, gt=0, le=1)
    """Curves: the share of steps at which the fork must be inside the band."""
    smooth: int = Field(default=1, ge=1)
    """Curves: steps that are averaged, so that the level is compared and not the noise."""

    def width(self, reference: float) -> float:
        return self.absolute + self.relative * abs(reference)


@dataclass(frozen=True)
class Parity:
    """What came out for one metric."""

    metric: str
    passed: bool
    fork: float
    reference: float
    said: str


Curve = Sequence[tuple[float, float]]
"""(step, value), by step."""


def numbers(metric: str, fork: Sequence[float], reference: Sequence[float], allowed: Tolerance) -> Parity:
    """Means of the samples of both sides. With one sample a side, their difference; with more, its confidence interval."""
    if not fork or not reference or not all(map(math.isfinite, [*fork, *reference])):
        return Parity(metric, False, math.nan, math.nan, "not measured on both sides, or not a number")
    ours, theirs = fmean(fork), fmean(reference)
    width, difference = allowed.width(theirs), ours - theirs
    low, high = bounds(allowed, width)
    margin = 0.0
    if len(fork) > 1 and len(reference) > 1:
        spread = [variance(fork) / len(fork), variance(reference) / len(reference)]
        margin = student(CONFIDENCE, welch(spread, [len(fork), len(reference)])) * math.sqrt(sum(spread))
    passed = low <= difference - margin and difference + margin <= high
    said = f"{ours:.6g} against {theirs:.6g}: {difference:+.3g}" + (f" ± {margin:.2g}" if margin else "")
    if not passed:
        clear = difference + margin < low or difference - margin > high
        said += f", {'outside' if clear or not margin else 'not surely inside'} ±{width:.3g}"
        said += "" if clear or not margin else "; measure with more runs"
    return Parity(metric, passed, ours, theirs, said)


def bounds(allowed: Tolerance, width: float) -> tuple[float, float]:
    return (-math.inf if allowed.better == "lower" else -width), (math.inf if allowed.better == "higher" else width)


def welch(spread: Sequence[float], sizes: Sequence[int]) -> float:
    """Degrees of freedom of a difference of means with unequal variances (Welch 1947)."""
    parts = sum(part**2 / (size - 1) for part, size in zip(spread, sizes, strict=True))
    return sum(spread) ** 2 / parts if parts else float(sum(sizes) - 2)


def student(probability: float, freedom: float) -> float:
    """The quantile of Student's t for a probability above one half, by bisection of the distribution function."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        tail = 0.5 * beta_share(freedom / 2, 0.5, freedom / (freedom + middle * middle))
        low, high = (middle, high) if 1 - tail < probability else (low, middle)
    return high


def beta_share(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function by its continued fraction (DLMF 8.17.22), evaluated from its far end."""
    if x <= 0 or x >= 1:
        return min(1.0, max(0.0, x))
    if x > (a + 1) / (a + b + 2):
        return 1 - beta_share(b, a, 1 - x)
    fraction = 1.0
    for m in range(200, 0, -1):
        half = m // 2
        if m % 2:
            term = -(a + half) * (a + b + half) * x / ((a + m - 1) * (a + m))
        else:
            term = half * (b - half) * x / ((a + m - 1) * (a + m))
        fraction = 1 + term / fraction
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    return front / a / fraction


def curves(metric: str, fork: Sequence[Curve], reference: Sequence[Curve], allowed: Tolerance) -> Parity:
    """The mean of the fork's runs must lie inside a band around the mean of the reference's: the tolerance, widened by how
    much the runs differ among themselves, or, of a single run, by its own noise around its smoothed course."""
    if not fork or not reference or not all(math.isfinite(value) for run in [*fork, *reference] for _, value in run):
        return Parity(metric, False, math.nan, math.nan, "not measured on both sides, or not a number")
    steps = sorted(set.intersection(*({step for step, _ in run} for run in reference)))
    short = [step for step in steps if any(step not in dict(run) for run in fork)]
    if short or not steps:
        return Parity(
            metric, False, math.nan, math.nan, f"the fork has no value at {len(short)} steps, e.g. {short[:1]}"
        )
    ours, theirs = (
        [smoothed([dict(run)[step] for step in steps], allowed.smooth) for run in side] for side in (fork, reference)
    )
    raw = [[dict(run)[step] for step in steps] for run in reference]
    noise = scatter(theirs, raw, allowed.smooth) * math.sqrt(1 / len(ours) + 1 / len(theirs))
    outside = []
    for at, step in enumerate(steps):
        middle = fmean(run[at] for run in theirs)
        low, high = bounds(allowed, allowed.width(middle) + noise)
        if not low <= fmean(run[at] for run in ours) - middle <= high:
            outside.append(step)
    share = 1 - len(outside) / len(steps)
    passed = share >= allowed.inside
    said = f"inside the band at {share:.0%} of {len(steps)} steps (noise ±{noise:.2g})"
    if not passed:
        said += f", {allowed.inside:.0%} needed; outside from step {outside[0]:g}"
    return Parity(metric, passed, fmean(run[-1] for run in ours), fmean(run[-1] for run in theirs), said)


def smoothed(values: Sequence[float], over: int) -> list[float]:
    """A centred moving mean, shorter at the ends."""
    half = over // 2
    return [fmean(values[max(0, at - half) : at + over - half]) for at in range(len(values))]


def scatter(courses: Sequence[Sequence[float]], raw: Sequence[Sequence[float]], smooth: int) -> float:
    """Half of the 95% interval of one run's smoothed value: from the runs' differences, pooled over all steps."""
    if len(courses) > 1:
        pooled = fmean(variance(at) for at in zip(*courses, strict=True))
        return student(0.975, len(courses) - 1) * math.sqrt(pooled)
    residuals = [value - course for value, course in zip(raw[0], courses[0], strict=True)]
    return student(0.975, max(1, len(residuals) - 1)) * math.sqrt(fmean(r * r for r in residuals) / smooth)
