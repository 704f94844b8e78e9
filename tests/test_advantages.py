"""Advantages against the papers' formulas, written with numpy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.training.advantages import ESTIMATORS, dr_grpo, grpo, rloo

REWARDS = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=9)


@given(REWARDS)
def test_grpo_is_reward_less_mean_over_sample_deviation(rewards: list[float]) -> None:
    r = np.asarray(rewards, dtype=np.float64)
    assert np.allclose(grpo(rewards), (r - r.mean()) / (r.std(ddof=1) + 1e-6), rtol=1e-6, atol=1e-6)


@given(REWARDS)
def test_dr_grpo_is_reward_less_mean(rewards: list[float]) -> None:
    r = np.asarray(rewards, dtype=np.float64)
    assert np.allclose(dr_grpo(rewards), r - r.mean(), atol=1e-10)


@given(REWARDS)
def test_rloo_is_reward_less_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert np.allclose(rloo(rewards), expected, atol=1e-10)


def test_values_worked_by_hand() -> None:
    assert grpo([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert dr_grpo([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]
    assert rloo([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.1, 0.7])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_equal_rewards_give_no_advantage(name: str, value: float, count: int) -> None:
    assert ESTIMATORS[name]([value] * count) == pytest.approx([0.0] * count, abs=1e-9)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(rewards=REWARDS, data=st.data())
def test_an_advantage_belongs_to_its_reward_whatever_the_order(name: str, rewards: list[float], data) -> None:
    order = data.draw(st.permutations(range(len(rewards))))
    straight = ESTIMATORS[name](rewards)
    moved = ESTIMATORS[name]([rewards[i] for i in order])
    assert np.allclose(moved, [straight[i] for i in order], atol=1e-7)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(rewards=REWARDS)
def test_advantages_sum_to_zero_and_are_finite(name: str, rewards: list[float]) -> None:
    advantages = ESTIMATORS[name](rewards)
    assert len(advantages) == len(rewards)
    assert all(map(math.isfinite, advantages))
    assert sum(advantages) == pytest.approx(0.0, abs=1e-5)


@given(REWARDS)
def test_rloo_is_dr_grpo_scaled_by_n_over_n_less_one(rewards: list[float]) -> None:
    n = len(rewards)
    assert np.allclose(rloo(rewards), np.asarray(dr_grpo(rewards)) * n / (n - 1), atol=1e-9)
