"""LoRA: peft's adapters beside the Linear modules of a transformers model, and what becomes of both together.

h = W x + scaling B A x, with A [r, in], B [out, r] and scaling = alpha / r, or alpha / sqrt(r). LoRA (arXiv 2106.09685),
section 4.1; rsLoRA (arXiv 2312.03732). Modules are peft's own: ``base_layer``, ``lora_A.default``, ``lora_B.default``.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from vime.config.sections import Lora
from vime.training.selfcheck import ModelRefused


def inject(model: PreTrainedModel, section: Lora, base: str) -> None:
    """Puts an adapter into the model, float32 whatever the model's dtype; it alone trains. ``base`` is the model's folder.

    ModelRefused where a target is missing or is not a Linear of a decoder layer: fused experts, embeddings, the output head.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    head = model.get_output_embeddings()
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]
        use_rslora=section.use_rslora,
        target_modules=section.target_modules,
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(section.seed)
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            raise ModelRefused(f"lora.target_modules = {section.target_modules!r}: {error}") from None
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            layer = module.get_base_layer()
            if type(module) is not Linear or type(layer) is not nn.Linear or layer is head:
                raise ModelRefused(
                    f"lora.target_modules: {name} is {'the output head' if layer is head else type(layer).__name__}, and "
                    "only Linear modules of decoder layers can have an adapter (no fused experts, no embeddings); name "
                    'the others, e.g. ["q_proj", "k_proj", "v_proj", "o_proj"]'
                )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def config_of(model: nn.Module) -> Any:
    """peft's configuration of the model's adapter, or None where it has none."""
    return getattr(model, "peft_config", {}).get("default")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def merged(state: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """The state under the model's own names: W + scaling B A, formed in float32 and kept in W's dtype."""
    config = config_of(model)
    if config is None:
        return state
    scaling = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    whole = {}
    for name, tensor in state.items():
        if is_adapter(name):
            continue
        if name.endswith(".base_layer.weight"):
            a, b = (state[name.replace(".base_layer.", f".lora_{letter}.default.")] for letter in "AB")
            tensor = tensor.float().addmm(b, a, alpha=scaling).to(tensor.dtype)
        whole[name.replace(".base_layer.", ".")] = tensor
    return whole


def file_name(name: str) -> str:
    """An adapter parameter's name in ``adapter_model.safetensors``."""
    return "base_model.model." + name.replace(".default.", ".")


def write_config(model: nn.Module, folder: Path) -> None:
    """``adapter_config.json`` as peft reads it."""
    config = copy.copy(config_of(model))
    config.inference_mode = True
    config.save_pretrained(str(folder))
