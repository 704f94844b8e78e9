"""Objectives on token level. Each returns per-token losses; the weights that average them are global (``plan.weigh``)."""

from __future__ import annotations

import torch


def ppo_clip(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token loss and whether the clip took effect, both [N].

    -min(rho A, clip(rho, 1 - low, 1 + high) A), rho = exp(logprobs - old_logprobs). PPO (arXiv 1707.06347), equation 7,
    with the two bounds apart as in DAPO (arXiv 2503.14476), equation 10. All inputs [N], one a token.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


def k3(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 >= 0 with d = other - logprobs, per token: an unbiased estimate of KL(policy || other) under
    samples of the policy. http://joschu.net/blog/kl-approx.html"""
    difference = other_logprobs - logprobs
    return torch.expm1(difference) - difference
