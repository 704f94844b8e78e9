"""Kernels that cannot be had: each combination refused with its reason and its fix. Imports no torch."""

from __future__ import annotations

from vime.config.sections import Config


def kernel_faults(config: Config, device: str) -> list[str]:
    """One line a fault; ``device`` is "auto" where it is not known yet."""
    trainer, faults = config.trainer, []
    asked = {
        'attention = "flash"': trainer.attention == "flash",
        "compile = true": trainer.compile is True,
        'kernels = "liger"': trainer.kernels == "liger",
    }
    if device == "cpu":
        faults += [
            f"trainer.{option} on a CPU: it is for GPUs; set trainer.{option.split()[0]} to its default, or trainer.device to "
            "cuda"
            for option, given in asked.items()
            if given
        ]
    if trainer.attention == "flash" and config.model.dtype == "float32":
        faults.append(
            'trainer.attention = "flash" with model.dtype = "float32": flash kernels compute in bfloat16; set '
            'trainer.attention = "auto" or model.dtype = "bfloat16"'
        )
    if trainer.compile is True and trainer.tensor_parallel > 1:
        faults.append(
            f"trainer.compile = true with trainer.tensor_parallel = {trainer.tensor_parallel}: the ranks' sums inside a layer "
            'are not compiled; set trainer.compile = "auto"'
        )
    if trainer.compile is True and trainer.activation_checkpointing == "selective":
        faults.append(
            'trainer.compile = true with trainer.activation_checkpointing = "selective": which results are kept cannot be chosen '
            'inside compiled code; set trainer.compile = "auto", or trainer.activation_checkpointing to "full" or "none"'
        )
    if trainer.compile is True and trainer.kernels == "liger":
        faults.append(
            'trainer.compile = true with trainer.kernels = "liger": both fuse the same operations; set one of them to its '
            "default"
        )
    return faults
