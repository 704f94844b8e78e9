"""Advantages from the rewards of a batch. Pure: no torch, no network.

An estimator takes all rollouts of the batch and returns one advantage a rollout, in the same order. Rollouts of one prompt
belong together by their group's id, never by position; groups may differ in size. A user's estimator is a function of the
same kind. The estimators of ``TOKEN_LEVEL`` need more than rewards and are in ``returns``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance, stdev

EPSILON = 1e-6


@dataclass(frozen=True)
class Scored:
    """A rollout as an estimator sees it: its group, its reward, its number of trained tokens."""

    group: str
    reward: float
    tokens: int = 1


Estimator = Callable[[Sequence[Scored]], list[float]]


def in_groups(rule: Callable[[Sequence[float]], list[float]]) -> Estimator:
    """The estimator that applies ``rule``, from the rewards of one group to their advantages, to every group."""

    def estimator(rollouts: Sequence[Scored]) -> list[float]:
        members: dict[str, list[int]] = {}
        for index, one in enumerate(rollouts):
            members.setdefault(one.group, []).append(index)
        advantages = [0.0] * len(rollouts)
        for indices in members.values():
            values = rule([rollouts[i].reward for i in indices])
            for index, value in zip(indices, values, strict=True):
                advantages[index] = value
        return advantages

    return estimator


def grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6), std with n - 1. DeepSeekMath (arXiv 2402.03300), section 4.1.2."""
    mean = fmean(rewards)
    spread = stdev(rewards) if len(rewards) > 1 else 0.0
    return [(r - mean) / (spread + EPSILON) for r in rewards]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r): GRPO without the standard deviation. Dr. GRPO (arXiv 2503.20783), equation 5."""
    mean = fmean(rewards)
    return [r - mean for r in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean of the other rewards; 0 for a group of one. RLOO (arXiv 2402.14740), equation 6."""
    total, others = sum(rewards), len(rewards) - 1
    return [r - (total - r) / others if others else 0.0 for r in rewards]


def maxrl(rewards: Sequence[float]) -> list[float]:
    """A_i = (r_i - mean(r)) / mean(r), 0 where nothing was right; for rewards >= 0. MaxRL (arXiv 2602.02710), equation 10."""
    if min(rewards) < 0:
        raise ValueError(f"maxrl needs rewards >= 0, got {min(rewards)}; shift the reward, or take another advantage")
    mean = fmean(rewards)
    return [(r - mean) / mean if mean else 0.0 for r in rewards]


def pair(rewards: Sequence[float]) -> list[float]:
    """+1 for the best response of a group, -1 for its worst, 0 for the others: DPO's preference pairs."""
    best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
    return [0.0 if best == worst else float(i == best) - float(i == worst) for i in range(len(rewards))]


def whiten(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """(v - mean) / sqrt(var + 1e-8) under ``weights``, the variance with N."""
    total = max(sum(weights), 1.0)
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    variance = sum(w * (v - mean) ** 2 for w, v in zip(weights, values, strict=True)) / total
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def batch_norm(rollouts: Sequence[Scored]) -> list[float]:
    """A_i = (r_i - mean) / (std + 1e-6) over the rewards of the whole batch: REINFORCE with a batch baseline."""
    rewards = [one.reward for one in rollouts]
    mean, spread = fmean(rewards), math.sqrt(pvariance(rewards))
    return [(r - mean) / (spread + EPSILON) for r in rewards]


def grpo_batch_std(rollouts: Sequence[Scored]) -> list[float]:
    """A_i = (r_i - mean of its group) / (std of the batch + 1e-6), std with n - 1. Lite PPO (arXiv 2508.08221), section 4.1."""
    spread = stdev(one.reward for one in rollouts) if len(rollouts) > 1 else 0.0
    return [value / (spread + EPSILON) for value in in_groups(dr_grpo)(rollouts)]


def reinforce_pp_baseline(rollouts: Sequence[Scored]) -> list[float]:
    """r_i - mean of its group, then whitened over the trained tokens of the batch. REINFORCE++ (arXiv 2501.03262)."""
    return whiten(in_groups(dr_grpo)(rollouts), [one.tokens for one in rollouts])


def constant(rollouts: Sequence[Scored]) -> list[float]:
    """1 for every rollout: supervised fine-tuning, where every response is right."""
    return [1.0] * len(rollouts)


def reward(rollouts: Sequence[Scored]) -> list[float]:
    """A_i = r_i, for rewards that are comparisons already."""
    return [one.reward for one in rollouts]


ESTIMATORS: dict[str, Estimator] = {
    "grpo": in_groups(grpo),
    "dr_grpo": in_groups(dr_grpo),
    "rloo": in_groups(rloo),
    "maxrl": in_groups(maxrl),
    "grpo_batch_std": grpo_batch_std,
    "batch_norm": batch_norm,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "pair": in_groups(pair),
    "constant": constant,
    "reward": reward,
}
COMPARING = (
    "grpo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "grpo_batch_std",
    "reinforce_pp_baseline",
    "pair",
)  # need group size >= 2
TOKEN_LEVEL = ("reinforce_pp", "gae", "reverse_kl")
