"""Micro-batches on the device, and the sums that metrics are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vime.store.shared_memory import Payload, SharedMemoryStore
from vime.training.flash import to_device
from vime.training.losses import Tokens, sequence_sums
from vime.training.mesh import Mesh
from vime.training.packed import Packed, pack
from vime.training.plan import Row, tokens
from vime.training.routing import Balance, Routers


@dataclass
class Batch:
    """One micro-batch: the packed row and, per response token ([N]), what the loss needs.

    ``weights`` are 0 where a token is not trained; ``sequence`` and ``group`` number the rows and their groups from 0. What
    is None comes from models, before the update, where the algorithm asks for it; ``reference_is_policy`` where the
    reference's log-probabilities are the policy's present ones. ``of_update`` counts the "samples" and the trained "tokens" of
    the update on all ranks.
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
    reference_is_policy: bool = False
    teacher: torch.Tensor | None = None
    proximal: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    experts: torch.Tensor | None = None  # [T, R, k]: of this rank's positions of the row
    balance: Balance | None = None
    of_update: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return tokens(self.rows)

    def predicts(self, mesh: Mesh) -> torch.Tensor:
        """How many trained tokens each of this rank's positions of the row predicts, float32 [T]: a prompt's last, one a
        response. Collective over tensor ranks, which share out what a position predicts."""
        own = self.mask if self.packed.own is None else self.mask[self.packed.own]
        counts = torch.zeros(self.packed.input_ids.shape[1], device=self.mask.device)
        counts.index_add_(0, self.packed.sources, own.to(counts))
        if mesh.tensors > 1:
            dist.all_reduce(counts, group=mesh.tensor_group)
        return counts

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
            reference=logprobs.detach() if self.reference_is_policy else self.reference,
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


def sample_experts(row: Row, payload: Payload, store: SharedMemoryStore, routers: Routers) -> np.ndarray:
    """Where the server routed the sample's tokens: int16 [prompt + response - 1, R, k]. A prompt's experts are those of its
    group's first sample, wherever that is: the server may have routed it differently for others."""
    prompt = len(payload.prompt_ids)
    first = payload if row.index == 0 else store.get(row.key, 0)
    of_prompt = routers.of_server(f"{row.key}/0", first.experts)[:prompt]
    return np.concatenate([of_prompt, routers.of_server(f"{row.key}/{row.index}", payload.experts)[prompt:]])


def packed_experts(
    rows: Sequence[Row], payloads: Sequence[Payload], store: SharedMemoryStore, routers: Routers, mesh: Mesh
) -> torch.Tensor:
    """The same of this rank's tokens of the packed row, in which a prompt stands once: [T, R, k]."""
    pieces = []
    for index, (row, payload) in enumerate(zip(rows, payloads, strict=True)):
        shared = index > 0 and rows[index - 1].key == row.key
        if shared:
            pieces.append(routers.of_server(f"{row.key}/{row.index}", payload.experts)[len(payload.prompt_ids) :])
        else:
            pieces.append(sample_experts(row, payload, store, routers))
    whole = np.concatenate(pieces)
    filled = np.pad(whole, [(0, -len(whole) % mesh.contexts), (0, 0), (0, 0)], mode="edge")
    return torch.from_numpy(filled).chunk(mesh.contexts)[mesh.context_rank]


def make_batch(
    rows: Sequence[Row],
    store: SharedMemoryStore,
    device: torch.device,
    mesh: Mesh,
    scored: Sequence[str] = (),
    routers: Routers | None = None,
) -> Batch:
    """Reads the rows' payloads and packs them; ``scored`` names the models whose log-probabilities lie in the payloads;
    ``routers`` are those that shall choose the experts that lie there.

    No rows make a batch that takes part in the collectives and weighs nothing.
    """
    if not rows:
        zeros = torch.zeros(2, device=device)
        packed, none = pack([([0], [[0, 0]])], device, mesh), zeros.long()
        others: dict[str, Any] = dict.fromkeys(scored, zeros)
        if routers is not None:
            others["experts"] = torch.zeros(
                packed.input_ids.shape[1], len(routers.layers), routers.top_k, dtype=torch.int16, device=device
            )
        return Batch([], packed, zeros, zeros.bool(), zeros, none, none, zeros, **others)
    rows, payloads, groups = gather_groups(rows, store)

    def per_token(values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.from_numpy(np.concatenate(values)).to(dtype), device)

    def spread(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return per_token([np.full(r.response_tokens, v) for v, r in zip(values, rows, strict=True)], dtype)

    others = {name: per_token([getattr(p, name) for p in payloads], torch.float32) for name in scored}
    if routers is not None:
        others["experts"] = packed_experts(rows, payloads, store, routers, mesh).to(device)
    mask = per_token([p.loss_mask for p in payloads], torch.bool)
    keys = list(dict.fromkeys(row.key for row in rows))
    return Batch(
        rows,
        pack(groups, device, mesh),
        behaviour=per_token([p.logprobs for p in payloads], torch.float32),
        mask=mask,
        weights=spread([row.weight for row in rows], torch.float32) * mask,
        sequence=spread(range(len(rows)), torch.long),
        group=spread([keys.index(row.key) for row in rows], torch.long),
        advantages=spread([0.0] * len(rows), torch.float32),
        **others,
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

    def reduce(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Sums over the group's ranks for every sum, maxima for every maximum; one collective each."""
        parts = []
        for kept, operation in ((self.sums, dist.ReduceOp.SUM), (self.maxima, dist.ReduceOp.MAX)):
            if not kept:
                continue
            parts.append(torch.stack([kept[name].double() for name in sorted(kept)]))
            dist.all_reduce(parts[-1], operation, group=group)
        return dict(zip([*sorted(self.sums), *sorted(self.maxima)], torch.cat(parts).tolist(), strict=True))
