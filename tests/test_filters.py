"""Group filters: which groups are dropped."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_shaping import config_of, group_of
from vime.config.sections import Rollout
from vime.rewards.shaping import shape
from vime.rollout.filters import FILTERS


def drops(name: str, rewards: list[float], **rollout: Any) -> bool:
    config = config_of(rollout={"max_tokens": 20, **rollout})
    return FILTERS[name](group_of(*((3, reward) for reward in rewards)), config)


def test_every_filter_can_be_chosen_and_every_choice_is_a_filter() -> None:
    assert set(get_args(Rollout.model_fields["filter"].annotation)) == set(FILTERS)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=6))
def test_none_drops_nothing_and_zero_variance_drops_equal_rewards(rewards: list[float]) -> None:
    assert not drops("none", rewards)
    assert drops("zero_variance", rewards) == (rewards == [rewards[0]] * len(rewards))


@pytest.mark.parametrize(
    ("passing", "kept"), [(0, False), (1, False), (2, True), (3, True), (5, True), (6, True), (7, False), (8, False)]
)
def test_the_accuracy_band_keeps_groups_on_its_bounds_and_between(passing: int, kept: bool) -> None:
    rewards = [0.5] * passing + [0.49] * (8 - passing)
    assert drops("accuracy_band", rewards, accuracy_low=0.25, accuracy_high=0.75) != kept


@given(st.integers(1, 60), st.data())
def test_by_default_the_accuracy_band_drops_groups_in_which_all_or_none_pass(size: int, data: Any) -> None:
    passing = data.draw(st.integers(0, size))
    assert drops("accuracy_band", [1.0] * passing + [0.0] * (size - passing)) == (passing in (0, size))


@given(st.integers(1, 30), st.integers(1, 30))
def test_a_share_that_is_exactly_the_bound_is_inside(passing: int, more: int) -> None:
    share = passing / (passing + more)
    rewards = [1.0] * passing + [0.0] * more
    assert not drops("accuracy_band", rewards, accuracy_low=share, accuracy_high=share)


def test_the_accuracy_band_counts_passes_before_shaping() -> None:
    config = config_of(reward={"overlong_buffer": 16}, rollout={"max_tokens": 20, "filter": "accuracy_band"})
    group = group_of((14, 1.0), (14, 0.0))
    shape(group, config)
    assert max(group.rewards) < config.eval.pass_reward
    assert not FILTERS["accuracy_band"](group, config)


def test_a_users_part_called_raw_is_not_taken_for_the_raw_reward() -> None:
    group = group_of((3, 1.0), (3, 0.0))
    for sample in group.samples:
        sample.reward_parts = {"raw": 0.0}
    assert not FILTERS["accuracy_band"](group, config_of())
