"""A model that learns: parameters, AdamW, learning-rate schedule; its state to a folder and back. Collective throughout."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Generic

import torch
from transformers import PreTrainedModel

from vime.config.sections import Trainer
from vime.training.lora import is_adapter, merged
from vime.training.mesh import Mesh
from vime.training.optimizer import is_quantised, make_optimizer, move_moments, plain, set_learning_rate
from vime.training.pieces import average_whole, full, gradient_norm, local, plain_name, sharded_parameters
from vime.training.policy import Critic, Policy, Trained

if TYPE_CHECKING:
    from vime.training.shards import Saved, State


class EngineError(Exception):
    """The engine cannot go on; the message says with what."""


def learning_rate_factor(step: int, config: Trainer, total: int) -> float:
    """Fraction of the peak learning rate at optimizer step ``step`` (from 0) of ``total``."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
    floor = config.min_learning_rate / config.learning_rate
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def full_state(module: Policy | Critic, dtype: torch.dtype, keep: bool) -> dict[str, torch.Tensor]:
    """Full parameters on the CPU by plain name, tied ones once; an empty dict unless ``keep`` (the writing rank). An
    adapter's are float32 whatever ``dtype``."""
    state = {}
    for name, parameter in sharded_parameters(module):
        whole = full(parameter.detach())
        if keep:
            state[name] = whole.to("cpu", torch.float32 if is_adapter(name) else dtype, copy=True)
    return state


def bare(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model without its weights, which knows transformers' names and layout for a state that it is given to save.

    FSDP changes the model itself at every forward pass; this one stays as it is while a thread writes.
    """
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config)).to(dtype)  # type: ignore[arg-type]
    empty.generation_config = model.generation_config
    empty._weight_conversions = getattr(model, "_weight_conversions", None)  # experts are un-fused by these
    return empty


def whole_model(policy: Policy, dtype: torch.dtype, keep: bool) -> dict[str, torch.Tensor]:
    """What a Hugging Face folder holds: the full parameters, an adapter added to the weights that it stands beside, and
    buffers, such as a router's correction of its scores, in their own dtype; empty unless ``keep``. Collective."""
    state = merged(full_state(policy, dtype, keep), policy.model)
    if keep:
        held = policy.model.state_dict().keys()
        buffers = ((plain_name(name), buffer) for name, buffer in policy.named_buffers())
        state |= {name: buffer.to("cpu", copy=True) for name, buffer in buffers if name in held}
    return state


def export_model(policy: Policy, folder: str, dtype: torch.dtype, write: bool) -> int:
    """Writes the model as a Hugging Face folder, with transformers' own names and layout; returns the bytes written."""
    state = whole_model(policy, dtype, write)
    if write:
        bare(policy.model, dtype).save_pretrained(folder, state_dict=state)
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


class Learner(Generic[Trained]):
    """``module`` under an optimizer. ``name`` is what its metrics are called after; ``steps`` are those it has taken."""

    def __init__(
        self, name: str, module: Trained, learning_rate: float, section: Trainer, mesh: Mesh, seed: int
    ) -> None:
        self.module: Trained = module
        self.name, self.learning_rate, self.section, self.mesh = name, learning_rate, section, mesh
        self.steps = 0
        if section.cpu_offload != "none" and mesh.sharding.device_type == "cpu":
            raise EngineError(
                f'trainer.cpu_offload = "{section.cpu_offload}" and there is no GPU: all lies in the host\'s memory already; '
                'set it to "none"'
            )
        module.train()
        self.optimizer = make_optimizer(module, learning_rate, section, f"{seed}/{name}")
        self.offloads = section.cpu_offload == "optimizer"

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, total_steps: int) -> torch.Tensor:
        """Clips the gradients, takes one optimizer step and clears them; returns their norm before clipping.

        EngineError, with the weights unchanged, where the norm is not finite.
        """
        parameters = list(self.module.parameters())
        average_whole(parameters, self.mesh)
        norm = gradient_norm(parameters, self.mesh)
        if not torch.isfinite(norm):
            raise EngineError(
                f"the {self.name}'s gradient norm is {norm.item()} at optimizer step {self.steps}; weights are unchanged"
            )
        scale = (self.section.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, scale.to(gradients[0].device))
        set_learning_rate(
            self.optimizer, self.learning_rate * learning_rate_factor(self.steps, self.section, total_steps)
        )
        if self.offloads:
            move_moments(self.optimizer, norm.device)
        self.optimizer.step()
        self.clear()
        if self.offloads:
            move_moments(self.optimizer, "cpu")
        self.steps += 1
        return norm

    def state(self) -> State:
        """Every parameter that learns ("weight") and all that the optimizer keeps of it (AdamW: "exp_avg", "exp_avg_sq",
        "step"), as sharded here, by NAME.KIND.PARAMETER. They are the tensors themselves, to be copied, or filled; of quantised
        moments the values."""
        state, kept = {}, 0
        for name, parameter in sharded_parameters(self.module):
            if not parameter.requires_grad:
                continue
            kept_of_it = self.optimizer.state.get(parameter, {})  # none: it never had a gradient
            entries = {kind: plain(tensor) for kind, tensor in kept_of_it.items()}
            kept += bool(entries)
            for kind, tensor in {"weight": parameter.detach(), **entries}.items():
                state[f"{self.name}.{kind}.{name}"] = tensor
        if kept != len(self.optimizer.state):
            raise EngineError(
                f"{len(self.optimizer.state)} of the {self.name}'s parameters have moments, {kept} were found"
            )
        return state

    def load(self, saved: Saved, steps: int) -> None:
        """Takes up what a learner of the same name saved; ``steps`` are those it had taken."""
        self.steps = steps
        for name, parameter in sharded_parameters(self.module):
            if f"{self.name}.step.{name}" in saved.names:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # makes its state for these; all that it changes is overwritten
        self.clear()
        state = self.state()
        saved.load(state)
        for name, parameter in sharded_parameters(self.module):
            for kind, kept in self.optimizer.state.get(parameter, {}).items():
                if is_quantised(kept):
                    local(kept).copy_(local(state[f"{self.name}.{kind}.{name}"]))
        if self.offloads:
            move_moments(self.optimizer, "cpu")
