"""Returns, advantages, whitening and the critic's loss against plain loops over the trained tokens of each sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engines import world
from vime.training.returns import gae, token_rewards, value_loss, whiten

NUMBERS = st.floats(-5, 5, width=32)
UNIT = st.floats(0, 1)


@pytest.fixture(autouse=True, scope="module")
def alone() -> None:
    world()


@dataclass
class Case:
    """Sequences of unequal lengths in one row: values a token, which are trained, a reward a sequence."""

    mask: torch.Tensor
    sequence: torch.Tensor
    rewards: torch.Tensor
    penalties: torch.Tensor
    values: torch.Tensor

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Each sequence's number and the places of its trained tokens."""
        for number in range(len(self.rewards)):
            places = (self.sequence == number).nonzero().flatten().tolist()
            yield number, [place for place in places if self.mask[place]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=5))
    count = sum(map(len, masks))

    def numbers(length: int) -> torch.Tensor:
        return torch.tensor(draw(st.lists(NUMBERS, min_size=length, max_size=length)), dtype=torch.float64)

    return Case(
        torch.tensor([trained for mask in masks for trained in mask]),
        torch.tensor([number for number, mask in enumerate(masks) for _ in mask]),
        numbers(len(masks)),
        numbers(count),
        numbers(count),
    )


def close(found: torch.Tensor, wanted: list[float]) -> bool:
    return torch.allclose(found.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def rewards_by_loop(case: Case) -> list[float]:
    result = [0.0] * len(case.mask)
    for number, places in case.steps():
        for place in places:
            result[place] = -case.penalties[place].item()
        if places:
            result[places[-1]] += case.rewards[number].item()
    return result


def gae_by_sum(case: Case, gamma: float, lam: float) -> list[float]:
    """A_t as the sum over l of (gamma lambda)^l delta_t+l."""
    result, reward = [0.0] * len(case.mask), rewards_by_loop(case)
    for _, places in case.steps():
        v = [case.values[place].item() for place in places] + [0.0]
        deltas = [reward[place] + gamma * v[t + 1] - v[t] for t, place in enumerate(places)]
        for t, place in enumerate(places):
            result[place] = sum((gamma * lam) ** later * delta for later, delta in enumerate(deltas[t:]))
    return result


@given(cases())
def test_the_reward_comes_with_the_last_trained_token_and_penalties_with_their_own(case: Case) -> None:
    assert close(token_rewards(case.rewards, case.penalties, case.mask, case.sequence), rewards_by_loop(case))


@given(cases(), UNIT, UNIT)
def test_gae_is_the_discounted_sum_of_the_temporal_differences(case: Case, gamma: float, lam: float) -> None:
    rewards = token_rewards(case.rewards, case.penalties, case.mask, case.sequence)
    advantages, returns = gae(rewards, case.values, case.mask, case.sequence, gamma, lam)
    wanted = gae_by_sum(case, gamma, lam)
    assert close(advantages, wanted)
    own = zip(wanted, case.values.tolist(), case.mask.tolist(), strict=True)
    assert close(returns, [a + v if trained else 0.0 for a, v, trained in own])


@given(cases())
def test_undiscounted_and_without_values_the_advantage_is_the_reward_to_go(case: Case) -> None:
    rewards = token_rewards(case.rewards, case.penalties, case.mask, case.sequence)
    advantages, returns = gae(rewards, torch.zeros_like(rewards), case.mask, case.sequence, 1.0, 1.0)
    wanted = [0.0] * len(case.mask)
    for _, places in case.steps():
        for t, place in enumerate(places):
            wanted[place] = sum(rewards[later].item() for later in places[t:])
    assert close(advantages, wanted)
    assert torch.equal(advantages, returns)


@given(cases(), UNIT)
def test_with_lambda_0_the_advantage_is_one_temporal_difference(case: Case, gamma: float) -> None:
    rewards = token_rewards(case.rewards, case.penalties, case.mask, case.sequence)
    advantages, _ = gae(rewards, case.values, case.mask, case.sequence, gamma, 0.0)
    for _, places in case.steps():
        for t, place in enumerate(places):
            later = case.values[places[t + 1]].item() if place != places[-1] else 0.0
            wanted = rewards[place].item() + gamma * later - case.values[place].item()
            assert advantages[place].item() == pytest.approx(wanted, abs=1e-9)


@given(cases(), UNIT)
def test_with_lambda_1_the_returns_do_not_depend_on_the_values(case: Case, gamma: float) -> None:
    rewards = token_rewards(case.rewards, case.penalties, case.mask, case.sequence)
    _, one = gae(rewards, case.values, case.mask, case.sequence, gamma, 1.0)
    _, other = gae(rewards, torch.zeros_like(rewards), case.mask, case.sequence, gamma, 1.0)
    assert torch.allclose(one, other, atol=1e-9)


@given(cases(), cases(), UNIT, UNIT)
def test_a_sequence_does_not_see_those_it_is_packed_with(one: Case, other: Case, gamma: float, lam: float) -> None:
    def advantages(case: Case) -> torch.Tensor:
        rewards = token_rewards(case.rewards, case.penalties, case.mask, case.sequence)
        return gae(rewards, case.values, case.mask, case.sequence, gamma, lam)[0]

    both = Case(
        torch.cat([one.mask, other.mask]),
        torch.cat([one.sequence, other.sequence + len(one.rewards)]),
        *(torch.cat([getattr(one, name), getattr(other, name)]) for name in ("rewards", "penalties", "values")),
    )
    assert torch.allclose(advantages(both), torch.cat([advantages(one), advantages(other)]), atol=1e-12)


def test_a_row_without_a_trained_token_gives_nothing() -> None:
    """What an empty micro-batch looks like."""
    mask, sequence = torch.zeros(2).bool(), torch.zeros(2).long()
    rewards = token_rewards(torch.tensor([3.0]), torch.ones(2), mask, sequence)
    advantages, returns = gae(rewards, torch.ones(2), mask, sequence, 0.9, 0.9)
    assert [rewards.tolist(), advantages.tolist(), returns.tolist()] == [[0, 0]] * 3


@given(st.lists(cases(), min_size=1, max_size=4))
def test_whitening_has_one_mean_and_one_variance_over_all_parts(parts: list[Case]) -> None:
    values, masks = [part.values for part in parts], [part.mask for part in parts]
    found = whiten(values, masks)
    trained = [value for part in parts for _, places in part.steps() for value in part.values[places].tolist()]
    mean = sum(trained) / max(len(trained), 1)
    variance = sum((value - mean) ** 2 for value in trained) / max(len(trained), 1)
    for part, white in zip(parts, found, strict=True):
        own = zip(part.values.tolist(), part.mask.tolist(), strict=True)
        assert close(white, [(v - mean) / math.sqrt(variance + 1e-8) if trained else 0.0 for v, trained in own])


@given(cases())
def test_whitening_does_not_depend_on_how_the_batch_is_split(case: Case) -> None:
    (whole,) = whiten([case.values], [case.mask])
    split = torch.cat(whiten(case.values.split(3), case.mask.split(3)))
    assert torch.allclose(whole, split, atol=1e-9)


def test_whitening_takes_no_values_as_they_come() -> None:
    empty = torch.zeros(0)
    found = whiten([empty, torch.tensor([2.0, 4.0])], [empty.bool(), torch.ones(2).bool()])
    assert [part.tolist() for part in found] == [[], pytest.approx([-1, 1])]
    assert whiten([torch.tensor([7.0, math.nan])], [torch.zeros(2).bool()])[0].tolist() == [0, 0]


def test_equal_values_whiten_to_zero() -> None:
    assert whiten([torch.full((5,), 0.1)], [torch.ones(5).bool()])[0].abs().max() < 1e-3


@given(NUMBERS, NUMBERS, NUMBERS, st.floats(0.01, 2))
def test_the_critics_loss_is_the_larger_of_the_plain_and_the_clipped(
    value: float, old: float, target: float, clip: float
) -> None:
    bounded = min(max(value, old - clip), old + clip)
    wanted = max((value - target) ** 2, (bounded - target) ** 2) / 2
    new, before, returns = (torch.tensor([number], dtype=torch.float64) for number in (value, old, target))
    loss, _ = value_loss(new, before, returns, clip)
    assert loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_the_critics_clip_is_noted_exactly_where_it_took_effect() -> None:
    """Where a value has moved towards its target beyond the bounds; rounding is no clip."""
    generator = torch.Generator().manual_seed(0)
    value, old, target = (torch.randn(1000, generator=generator) * scale for scale in (0.3, 0.3, 1.0))
    _, clipped = value_loss(value, old, target, 0.2)
    moved = value - old
    bounded = old + moved.clamp(-0.2, 0.2)
    wanted = (moved.abs() > 0.2) & ((bounded - target).abs() > (value - target).abs())
    assert 100 < wanted.sum() < 900
    assert torch.equal(clipped, wanted)


SLOPES: dict[str, tuple[float, float, Callable[[float], float]]] = {
    "within the bounds": (0.1, 3.0, lambda gap: gap),
    "moved towards the target beyond them": (0.5, 3.0, lambda gap: 0.0),
    "moved away from it beyond them": (0.5, -3.0, lambda gap: gap),
}


@pytest.mark.parametrize("place", list(SLOPES))
def test_the_critics_gradient_is_zero_only_where_it_has_come_far_enough(place: str) -> None:
    value, target, slope = SLOPES[place]
    moved = torch.tensor([value], requires_grad=True)
    loss, _ = value_loss(moved, torch.zeros(1), torch.tensor([target]), 0.2)
    loss.sum().backward()
    assert moved.grad is not None
    assert moved.grad.item() == pytest.approx(slope(value - target))
