"""A model whose weights still lie in its folder's files: each rank then reads its own pieces, and no rank all of them.

transformers' own loading is run on tensors that are not read yet. So renamed, fused, tied and missing weights, and dtypes
that some keep, are all as it would have them; what it makes of a tensor is done when that is read.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from vime.training.pieces import pieces, plain_name, sharded_parameters
from vime.training.tensor_parallel import local_parameters

CPU = torch.device("cpu")
ATEN = torch.ops.aten
SAME = {ATEN.alias.default, ATEN.detach.default, ATEN.clone.default, ATEN._to_copy.default}  # values of their argument
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


class Stored(torch.Tensor):
    """A tensor that is not read yet, on the CPU as far as one can tell. Operators on it give others, which are computed when
    they are read; what gives no tensor (``torch.equal``) is computed at once.

    ``within`` gives the values in a box of it, in whatever dtype they have before transformers casts them.
    """

    within: Callable[[Any], torch.Tensor]

    @staticmethod
    def __new__(cls, like: torch.Tensor, within: Callable[[Any], torch.Tensor]) -> Stored:
        tensor: Stored = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=CPU
        )
        tensor.within = within
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Stored({[*self.shape]}, {self.dtype})"

    def read(self, box: Any = ...) -> torch.Tensor:
        """The values, or those in a box (a tuple of slices). Of what was only renamed or cast, no more is read from the file."""
        return self.within(box).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def compute() -> Any:
            given, named = tree_map_only(Stored, lambda one: one.within(...), (args, kwargs or {}))
            return operator(*given, **named)

        if not any("Tensor" in str(result.type) for result in operator._schema.returns):
            return compute()
        given, named = tree_map_only(Stored, empty_like, (args, kwargs or {}))
        results, form = tree_flatten(operator(*given, **{**named, **({"device": "meta"} if "device" in named else {})}))

        def take(number: int, box: Any) -> torch.Tensor:
            return tree_leaves(compute())[number][box]

        takes = [args[0].within if operator in SAME else functools.partial(take, n) for n in range(len(results))]
        return tree_unflatten([cls(result, one) for result, one in zip(results, takes, strict=True)], form)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """The same without data."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in a model's folder by their names there; FileNotFoundError with the name of a file that it lacks."""
    names = [WEIGHTS]
    if (folder / INDEX).exists():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    found: dict[str, torch.Tensor] = {}
    for name in names:
        if not (folder / name).exists():
            raise FileNotFoundError(name)
        file = safe_open(folder / name, framework="pt")  # open for as long as there are tensors of it to read
        for key in file.keys():  # noqa: SIM118  no dict
            part = file.get_slice(key)
            shape = part.get_shape()
            dtype = part[:0].dtype if shape else part[...].dtype
            take = functools.partial(take_from, file, key)
            found[key] = Stored(torch.empty(shape, dtype=dtype, device="meta"), take)
    return found


def take_from(file: Any, key: str, box: Any) -> torch.Tensor:
    return file.get_slice(key)[box]


# Read whole, a part of the model at a time


def read_buffers(module: nn.Module) -> None:
    """Reads the module's buffers, which are small and never split."""
    for part in module.modules():
        part._buffers |= {name: b.read() for name, b in part._buffers.items() if isinstance(b, Stored)}


@contextmanager
def present(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the modules' own parameters are read."""
    read = functools.cache(lambda parameter: parameter.read())  # tied ones once
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(local_parameters(module, lambda _, p: read(p) if isinstance(p, Stored) else p))
        yield


@contextmanager
def present_in_turn(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, each of the layers has its parameters while it is called, the rest of the model all the time."""
    layers = list(layers)
    inside = {module for layer in layers for module in layer.modules()}

    def reading(layer: nn.Module) -> Callable[..., Any]:
        plain = layer.forward

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with present(layer.modules()):
                return plain(*args, **kwargs)

        return forward

    for layer in layers:
        layer.forward = reading(layer)  # type: ignore[method-assign]
    try:
        with present(module for module in model.modules() if module not in inside):
            yield
    finally:
        for layer in layers:
            del layer.forward


# Read in pieces


def replace(module: nn.Module, make: Callable[[Stored], torch.Tensor]) -> None:
    """Parameters that are not read yet become what ``make`` gives, tied ones the same."""
    made = functools.cache(lambda parameter: nn.Parameter(make(parameter), requires_grad=parameter.requires_grad))
    for part in module.modules():
        part._parameters |= {name: made(p) for name, p in part._parameters.items() if isinstance(p, Stored)}


def hollow(module: nn.Module) -> dict[str, Stored]:
    """Parameters that are not read yet become ones without data, which can be split; gives what they are, by plain name."""
    stored: dict[str, Stored] = {plain_name(name): p for name, p in module.named_parameters() if isinstance(p, Stored)}
    replace(module, empty_like)
    return stored


@torch.no_grad()
def fill(module: nn.Module, stored: dict[str, Stored], device: torch.device) -> None:
    """What ``hollow`` left without data gets memory on ``device`` as it is split by now, and its values: of each parameter a
    rank reads the pieces that it holds."""
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for name, parameter in sharded_parameters(module):
        if name in stored:
            for piece, offsets in pieces(parameter):
                box = tuple(slice(at, at + size) for at, size in zip(offsets, piece.shape, strict=True))
                piece.copy_(stored[name].within(box))
