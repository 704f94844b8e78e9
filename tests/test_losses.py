"""The objectives against the papers' formulas, token by token in float64."""

import math

import numpy as np
import pytest
import torch

from vime.training.losses import k3, ppo_clip

LOW, HIGH = 0.2, 0.3


def token_loss(logprob: float, old: float, advantage: float) -> float:
    """PPO (arXiv 1707.06347), equation 7, with DAPO's two bounds (arXiv 2503.14476), equation 10: one token."""
    ratio = math.exp(logprob) / math.exp(old)
    bounded = ratio if 1 - LOW <= ratio <= 1 + HIGH else (1 - LOW if ratio < 1 else 1 + HIGH)
    return -min(ratio * advantage, bounded * advantage)


def tensors(count: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(count, generator=generator, dtype=torch.float64) * 5
    new = old + torch.randn(count, generator=generator, dtype=torch.float64) * 0.4
    return new, old, torch.randn(count, generator=generator, dtype=torch.float64)


def of_ratio(ratio: float, advantage: float) -> tuple[float, bool, float]:
    """Loss, clipped and d loss / d log-probability of one token."""
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss, clipped = ppo_clip(
        logprob, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64), LOW, HIGH
    )
    (slope,) = torch.autograd.grad(loss.sum(), logprob)
    return loss.item(), bool(clipped), slope.item()


def test_the_clipped_objective_is_the_papers_for_every_token() -> None:
    new, old, advantages = tensors()
    loss, _ = ppo_clip(new, old, advantages, LOW, HIGH)
    expected = [token_loss(*values) for values in zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)]
    assert loss.shape == new.shape
    assert np.allclose(loss.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_on_policy_the_loss_is_minus_the_advantage_and_its_slope_too() -> None:
    assert of_ratio(1.0, 2.0) == (-2.0, False, -2.0)
    assert of_ratio(1.0, -2.0) == (2.0, False, 2.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.29, 1.0, False),
        (1.31, 1.0, True),  # good, and already more likely by enough
        (1.31, -1.0, False),  # bad and more likely: pushed down without bound
        (0.81, -1.0, False),
        (0.79, -1.0, True),  # bad, and already less likely by enough
        (0.79, 1.0, False),  # good and less likely: pulled up without bound
        (5.0, 0.0, False),
    ],
)
def test_a_token_counts_as_clipped_exactly_where_the_clip_stops_its_gradient(
    ratio: float, advantage: float, clipped: bool
) -> None:
    _, was_clipped, slope = of_ratio(ratio, advantage)
    assert was_clipped == clipped
    assert slope == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_the_two_bounds_are_apart() -> None:
    one = torch.ones(1, dtype=torch.float64)
    up, down = math.log(1.5) * one, math.log(0.5) * one
    assert ppo_clip(up, 0 * one, one, 0.1, 0.4)[0].item() == pytest.approx(-1.4)
    assert ppo_clip(down, 0 * one, -one, 0.1, 0.4)[0].item() == pytest.approx(0.9)


def test_the_gradient_is_the_numerical_one_away_from_the_kinks() -> None:
    new, old, advantages = tensors(60)
    ratio = torch.exp(new - old)
    smooth = ((ratio - (1 - LOW)).abs() > 1e-3) & ((ratio - (1 + HIGH)).abs() > 1e-3) & (advantages.abs() > 1e-3)
    new, old, advantages = new[smooth].requires_grad_(), old[smooth], advantages[smooth]
    assert torch.autograd.gradcheck(lambda x: ppo_clip(x, old, advantages, LOW, HIGH)[0], new)


def test_k3_is_the_papers_for_every_token() -> None:
    new, old, _ = tensors()
    expected = [math.exp(o - n) - (o - n) - 1 for n, o in zip(new.tolist(), old.tolist(), strict=True)]
    assert np.allclose(k3(new, old).numpy(), expected, rtol=1e-9, atol=1e-12)


def test_k3_is_zero_for_equal_policies_positive_else_and_exact_where_they_hardly_differ() -> None:
    new, old, _ = tensors()
    assert (k3(new, new) == 0).all()
    assert (k3(new, old) > 0).all()
    tiny = torch.tensor([1e-6], dtype=torch.float64)
    assert k3(torch.zeros_like(tiny), tiny).item() == pytest.approx(5e-13, rel=1e-3)


def test_k3_has_the_kl_divergence_as_its_mean_under_the_policy() -> None:
    generator = torch.Generator().manual_seed(1)
    policy, other = (torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0) for _ in range(2))
    mean = (policy.exp() * k3(policy, other)).sum()
    assert mean.item() == pytest.approx((policy.exp() * (policy - other)).sum().item())


def test_the_gradient_of_k3_is_the_numerical_one() -> None:
    new, old, _ = tensors(20)
    assert torch.autograd.gradcheck(lambda x: k3(x, old), new.requires_grad_())
