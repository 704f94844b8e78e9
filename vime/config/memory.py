"""Settings of the trainer's memory that cannot work together. Imports no torch."""

from __future__ import annotations

from importlib.util import find_spec

from vime.config.sections import Config


def impossible_memory(config: Config) -> list[str]:
    """One line a fault."""
    trainer, faults = config.trainer, []
    if trainer.cpu_offload != "none" and trainer.device == "cpu":
        faults.append(
            f"trainer.cpu_offload = {trainer.cpu_offload!r} with trainer.device = 'cpu': all lies in the host's memory "
            'already; set cpu_offload = "none"'
        )
    if trainer.master_dtype != "float32" and config.lora.rank:
        faults.append(
            f"trainer.master_dtype = {trainer.master_dtype!r} with [lora]: the adapter is float32 and the model beside it has no "
            'float32 copy anyway; set master_dtype = "float32"'
        )
    if trainer.optimizer != "adamw":
        if find_spec("torchao") is None:
            faults.append(
                f"trainer.optimizer = {trainer.optimizer!r} needs torchao, which is not installed; run "
                '`pip install --no-deps torchao`, or set optimizer = "adamw"'
            )
        if trainer.master_dtype != "float32" or trainer.cpu_offload != "none":
            faults.append(
                f"trainer.optimizer = {trainer.optimizer!r} with master_dtype = {trainer.master_dtype!r} and cpu_offload = "
                f'{trainer.cpu_offload!r}: it takes float32 weights on the device; set master_dtype = "float32" and '
                'cpu_offload = "none", or optimizer = "adamw"'
            )
    return faults
