"""Micro-batches on the device, and the sums that metrics are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vime.store.shared_memory import Payload, SharedMemoryStore
from vime.training.losses import Tokens, sequence_sums
from vime.training.packed import Packed, pack
from vime.training.plan import Row, tokens


@dataclass
class Batch:
    """One micro-batch: the packed row and, per response token ([N]), what the loss needs.

    ``weights`` are 0 where a token is not trained; ``sequence`` and ``group`` number the rows and their groups from 0. What
    is None comes from models, before the update, where the algorithm asks for it.
    """

    rows: list[Row]
    packed: Packed
    behaviour: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    sequence: torch.Tensor
    group: torch.Tensor
    advantages: torch.Tensor
    reference: torch.Tensor | None = None
    teacher: torch.Tensor | None = None
    proximal: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return tokens(self.rows)

    def seen(self, logprobs: torch.Tensor, entropy: torch.Tensor, old_logprobs: str) -> Tokens:
        """What an objective sees, with the policy's present log-probabilities."""
        proximal = logprobs.detach() if self.proximal is None else self.proximal
        sampled = (
            self.mask & ~self.behaviour.isnan()
        )  # what is not trained may hold anything; NaN: no server sampled it
        behaviour = torch.where(sampled, self.behaviour, proximal)
        return Tokens(
            logprobs=logprobs,
            entropy=entropy,
            old=behaviour if old_logprobs == "behaviour" else proximal,
            proximal=proximal,
            behaviour=behaviour,
            advantages=self.advantages,
            mask=self.mask,
            sequence=self.sequence,
            group=self.group,
            reference=self.reference,
            teacher=self.teacher,
            chosen=self.chosen,
        )

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        return sequence_sums(values, self.mask, self.sequence)


def gather_groups(rows: Sequence[Row], store: SharedMemoryStore) -> tuple[list[Row], list[Payload], Any]:
    """Rows ordered by group, their payloads, and what ``pack`` takes: each prompt once with its responses."""
    rows = sorted(rows, key=lambda row: (row.key, row.index))
    payloads = [store.get(row.key, row.index) for row in rows]
    groups: list[tuple[list[int], list[list[int]]]] = []
    for index, (row, payload) in enumerate(zip(rows, payloads, strict=True)):
        if not index or rows[index - 1].key != row.key:
            groups.append((payload.prompt_ids.tolist(), []))
        groups[-1][1].append(payload.response_ids.tolist())
    return rows, payloads, groups


def make_batch(
    rows: Sequence[Row], store: SharedMemoryStore, device: torch.device, scored: Sequence[str] = ()
) -> Batch:
    """Reads the rows' payloads and packs them; ``scored`` names the models whose log-probabilities lie in the payloads.

    No rows make a batch that takes part in the collectives and weighs nothing.
    """
    if not rows:
        zeros = torch.zeros(2, device=device)
        none, others = zeros.long(), {name: zeros for name in scored}
        return Batch([], pack([([0], [[0, 0]])], device), zeros, zeros.bool(), zeros, none, none, zeros, **others)
    rows, payloads, groups = gather_groups(rows, store)

    def per_token(values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device, dtype)

    def spread(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return per_token([np.full(r.response_tokens, v) for v, r in zip(values, rows, strict=True)], dtype)

    mask = per_token([p.loss_mask for p in payloads], torch.bool)
    keys = list(dict.fromkeys(row.key for row in rows))
    return Batch(
        rows,
        pack(groups, device),
        behaviour=per_token([p.logprobs for p in payloads], torch.float32),
        mask=mask,
        weights=spread([row.weight for row in rows], torch.float32) * mask,
        sequence=spread(range(len(rows)), torch.long),
        group=spread([keys.index(row.key) for row in rows], torch.long),
        advantages=spread([0.0] * len(rows), torch.float32),
        **{name: per_token([getattr(p, name) for p in payloads], torch.float32) for name in scored},
    )


class Sums:
    """Metrics over trained tokens: sums and maxima, added up over micro-batches and ranks."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}

    def add(self, mask: torch.Tensor, **values: torch.Tensor) -> None:
        for name, value in values.items():
            total = torch.where(mask, value.detach().double(), 0.0).sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def maximum(self, mask: torch.Tensor, **values: torch.Tensor) -> None:
        for name, value in values.items():
            top = torch.where(mask, value.detach().double(), 0.0).max()
            self.maxima[name] = torch.maximum(self.maxima.get(name, top), top)

    def reduce(self) -> dict[str, float]:
        """Sums over ranks for every sum, maxima over ranks for every maximum; one collective each."""
        both: dict[str, float] = {}
        for kept, operation in ((self.sums, dist.ReduceOp.SUM), (self.maxima, dist.ReduceOp.MAX)):
            names = sorted(kept)
            stacked = torch.stack([kept[name].double() for name in names])
            dist.all_reduce(stacked, operation)
            both |= dict(zip(names, stacked.tolist(), strict=True))
        return both
