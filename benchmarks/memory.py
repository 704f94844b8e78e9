"""Predicted against measured memory of a training step, for random models of real shapes; downloads nothing.

    python benchmarks/memory.py [--shape qwen3-0.6b] [--only full] [--json FILE]

On a GPU measured is torch.cuda.max_memory_allocated, on a CPU the allocations that torch's profiler counts. Every setting is
trained for two steps of two full micro-batches, in one rank; the second step is measured.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from vime.config.sections import Config
from vime.training import memory
from vime.training.kernels import choose
from vime.training.learner import Learner
from vime.training.mesh import Mesh
from vime.training.packed import FLASH, NAME
from vime.training.parallel import parallelize
from vime.training.policy import Policy

SHAPES: dict[str, Any] = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=32768,
    ),
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=32768,
    ),
    "tiny": Qwen3Config(
        vocab_size=1024, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    ),
}  # fmt: skip
MODES = ("none", "selective", "full")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row: tokens of a micro-batch, of each sequence, and what [trainer] has beside."""

    name: str
    tokens: int
    length: int
    trainer: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.name} {self.tokens}x{self.length}"


def settings(shape: str) -> list[Setting]:
    if shape == "tiny":
        return [Setting(mode, 1024, 256, {"activation_checkpointing": mode}) for mode in MODES]
    rows = [
        Setting(mode, tokens, length, {"activation_checkpointing": mode})
        for mode in MODES
        for tokens, length in ((4096, 512), (8192, 2048), (8192, 8192), (32768, 512))
    ]
    more: list[dict[str, Any]] = [
        {"attention": "sdpa", "compile": False},
        {"activation_checkpointing": "none", "compile": False},
        {"cpu_offload": "optimizer"},
        {"cpu_offload": "all"},
        {"master_dtype": "bfloat16"},
        {"optimizer": "adamw_8bit"},
    ]
    full = {"activation_checkpointing": "full"}
    return rows + [
        Setting(" ".join(f"{name} {value}" for name, value in one.items()), 4096, 512, full | one) for one in more
    ]


def counted(device: torch.device, command: Callable[[], None], before: int) -> int:
    """The most bytes in tensors during ``command``; ``before`` of them were there when it began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        command()
        return torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        command()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = top = before
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top


def measure(shape: str, setting: Setting, device: torch.device) -> tuple[memory.Prediction, int]:
    """The prediction of a row, and the bytes measured; in a process group of one."""
    with tempfile.TemporaryDirectory() as folder:
        SHAPES[shape].save_pretrained(folder)
        config = Config.model_validate(
            {
                "model": {"path": folder},
                "data": {"source": "none"},
                "rollout": {"max_tokens": setting.length},
                "trainer": {"tokens_per_micro_batch": setting.tokens, **setting.trainer},
            }
        )
        prediction = memory.predict(config, device)
    section, kernels = config.trainer, choose(config, device)
    with device:
        shapes = {
            "attn_implementation": FLASH if kernels.flash else NAME,
            "dtype": getattr(torch, section.master_dtype),
        }
        module = Policy(AutoModelForCausalLM.from_config(copy.deepcopy(SHAPES[shape]), **shapes))
    offload = section.cpu_offload == "all"
    mesh = Mesh(section, device.type)
    mode = section.activation_checkpointing
    module = parallelize(module, mesh, device, torch.bfloat16, mode, offload, compiled=kernels.compile)
    learner = Learner("policy", module, 1e-6, section, mesh, 0)
    row = memory.moved(memory.row_of(setting.tokens, setting.length), device)

    def step() -> None:
        for _ in range(2):
            module(row, 1.0, section.logprob_chunk)[0].sum().backward()
        learner.step(10)

    step()
    moments = [t for state in learner.optimizer.state.values() for t in state.values()]
    lying = sum(tensor.numel() * tensor.element_size() for tensor in [*module.parameters(), *moments])
    return prediction, counted(device, step, lying)


def report(shape: str, setting: Setting, device: torch.device) -> dict[str, Any]:
    """Prints a row and gives it whole."""
    row = {"shape": shape, **dataclasses.asdict(setting)}
    print(f"{shape:<14}{setting.label:<36}", end="", flush=True)
    try:
        prediction, measured = measure(shape, setting, device)
    except (RuntimeError, ImportError) as error:
        print(str(error).splitlines()[0][:100], flush=True)
        return {**row, "error": str(error)}
    numbers = "".join(f"{size / memory.GIB:10.3f}" for size in (prediction.total, measured))
    print(f"{numbers}{prediction.total / measured - 1:+9.1%}  {prediction.largest}, {prediction.moment}", flush=True)
    return {**row, **dataclasses.asdict(prediction), "predicted": prediction.total, "measured": measured}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--shape", choices=list(SHAPES), help="default: both real ones")
    arguments.add_argument("--only", default="", help="rows whose name begins so")
    arguments.add_argument("--json", type=Path, help="write all there")
    given = arguments.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    print(
        f"{'model':<14}{'setting':<36}{'predicted':>10}{'measured':>10}{'':>9}  largest part, moment of the peak; GiB"
    )
    rows = []
    for shape in [given.shape] if given.shape else ["smollm2-135m", "qwen3-0.6b"]:
        for setting in settings(shape):
            if setting.label.startswith(given.only):
                rows.append(report(shape, setting, device))
                gc.collect()
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
