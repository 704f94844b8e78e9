"""Which finished groups are not trained on. A filter is a function and a line in FILTERS: True drops the group, and its
name is the counted reason. Rewards are those that would be trained on, after shaping.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from vime.config.sections import Config
from vime.sample import Group


def passed(group: Group, config: Config) -> float:
    """The share of a group's responses that pass, by the reward before shaping."""
    rewards = [s.reward_parts["raw"] if config.reward.shaped else s.reward or 0.0 for s in group.samples]
    return fmean(reward >= config.eval.pass_reward for reward in rewards)


def zero_variance(group: Group, config: Config) -> bool:
    """All rewards are equal: the group teaches nothing. Dynamic sampling of DAPO (arXiv 2503.14476), section 3.2."""
    return len(set(group.rewards)) < 2


def accuracy_band(group: Group, config: Config) -> bool:
    """The share of responses that pass, by the reward before shaping, is outside accuracy_low and accuracy_high."""
    return not config.rollout.accuracy_low <= passed(group, config) <= config.rollout.accuracy_high


FILTERS: dict[str, Callable[[Group, Config], bool]] = {
    "none": lambda group, config: False,
    "zero_variance": zero_variance,
    "accuracy_band": accuracy_band,
}
