"""The models of training: transformers models, from packed tokens to log-probabilities or values, sharded by FSDP2."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, TypeVar

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


def hidden_states(decoder: nn.Module, batch: packed.Packed) -> torch.Tensor:
    """The last hidden states [N, d] from which a packed micro-batch's N response tokens are predicted."""
    output = decoder(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        layout=batch.layout,
    )
    return output.last_hidden_state[0, batch.sources]


class Policy(nn.Module):
    """``model`` is the transformers model, with its own parameter names; forward gives what the losses need."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: PreTrainedModel = model

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.get_decoder().layers

    def forward(self, batch: packed.Packed, temperature: float, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies (float32 [N]) of a packed micro-batch's N response tokens."""
        head = self.model.get_output_embeddings()
        hidden = hidden_states(self.model.get_decoder(), batch)
        return chunked_logprobs(hidden, head.weight, getattr(head, "bias", None), batch.targets, temperature, chunk)


class Critic(nn.Module):
    """The decoder of a transformers model with a scalar head, which starts from zero."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: nn.Module = model.get_decoder()
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers  # type: ignore[return-value]

    def forward(self, batch: packed.Packed) -> torch.Tensor:
        """Value (float32 [N]) of the state before each of a packed micro-batch's N response tokens."""
        return self.head(hidden_states(self.model, batch)).float().sum(-1)  # of one: FSDP wants no view


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The folder's model with packed attention; ModelRefused names what the engine cannot do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
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


Trained = TypeVar("Trained", Policy, Critic)


def shard(
    module: Trained, ranks: int, device: torch.device, dtype: torch.dtype, checkpointing: bool = False
) -> Trained:
    """The recipe: (checkpoint and) shard each decoder layer, then the rest as one unit; compute in ``dtype``."""
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("fsdp",))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    module.to(device)
    layers = module.layers
    for index, layer in enumerate(layers):
        if checkpointing:
            layers[index] = layer = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    return module


def frozen(folder: Path, ranks: int, device: torch.device, dtype: torch.dtype) -> Policy:
    """A model that is only asked: reference or teacher, kept in the dtype it computes in."""
    policy = shard(Policy(load_model(folder, dtype)), ranks, device, dtype)
    return policy.requires_grad_(False)
