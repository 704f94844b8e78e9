"""Which tokens the covariance objectives choose, over the whole update on the group's ranks. Collective.

cov_t = (log pi_t - mean log pi) (A_t - mean A), means over the update's trained tokens, log pi before the step.
The entropy mechanism of RL for reasoning (arXiv 2505.22617), equation 9.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from vime.config.sections import Algorithm, Config
from vime.training.batch import Batch


def gathered(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """All ranks' values, one after the other; ranks may hold different numbers of them."""
    ranks = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.long, device=values.device) for _ in range(ranks)]
    dist.all_gather(counts, torch.tensor([len(values)], device=values.device), group=group)
    room = values.new_zeros(int(max(counts)))
    room[: len(values)] = values
    parts = [torch.empty_like(room) for _ in range(ranks)]
    dist.all_gather(parts, room, group=group)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])


def covariances(
    logprobs: torch.Tensor, advantages: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """cov_t of this rank's trained tokens, means over all ranks'."""
    ones = torch.ones_like(logprobs)
    sums = torch.stack([values.double().sum() for values in (logprobs, advantages, ones)])
    dist.all_reduce(sums, group=group)
    mean_logprob, mean_advantage = sums[0] / sums[2], sums[1] / sums[2]
    return (logprobs.double() - mean_logprob) * (advantages.double() - mean_advantage)


def uniform(seed: int, step: int, key: str, index: int, count: int) -> torch.Tensor:
    """Numbers in [0, 1) for the tokens of one sample: the same wherever and in whatever order it is computed."""
    digest = hashlib.sha256(f"{seed}/{step}/{key}/{index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def choose(
    objective: str,
    covariance: torch.Tensor,
    draw: torch.Tensor,
    options: Algorithm,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """True where this rank's tokens are chosen, [n].

    kl_cov: the ``cov_fraction`` of all tokens whose covariance is highest. clip_cov: as many, drawn at random (``draw``)
    from those within [cov_low, cov_high]. At least one where there is any.
    """
    if objective == "kl_cov":
        eligible, score = torch.ones_like(covariance, dtype=torch.bool), covariance
    else:
        eligible = (covariance >= options.cov_low) & (covariance <= options.cov_high)
        score = -draw.to(covariance)
    total = gathered(torch.ones_like(covariance), group).sum()
    candidates = gathered(score[eligible], group)
    wanted = min(max(int(total * options.cov_fraction), 1), len(candidates))
    if not wanted:
        return torch.zeros_like(eligible)
    threshold = candidates.topk(wanted).values[-1]
    return eligible & (score >= threshold)


def choose_in(batches: Sequence[Batch], config: Config, step: int, group: dist.ProcessGroup) -> None:
    """Sets ``chosen`` of an update's micro-batches, from the log-probabilities before the update and the advantages."""
    device = batches[0].mask.device
    draws = [
        uniform(config.run.seed, step, row.key, row.index, row.response_tokens).to(device)
        for batch in batches
        for row in batch.rows
    ]
    masks = torch.cat([batch.mask for batch in batches])
    draw = torch.cat([*draws, *(torch.zeros(2, device=device) for batch in batches if not batch.rows)])
    before = torch.cat([batch.proximal for batch in batches if batch.proximal is not None])
    advantages = torch.cat([batch.advantages for batch in batches])
    values = covariances(before[masks], advantages[masks], group)
    chosen = torch.zeros_like(masks)
    chosen[masks] = choose(config.algorithm.objective, values, draw[masks], config.algorithm, group)
    for batch, own in zip(batches, chosen.split([len(batch.mask) for batch in batches]), strict=True):
        batch.chosen = own
