"""AdamW in the forms of trainer.optimizer and trainer.master_dtype, and its moments in and out as plain tensors."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vime.config.sections import Trainer
from vime.training.pieces import is_split, local

MOMENTS = ("exp_avg", "exp_avg_sq")
TORCHAO = {"adamw_8bit": "AdamW8bit", "adamw_fp8": "AdamWFp8"}
CHUNK = 1 << 21  # elements that a stochastically rounded update works on at once: some tens of MiB


def make_optimizer(module: nn.Module, learning_rate: float, section: Trainer, seed: str) -> torch.optim.Optimizer:
    """AdamW over what learns of the module; matrices decay, vectors (norms, biases) do not.

    ``seed`` is that of stochastic rounding.
    """
    members: dict[tuple[bool, bool], dict[str, Any]] = {}
    for number, parameter in enumerate(module.parameters()):  # a fused step takes parameters of one mesh
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim > 1
        group = members.setdefault((decays, is_split(parameter)), {"params": [], "numbers": []})
        group["weight_decay"] = section.weight_decay if decays else 0.0
        group["params"].append(parameter)
        group["numbers"].append(number)
    groups = list(members.values())
    options: dict[str, Any] = {"lr": learning_rate, "betas": section.betas, "eps": section.eps}
    if section.optimizer in TORCHAO:
        from torchao import optim

        return getattr(optim, TORCHAO[section.optimizer])(groups, **options)
    if section.master_dtype == "bfloat16":
        return StochasticAdamW(groups, seed=seed, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # torchao's, which compiles its step
            group["lr"].fill_(value)
        else:
            group["lr"] = value


# Stochastic rounding


def element_numbers(parameter: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Number in the whole, row-major tensor (int64 [count]) of this rank's elements ``first``, ``first`` + 1, ..."""
    whole, shape, offset = list(parameter.shape), list(parameter.shape), [0] * parameter.ndim
    if isinstance(parameter, DTensor):
        found = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        shape, offset = list(found[0]), list(found[1])
    last = max((d for d in range(parameter.ndim) if shape[d] != whole[d]), default=0)  # dimension that is split
    inner = math.prod(whole[last + 1 :])
    rest = torch.arange(first, first + count, device=local(parameter).device)
    numbers, stride = torch.zeros_like(rest), 1
    for dim in range(last, -1, -1):
        unit = inner if dim == last else 1
        numbers += (rest % (shape[dim] * unit) + offset[dim] * unit) * stride
        rest = rest // (shape[dim] * unit)
        stride *= whole[dim] * unit
    return numbers


def random_bits(numbers: torch.Tensor, key: int) -> torch.Tensor:
    """32 random bits (int32) for each number: MurmurHash3's finaliser of number xor key (wrapping multiplications)."""
    bits = numbers.to(torch.int32) ^ key
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * -0x7A143595  # 0x85EBCA6B
    bits = (bits ^ (bits >> 13 & 0x7FFFF)) * -0x3D4D51CB  # 0xC2B2AE35
    return bits ^ (bits >> 16 & 0xFFFF)


def round_stochastically(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """float32 to bfloat16: up or down with the probabilities that make the mean the value itself.

    A bfloat16 is a float32's upper 16 bits: adding 16 random bits to the lower ones carries into the upper with probability
    lower / 2^16. Of ``bits`` (int32) the lower 16 are used.
    """
    return ((values.view(torch.int32) + (bits & 0xFFFF)) & -0x10000).view(torch.float32).to(torch.bfloat16)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) on bfloat16 weights and moments without a float32 copy: arithmetic in float32, results
    rounded stochastically, so that updates smaller than half a unit in the last place are not lost but taken now and then.

    The random bits of an element depend on the seed, the step, the number of the parameter (its group's ``numbers``) and the
    element's place in it: not on how the parameter is split over ranks (but for fused matrices of experts, which tensor ranks
    hold in two boxes), and replicas round alike.
    """

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], eps: float, seed: str) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.seed = seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for number, parameter in zip(group["numbers"], group["params"], strict=True):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"step": torch.tensor(0.0), **{key: torch.zeros_like(parameter) for key in MOMENTS}}
                state["step"] += 1
                digest = hashlib.sha256(f"{self.seed}/{int(state['step'])}/{number}".encode()).digest()
                keys = [int.from_bytes(digest[i : i + 4], "big", signed=True) for i in (0, 4, 8)]
                self._update(parameter, state, group, keys)

    def _update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any], keys: list[int]) -> None:
        """Chunk by chunk, so that the float32 values exist of few elements at a time."""
        (beta, beta_sq), step, lr = group["betas"], int(state["step"]), group["lr"]
        held = [local(tensor).view(-1) for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        gradient = local(parameter.grad).view(-1)  # type: ignore[arg-type]
        for first in range(0, len(gradient), CHUNK):
            parts = [tensor[first : first + CHUNK] for tensor in held]
            g = gradient[first : first + CHUNK].float()
            weight, average, square = (part.float() for part in parts)
            average.lerp_(g, 1 - beta)
            square.lerp_(g.square(), 1 - beta_sq)
            weight.mul_(1 - lr * group["weight_decay"])
            scale = square.sqrt().div_(math.sqrt(1 - beta_sq**step)).add_(group["eps"])
            weight.addcdiv_(average, scale, value=-lr / (1 - beta**step))
            numbers = element_numbers(parameter, first, len(g))
            for part, exact, key in zip(parts, (weight, average, square), keys, strict=True):
                part.copy_(round_stochastically(exact, random_bits(numbers, key)))


# Moments


def is_quantised(moment: torch.Tensor) -> bool:
    """Whether it is torchao's: codes of a byte, with a scale a block."""
    return hasattr(local(moment), "__tensor_flatten__")


def plain(moment: torch.Tensor) -> torch.Tensor:
    """A moment itself, or the values of a quantised one (float32), sharded as it is."""
    if not is_quantised(moment):
        return moment
    values = local(moment).dequantize().float()
    if not isinstance(moment, DTensor):
        return values
    mesh, placements = moment.device_mesh, moment.placements
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=moment.shape, stride=moment.stride())


def move_moments(optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
    """Between steps trainer.cpu_offload = "optimizer" keeps them in the host's memory."""
    for state in optimizer.state.values():
        for key in MOMENTS:
            state[key] = state[key].to(device)
