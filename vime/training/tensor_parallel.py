"""Tensor parallelism, by the plan that the model's configuration carries.

A rank's parts are DTensors, so that FSDP, checkpoints and exports know the whole; the model's code sees plain local tensors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from vime.training.mesh import CopyIn, GatherOut, Mesh, SplitIn, SumOut, parts_in


class SplitRefused(Exception):
    """The model cannot be split as asked; the message names what is in the way and which sizes fit."""


def split_tensors(decoder: nn.Module, mesh: Mesh) -> None:
    """Splits the decoder by its ``base_model_tp_plan``; SplitRefused where there is none or a style is not known.

    Embedding and output head stay whole: the ranks share the positions of the head among them instead (``packed.pack``).
    """
    config: Any = decoder.config
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise SplitRefused(f"{config.model_type} models carry no tensor-parallel plan; set trainer.tensor_parallel = 1")
    patterns = [(re.compile(re.escape(k).replace(r"\*", r"\d+")), style) for k, style in plan.items()]

    def style_of(name: str) -> str | None:
        return next((style for pattern, style in patterns if pattern.fullmatch(name)), None)

    embedding: Any = decoder.get_input_embeddings()  # type: ignore[operator]
    for name, module in decoder.named_modules():
        if module is embedding:
            continue
        style, own = style_of(name), {n: style_of(f"{name}.{n}") for n, _ in module.named_parameters(recurse=False)}
        if style is None and not any(own.values()):
            continue
        if unknown := ({style} - {None, *STYLES}) | (set(own.values()) - {None, *PARAMETER_STYLES}):
            raise SplitRefused(
                f"{config.model_type}: the tensor-parallel style {unknown.pop()!r} of {name} is not known to this engine; "
                "set trainer.tensor_parallel = 1"
            )
        if style is not None:
            STYLES[style](module, mesh)
        for parameter, its_style in own.items():
            if its_style is not None:
                PARAMETER_STYLES[its_style](module, parameter, mesh)


def split(module: nn.Module, name: str, dim: int, mesh: Mesh, halves: int = 1) -> None:
    """Makes parameter ``name`` a DTensor split along ``dim``; where several matrices lie one after the other in it
    (``halves``), each of them is split."""
    parameter: Any = getattr(module, name)
    size = parameter.shape[dim]
    if size % (mesh.tensors * halves):
        raise SplitRefused(
            f"trainer.tensor_parallel = {mesh.tensors} does not divide {size // halves}, a size of {name} in "
            f"{type(module).__name__}"
        )
    dim %= parameter.ndim
    placement: Placement = Shard(dim) if halves == 1 else _StridedShard(dim, split_factor=halves)
    whole = distribute_tensor(parameter.data, mesh.tensor, [placement])
    setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


@contextmanager
def local_parameters(module: nn.Module, prepare: Any) -> Iterator[None]:
    """Inside, the module's own parameters are what ``prepare(name, parameter)`` gives."""
    held = dict(module._parameters)
    try:
        for name, parameter in held.items():
            if parameter is not None:
                module._parameters[name] = prepare(name, parameter)
        yield
    finally:
        module._parameters.update(held)


def on_part(module: nn.Module, mesh: Mesh, enters: Any = None, leaves: Any = None, whole: tuple[str, ...] = ()) -> None:
    """Lets ``module`` compute this rank's part: with local parameters, its inputs having gone through ``enters`` and its output
    through ``leaves`` (functions between ranks). Parameters in ``whole`` are held whole and used for the part; a bias of a sum
    is added once."""
    plain = module.forward

    def prepare(name: str, parameter: Any) -> torch.Tensor:
        if isinstance(parameter, DTensor):
            return parameter.to_local()
        if name not in whole:
            return parameter
        used = parts_in(mesh, parameter)[0]
        return used * float(mesh.tensor_rank == 0) if leaves is SumOut else used

    def enter(x: Any) -> Any:
        floating = isinstance(x, torch.Tensor) and x.is_floating_point()
        return enters.apply(x, mesh.tensor_group) if enters and floating else x

    @functools.wraps(plain)
    def forward(*inputs: Any, **named: Any) -> Any:
        with local_parameters(module, prepare):
            output = plain(*map(enter, inputs), **{name: enter(value) for name, value in named.items()})
        return leaves.apply(output, mesh.tensor_group) if leaves else output

    module.forward = forward  # type: ignore[method-assign]


def with_adapter(linear: Any, matrix: str) -> list[nn.Module]:
    """The Linear itself or, where it has an adapter (peft's names), what it wraps and the adapter's matrix."""
    return [linear.base_layer, getattr(linear, matrix).default] if hasattr(linear, "base_layer") else [linear]


def column(module: nn.Module, mesh: Mesh, leaves: Any = None) -> None:
    """Output features are split: [out/n, in], the input is whole."""
    for linear in with_adapter(module, "lora_B"):
        for name, _ in list(linear.named_parameters(recurse=False)):
            split(linear, name, 0, mesh)
        on_part(linear, mesh, CopyIn, leaves)


def row(module: nn.Module, mesh: Mesh, enters: Any = None) -> None:
    """Input features are split: [out, in/n], the outputs are summed."""
    for linear in with_adapter(module, "lora_A"):
        split(linear, "weight", 1, mesh)
        on_part(linear, mesh, enters, SumOut, whole=("bias",))


def experts(module: nn.Module, mesh: Mesh) -> None:
    """All experts' matrices in one module: split inside, summed at the end."""
    on_part(module, mesh, CopyIn, SumOut)


def on_heads(norm: nn.Module, mesh: Mesh) -> None:
    """A norm over each head: held whole, used for this rank's heads."""
    on_part(norm, mesh, whole=tuple(name for name, _ in norm.named_parameters(recurse=False)))


# Between "colwise_gather_output" and "rowwise_split_input" every rank computes the same: what lies there is fused, or normed
# over all heads.
STYLES: dict[str, Callable[[nn.Module, Mesh], None]] = {
    "colwise": column,
    "rowwise": row,
    "colwise_gather_output": functools.partial(column, leaves=GatherOut),
    "rowwise_split_input": functools.partial(row, enters=SplitIn),
    "moe_tp_experts": experts,
    "replicated_with_grad_allreduce": on_heads,
}
PARAMETER_STYLES = {
    "colwise": lambda module, name, mesh: split(module, name, -2, mesh),
    "packed_colwise": lambda module, name, mesh: split(module, name, -2, mesh, halves=2),
    "rowwise": lambda module, name, mesh: split(module, name, -1, mesh),
}
