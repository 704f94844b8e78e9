"""Parameters and gradients as one rank holds them: its pieces of each, the whole of them, and their norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from vime.training.mesh import Mesh


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_split(parameter: torch.Tensor) -> bool:
    """Whether each tensor rank holds another part of it."""
    return isinstance(parameter, DTensor) and "tensor" in (parameter.device_mesh.mesh_dim_names or ())


def pieces(tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Size]]:
    """The boxes of the whole that this rank holds, as views, each with its offsets; none where it holds nothing."""
    part, boxes = local(tensor), 1
    offsets: list[Any] = [0] * tensor.ndim
    if isinstance(tensor, DTensor):
        offsets = list(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])
        last = tensor.placements[-1]
        if isinstance(last, _StridedShard):  # several matrices lie in one, one after the other, each of them split
            dim, boxes = last.dim, int(last.split_factor)
    if not part.numel():
        return []
    if boxes == 1:
        return [(part, torch.Size(offsets))]
    step = tensor.shape[dim] // boxes
    starts = [[at + box * step * (d == dim) for d, at in enumerate(offsets)] for box in range(boxes)]
    return list(zip(part.chunk(boxes, dim), map(torch.Size, starts), strict=True))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    *others, last = tensor.placements
    if not isinstance(last, _StridedShard):
        return tensor.full_tensor()
    # Several matrices lie in one and each is split over the last dimension's ranks, which torch 2.11 cannot put together.
    mesh = tensor.device_mesh
    part = tensor.to_local()
    if others:
        shape = list(tensor.shape)
        shape[last.dim] //= mesh.size(-1)
        like = torch.empty(shape, device="meta")
        outer = mesh[mesh.mesh_dim_names[:-1]]  # type: ignore[index]
        part = DTensor.from_local(part, outer, others, shape=like.shape, stride=like.stride()).full_tensor()
    parts = [torch.empty_like(part) for _ in range(mesh.size(-1))]
    dist.all_gather(parts, part.contiguous(), group=mesh.get_group(mesh.ndim - 1))
    pieces = [one.chunk(int(last.split_factor), last.dim) for one in parts]
    return torch.cat([piece for matrix in zip(*pieces, strict=True) for piece in matrix], last.dim)


def plain_name(name: str) -> str:
    """A parameter's name in the Hugging Face model, without the wrappers'."""
    return name.removeprefix("model.").replace("_checkpoint_wrapped_module.", "")


def sharded_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Plain name and parameter of each, tied ones once, as the optimizer knows them.

    After a forward pass without a backward one FSDP leaves its root's parameters whole, which are other objects: they are
    given back first.
    """
    if isinstance(module, FSDPModule):
        module.reshard()
    for name, parameter in module.named_parameters():
        yield plain_name(name), parameter


# Gradients


def average_whole(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Makes gradients of what every tensor rank holds whole the same on all: rounding alone would let copies drift apart."""
    if mesh.tensors > 1:
        for parameter in parameters:
            if parameter.grad is not None and not is_split(parameter):
                gradient = local(parameter.grad)
                dist.all_reduce(gradient, group=mesh.tensor_group)
                gradient /= mesh.tensors


def foreach_norm(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Each tensor's float32 norm on ``device``."""
    found = torch._foreach_norm(tensors, dtype=torch.float32) if tensors else []
    return [norm.to(device) for norm in found]


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> torch.Tensor:
    """The global norm of all gradients, a float32 scalar, the same on every rank."""
    gradients: tuple[list[torch.Tensor], ...] = [], []  # what tensor ranks hold whole, what is split between them
    for parameter in parameters:
        if parameter.grad is not None:
            gradients[is_split(parameter)].append(local(parameter.grad))
    device = torch.device(mesh.sharding.device_type)
    norms = [torch.stack([torch.zeros((), device=device), *foreach_norm(part, device)]) for part in gradients]
    squares = torch.stack([part.square().sum() for part in norms])
    dist.all_reduce(squares, group=mesh.fsdp_group)
    whole, parts = squares.unbind()
    if mesh.tensors > 1:
        parts = parts.clone()
        dist.all_reduce(parts, group=mesh.tensor_group)
    return (whole + parts).sqrt()
