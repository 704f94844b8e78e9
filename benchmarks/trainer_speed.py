"""Speed of one optimizer step (forward, backward, gradient clipping, AdamW) of the torch engine and of a plain transformers loop.

    python benchmarks/trainer_speed.py [--models smollm2 qwen3-0.6b qwen3-4b] [--steps 5] [--json FILE]

Random weights, made on the device from the shapes below; random tokens. Everything is bfloat16 compute, float32 master
weights and moments, fused AdamW. Needs one CUDA GPU with about 100 GB for the largest model, and prints one table.

FLOPs of a step: 6 x (weights of matrices without the embedding) a token, 6 x (weights of the output head) a predicted token,
12 x layers x heads x head_dim for each pair of a query and a key it sees; recomputation does not count. MFU is their rate
over the card's dense bfloat16 peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from vime.config.sections import Config
from vime.sample import Sample, VersionSpan
from vime.store.shared_memory import SharedMemoryStore
from vime.training.engine import TorchEngine
from vime.training.kernels import apply_liger, choose
from vime.training.learner import Learner
from vime.training.packed import FLASH, NAME
from vime.training.parallel import parallelize
from vime.training.plan import Row, plan, plan_json, weigh
from vime.training.policy import Policy

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16 FLOP/s by the data sheets
NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MODELS: dict[str, PretrainedConfig] = {
    "tiny": Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=40960, tie_word_embeddings=True, **NO_IDS),
    "smollm2": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, **NO_IDS),
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True, **NO_IDS),
    "qwen3-4b": Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True, **NO_IDS),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """``groups`` prompts with ``responses`` responses each."""

    name: str
    groups: int
    responses: int
    prompt: int
    response: int

    @property
    def predicted(self) -> int:
        return self.groups * self.responses * self.response

    def work(self, shared: bool) -> tuple[int, int]:
        """Tokens, and pairs of a query and a key, computed with shared prompts or with each sequence alone."""
        p, b, n = self.prompt, self.response - 1, self.groups * self.responses
        if not shared:
            return n * (p + b), n * (p + b) * (p + b + 1) // 2
        return self.groups * p + n * b, self.groups * p * (p + 1) // 2 + n * (b * p + b * (b + 1) // 2)


def cases(tokens: int, lengths: list[int]) -> list[Case]:
    plain = [Case(f"{tokens // n} x {n}", tokens // n, 1, 1, n) for n in lengths]
    return [*plain, Case("2 x 8 x 512 on a prompt of 2048", 2, 8, 2048, 512)] if tokens >= 8192 else plain


def flops(shape: PretrainedConfig, case: Case, shared: bool) -> float:
    heads, size = (
        shape.num_attention_heads,
        getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads,
    )
    projections = shape.hidden_size * size * (2 * heads + 2 * shape.num_key_value_heads)
    layer = projections + 3 * shape.hidden_size * shape.intermediate_size
    tokens, pairs = case.work(shared)
    matrices = (
        6.0 * shape.num_hidden_layers * layer * tokens + 6.0 * shape.hidden_size * shape.vocab_size * case.predicted
    )
    return matrices + 12.0 * shape.num_hidden_layers * heads * size * pairs


def sequences(case: Case, vocabulary: int) -> list[tuple[list[int], list[list[int]]]]:
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=draw).tolist()

    return [(ids(case.prompt), [ids(case.response) for _ in range(case.responses)]) for _ in range(case.groups)]


Step = Callable[[], None]


# The engine


def engine_of(
    shape: PretrainedConfig, folder: Path, device: torch.device, trainer: dict[str, Any], dtype: str
) -> TorchEngine:
    """An engine as ``load`` makes it, its policy from a configuration instead of a folder."""
    section = {"device": device.type, "learning_rate": 1e-5, "tokens_per_micro_batch": 1 << 30, **trainer}
    config = Config.model_validate({
        "model": {"path": "-", "dtype": dtype}, "data": {"source": "-"}, "trainer": section,
        "algorithm": {"advantage": "constant", "objective": "policy_gradient"},
    })  # fmt: skip
    engine = TorchEngine(config, SharedMemoryStore(folder), device)
    kernels = choose(config, device)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            shape, dtype=torch.float32, attn_implementation=FLASH if kernels.flash else NAME
        )
    if kernels.liger:
        apply_liger(model)
    precision = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    policy = parallelize(Policy(model), engine.mesh, device, precision, compiled=kernels.compile)
    engine.policy = Learner("policy", policy, 1e-5, config.trainer, engine.mesh, 0)
    engine.reference = engine.teacher = engine.critic = engine.routers = engine.same_at = None
    return engine


def stored(case: Case, vocabulary: int, store: SharedMemoryStore, budget: int) -> Any:
    """The plan of one update of all the case's sequences, its micro-batches of at most ``budget`` tokens."""
    rows = []
    for number, (prompt, responses) in enumerate(sequences(case, vocabulary)):
        key, span = f"g{number}", (VersionSpan(0, 0, case.response),)
        store.put(key, [Sample(prompt, r, [-1.0] * len(r), span, "stop", "", reward=1.0) for r in responses])
        rows += [Row(key, i, i, case.prompt, case.response, case.response, 1.0) for i in range(case.responses)]
    return [plan_json(plan(weigh(rows, "token"), 1, budget, False, 1024))]


@contextmanager
def engine_steps(shape: PretrainedConfig, trainer: dict[str, Any]) -> Iterator[Callable[[Case, int], Step]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        engine = engine_of(shape, Path(folder), torch.device("cuda"), trainer, "bfloat16")

        def step_of(case: Case, tokens: int) -> Step:
            updates = stored(case, shape.vocab_size, engine.store, tokens)
            return lambda: engine.train(updates, 1000) and None

        yield step_of


# The plain loop


@contextmanager
def plain_steps(shape: PretrainedConfig, autocast: bool) -> Iterator[Callable[[Case, int], Step]]:
    """transformers' model and loss with its SDPA attention; sequences of equal length, so that no forward pass has padding.

    ``autocast``: float32 weights under torch.autocast, as transformers' Trainer has it; else bfloat16 weights, whose float32
    copies AdamW steps.
    """
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation="sdpa").train()
    masters = [p.detach().clone() for p in model.parameters()] if not autocast else list(model.parameters())
    if not autocast:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=1e-5, betas=(0.9, 0.95), fused=True)

    def optimize() -> None:
        weights = list(model.parameters())
        if not autocast:
            for master, weight in zip(masters, weights, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not autocast:
            torch._foreach_copy_([w.data for w in weights], masters)

    def step_of(case: Case, tokens: int) -> Step:
        whole = [
            [*prompt, *response] for prompt, responses in sequences(case, shape.vocab_size) for response in responses
        ]
        ids = torch.tensor(whole, device="cuda")
        labels = ids.clone()
        labels[:, : case.prompt] = -100
        inputs, labels = ids[:, :-1].contiguous(), labels[:, 1:].contiguous()
        rows = max(tokens // inputs.shape[1], 1)

        def step() -> None:
            for some, wanted in zip(inputs.split(rows), labels.split(rows), strict=True):
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    loss = model(input_ids=some, shift_labels=wanted, labels=wanted, use_cache=False).loss
                (loss * len(some) / len(inputs)).backward()
            optimize()

        return step

    yield step_of


# Measuring


VARIANTS: dict[str, Callable[[PretrainedConfig], Any]] = {
    "transformers, autocast": lambda shape: plain_steps(shape, True),
    "transformers, bf16 weights": lambda shape: plain_steps(shape, False),
    "vime sdpa": lambda shape: engine_steps(shape, {"attention": "sdpa", "compile": False}),
    "vime flash": lambda shape: engine_steps(shape, {"compile": False}),
    "vime flash, liger": lambda shape: engine_steps(shape, {"kernels": "liger"}),
    "vime flash, compile (default)": lambda shape: engine_steps(shape, {}),
}


def timed(step: Step) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(shape: PretrainedConfig, case: Case, variant: str, step: Step, steps: int) -> dict[str, Any]:
    """Two steps of warm-up, the first of which compiles, then the median of ``steps``."""
    frames = counters["frames"]["total"]
    first = timed(step)
    timed(step)
    torch.cuda.reset_peak_memory_stats()
    seconds = [timed(step) for _ in range(steps)]
    median, shared = statistics.median(seconds), variant.startswith("vime")
    peak = next((rate for name, rate in PEAKS.items() if name in torch.cuda.get_device_name()), float("nan"))
    return {
        "case": case.name,
        "variant": variant,
        "seconds": median,
        "spread": (max(seconds) - min(seconds)) / median,
        "predicted_per_s": case.predicted / median,
        "mfu": flops(shape, case, shared) / median / peak,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "first_s": first,
        "compiled_frames": counters["frames"]["total"] - frames,
    }


def clean() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def run(name: str, chosen: list[Case], variants: list[str], steps: int, tokens: int) -> list[dict[str, Any]]:
    shape, found = MODELS[name], []
    for variant in variants:
        try:
            with VARIANTS[variant](shape) as step_of:
                for case in chosen:
                    result = {"model": name, **measure(shape, case, variant, step_of(case, tokens), steps)}
                    found.append(result)
                    print(line(result), flush=True)
                    gc.collect()
        except torch.OutOfMemoryError as error:
            print(f"| {name} | {variant} | out of memory: {str(error)[:80]}", flush=True)
        clean()
    return found


HEAD = """| model | sequences | variant | step, ms | predicted tokens/s | MFU | peak, GB | first step, s | frames compiled |
|---|---|---|---|---|---|---|---|---|"""


def line(r: dict[str, Any]) -> str:
    return (
        f"| {r['model']} | {r['case']} | {r['variant']} | {r['seconds'] * 1e3:.0f} ± {r['spread'] * 50:.0f}% | "
        f"{r['predicted_per_s']:,.0f} | {r['mfu']:.1%} | {r['peak_gb']:.1f} | {r['first_s']:.1f} | {r['compiled_frames']} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["smollm2", "qwen3-0.6b", "qwen3-4b"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--micro-batch", type=int, help="tokens of a micro-batch at most; default: all of the step's")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "transformers", transformers.__version__)
    print(HEAD)
    found = []
    for name in args.models:
        found += run(name, cases(args.tokens, args.lengths), args.variants, args.steps, args.micro_batch or args.tokens)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
