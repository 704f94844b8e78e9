"""Log-probabilities and entropies of chosen tokens, without the logits of a batch ever existing.

The output head is applied to a chunk of positions at a time. Only the normaliser of each position is kept; the backward
pass makes the chunk's logits again and turns them into their gradient in place.
"""

from __future__ import annotations

from typing import Any

import torch


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1.0 else logits.div_(temperature)


class _Chunk(torch.autograd.Function):
    """(hidden [n, d], weight [V, d], bias [V] or None, targets [n], temperature) -> log p(target) [n], entropy [n]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = _logits(hidden, weight, bias, temperature)
        chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
        normaliser = torch.logsumexp(logits, dim=-1)
        probabilities = torch.exp(logits - normaliser[:, None])
        entropy = normaliser - torch.bmm(probabilities[:, None], logits[:, :, None]).flatten()
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """d log p_t / d z_j = [j = t] - p_j;  d H / d z_j = -p_j (log p_j + H), z the tempered logits."""
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        of_logprob, of_entropy = gradients
        log_p = _logits(hidden, weight, bias, ctx.temperature).sub_(normaliser[:, None])
        if of_entropy is None:
            assert of_logprob is not None
            slope = log_p.exp_().mul_(-of_logprob[:, None])
        else:
            base = torch.zeros_like(entropy) if of_logprob is None else of_logprob
            probabilities = log_p.exp()
            slope = log_p.add_(entropy[:, None]).mul_(-of_entropy[:, None]).sub_(base[:, None]).mul_(probabilities)
        if of_logprob is not None:
            slope.scatter_add_(-1, targets[:, None], of_logprob[:, None])
        if ctx.temperature != 1.0:
            slope.div_(ctx.temperature)
        slope = slope.to(weight.dtype)
        needs = ctx.needs_input_grad
        return (
            slope @ weight if needs[0] else None,
            slope.T @ hidden if needs[1] else None,
            slope.sum(0) if bias is not None and needs[2] else None,
            None,
            None,
        )


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) and entropy (nats), both [N], of softmax(hidden W^T / temperature).

    hidden [N, d], weight [V, d], targets [N]. Logits come in the dtype of ``hidden``; everything after them is float32
    (float64 where the logits are).
    """
    pieces = [
        _Chunk.apply(h, weight, bias, t, temperature)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
