"""Log-probabilities and entropies of chosen tokens, without the logits of a batch ever existing.

The output head is applied to a chunk of positions at a time. Only the normaliser of each position is kept; the backward
pass makes the chunk's logits again and turns them into their gradient in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def tempered(logits: torch.Tensor, temperature: float, softcap: float | None) -> torch.Tensor:
    """In float32 (float64 where the logits are); may be the same tensor, changed in place."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits if temperature == 1.0 else logits.div_(temperature)


def statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, softcap: float | None
) -> tuple[torch.Tensor, ...]:
    """log p(target), entropy and normaliser, all [n], of logits [n, V]."""
    logits = tempered(logits, temperature, softcap)
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    normaliser = torch.logsumexp(logits, dim=-1)
    log_p = logits.sub_(normaliser[:, None])
    entropy = -torch.exp(log_p).mul_(log_p).sum(-1)
    return chosen - normaliser, entropy, normaliser


def slope(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    softcap: float | None,
    normaliser: torch.Tensor,
    entropy: torch.Tensor,
    of_logprob: torch.Tensor | None,
    of_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient of the logits [n, V]: d log p_t / d z_j = [j = t] - p_j;  d H / d z_j = -p_j (log p_j + H), z the tempered
    ones.

    With a soft cap c and temperature T, z = c tanh(x / c) / T of the head's x: d z / d x = (1 - (z T / c)^2) / T.
    """
    dtype = logits.dtype
    z = tempered(logits, temperature, softcap)
    flatness = 1 - (z * (temperature / softcap)).square_() if softcap else None
    log_p = z.sub_(normaliser[:, None])
    base = torch.zeros_like(entropy) if of_logprob is None else of_logprob
    if of_entropy is None:
        gradient = log_p.exp_().mul_(-base[:, None])
    else:
        probabilities = log_p.exp()
        gradient = log_p.add_(entropy[:, None]).mul_(-of_entropy[:, None]).sub_(base[:, None]).mul_(probabilities)
    if torch.compiler.is_compiling():  # one pass; without a compiler it would be two more
        here = torch.arange(gradient.shape[1], device=targets.device) == targets[:, None]
        gradient = gradient + torch.where(here, base[:, None], 0.0)
    else:
        gradient.scatter_add_(-1, targets[:, None], base[:, None])
    if flatness is not None:
        gradient = gradient.mul_(flatness)
    return gradient.div_(temperature).to(dtype)


@functools.cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """``statistics`` or ``slope`` in as few passes over the logits as may be, compiled once for all numbers of positions."""
    compiled = torch.compile(function)

    def call(logits: torch.Tensor, *others: Any) -> Any:
        given = [
            x.clone() if isinstance(x, torch.Tensor) else x for x in others
        ]  # views would bring their bases' sizes
        for tensor in (logits, *given):
            if isinstance(tensor, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(logits, *given)

    return call


class _Chunk(torch.autograd.Function):
    """(hidden [n, d], weight [V, d], bias [V] or None, targets [n], temperature, softcap or None, compiled) -> log p(target)
    [n], entropy [n]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        softcap: float | None,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden, weight, bias)
        compute = fused(statistics) if compiled else statistics
        logprobs, entropy, normaliser = compute(logits, targets, temperature, softcap)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.options, ctx.compiled = (temperature, softcap), compiled
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        logits = F.linear(hidden, weight, bias)
        compute = fused(slope) if ctx.compiled else slope
        temperature, softcap = ctx.options
        of_logits = compute(logits, targets, temperature, softcap, normaliser, entropy, *gradients)
        needs = ctx.needs_input_grad
        return (
            of_logits @ weight if needs[0] else None,
            of_logits.T @ hidden if needs[1] else None,
            of_logits.sum(0) if bias is not None and needs[2] else None,
            *(None, None, None, None),
        )


def chunked_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    chunk: int,
    softcap: float | None = None,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) and entropy (nats), both [N], of softmax(x / temperature), x = hidden W^T + bias or, with a soft cap c,
    c tanh(x / c) of it.

    hidden [N, d], weight [V, d], targets [N]. Logits come in the dtype of ``hidden``; everything after them is float32
    (float64 where the logits are).
    """
    pieces = [
        _Chunk.apply(h, weight, bias, t, temperature, softcap, compiled)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
