"""Advantages of one group from its rewards. Pure: no torch, no network.

Each estimator takes the rewards r_1..r_n of one prompt's responses and returns one advantage a response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev

STD_EPSILON = 1e-6
Estimator = Callable[[Sequence[float]], list[float]]


def grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), std with n - 1. DeepSeekMath (arXiv 2402.03300), section 4.1.2."""
    mean, spread = fmean(rewards), stdev(rewards)
    return [(r - mean) / (spread + STD_EPSILON) for r in rewards]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r). Dr. GRPO (arXiv 2503.20783), equation 5."""
    mean = fmean(rewards)
    return [r - mean for r in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean of the other rewards. RLOO (arXiv 2402.14740), equation 6."""
    total, others = sum(rewards), len(rewards) - 1
    return [r - (total - r) / others for r in rewards]


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
