"""Activation checkpointing: what a decoder layer keeps for its backward pass and what it computes again.

- "none": everything is kept.
- "full": only the layer's input; its forward pass runs again (Chen et al., arXiv 1604.06174).
- "selective": what is dear to compute and cheap to keep, that is the attention's output and every second matrix product; the
  rest runs again. As torchtitan's op mode, which keeps the other half of the matrix products.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm")
ATTENTION = ("attention", "attn")  # in an operator's name, whichever kernel it is


def _selective() -> Any:
    """The contexts of one layer's forward pass and of its repetition; each counts its own matrix products."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator._schema.name
        if name in MATRIX_PRODUCTS:
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 0  # not the seventh: nobody needs a layer's last product again
        else:
            keep = any(word in name for word in ATTENTION)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def checkpointed(layer: nn.Module, mode: str) -> nn.Module:
    """The layer under ``mode``, one of trainer.activation_checkpointing's; its outputs and gradients are the same."""
    if mode == "none":
        return layer
    options = {"context_fn": _selective} if mode == "selective" else {}
    return checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)
