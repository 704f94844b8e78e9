"""Trains the same batches under many splits, in one process a rank: python -m tests.splits RANKS FOLDER [KIND ...]

A case is a model and a split: every split of the kinds that are named; without names every split of the first kinds, and of the
others those that join two. What it came to (losses, gradients of the first step, weights after the last) is written by
rank 0 as ``FOLDER/KIND-SPLIT.safetensors``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file

from tests.engines import VOCABULARY, engine_config, note_gradients, plan_each, put, random_groups, routed, weights
from vime.config.sections import Config
from vime.store.shared_memory import SharedMemoryStore
from vime.training.engine import TorchEngine

STEPS = 5
SPLITS: dict[str, dict[str, int]] = {
    "one": {"ranks": 1},
    "tp2": {"ranks": 2, "tensor_parallel": 2},
    "cp2": {"ranks": 2, "context_parallel": 2},
    "dp4": {"ranks": 4, "replicas": 4},
    "fsdp4": {"ranks": 4},
    "cp4": {"ranks": 4, "context_parallel": 4},
    "fsdp2-tp2": {"ranks": 4, "tensor_parallel": 2},
    "fsdp2-cp2": {"ranks": 4, "context_parallel": 2},
    "hsdp2x2": {"ranks": 4, "replicas": 2},
    "tp2-cp2": {"ranks": 4, "tensor_parallel": 2, "context_parallel": 2},
}
ALGORITHM = {"objective": "policy_gradient", "entropy_coef": 0.01}  # of ppo the loss would be that of any weights
BALANCED = {**ALGORITHM, "router_aux_coef": 0.5}
WIDE = {"old_logprobs": "behaviour", "entropy_coef": 0.01, "clip_low": 1.0, "clip_high": 99.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # by name: the model, and further sections of the configuration
    "tied": ("tied", {}),
    "untied": ("untied", {}),
    "moe": ("moe", {}),
    "fused": ("fused", {}),
    "lora": ("untied", {"lora": {"rank": 4, "alpha": 8}}),
    "moe-balanced": ("moe", {"algorithm": BALANCED}),
    "moe-replayed": ("moe", {"algorithm": {**BALANCED, "router_replay": "server"}}),
    "critic": ("tied", {"algorithm": {**ALGORITHM, "advantage": "gae"}, "critic": {"learning_rate": 1e-3}}),
    "gspo": ("untied", {"algorithm": {**WIDE, "objective": "gspo", "reduction": "sequence"}}),
    "clip_cov": ("untied", {"algorithm": {**WIDE, "objective": "clip_cov", "cov_low": -99, "cov_fraction": 0.3}}),
    "row by row": ("untied", {"trainer": {"tokens_per_micro_batch": 1}}),
    "one row": ("untied", {"trainer": {"tokens_per_micro_batch": 4096}}),
}
THOROUGH = ("tied", "moe")
JOINING = ("one", "hsdp2x2", "tp2-cp2")
LIKE = {"row by row": "untied", "one row": "untied"}  # whose results must be the same


def make_models(folder: Path) -> None:
    """Random models of every kind: norms that are not all ones, biases in the tied one; the fused one (Phi-3) has queries, keys
    and values in one matrix, gates beside what they gate in another."""
    from transformers import AutoModelForCausalLM, Phi3Config, Qwen3Config, Qwen3MoeConfig

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    configs = {
        "tied": Qwen3Config(**shape, tie_word_embeddings=True, attention_bias=True),
        "untied": Qwen3Config(**shape, tie_word_embeddings=False),
        "moe": Qwen3MoeConfig(
            **shape, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
        ),
        "fused": Phi3Config(**{name: value for name, value in shape.items() if name != "head_dim"}),
    }
    for kind, config in configs.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(folder / kind)


def configuration(folder: Path, kind: str, split: str) -> Config:
    trainer = {
        "learning_rate": 1e-3,
        "eps": 1e-8,
        "max_grad_norm": 1.0,
        "tokens_per_micro_batch": 40,
        "compile": False,
        **SPLITS[split],
    }
    model, sections = KINDS[kind]
    sections = {"algorithm": ALGORITHM, **sections, "trainer": trainer | sections.get("trainer", {})}
    return engine_config(folder / model, **sections)


def cases(kinds: Collection[str] = ()) -> list[tuple[str, str]]:
    return [
        (kind, split) for kind in kinds or KINDS for split in SPLITS if kinds or kind in THOROUGH or split in JOINING
    ]


def train(
    config: Config, store: SharedMemoryStore, outcomes: list[list[Any]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Losses [STEPS], gradients of the first step and weights after the last, by name."""
    engine = TorchEngine(config, store, device)
    engine.load(config.model.path, None)
    noted = note_gradients(engine.policy)
    losses = [engine.train([update], STEPS)["metrics"]["train/loss"] for update in plan_each(config, outcomes)]
    result = {"losses": torch.tensor(losses, dtype=torch.float64)}
    result |= {f"gradient.{name}": gradient for name, gradient in noted[0].items()}
    learned = {name: weight for name, weight in weights(engine.policy.module).items() if name in noted[0]}
    if engine.critic is not None:
        learned |= {f"critic.{name}": weight for name, weight in weights(engine.critic.module).items()}
    return result | {f"weight.{name}": weight for name, weight in learned.items()}


def rank_main(rank: int, ranks: int, folder: Path, kinds: list[str]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    cuda = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=f"file://{folder}/meeting-{ranks}",
        rank=rank,
        world_size=ranks,
    )
    store = SharedMemoryStore(folder / f"store-{ranks}-{rank}")
    groups = [random_groups(step, [[1, 1, 2], [1, 1], [2, 1]], first=3 * step) for step in range(STEPS)]
    outcomes = [put(store, routed(step, number, 2, 4)) for number, step in enumerate(groups)]
    for kind, split in cases(kinds):
        if SPLITS[split]["ranks"] != ranks:
            continue
        found = train(configuration(folder, kind, split), store, outcomes, device)
        if rank == 0:
            save_file(
                {name: tensor.cpu().contiguous() for name, tensor in found.items()},
                folder / f"{kind}-{split}.safetensors",
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank_main, (int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]), int(sys.argv[1]))
