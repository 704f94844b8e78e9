"""Log-probabilities and entropies of chosen tokens, without the logits of a batch ever existing.

The output head is applied to a chunk of positions at a time; each chunk's logits are recomputed in the backward pass.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint


def _chunk(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias).float() / temperature  # [n, vocabulary]
    normaliser = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    entropy = normaliser - (torch.softmax(logits, dim=-1) * logits).sum(-1)
    return chosen - normaliser, entropy


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) and entropy (nats), both float32 [N], of softmax(hidden W^T / temperature).

    hidden [N, d], weight [vocabulary, d], targets [N]. Computed in the dtype of ``hidden``, normalised in float32.
    """
    pieces = [
        checkpoint(_chunk, h, weight, bias, t, temperature, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
