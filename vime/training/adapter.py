"""The policy's adapter as a thing of its own: to a peft folder and back, and out of the way for the reference. Collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from vime.training.lora import file_name, is_adapter, write_config
from vime.training.pieces import full, sharded_parameters
from vime.training.policy import Policy

WEIGHTS = "adapter_model.safetensors"
State = dict[str, torch.Tensor]  # an adapter, or a part of one, by plain parameter name, sharded as the policy's


def parameters(policy: Policy) -> Iterator[tuple[str, nn.Parameter]]:
    """Plain name and parameter of the adapter's matrices."""
    return ((name, parameter) for name, parameter in sharded_parameters(policy) if is_adapter(name))


def whole(policy: Policy, dtype: torch.dtype, keep: bool) -> State:
    """The adapter, whole and on the CPU, by peft's names; empty unless ``keep`` (the writing rank)."""
    held = {}
    for name, parameter in parameters(policy):
        tensor = full(parameter.detach())
        if keep:
            held[file_name(name)] = tensor.to("cpu", dtype, copy=True).contiguous()
    return held


def write(model: PreTrainedModel, folder: Path, held: State) -> None:
    """Writes what ``whole`` gave as a peft folder. Not collective."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(held, folder / WEIGHTS, metadata={"format": "pt"})
    write_config(model, folder)


def export(policy: Policy, folder: Path, dtype: torch.dtype, writes: bool) -> int:
    """Writes the adapter as a peft folder on the rank that ``writes``; returns its bytes."""
    held = whole(policy, dtype, writes)
    if writes:
        write(policy.model, folder, held)
    return sum(tensor.nbytes for tensor in held.values())


@torch.no_grad()
def copy_into(policy: Policy, state: State) -> None:
    """The policy's adapter becomes ``state``, as far as that goes."""
    for name, parameter in parameters(policy):
        if name in state:
            parameter.copy_(state[name])


class AdapterReference:
    """The reference in the policy's own weights: its adapter stands aside for the start's, which adds nothing, or for a
    later one's since a refresh. Called as a Policy is, without gradients."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.state: State = {
            name: torch.zeros_like(parameter.detach()) for name, parameter in parameters(policy) if ".lora_B." in name
        }

    @contextmanager
    def instead(self) -> Iterator[None]:
        mine = {name: parameter.detach().clone() for name, parameter in parameters(self.policy) if name in self.state}
        copy_into(self.policy, self.state)
        try:
            yield
        finally:
            copy_into(self.policy, mine)

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with self.instead():
            return self.policy(*arguments)

    def refresh(self) -> None:
        """The policy's present adapter becomes the reference's."""
        self.state = {name: parameter.detach().clone() for name, parameter in parameters(self.policy)}
