"""Off-policy corrections: weights for what the server sampled and the trainer learns from, where the two policies differ.

A correction takes the tokens of a micro-batch and two bounds and returns a weight a token, [N], without gradient. The loss is
multiplied by the product of all chosen corrections (``[algorithm.corrections]``). w = exp(proximal - behaviour) is the
importance ratio between the trainer's policy before the step and the server's.

Mismatch metrics are of all trained tokens, before any clipping.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vime.training.losses import Tokens, k3

Correction = Callable[[Tokens, float, float], torch.Tensor]


def token_ratio(tokens: Tokens) -> torch.Tensor:
    return torch.exp(tokens.proximal - tokens.behaviour)


def sequence_ratio(tokens: Tokens) -> torch.Tensor:
    """The product of w over the trained tokens of a token's sequence."""
    return torch.exp(tokens.per_sequence(tokens.proximal - tokens.behaviour))[tokens.sequence]


def within(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (ratio >= low) & (ratio <= high)


def tis(tokens: Tokens, low: float, high: float) -> torch.Tensor:
    """w truncated to [low, high], token by token. Truncated importance sampling (fengyao.notion.site/off-policy-rl)."""
    return token_ratio(tokens).clamp(low, high)


def tis_sequence(tokens: Tokens, low: float, high: float) -> torch.Tensor:
    """The sequence's product of w, truncated to [low, high]: less bias, more variance than tis."""
    return sequence_ratio(tokens).clamp(low, high)


def mis(tokens: Tokens, low: float, high: float) -> torch.Tensor:
    """The sequence's product of w, 0 outside [low, high]. Masked importance sampling (richardli.xyz/rl-collapse)."""
    ratio = sequence_ratio(tokens)
    return torch.where(
        within(ratio, low, high), ratio, 0.0
    )  # not a product: the ratio of a long sequence may be infinite


def icepop(tokens: Tokens, low: float, high: float) -> torch.Tensor:
    """w where it lies in [low, high], else 0, token by token. IcePop (arXiv 2510.18855), equation 4."""
    ratio = token_ratio(tokens)
    return torch.where(within(ratio, low, high), ratio, 0.0)


def mask_geometric(tokens: Tokens, low: float, high: float) -> torch.Tensor:
    """1 for sequences whose geometric mean of w lies in [low, high], else 0: no length bias (richardli.xyz/rl-collapse)."""
    mean = tokens.sequence_mean(tokens.proximal - tokens.behaviour)
    return within(torch.exp(mean), low, high).to(mean)


def mask_worst(tokens: Tokens, low: float, high: float) -> torch.Tensor:
    """1 for sequences all of whose trained tokens have w in [low, high], else 0: one token vetoes its sequence."""
    ratio = token_ratio(tokens)
    outside = (~within(ratio, low, high)).to(ratio)
    return (tokens.per_sequence(outside) == 0).to(outside)[tokens.sequence]


def opsm(tokens: Tokens, low: float, high: float) -> torch.Tensor:
    """0 for sequences of negative advantage whose mean of behaviour - logprobs is over ``high``, else 1.

    ``logprobs`` are the current ones: later updates of a batch count as off-policy too. Off-policy sequence masking,
    DeepSeek-V3.2 (arXiv 2512.02556), section 3.1.
    """
    drift = tokens.sequence_mean(tokens.behaviour - tokens.logprobs.detach())
    return 1.0 - ((tokens.advantages < 0) & (drift > high)).to(drift)


INFINITY = float("inf")
CORRECTIONS: dict[str, tuple[Correction, float, float]] = {  # with the default bounds
    "tis": (tis, 0.0, 2.0),
    "tis_sequence": (tis_sequence, 0.0, 2.0),
    "mis": (mis, 0.0, 2.0),
    "icepop": (icepop, 0.5, 5.0),
    "mask_geometric": (mask_geometric, 0.99, 1.01),
    "mask_worst": (mask_worst, 1e-4, INFINITY),
    "opsm": (opsm, 0.0, 0.1),
}


def mismatch(proximal: torch.Tensor, behaviour: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per token: |difference|, k3 estimate of KL(behaviour || proximal), and w and w^2 for the effective sample size."""
    ratio = torch.exp((proximal - behaviour).double())
    return {
        "difference": (proximal - behaviour).abs(),
        "mismatch_kl": k3(behaviour, proximal),
        "ratio": ratio,
        "ratio_squared": ratio.square(),
    }
