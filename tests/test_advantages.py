"""The advantage estimators against the papers' formulas, written with numpy in float64, and their properties."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.training.advantages import ESTIMATORS, Scored

Array = np.ndarray
IN_GROUPS = {"grpo", "dr_grpo", "rloo", "maxrl", "pair"}  # a group's advantages depend on its own rewards only
OVER_BATCH = {"grpo_batch_std", "batch_norm", "reinforce_pp_baseline"}
SHIFTED = {"grpo", "dr_grpo", "rloo", "pair", *OVER_BATCH}  # the same rewards and a constant: the same advantages
CENTRED = {"grpo", "dr_grpo", "rloo", "maxrl", "pair", "grpo_batch_std"}  # sum to 0 in each group


# The papers' formulas ----------------------------------------------------------------------------------------------------


def deviation(values: Array) -> float:
    """With n - 1; 0 of one value."""
    return math.sqrt(sum((values - values.mean()) ** 2) / (len(values) - 1)) if len(values) > 1 else 0.0


def group_mean(rewards: Array, groups: Array) -> Array:
    return np.asarray([rewards[groups == group].mean() for group in groups])


def grpo(rewards: Array, groups: Array, tokens: Array) -> Array:
    spread = np.asarray([deviation(rewards[groups == group]) for group in groups])
    return (rewards - group_mean(rewards, groups)) / (spread + 1e-6)


def dr_grpo(rewards: Array, groups: Array, tokens: Array) -> Array:
    return rewards - group_mean(rewards, groups)


def rloo(rewards: Array, groups: Array, tokens: Array) -> Array:
    def one(i: int) -> float:
        others = [rewards[j] for j in range(len(rewards)) if j != i and groups[j] == groups[i]]
        return rewards[i] - np.mean(others) if others else 0.0

    return np.asarray([one(i) for i in range(len(rewards))])


def maxrl(rewards: Array, groups: Array, tokens: Array) -> Array:
    means = group_mean(rewards, groups)
    return np.divide(rewards - means, means, out=np.zeros_like(means), where=means > 0)


def pair(rewards: Array, groups: Array, tokens: Array) -> Array:
    """The first of the best and the first of the worst, unless all are equal."""
    result = np.zeros_like(rewards)
    for group in set(groups):
        (members,) = np.nonzero(groups == group)
        own = rewards[members]
        if own.max() > own.min():
            result[members[own.argmax()]], result[members[own.argmin()]] = 1.0, -1.0
    return result


def grpo_batch_std(rewards: Array, groups: Array, tokens: Array) -> Array:
    return (rewards - group_mean(rewards, groups)) / (deviation(rewards) + 1e-6)


def batch_norm(rewards: Array, groups: Array, tokens: Array) -> Array:
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def reinforce_pp_baseline(rewards: Array, groups: Array, tokens: Array) -> Array:
    """Whitened over tokens: each rollout's value stands as often as it has tokens."""
    centred = rewards - group_mean(rewards, groups)
    every = np.repeat(centred, tokens)
    mean, variance = (every.mean(), every.var()) if len(every) else (0.0, 0.0)
    return (centred - mean) / np.sqrt(variance + 1e-8)


def constant(rewards: Array, groups: Array, tokens: Array) -> Array:
    return np.ones_like(rewards)


FORMULAS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "pair": pair,
    "grpo_batch_std": grpo_batch_std,
    "batch_norm": batch_norm,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "constant": constant,
    "reward": lambda rewards, groups, tokens: rewards,
}


def expected(name: str, rollouts: Sequence[Scored]) -> Array:
    assert name in FORMULAS, f"the estimator {name} has no reference in this test: add its paper's formula"
    columns = ([one.reward for one in rollouts], [one.group for one in rollouts], [one.tokens for one in rollouts])
    return FORMULAS[name](*map(np.asarray, columns))


# Batches -----------------------------------------------------------------------------------------------------------------

REWARDS = st.integers(0, 400).map(lambda x: x / 32)  # exact in binary: equal rewards are equal, and >= 0 for maxrl
BATCHES = st.lists(
    st.builds(Scored, group=st.sampled_from("abcd"), reward=REWARDS, tokens=st.integers(0, 50)), min_size=1, max_size=14
)
DISTINCT = st.lists(
    st.tuples(st.sampled_from("abc"), REWARDS), min_size=1, max_size=12, unique_by=lambda one: one[1]
).map(lambda drawn: [Scored(group, reward, tokens) for tokens, (group, reward) in enumerate(drawn, 1)])


def close(values: Sequence[float], others: Sequence[float] | Array, rtol: float = 1e-9, atol: float = 1e-8) -> None:
    np.testing.assert_allclose(np.asarray(values), np.asarray(others), rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(rollouts=BATCHES)
def test_an_estimator_is_its_papers_formula(name: str, rollouts: list[Scored]) -> None:
    """Over interleaved groups of unequal sizes, some of one, some whose rewards are all equal."""
    advantages = ESTIMATORS[name](rollouts)
    assert len(advantages) == len(rollouts)
    close(advantages, expected(name, rollouts))


def scored(*rewards: float, group: str = "a") -> list[Scored]:
    return [Scored(group, reward) for reward in rewards]


@pytest.mark.parametrize(
    ("name", "advantages"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),  # std 1/2
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("maxrl", [3.0, -1.0, -1.0, -1.0]),
        ("pair", [1.0, -1.0, 0.0, 0.0]),
        ("grpo_batch_std", [1.5, -0.5, -0.5, -0.5]),
        ("batch_norm", [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
        ("reinforce_pp_baseline", [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]),
        ("constant", [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_values_worked_by_hand(name: str, advantages: list[float]) -> None:
    assert ESTIMATORS[name](scored(1.0, 0.0, 0.0, 0.0)) == pytest.approx(advantages, abs=1e-5)


# Groups ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATORS)
@given(rollouts=DISTINCT, data=st.data())
def test_an_advantage_belongs_to_its_rollout_wherever_it_stands(
    name: str, rollouts: list[Scored], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(rollouts))))
    straight = ESTIMATORS[name](rollouts)
    moved = ESTIMATORS[name]([rollouts[i] for i in order])
    close(moved, [straight[i] for i in order])


@pytest.mark.parametrize("name", sorted(IN_GROUPS))
@given(rollouts=BATCHES)
def test_a_groups_advantages_depend_on_its_own_rewards_only(name: str, rollouts: list[Scored]) -> None:
    together = ESTIMATORS[name](rollouts)
    for group in {one.group for one in rollouts}:
        members = [i for i, one in enumerate(rollouts) if one.group == group]
        assert ESTIMATORS[name]([rollouts[i] for i in members]) == [together[i] for i in members]


@pytest.mark.parametrize("name", sorted(CENTRED))
@given(rollouts=BATCHES)
def test_advantages_sum_to_zero_in_each_group(name: str, rollouts: list[Scored]) -> None:
    advantages = ESTIMATORS[name](rollouts)
    for group in {one.group for one in rollouts}:
        total = math.fsum(a for a, one in zip(advantages, rollouts, strict=True) if one.group == group)
        assert total == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("name", sorted(SHIFTED))
@given(rollouts=DISTINCT, shift=st.integers(-1000, 1000))
def test_a_constant_added_to_all_rewards_changes_nothing(name: str, rollouts: list[Scored], shift: int) -> None:
    shifted = [Scored(one.group, one.reward + shift, one.tokens) for one in rollouts]
    close(ESTIMATORS[name](shifted), ESTIMATORS[name](rollouts), rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("name", sorted(SHIFTED - {"batch_norm", "grpo_batch_std"}))
@given(rollouts=DISTINCT)
def test_nor_does_a_constant_added_to_one_group(name: str, rollouts: list[Scored]) -> None:
    shifted = [Scored(one.group, one.reward + 100 * (one.group == "a"), one.tokens) for one in rollouts]
    close(ESTIMATORS[name](shifted), ESTIMATORS[name](rollouts), rtol=1e-7, atol=1e-6)


@given(rollouts=BATCHES)
def test_maxrl_does_not_depend_on_the_rewards_scale(rollouts: list[Scored]) -> None:
    scaled = [Scored(one.group, 8 * one.reward) for one in rollouts]
    close(ESTIMATORS["maxrl"](scaled), ESTIMATORS["maxrl"](rollouts))


@given(rollouts=BATCHES)
def test_rloo_is_dr_grpo_times_n_over_n_less_one(rollouts: list[Scored]) -> None:
    sizes = [sum(other.group == one.group for other in rollouts) for one in rollouts]
    scaled = [a * n / max(n - 1, 1) for a, n in zip(ESTIMATORS["dr_grpo"](rollouts), sizes, strict=True)]
    close(ESTIMATORS["rloo"](rollouts), scaled)


# Where nothing can be compared -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"constant", "reward"}))
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.7, 1e6])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_equal_rewards_give_no_advantage(name: str, value: float, count: int) -> None:
    assert ESTIMATORS[name](scored(*[value] * count)) == pytest.approx([0.0] * count, abs=1e-5)


@pytest.mark.parametrize("name", sorted(IN_GROUPS))
@pytest.mark.parametrize("value", [0.0, 0.3, 5.0])
def test_a_group_of_one_has_no_advantage_beside_groups_that_have(name: str, value: float) -> None:
    advantages = ESTIMATORS[name]([*scored(0.0, 1.0), *scored(value, group="b"), *scored(2.0, 3.0, group="c")])
    assert advantages[2] == pytest.approx(0.0)
    assert all(advantages[:2]) and all(advantages[3:])


@pytest.mark.parametrize("name", ESTIMATORS)
@given(rewards=st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=8))
def test_advantages_are_finite(name: str, rewards: list[float]) -> None:
    assert all(map(math.isfinite, ESTIMATORS[name](scored(*rewards))))


@pytest.mark.parametrize("rewards", [[-1.0], [1.0, -0.5], [-1e-9, 0.0]])
def test_maxrl_refuses_negative_rewards_and_says_what_to_do(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match=rf"maxrl needs rewards >= 0, got {min(rewards)}; shift the reward"):
        ESTIMATORS["maxrl"]([*scored(1.0, 2.0), *scored(*rewards, group="b")])


def test_maxrl_gives_nothing_where_nothing_was_right() -> None:
    assert ESTIMATORS["maxrl"](scored(0.0, 0.0)) == [0.0, 0.0]


def test_pair_takes_the_first_of_equals() -> None:
    assert ESTIMATORS["pair"](scored(1.0, 2.0, 0.0, 2.0, 0.0)) == [0.0, 1.0, -1.0, 0.0, 0.0]


# The token weights of reinforce_pp_baseline ------------------------------------------------------------------------------


@given(rollouts=BATCHES)
def test_reinforce_pp_baseline_has_mean_0_and_variance_1_over_tokens(rollouts: list[Scored]) -> None:
    advantages = np.repeat(ESTIMATORS["reinforce_pp_baseline"](rollouts), [one.tokens for one in rollouts])
    if len(advantages) and np.ptp(advantages):
        assert advantages.mean() == pytest.approx(0.0, abs=1e-6)
        assert advantages.var() == pytest.approx(1.0, rel=1e-3)  # less 1e-8 over the variance before


def test_reinforce_pp_baseline_counts_a_rollout_as_often_as_it_has_tokens() -> None:
    """Centred rewards of 1 and -1, the first three times as long: mean 1/2, variance 3/4."""
    advantages = ESTIMATORS["reinforce_pp_baseline"]([Scored("a", 2.0, tokens=30), Scored("a", 0.0, tokens=10)])
    assert advantages == pytest.approx([0.5 / 0.75**0.5, -1.5 / 0.75**0.5])


def test_a_rollout_without_trained_tokens_has_no_say_in_the_whitening() -> None:
    base = [Scored("a", 2.0, 30), Scored("a", 0.0, 10)]
    apart = [*base, Scored("b", 100.0, 0), Scored("b", -100.0, 0)]
    estimator = ESTIMATORS["reinforce_pp_baseline"]
    assert estimator(apart)[:2] == pytest.approx(estimator(base))
