"""Out of memory: said with the numbers and with the settings that help most."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable
from typing import Any

import torch

from vime.config.sections import Config
from vime.training.learner import EngineError
from vime.training.memory import GIB, Prediction, allocated, device_memory, predict

ASKED = re.compile(r"ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}


def is_out_of_memory(error: BaseException) -> bool:
    """torch's own error on a GPU; on a CPU it has none, only its message."""
    said = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def explains_memory(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command of the engine that says an allocation that failed as an EngineError with numbers and what to set."""

    @functools.wraps(command)
    def explaining(engine: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return command(engine, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            in_use, said = allocated(engine.device), str(error)
            traceback.clear_frames(error.__traceback__)  # gives back what the command held, for the prediction
            raise EngineError(explanation(engine, in_use, said)) from None

    return explaining


def explanation(engine: Any, in_use: int, said: str) -> str:
    config, device = engine.config, engine.device
    asked, amount = ASKED.search(said), "an allocation failed"
    if asked:
        amount = f"{float(asked[1]) * UNITS[asked[2]] / GIB:.3f} GiB more were asked for"
    used = f"{in_use / GIB:.3f} of {device_memory(device) / GIB:.3f} GiB were in use"
    text = f"out of memory in {engine.phase}: {amount}, {used}. "
    if config.algorithm.objective == "bradley_terry":  # predicted are policies, with their logits
        return text + advice(config, "activations", device)
    try:
        prediction = predict(config, device)
    except Exception as error:  # a prediction must not hide what happened
        return text + f"No prediction of it ({error}). {advice(config, 'activations', device)}"
    return text + summary(prediction, config) + advice(config, prediction.largest, device)


def summary(prediction: Prediction, config: Config) -> str:
    what = "sequence" if config.length_option == "batch.max_length" else "response"
    name = prediction.largest
    size = prediction.parts[name]
    return (
        f"Predicted at the peak, with {config.length_option} in a {what}: {prediction.total / GIB:.3f} GiB, of which {name} "
        f"{size / GIB:.3f}. "
    )


def advice(config: Config, largest: str, device: torch.device) -> str:
    """Two settings to change, those first that make the ``largest`` part smaller."""
    trainer = config.trainer
    tokens = ("tokens_per_micro_batch", trainer.tokens_per_micro_batch, max(1, trainer.tokens_per_micro_batch // 2))
    chunk = ("logprob_chunk", trainer.logprob_chunk, max(1, trainer.logprob_chunk // 2))
    recompute = ("activation_checkpointing", trainer.activation_checkpointing, "full")
    wishes: list[tuple[str, Any, Any]] = [("master_dtype", trainer.master_dtype, "bfloat16")]  # what lies still
    if device.type == "cuda":
        wishes = [("cpu_offload", trainer.cpu_offload, "all"), ("ranks", trainer.ranks, 2 * trainer.ranks), *wishes]
    if largest == "activations":
        wishes = []
    others = [recompute, tokens] if config.algorithm.objective == "bradley_terry" else [recompute, tokens, chunk]
    if largest == "logits chunk":
        wishes = [chunk, tokens]
    settings = [
        f"trainer.{name} = {_quoted(better)} (now {_quoted(now)})"
        for name, now, better in [*wishes, *others]
        if now != better
    ]
    return f"Set {', or '.join(list(dict.fromkeys(settings))[:2])}"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
