"""Token-level rewards to advantages: discounted returns and generalised advantage estimation.

Tensors are [N], one entry a response token; ``mask`` marks the trained ones and ``sequence`` numbers their sequences from 0.
Steps are the trained tokens of a sequence in their order: what a tool or a user wrote in between is no step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def steps_of(mask: torch.Tensor, sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Trained tokens as a table: token index [S, L], padded with 0, and which entries are real."""
    count = torch.zeros(int(sequence[-1]) + 1, dtype=torch.long, device=mask.device).index_add(0, sequence, mask.long())
    width = max(int(count.max()), 1)
    valid = torch.arange(width, device=mask.device)[None] < count[:, None]
    index = torch.zeros_like(valid, dtype=torch.long)
    index[valid] = mask.nonzero().flatten()
    return index, valid


def token_rewards(
    rewards: torch.Tensor, penalties: torch.Tensor, mask: torch.Tensor, sequence: torch.Tensor
) -> torch.Tensor:
    """-penalty of each token, plus the sequence's reward [S] on its last trained token."""
    index, valid = steps_of(mask, sequence)
    count = valid.sum(-1)
    some = count > 0
    result = torch.where(mask, -penalties, 0.0)
    last = index[some, count[some] - 1]
    return result.index_add(0, last, rewards[some].to(result))


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    sequence: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, both [N]: A_t = delta_t + gamma lambda A_t+1, delta_t = r_t + gamma V_t+1 - V_t; return A + V.

    ``rewards`` are per token; V after the last token is 0. With values of 0 and lambda 1, A is the discounted return.
    High-dimensional continuous control using generalized advantage estimation (arXiv 1506.02438), equation 16.
    """
    index, valid = steps_of(mask, sequence)
    r, v = (torch.where(valid, x[index], 0.0) for x in (rewards, values))
    advantages = torch.zeros_like(r)
    after = next_value = torch.zeros_like(r[:, 0])
    for t in range(r.shape[1] - 1, -1, -1):
        here = r[:, t] + gamma * next_value - v[:, t] + gamma * lam * after
        after = advantages[:, t] = torch.where(valid[:, t], here, 0.0)
        next_value = v[:, t]
    result = torch.zeros_like(rewards)
    result[index[valid]] = advantages[valid]
    return result, torch.where(mask, result + values, 0.0)


def whiten(
    parts: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> list[torch.Tensor]:
    """(x - mean) / sqrt(var + 1e-8) over the masked entries of all parts on the group's ranks; 0 elsewhere. Collective."""

    def total(values: Sequence[torch.Tensor]) -> torch.Tensor:
        device = parts[0].device
        result = torch.stack([*(v.double().sum() for v in values), torch.zeros((), dtype=torch.double, device=device)])
        result = result.sum()
        dist.all_reduce(result, group=group)
        return result

    count = total(masks).clamp(min=1)
    mean = total([x[m] for x, m in zip(parts, masks, strict=True)]) / count
    variance = total([(x[m].double() - mean).square() for x, m in zip(parts, masks, strict=True)]) / count
    scale = torch.sqrt(variance + 1e-8)
    return [torch.where(m, ((x - mean) / scale).to(x), 0.0) for x, m in zip(parts, masks, strict=True)]


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 a token, and where the clip took effect. PPO with a clipped
    value loss, as in the implementation study arXiv 2005.12729."""
    bounded = torch.clamp(values, old_values - clip, old_values + clip)  # within them exactly the value
    plain, clipped = (values - returns).square(), (bounded - returns).square()
    return torch.maximum(plain, clipped) / 2, clipped > plain
