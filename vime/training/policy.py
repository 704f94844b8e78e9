"""The policy for training: a transformers model, from hidden states to log-probabilities, sharded by FSDP2."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from vime.training import packed
from vime.training.logprobs import chunked_logprobs

NOT_SUPPORTED = ("final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale")


class ModelRefused(Exception):
    """The model needs something that this engine does not do; the message names it."""


class Policy(nn.Module):
    """``model`` is the transformers model, with its own parameter names; forward gives what the losses need."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: PreTrainedModel = model

    def forward(self, batch: packed.Packed, temperature: float, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies (float32 [N]) of a packed micro-batch's N response tokens."""
        backbone, head = self.model.get_decoder(), self.model.get_output_embeddings()
        hidden = backbone(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            layout=batch.layout,
        ).last_hidden_state[0, batch.sources]
        return chunked_logprobs(hidden, head.weight, getattr(head, "bias", None), batch.targets, temperature, chunk)


def load_model(folder: Path) -> PreTrainedModel:
    """The folder's model in float32 with packed attention; ModelRefused names what the engine cannot do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=packed.NAME,
            local_files_only=True,
            output_loading_info=True,
        )
    model, loading = found
    if missing := sorted(loading["missing_keys"]):
        raise ModelRefused(
            f"{folder} lacks weights, which would be random: {', '.join(missing[:3])} ({len(missing)} in all)"
        )
    for name in NOT_SUPPORTED:
        if getattr(model.config, name, None) not in (None, 1.0):
            raise ModelRefused(f"{folder}: the model's {name} is not supported by the torch engine")
    if getattr(model.config, "attention_dropout", 0.0):
        model.config.attention_dropout = 0.0
    return model


def shard(model: Any, ranks: int, device: torch.device, dtype: torch.dtype, checkpointing: bool) -> Policy:
    """The recipe: (checkpoint and) shard each decoder layer, then the rest as one unit; compute in ``dtype``, keep float32."""
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("fsdp",))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    policy = Policy(model.to(device))
    layers = model.get_decoder().layers
    for index, layer in enumerate(layers):
        if checkpointing:
            layers[index] = layer = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    return policy


def plain_name(name: str) -> str:
    """A parameter's name in the Hugging Face model, without the wrappers'."""
    return name.removeprefix("model.").replace("_checkpoint_wrapped_module.", "")
