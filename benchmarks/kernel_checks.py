"""Checks of the trainer's kernels on one CUDA GPU: each line a comparison, its figure and its bound; exit status 1 if one fails.

    python benchmarks/kernel_checks.py

- flash attention of packed rows (shared prompts, grouped heads, windows, sinks) in bfloat16 against plain attention in float64;
- log-probabilities and gradients of whole random models under each choice of kernels, against the same engine on SDPA in
  float32: fused kernels in float32 to 1e-5, all of them in bfloat16 as near as SDPA in bfloat16;
- nothing between the first micro-batch's forward pass and the end of the last one's backward pass makes the host wait;
- row lengths compile nothing again.
"""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch._dynamo.utils import counters
from trainer_speed import MODELS, NO_IDS, Case, engine_of, stored
from transformers import Qwen3MoeConfig

from vime.training.batch import Sums
from vime.training.flash import flash_attention
from vime.training.packed import Packed, pack
from vime.training.pieces import sharded_parameters
from vime.training.plain import distance, gradients

DEVICE = torch.device("cuda")
FAILED: list[str] = []
SHAPES: dict[str, Any] = {
    "qwen3": MODELS["tiny"],
    "llama": transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, **NO_IDS),
    "qwen3_moe": Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        norm_topk_prob=True, **NO_IDS),
}  # fmt: skip


def report(name: str, figure: float, bound: float) -> None:
    good = figure <= bound
    print(f"{'ok    ' if good else 'FAILED'} {name}: {figure:.3g} (bound {bound:.3g})", flush=True)
    if not good:
        FAILED.append(name)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def random_row(seed: int, longest: int) -> Packed:
    draw = random.Random(seed)
    groups = [
        ([1] * draw.randint(1, longest), [[2] * draw.randint(1, longest) for _ in range(draw.randint(1, 5))])
        for _ in range(4)
    ]
    return pack(groups, DEVICE)


def plain_attention(
    q: Any, k: Any, v: Any, packed: Packed, scale: float, window: int | None, sinks: Any
) -> torch.Tensor:
    """In float64 by the whole matrix of scores."""
    tokens = q.shape[2]
    seen = torch.zeros(tokens, tokens, dtype=torch.bool, device=DEVICE)
    for (start, length), own in packed.layout.runs.groups:
        for first, count in [(start, length), *own]:
            seen[first : first + count, start : start + length] = True
            seen[first : first + count, first : first + count] = True
    place = packed.position_ids[0]
    seen = seen.tril() & (place[:, None] - place[None] < (window or tokens))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    if sinks is None:
        return (scores.softmax(-1) @ v).transpose(1, 2)
    column = sinks[None, :, None, None].expand(1, -1, tokens, 1)
    return (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)


def check_attention() -> None:
    for size, window, with_sinks in (
        (64, None, False),
        (128, None, False),
        (128, 100, False),
        (64, 33, True),
        (64, None, True),
    ):
        packed = random_row(size, 300)
        tokens = packed.input_ids.shape[1]
        shapes = [(1, 8, tokens, size), (1, 2, tokens, size), (1, 2, tokens, size)] + [(8,)] * with_sinks
        exact = [torch.randn(s, device=DEVICE).bfloat16().double().requires_grad_() for s in shapes]
        rough = [x.detach().bfloat16().requires_grad_() for x in exact]
        weights = torch.randn(1, tokens, 8, size, device=DEVICE)
        scale = size**-0.5
        q, k, v, *sinks = exact
        wanted = plain_attention(q, k, v, packed, scale, window, sinks[0] if sinks else None)
        q, k, v, *sinks = rough
        found = flash_attention(q, k, v, packed.layout.runs, scale, window, sinks[0] if sinks else None)
        slopes = [torch.autograd.grad((o * weights).sum(), x) for o, x in ((found, rough), (wanted, exact))]
        name = f"flash attention, heads of {size}, window {window}, sinks {with_sinks}"
        report(f"{name}: output", relative(found, wanted), 6e-3)
        report(f"{name}: gradients", max(relative(a, b) for a, b in zip(*slopes, strict=True)), 1.2e-2)


def outcome(kind: str, dtype: str, trainer: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities and gradients of one update of several micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(SHAPES[kind], Path(folder), DEVICE, trainer, dtype)
        with torch.no_grad():  # norms too, which would all be one
            for _, parameter in sharded_parameters(engine.policy.module):
                here = parameter.to_local()
                here += 0.02 * torch.sin(torch.arange(here.numel(), device=DEVICE).view(here.shape))
        (batches,), _ = engine.prepare(stored(Case("", 3, 4, 150, 90), 512, engine.store, budget=600))
        logprobs = []
        for batch in batches:
            output = engine.policy_pass(batch)
            engine.loss(batch, output, Sums()).backward()
            logprobs.append(output[0].detach().double())
        return torch.cat(logprobs), gradients(sharded_parameters(engine.policy.module), True)


def check_models() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for kind in ("qwen3", "llama"):
        wanted = outcome(kind, "float32", {"compile": False})
        for name, trainer in {"compile": {}, "liger": {"kernels": "liger"}}.items():
            found = outcome(kind, "float32", trainer)
            report(f"{kind}, float32, {name}: log-probabilities", (found[0] - wanted[0]).abs().max().item(), 1e-5)
            report(f"{kind}, float32, {name}: gradients", distance(found[1], wanted[1]), 1e-5)
        rough = outcome(kind, "bfloat16", {"attention": "sdpa", "compile": False})
        nearest = [(rough[0] - wanted[0]).abs().mean().item(), distance(rough[1], wanted[1])]
        for name, trainer in {
            "flash": {"compile": False},
            "flash, compile": {},
            "flash, liger": {"kernels": "liger"},
        }.items():
            found = outcome(kind, "bfloat16", trainer)
            report(
                f"{kind}, bfloat16, {name}: log-probabilities",
                (found[0] - wanted[0]).abs().mean().item(),
                1.3 * nearest[0],
            )
            report(f"{kind}, bfloat16, {name}: gradients", distance(found[1], wanted[1]), 1.3 * nearest[1])


def check_waits(kind: str, trainer: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(SHAPES[kind], Path(folder), DEVICE, trainer, "bfloat16")
        updates = stored(Case("", 3, 4, 150, 90), 512, engine.store, budget=600)
        engine.train(updates, 10)
        (batches,), _ = engine.prepare(updates)
        engine.policy.clear()
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine._accumulate(batches, 1, False, Sums())
            waits = 0
        except RuntimeError as error:
            print(str(error)[:200])
            waits = 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
        report(f"{kind}, {trainer or 'default'}: waits of the host between micro-batches", waits, 0)


def check_recompiles() -> None:
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(SHAPES["qwen3"], Path(folder), DEVICE, {}, "bfloat16")
        frames = []
        for seed in range(12):
            packed = random_row(seed, 40 * (seed + 1))
            logprobs, entropy = engine.forward(engine.policy.module, packed)
            (logprobs.sum() + entropy.sum()).backward()
            with torch.no_grad():
                engine.forward(engine.policy.module, packed)
            frames.append(counters["frames"]["total"])
        print("frames compiled after each of 12 rows of different lengths:", frames)
        report("frames compiled after the third row", frames[-1] - frames[2], 0)


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "transformers", transformers.__version__)
    torch.manual_seed(0)
    check_attention()
    check_models()
    for trainer in ({}, {"compile": False}, {"attention": "sdpa", "compile": False}):
        check_waits("qwen3", trainer)
    check_waits("qwen3_moe", {"compile": False})
    check_recompiles()
    dist.destroy_process_group()
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
