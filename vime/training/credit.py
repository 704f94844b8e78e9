"""From the rewards of a batch to the advantage of every trained token. Collective: the group's ranks hold parts of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from vime.config.sections import Algorithm
from vime.training.advantages import Estimator, Scored
from vime.training.batch import Batch
from vime.training.losses import KL
from vime.training.plan import Row
from vime.training.returns import gae, token_rewards, whiten


def kl_penalty(batch: Batch, options: Algorithm) -> torch.Tensor:
    """kl_coef times the KL estimate of each token before the step, where it belongs to the reward; else 0."""
    if options.kl_in != "reward" or not options.kl_coef:
        return torch.zeros_like(batch.behaviour)
    assert batch.proximal is not None and batch.reference is not None
    return options.kl_coef * KL[options.kl_estimator](batch.proximal, batch.reference)


def gather(
    rows: Sequence[Row], batches: Sequence[Batch], values: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[float]:
    """One value a row of all ranks, from the values of this rank's batches by sequence, in the order of ``rows``."""
    place = {(row.key, row.index): i for i, row in enumerate(rows)}
    found = torch.zeros(len(rows), dtype=torch.double)
    for batch, value in zip(batches, values, strict=True):
        for row, one in zip(batch.rows, value[: len(batch.rows)].tolist(), strict=True):
            found[place[row.key, row.index]] = one
    device = batches[0].mask.device
    found = found.to(device)
    dist.all_reduce(found, group=group)
    return found.tolist()


def rollout_advantages(rows: Sequence[Row], penalties: Sequence[float], estimator: Estimator) -> list[float]:
    """One advantage a row: the estimator's over rollouts. Samples of one rollout share the mean of their rewards, less their
    KL penalties, and its advantage."""
    members: dict[tuple[str, int], list[int]] = {}
    for index, row in enumerate(rows):
        members.setdefault((row.key, row.rollout), []).append(index)
    scored = [
        Scored(
            key,
            sum(rows[i].reward for i in own) / len(own) - sum(penalties[i] for i in own),
            sum(rows[i].trained_tokens for i in own),
        )
        for (key, _), own in members.items()
    ]
    advantages = [0.0] * len(rows)
    for own, value in zip(members.values(), estimator(scored), strict=True):
        for index in own:
            advantages[index] = value
    return advantages


def assign_means(rows: Sequence[Row], batches: Sequence[Batch], group: dist.ProcessGroup) -> list[float]:
    """Each row's advantage, the mean over its trained tokens, where the batches' have been set token by token."""
    counts = [batch.per_sequence(torch.ones_like(batch.advantages)).clamp(min=1) for batch in batches]
    means = [b.per_sequence(b.advantages) / count for b, count in zip(batches, counts, strict=True)]
    return gather(rows, batches, means, group)


def assign(
    rows: Sequence[Row],
    batches: Sequence[Batch],
    options: Algorithm,
    estimator: Estimator | None,
    group: dist.ProcessGroup,
) -> list[float]:
    """Sets the batches' ``advantages`` (and ``returns``); gives each row's, mean over its trained tokens.

    ``rows`` are those of all ranks, in the same order on each; ``batches`` are this rank's. ``estimator`` is None for the
    token-level estimators.
    """
    penalties = [kl_penalty(batch, options) for batch in batches]
    if estimator is None:
        token_level(batches, penalties, options, group)
        return assign_means(rows, batches, group)
    sums = [batch.per_sequence(penalty) for batch, penalty in zip(batches, penalties, strict=True)]
    advantages = rollout_advantages(rows, gather(rows, batches, sums, group), estimator)
    by_row = {(row.key, row.index): value for row, value in zip(rows, advantages, strict=True)}
    for batch in batches:
        if batch.rows:
            own = [by_row[row.key, row.index] for row in batch.rows]
            batch.advantages = torch.tensor(own, device=batch.mask.device)[batch.sequence]
    return advantages


def token_level(
    batches: Sequence[Batch], penalties: Sequence[torch.Tensor], options: Algorithm, group: dist.ProcessGroup
) -> None:
    """The estimators that look at tokens.

    - gae: advantages from the critic's values, whitened over the batch. PPO (arXiv 1707.06347), equation 11.
    - reinforce_pp: discounted return of reward and KL penalties, whitened over the batch. REINFORCE++ (arXiv 2501.03262),
      section 3.
    - reverse_kl: log teacher - log policy of the token: its mean is -KL(policy || teacher). On-policy distillation
      (arXiv 2306.13649, section 3, with the reverse divergence; thinkingmachines.ai/blog/on-policy-distillation).
    """
    for batch, penalty in zip(batches, penalties, strict=True):
        if options.advantage == "reverse_kl":
            assert batch.proximal is not None and batch.teacher is not None
            batch.advantages = torch.where(batch.mask, batch.teacher - batch.proximal, 0.0) - penalty * batch.mask
            continue
        sequence_rewards = torch.tensor([row.reward for row in batch.rows] or [0.0], device=batch.mask.device)
        rewards = token_rewards(sequence_rewards, penalty, batch.mask, batch.sequence)
        values = torch.zeros_like(rewards) if batch.values is None else batch.values
        lam = options.gae_lambda if options.advantage == "gae" else 1.0
        batch.advantages, batch.returns = gae(rewards, values, batch.mask, batch.sequence, options.gamma, lam)
    if options.advantage != "reverse_kl":
        whitened = whiten([batch.advantages for batch in batches], [batch.mask for batch in batches], group)
        for batch, advantages in zip(batches, whitened, strict=True):
            batch.advantages = advantages
