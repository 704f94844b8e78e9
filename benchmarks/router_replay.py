"""Router replay with a real vLLM on one NVIDIA GPU: how far server and trainer differ with and without the server's experts.

    python benchmarks/router_replay.py TOKENIZER DATA OUT      TOKENIZER: a model's folder; DATA: has train.jsonl

A Qwen3-MoE of random weights (8 layers, 32 experts of which 4 are chosen) in bfloat16 runs a few steps of the demo's job. The
differences of log-probabilities between server and trainer are those that the run itself reports. Its rewards are all zero, so
that the weights stay as they are.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

STEPS = 6


def make_model(tokenizer_folder: str, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    shape = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, moe_intermediate_size=128, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
        tie_word_embeddings=True, max_position_embeddings=2048, initializer_range=0.08, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def differences(model: Path, data: str, out: Path, replay: str) -> list[tuple[float, float]]:
    """Mean and largest difference of each step."""
    run = out / f"replay-{replay}"
    options = [
        "--run.dir", run, "--model.path", model, "--data.source", f"{data}/train.jsonl", "--data.options", "{}",
        "--data.template", "{prompt}", "--eval.sets", "{}", "--run.steps", STEPS, "--rollout.max_tokens", 64,
        "--rollout.filter", "none", "--checkpoint.every", 0, "--vllm.enforce-eager", "true", "--algorithm.router_replay", replay,
    ]  # fmt: skip
    command = [sys.executable, "-m", "vime.cli", "train", "examples/demo/config.toml", *map(str, options)]
    subprocess.run(command, check=True)
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = [event["metrics"] for event in events if event["kind"] == "step"]
    return [(s["train/logprob_abs_diff_mean"], s["train/logprob_abs_diff_max"]) for s in steps]


def main() -> None:
    tokenizer, data, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    model = out.absolute() / "moe"
    make_model(tokenizer, model)
    found = {replay: differences(model, data, out, replay) for replay in ("none", "server")}
    print("| router_replay | difference of a step: mean | largest | steps |\n|---|---|---|---|")
    for replay, steps in found.items():
        mean, largest = statistics.mean(mean for mean, _ in steps), max(largest for _, largest in steps)
        print(f"| {replay} | {mean:.4f} | {largest:.3f} | {len(steps)} |")


if __name__ == "__main__":
    main()
