"""Which kernels compute the models: attention's, and what is fused. Chosen once from configuration and device, and applied to
transformers' models from outside."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from vime.config.kernels import kernel_faults
from vime.config.sections import Config


class KernelsRefused(Exception):
    """The kernels asked for cannot be had; the message names what is in the way."""


@dataclass(frozen=True)
class Kernels:
    """What is computed by other kernels than PyTorch's own; see [trainer] attention, compile and kernels."""

    flash: bool = False
    compile: bool = False
    liger: bool = False


def choose(config: Config, device: torch.device) -> Kernels:
    """What the configuration asks for on ``device``; KernelsRefused where that cannot be."""
    if faults := kernel_faults(config, device.type):
        raise KernelsRefused("\n".join(faults))
    trainer, gpu = config.trainer, device.type == "cuda"
    flash = trainer.attention == "flash" or (trainer.attention == "auto" and gpu and config.model.dtype == "bfloat16")
    liger = trainer.kernels == "liger"
    selective = trainer.activation_checkpointing == "selective"
    fits = gpu and not liger and not selective and trainer.tensor_parallel == 1 and not config.lora.rank
    compiled = trainer.compile is True or (trainer.compile == "auto" and fits)
    return Kernels(flash, compiled, liger)


def apply_liger(model: PreTrainedModel) -> None:
    """Replaces the model's norms, gated MLPs and rotary embeddings by Liger's fused kernels (arXiv 2410.10989); its fused
    cross-entropy is not for log-probabilities with entropies."""
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError:
        raise KernelsRefused('trainer.kernels = "liger" needs liger-kernel: pip install "vime[liger]"') from None
    kind = model.config.get_text_config().model_type
    known = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    if kind not in known:
        raise KernelsRefused(
            f'trainer.kernels = "liger": liger-kernel knows no {kind} models; set trainer.kernels = "torch". It knows: '
            f"{', '.join(sorted(known))}"
        )
    code = sys.modules[type(model).__module__]
    classes = {name: value for name, value in vars(code).items() if isinstance(value, type)}
    monkey_patch._apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
    vars(code).update(classes)  # models made later are transformers' own again, but for the rotary embedding's function


def compile_layers(layers: nn.ModuleList) -> None:
    """torch.compile on each decoder layer, whose code and shapes they share: compiled once for all, with and without
    gradients. Row lengths are symbolic. Layers with experts, whose shapes are data, stay as they are. To be applied before
    checkpointing and sharding, which stay outside."""
    for layer in layers:
        if all(parameter.ndim < 3 for parameter in layer.parameters()):
            layer.forward = torch.compile(layer.forward, dynamic=True)
