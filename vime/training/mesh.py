"""The ranks' mesh: its dimensions, and what ranks exchange along them.

    replica   copies of the sharded model, each with its own part of the batch (HSDP; DDP where every copy is whole)
    shard     FSDP2: parameters, gradients and optimizer state are sharded, and the batch is split
    context   Ulysses: each rank holds a part of every packed row; attention exchanges tokens for heads
              (DeepSpeed-Ulysses, arXiv 2309.14509, section 3)
    tensor    each rank holds a part of every weight matrix (Megatron-LM, arXiv 1909.08053, section 3)

Parameters are also sharded over the context ranks: shard and context together are the mesh's dimension "fsdp".
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from vime.config.sections import Trainer


class Mesh:
    """This rank's place among all ranks, and the groups it works with. Every size may be 1."""

    def __init__(self, trainer: Trainer, device_type: str) -> None:
        sizes = (trainer.replicas, trainer.shards, trainer.context_parallel, trainer.tensor_parallel)
        replicas, shards, self.contexts, self.tensors = sizes
        mesh, *groups = groups_of(device_type, *sizes)
        # Of the ranks that share a row; that have the same micro-batches; that together hold all micro-batches.
        self.context_group, self.model_group, self.data_group = groups
        self.sharding = mesh["replica", "fsdp"] if replicas > 1 else mesh["fsdp"]
        self.tensor = mesh["tensor"]
        self.fsdp_group, self.tensor_group = mesh.get_group("fsdp"), mesh.get_group("tensor")
        place = (torch.arange(dist.get_world_size()).view(sizes) == dist.get_rank()).nonzero()[0].tolist()
        self.data_rank = place[0] * shards + place[1]
        self.context_rank, self.tensor_rank = place[2:]
        self.rank = dist.get_rank()
        # FSDP means gradients over these ranks; each holds a part of the sum.
        self.averaged = replicas * shards * self.contexts


@functools.cache
def groups_of(device_type: str, replicas: int, shards: int, contexts: int, tensors: int) -> tuple[Any, ...]:
    """The device mesh, and this rank's groups over contexts, over contexts and tensors, over replicas and shards. Collective.

    Made once a process: each group has threads of its own.
    """
    names = ("replica", "fsdp", "tensor")
    mesh = init_device_mesh(device_type, (replicas, shards * contexts, tensors), mesh_dim_names=names)
    ranks = torch.arange(dist.get_world_size()).view(replicas, shards, contexts, tensors)
    tables = (
        ranks.transpose(2, 3).reshape(-1, contexts),
        ranks.view(-1, contexts * tensors),
        ranks.view(replicas * shards, -1).T,
    )
    return mesh, *(dist.new_subgroups_by_enumeration(table.tolist())[0] for table in tables)


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's value on every rank, as JSON bytes; ``group`` takes tensors of the CPU."""
    if dist.get_world_size(group) == 1:
        return value
    data = torch.tensor(list(json.dumps(value).encode()) if value is not None else [0], dtype=torch.uint8)
    length = torch.tensor([len(data)])
    dist.broadcast(length, 0, group)
    data = data if dist.get_rank() == 0 else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, 0, group)
    return json.loads(bytes(data.tolist()))


class CopyIn(torch.autograd.Function):
    """What every rank of the group holds whole and uses for its part: the identity; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class SumOut(torch.autograd.Function):
    """The sum of the parts that the ranks of the group computed; its gradient is every part's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class GatherOut(torch.autograd.Function):
    """The last dimension's parts of all ranks of the group, one after the other. What follows is the same on every rank, and so
    is its gradient, of which each takes its part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return SplitIn.forward(ctx, gradients[0], ctx.group), None


class SplitIn(torch.autograd.Function):
    """This rank's part of the last dimension of what every rank of the group holds whole: the inverse of GatherOut."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return GatherOut.forward(ctx, gradients[0], ctx.group), None


class Exchange(torch.autograd.Function):
    """[n, ...] by rank of the group: entry i goes to rank i. Its own inverse, and its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Exchange.forward(ctx, gradients[0], ctx.group), None


class Times(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: int) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def tokens_to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[1, H, t, D], this rank's tokens of all heads, to [1, H/n, n t, D], all tokens of this rank's heads."""
    n = dist.get_world_size(group)
    parts = x[0].unflatten(0, (n, -1))  # [n, H/n, t, D]
    return Exchange.apply(parts, group).transpose(0, 1).flatten(1, 2)[None]


def heads_to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[1, n t, H/n, D], all tokens of this rank's heads, to [1, t, H, D], this rank's tokens of all heads."""
    n = dist.get_world_size(group)
    parts = x[0].unflatten(0, (n, -1))  # [n, t, H/n, D]
    return Exchange.apply(parts, group).transpose(0, 1).flatten(1, 2)[None]


def parts_in(mesh: Mesh | None, *weights: torch.Tensor | None) -> list[Any]:
    """Weights that every tensor rank holds whole and uses for its part: their gradients, which are averaged over the tensor
    ranks before the step (``average_whole``), then are the sums."""
    return [Times.apply(w, mesh.tensors) if mesh and mesh.tensors > 1 and w is not None else w for w in weights]
