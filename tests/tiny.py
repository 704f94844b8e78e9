"""Tiny real models and configurations for tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vime.config.sections import Config
from vime.contract.inputs import make_tokenizer
from vime.rewards import RewardError
from vime.rewards.load import numbers_of
from vime.rewards.scoring import Scored
from vime.rollout.generate import Context, Score
from vime.sample import Sample, Task

__all__ = ["make_config", "make_model", "make_tokenizer", "scored_by"]


def make_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """A random two-layer model: "tied" and "untied" (Qwen3), or "moe" (Qwen3-MoE, untied)."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    shape: dict[str, Any] = {
        "vocab_size": 288,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": kind == "tied",
        "initializer_range": 0.08,
        "eos_token_id": 256,
        "bos_token_id": None,
    }
    if kind == "moe":
        config: Any = Qwen3MoeConfig(
            **shape, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
        )
    else:
        config = Qwen3Config(**shape)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_config(model: Path, **sections: dict[str, Any]) -> Config:
    """A configuration for a tiny model; sections are merged into the base."""
    tree: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"source": "reasoning-gym:chain_sum", "size": 8},
        "vllm": {"max-model-len": 256, "max-num-seqs": 16},
        "trainer": {"threads": 1, "device": "cpu"},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return Config.model_validate(tree)


def scored_by(reward: Callable[[Task, str], Any]) -> Score:
    """A ``Context.score`` of a test's own function, called here instead of in a worker."""

    async def score(context: Context, task: Task, sample: Sample) -> Scored:
        try:
            result = reward(task, sample.text)
            numbers = numbers_of(await result if inspect.isawaitable(result) else result) or {}
            return numbers.pop("reward"), numbers
        except Exception as error:
            raise RewardError(f"{type(error).__name__}: {error}") from None

    return score
