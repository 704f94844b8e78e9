"""Tiny random models of each architecture from trainer to vLLM: sync, probe, one step, sync, probe.

    python -m benchmarks.models_table [NAME ...] [--out FILE]

From the root of the repository; float32, on the CPU. vLLM runs in a process of this script, one architecture after another,
with vime's worker extension (`tests/test_served_models.py` does the same over HTTP for some). Prints a row as soon as it is
measured and appends it to FILE as JSON. Columns:

plain, gradient: largest difference of log-probabilities between packed rows and the plain model; difference of gradients,
    relative to their norm.
before, start, step: mean difference of log-probabilities between vLLM and trainer before the first sync (other random weights),
    after it, and after a training step and another sync.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip

import torch
from vllm import LLM, SamplingParams

from tests.architectures import ARCHITECTURES, make_architecture
from tests.engines import distance, load_engine, load_policy, make_sample, plain_model, put
from tests.test_models import GROUPS
from tests.test_packed import gradients, separately, together
from tests.tiny import make_config, make_tokenizer
from vime.loop import plan_updates
from vime.store.shared_memory import SharedMemoryStore
from vime.training.engine import TorchEngine

PROMPTS = [[10, 20, 30, 40, 50], [7, 8, 9], list(range(60, 90))]


def against_plain(folder: Path) -> dict[str, float]:
    plain, policy = plain_model(folder), load_policy(folder).train()
    mine, theirs = together(policy, GROUPS), separately(plain, GROUPS)
    apart = (mine[0] - theirs[0]).abs().max().item()
    return {"logprob": apart, "gradient": distance(gradients(policy.model, *mine), gradients(plain, *theirs))}


def start(folder: Path) -> LLM:
    """vLLM with the flags of ``vime.inference.server``."""
    llm = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=256,
        max_num_seqs=16,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        worker_extension_cls="vime.inference.worker_extension.WorkerExtension",
        weight_transfer_config={"backend": "vime_files"},
    )
    llm.init_weight_transfer_engine({"init_info": {}})
    return llm


class Vllm:
    """vLLM in a process of its own: it makes some of transformers' classes its own, which the trainer must not meet."""

    def __init__(self, folder: Path) -> None:
        self.pipe, its = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=serve, args=(folder, its))
        self.process.start()
        its.close()

    def ask(self, command: str, *arguments: Any) -> Any:
        self.pipe.send((command, *arguments))
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def serve(folder: Path, pipe: Any) -> None:
    """Carries out what comes through the pipe; a fault is answered as a RuntimeError."""
    llm = None
    while True:
        command, *arguments = pipe.recv()
        try:
            llm = llm or start(folder)
            pipe.send({"sample": sample, "load": load}[command](llm, *arguments))
        except Exception as error:
            traceback.print_exc()
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def load(llm: LLM, folder: str) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": folder}})
    llm.finish_weight_update()
    llm.reset_prefix_cache()


def sync(llm: Vllm, engine: TorchEngine, folder: Path) -> None:
    engine.export(str(folder), "float32")
    llm.ask("load", str(folder))


def sample(llm: LLM) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt, response and its log-probabilities, two of each prompt."""
    sampling = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, logprobs=0)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    rows = []
    for prompt, (output,) in zip(prompts, (one.outputs for one in found), strict=True):
        ids = list(output.token_ids)
        rows.append((prompt, ids, [place[i].logprob for i, place in zip(ids, output.logprobs, strict=True)]))
    return rows


def probe(llm: Vllm, engine: TorchEngine) -> float:
    """Mean absolute difference of the log-probabilities of what vLLM samples."""
    rows = llm.ask("sample")
    mine = engine.logprobs([{"prompt_ids": prompt, "response_ids": ids} for prompt, ids, _ in rows])
    apart = [
        abs(a - b) for values, (*_, theirs) in zip(mine, rows, strict=True) for a, b in zip(values, theirs, strict=True)
    ]
    return sum(apart) / len(apart)


def measure(name: str, folder: Path, pipe: Any) -> None:
    """Sends the architecture's row, each value as soon as it is measured."""
    llm = Vllm(folder / "0")
    try:
        served, other = (make_architecture(folder / str(seed), name, seed) for seed in (0, 1))
        make_tokenizer().save_pretrained(served)
        for key, value in against_plain(served).items():
            pipe.send((key, value))
        config, store = make_config(other), SharedMemoryStore(folder / "store")
        engine = load_engine(config, store)
        pipe.send(("before", probe(llm, engine)))
        sync(llm, engine, folder / "v1")
        pipe.send(("start", probe(llm, engine)))
        rows = llm.ask("sample")
        samples = [make_sample(*row, reward=number % 2, rollout=number % 2) for number, row in enumerate(rows)]
        outcomes = put(store, {group: samples[2 * group : 2 * group + 2] for group in range(len(PROMPTS))})
        pipe.send(("norm", engine.train(plan_updates(outcomes, config), 1)["metrics"]["train/grad_norm"]))
        sync(llm, engine, folder / "v2")
        pipe.send(("step", probe(llm, engine)))
    finally:
        llm.stop()


def attempt(name: str, folder: Path, pipe: Any) -> None:
    try:
        measure(name, folder, pipe)
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))
    os._exit(0)  # no clean-up of what vLLM left


def row_of(name: str) -> dict[str, Any]:
    """Measured in a process of its own."""
    row: dict[str, Any] = {"name": name, "model": ARCHITECTURES[name][0]}
    started = time.perf_counter()
    mine, its = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        child = multiprocessing.get_context("fork").Process(target=attempt, args=(name, Path(folder), its))
        child.start()
        its.close()
        try:
            while True:
                row |= [mine.recv()]
        except EOFError:
            child.join()
    return row | {"seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ARCHITECTURES)}; all if none is given")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("logprob", "gradient", "before", "start", "step")
    print(f"{'':16}" + "".join(f"{column:>10}" for column in ("plain", *columns[1:], "seconds")))
    for name in options.names or ARCHITECTURES:
        row = row_of(name)
        cells = "".join(f"{row[key]:10.1e}" if key in row else f"{'-':>10}" for key in columns)
        print(f"{name:16}{cells}{row['seconds']:10.0f}  {' '.join(row.get('error', '').split())[:200]}", flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
