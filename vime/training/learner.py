"""A model that learns: parameters, AdamW, learning-rate schedule; its state to a folder and back. Collective throughout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Generic

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from vime.config.sections import Trainer
from vime.training.policy import Critic, Policy, Trained


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


def plain_name(name: str) -> str:
    """A parameter's name in the Hugging Face model, without the wrappers'."""
    return name.removeprefix("model.").replace("_checkpoint_wrapped_module.", "")


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_parameters(module: Policy | Critic) -> Iterator[tuple[str, nn.Parameter]]:
    """Plain name and parameter of each, tied ones once, as the optimizer knows them.

    After a forward pass without a backward one FSDP leaves its root's parameters whole, which are other objects: they are
    given back first.
    """
    if isinstance(module, FSDPModule):
        module.reshard()
    for name, parameter in module.named_parameters():
        yield plain_name(name), parameter


def full_state(module: Policy | Critic, dtype: torch.dtype, keep: bool) -> dict[str, torch.Tensor]:
    """Full parameters on the CPU by plain name, tied ones once; an empty dict unless ``keep`` (the writing rank)."""
    state = {}
    for name, parameter in sharded_parameters(module):
        whole = full(parameter.detach())
        if keep:
            state[name] = whole.to("cpu", dtype, copy=True)
    return state


def export_model(policy: Policy, folder: str, dtype: torch.dtype, write: bool) -> int:
    """Writes the model as a Hugging Face folder, with transformers' own names and layout; returns the bytes written."""
    state = full_state(policy, dtype, write)
    if write:
        model, kept = policy.model, policy.model.config.dtype
        model.config.dtype = dtype
        model.save_pretrained(folder, state_dict=state)
        model.config.dtype = kept
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


class Learner(Generic[Trained]):
    """``module`` under an optimizer. ``name`` is what its metrics are called after; ``steps`` are those it has taken."""

    def __init__(self, name: str, module: Trained, learning_rate: float, section: Trainer) -> None:
        self.module: Trained = module
        self.name, self.learning_rate, self.section = name, learning_rate, section
        self.steps = 0
        module.train()
        matrices = [p for p in module.parameters() if p.ndim > 1]
        vectors = [p for p in module.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=learning_rate,
            betas=section.betas,
            eps=section.eps,
            fused=True,
        )

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, total_steps: int) -> torch.Tensor:
        """Clips the gradients, takes one optimizer step and clears them; returns their norm before clipping.

        EngineError, with the weights unchanged, where the norm is not finite.
        """
        norm = full(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.section.max_grad_norm))
        if not torch.isfinite(norm):
            raise EngineError(
                f"the {self.name}'s gradient norm is {norm.item()} at optimizer step {self.steps}; weights are unchanged"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * learning_rate_factor(self.steps, self.section, total_steps)
        self.optimizer.step()
        self.clear()
        self.steps += 1
        return norm

    def save_moments(self, file: Path, write: bool) -> None:
        """AdamW's moments as safetensors, full and in float32; none before the first step."""
        moments: dict[str, torch.Tensor] = {}
        for name, parameter in sharded_parameters(self.module) if self.steps else ():
            state = self.optimizer.state.get(parameter, {})  # none: it never had a gradient
            for key in ("exp_avg", "exp_avg_sq") if state else ():
                whole = full(state[key])
                if write:
                    moments[f"{key}.{name}"] = whole.cpu().contiguous()
        if write:
            if len(moments) != 2 * len(self.optimizer.state):
                raise EngineError(f"{len(self.optimizer.state)} parameters have moments and {len(moments)} were found")
            save_file(moments, file)

    def load_moments(self, file: Path, steps: int) -> None:
        self.steps = steps
        with safe_open(file, framework="pt") as moments:
            known = set(moments.keys())
            for name, parameter in sharded_parameters(self.module):
                if f"exp_avg.{name}" not in known:
                    continue
                state = {"step": torch.tensor(float(steps), device=parameter.device)}
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = placed_like(parameter, moments.get_tensor(f"{key}.{name}"))
                self.optimizer.state[parameter] = state  # type: ignore[assignment]

    def load_parameters(self, file: Path) -> None:
        with safe_open(file, framework="pt") as weights, torch.no_grad():
            for name, parameter in sharded_parameters(self.module):
                parameter.copy_(placed_like(parameter, weights.get_tensor(name)))


def placed_like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A full tensor on the parameter's device, sharded as it is."""
    whole = whole.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole
