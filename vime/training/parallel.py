"""How a model is spread over ranks: one recipe, which is applied to any transformers model from outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from vime.training.checkpointing import checkpointed
from vime.training.kernels import compile_layers
from vime.training.mesh import Mesh
from vime.training.stored import fill, hollow
from vime.training.tensor_parallel import SplitRefused, split_tensors


def parallelize(
    module: Any,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    checkpointing: str = "none",
    offload: bool = False,
    compiled: bool = False,
) -> Any:
    """Splits matrices over the tensor ranks, then (compiles, checkpoints and) shards each decoder layer, then the rest as one
    unit; computes in ``dtype``. Context parallelism needs nothing here: attention does it (``packed``).

    What is not read yet is read at the end, each rank its own pieces, so that none ever holds the whole model; they lie on the
    device or, with ``offload``, in the host's memory.
    """
    check_sizes(module.decoder.config.get_text_config(), mesh)
    module.mesh, module.compiled = mesh, compiled
    stored = hollow(module)
    if mesh.tensors > 1:
        split_tensors(module.decoder, mesh)
    options: Any = {
        "mesh": mesh.sharding,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy(),
    }
    layers = decoder_layers(module.decoder)
    if compiled:
        compile_layers(layers)
    for index, layer in enumerate(layers):
        layers[index] = layer = checkpointed(layer, checkpointing)
        fully_shard(layer, **options)
    fully_shard(module, reshard_after_forward=False, **options)
    fill(module, stored, torch.device("cpu") if offload else device)
    return module


def decoder_layers(decoder: Any) -> nn.ModuleList:
    """The decoder's layers, whatever their list is called: ``layers``, ``h``, ``blocks``."""
    count = decoder.config.num_hidden_layers
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise ValueError(f"{type(decoder).__name__} has no list of {count} layers")


def check_sizes(config: Any, mesh: Mesh) -> None:
    """SplitRefused where heads cannot be divided."""
    heads, kept = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    n, c = mesh.tensors, mesh.contexts
    if heads % n or kept % n:
        fits = [k for k in range(1, kept + 1) if not kept % k and not heads % k]
        raise SplitRefused(
            f"trainer.tensor_parallel = {n} does not divide the model's {heads} attention and {kept} key/value heads; "
            f"sizes that fit: {fits}"
        )
    heads, kept = heads // n, kept // n
    fits = [k for k in range(1, heads + 1) if not heads % k and (not kept % k or not k % kept)]
    if c not in fits:
        raise SplitRefused(
            f"trainer.context_parallel = {c} does not fit {heads} attention and {kept} key/value heads"
            f"{f' (of each of {n} tensor ranks)' if n > 1 else ''}; sizes that fit: {fits}"
        )
