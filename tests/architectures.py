"""Tiny random models of the common decoder architectures, by name; head sizes and widths are such that vLLM serves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WINDOW = 8
BASE: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.08,
    "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None,
}  # fmt: skip
HEAD = {"head_dim": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"]
# name: (model type, options)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False, **HEAD}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, **HEAD}),
    "mistral": ("mistral", {"sliding_window": WINDOW, **HEAD}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": None, **HEAD}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, **HEAD}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, **HEAD}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True, **EXPERTS, **HEAD}),
    "gemma": ("gemma", {"initializer_range": 0.04, **HEAD}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
                          "final_logit_softcapping": 3.0, "layer_types": ALTERNATING, **HEAD}),
    "gemma3": ("gemma3_text", {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "num_hidden_layers": 4,
                               "layer_types": [*["sliding_attention"] * 3, "full_attention"], **HEAD}),
    "gpt-oss": ("gpt_oss", {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
                            "layer_types": ALTERNATING, **HEAD}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "olmoe": ("olmoe", {**EXPERTS}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "glm4": ("glm4", {"attention_bias": True, **HEAD}),
    "glm4-moe": ("glm4_moe", {**LATENT, "num_key_value_heads": 2, "use_qk_norm": True, **HEAD}),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                            "attention_multiplier": 0.3}),
    "granite-moe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0,
                                   "embedding_multiplier": 3.0, "attention_multiplier": 0.3}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW, "layer_types": ALTERNATING, "logit_scale": 0.5, **HEAD}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    "exaone4": ("exaone4", {"sliding_window": WINDOW, "layer_types": ALTERNATING, **HEAD}),
    "seed-oss": ("seed_oss", {**HEAD}),
    "ernie4.5": ("ernie4_5", {**HEAD}),
    "hunyuan": ("hunyuan_v1_dense", {**HEAD}),
    "ernie4.5-moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, **HEAD}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "ministral3": ("ministral3", {**HEAD}),
}  # fmt: skip


def make_architecture(folder: Path, name: str, seed: int = 0) -> Path:
    """Saves the architecture's model: random weights, and norms, biases and sinks too, which would start at one or zero."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, options = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(BASE | options)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder
