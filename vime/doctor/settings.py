"""A configuration on this machine: its model, data, functions, room for what it writes, and the servers that it names."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vime.config.algorithms import warnings
from vime.config.load import ConfigError, load
from vime.config.sections import Config
from vime.doctor import Finding, gib, guarded, judged, ok

MOST_PROMPTS = 1000
"""whose tokens are counted, evenly over the data"""
ASK_TIMEOUT_S = 10.0
BYTES = {"float32": 4, "bfloat16": 2}
MOMENTS = {"adamw": 0, "adamw_8bit": 1, "adamw_fp8": 1}  # bytes of each of the two; 0: of the weights' own dtype
EXCERPT = 300


def look(file: Path, overrides: Sequence[str]) -> Iterator[Finding]:
    try:
        config = load(file, overrides)
    except ConfigError as error:
        for line in str(error).splitlines():
            yield Finding("configuration", "fault", line)
        return
    yield ok("configuration", f"{file} is valid")
    for note in warnings(config):
        yield Finding("configuration", "warning", note)
    patient = Patient(config)
    for part, one in patient.looks().items():
        yield from guarded(part, one)


class Patient:
    """The configuration, with what earlier looks have found out for later ones."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path(config.model.path)
        self.parameters = 0
        self.tokenizer: Any = None

    def looks(self) -> dict[str, Any]:
        found = {
            "flags": self.flags,
            "model": self.model,
            "chat template": self.template,
            "data": self.data,
            "functions": self.functions,
            "rewards": self.rewards,
            "checkpoints": self.checkpoints,
            "shared memory": self.shared_memory,
            "trainer's memory": self.memory,
            "servers": self.servers,
        }
        return found

    def flags(self) -> Iterator[Finding]:
        """Only where there are some: the program must be asked for those it knows, which takes long the first time."""
        from vime.inference.commands import check_all_flags

        if self.config.vllm or self.config.router:
            check_all_flags(self.config)
            yield ok("flags", f"{len(self.config.vllm) + len(self.config.router)} of [vllm] and [router] are known")

    def model(self) -> Iterator[Finding]:
        if not (self.folder / "config.json").exists():
            fix = "name a Hugging Face folder; `vime model smollm2 DIR` makes a small one"
            yield Finding("model", "fault", f"{self.folder} has no config.json", fix)
            return
        said = json.loads((self.folder / "config.json").read_text())
        self.parameters, faults = weights_of(self.folder)
        yield from (Finding("model", "fault", fault, "download or save the model again") for fault in faults)
        if not faults:
            yield ok(
                "model",
                f"{', '.join(said.get('architectures') or ['?'])}, {self.parameters / 1e6:.3g} M parameters, complete",
            )

    def template(self) -> Iterator[Finding]:
        from vime.data.turns import render
        from vime.run import load_tokenizer

        tokenizer = load_tokenizer(str(self.folder))
        talk = [{"role": "user", "content": "Hello."}]
        without = render(tokenizer, talk, None, tokenize=False)
        text = render(tokenizer, talk, None, tokenize=False, add_generation_prompt=True)
        self.tokenizer = tokenizer
        prompt = text.removeprefix(without)
        fix = "without one the model is not told that it is to reply: see {% if add_generation_prompt %} of other templates"
        found = f"generation prompt {prompt!r}" if text != without else "it has no generation prompt"
        yield judged("chat template", found, text == without, fix, "warning")

    def data(self) -> Iterator[Finding]:
        from vime.data.load import known_tasks, load_data
        from vime.data.turns import render
        from vime.job import check_tasks

        prompts, held_out = load_data(self.config)
        train = known_tasks(prompts)
        check_tasks(self.config, train, self.config.data.response_keys)
        for tasks in held_out.values():
            check_tasks(self.config, tasks)
        sets = "".join(f", {len(tasks)} of the set {name}" for name, tasks in held_out.items())
        yield judged(
            "data", f"{len(train)} prompts{sets}", not train, "data.source has no row that no evaluation set has"
        )
        if not self.tokenizer or not train:
            return
        text = render(
            self.tokenizer,
            list(train[0].messages),
            list(train[0].tools) or None,
            tokenize=False,
            add_generation_prompt=True,
        )
        yield ok("first prompt", repr(text[:EXCERPT]) + ("..." if len(text) > EXCERPT else ""))
        every = -(-len(train) // MOST_PROMPTS)
        seen = train[::every]
        lengths = [
            len(
                render(
                    self.tokenizer,
                    list(t.messages),
                    list(t.tools) or None,
                    add_generation_prompt=True,
                    return_dict=False,
                )
            )
            for t in seen
        ]
        yield self._lengths(lengths, len(train))

    def _lengths(self, lengths: list[int], of: int) -> Finding:
        context, option = self._context()
        most = self.config.rollout.max_tokens
        long = sum(length + most > context for length in lengths)
        found = (
            f"longest {max(lengths)} tokens, of {len(lengths)} of {of} prompts that were counted; {option} is {context}"
        )
        if not long:
            return ok("prompt lengths", found)
        fix = "they are refused or their responses cut: shorten them, lower rollout.max_tokens, or raise vllm.max-model-len"
        found += f"; {long} are too long for responses of rollout.max_tokens = {most}"
        return Finding("prompt lengths", "fault" if long == len(lengths) else "warning", found, fix)

    def _context(self) -> tuple[int, str]:
        """Tokens of a sequence at most, and what says so."""
        for name in ("max-model-len", "max_model_len"):
            if isinstance(given := self.config.vllm.get(name), int):
                return given, f"vllm.{name}"
        said = json.loads((self.folder / "config.json").read_text())
        said = {**said, **said.get("text_config", {})}
        return int(said.get("max_position_embeddings", 10**9)), "the model's context"

    def functions(self) -> Iterator[Finding]:
        from vime.job import check_functions

        check_functions(self.config)
        yield ok(
            "functions",
            f"rollout.generate = {self.config.rollout.generate}, algorithm.objective = {self.config.algorithm.objective}",
        )

    def rewards(self) -> Iterator[Finding]:
        from vime.rewards.scoring import check_rewards

        asyncio.run(check_rewards(self.config.reward))
        parts = {name: part.function for name, part in self.config.reward.parts.items()}
        yield ok("rewards", ", ".join(parts.values()) or self.config.reward.function)

    def checkpoints(self) -> Iterator[Finding]:
        trainer, kept = self.config.trainer, self.config.checkpoint.keep + 2  # the best, and the one being written
        master = BYTES[trainer.master_dtype]
        state = 0 if self.config.lora.rank else master + 2 * (MOMENTS[trainer.optimizer] or master)
        model = BYTES[self.config.model.dtype]
        need = (
            kept * self.parameters * (state + (model if self.config.checkpoint.model else 0)) + self.parameters * model
        )
        folder = Path(self.config.run.dir).absolute()
        free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
        found = f"about {gib(need)} for {kept} at once, {gib(free)} free for {self.config.run.dir}"
        yield judged(
            "checkpoints", found, need > free, "lower checkpoint.keep, or set run.dir to a larger disk", "warning"
        )

    def shared_memory(self) -> Iterator[Finding]:
        from vime.inference.commands import on_gpu

        folder = Path(self.config.weights.dir)
        if not folder.is_dir():
            yield Finding(
                "shared memory", "fault", f"weights.dir = {folder} is no folder", "name a memory-backed one, /dev/shm"
            )
            return
        need, free = self.parameters * BYTES[self.config.model.dtype], shutil.disk_usage(folder).free
        found = f"weights of {gib(need)} pass through {folder}, {gib(free)} free"
        fix = "mount it larger (docker run --shm-size), or set weights.dir"
        verdict: Any = "fault" if need > free else "warning"
        yield judged("shared memory", found, 2 * need > free and need, f"{fix}; samples lie there too", verdict)
        if on_gpu():
            yield from self._devices()

    def _devices(self) -> Iterator[Finding]:
        from vime.doctor.machine import gpus

        count, wanted = len(gpus()), self.config.inference.servers * self.config.inference.gpus_per_server
        found = f"{wanted} for servers, {self.config.trainer.ranks} for trainer ranks, of {count}"
        fix = "several share one; lower vllm.gpu-memory-utilization so that they fit, or use fewer"
        yield judged("devices", found, max(wanted, self.config.trainer.ranks) > count, fix, "warning")

    def memory(self) -> Iterator[Finding]:
        import torch

        from vime.training.memory import device_memory, predict
        from vime.training.worker import device_of

        device = torch.device(device_of(self.config.trainer))
        prediction, whole = predict(self.config, device), device_memory(device)
        ranks = self.config.trainer.ranks if device.type == "cpu" else 1
        need = ranks * prediction.total
        found = f"{gib(need)} at its peak, mostly {prediction.largest}, of {gib(whole)}; its parts: vime train --dry-run --memory"
        fix = "lower trainer.tokens_per_micro_batch, or see Memory in docs/training.md"
        yield judged("trainer's memory", found, need > 0.9 * whole, fix, "fault" if need > whole else "warning")

    def servers(self) -> Iterator[Finding]:
        urls = self.config.inference.urls
        if not urls:
            yield ok("servers", f"{self.config.inference.servers} will be started")
        scoring = [url for url in (self.config.reference.url, self.config.teacher.url) if url]
        yield from asyncio.run(ask(self.config, urls, scoring))


async def ask(config: Config, urls: Sequence[str], scoring: Sequence[str]) -> list[Finding]:
    """What servers that run already offer, asked as a run would."""
    from vime.inference.client import InferenceError, open_session
    from vime.inference.fleet import given_server, scoring_server

    quick = config.model_copy(
        update={"inference": config.inference.model_copy(update={"control_timeout_s": ASK_TIMEOUT_S})}
    )
    async with open_session() as session:

        async def one(url: str, scores: bool) -> Finding:
            try:
                server = await (scoring_server if scores else given_server)(url, session, quick)
            except InferenceError as error:
                return Finding(
                    "servers", "fault", str(error), "" if "lacks" in str(error) else "start it, or correct its URL"
                )
            return ok("servers", f"{url} serves {server.model!r} and offers what is needed")

        calls = [one(url, False) for url in urls] + [one(url, True) for url in scoring]
        return list(await asyncio.gather(*calls))


def weights_of(folder: Path) -> tuple[int, list[str]]:
    """The number of parameters in the folder's safetensors, and what is wrong with the files."""
    index = folder / "model.safetensors.index.json"
    named: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    files = sorted(set(named.values())) or [path.name for path in sorted(folder.glob("*.safetensors"))]
    if not files:
        return 0, [f"{folder} holds no safetensors"]
    parameters, faults, held = 0, [], set()
    for name in files:
        tensors, fault = header(folder / name)
        faults += [fault] if fault else []
        held |= {*tensors}
        parameters += sum(product(tensor["shape"]) for tensor in tensors.values())
    if missing := sorted({*named} - held):
        faults += (
            [f"{index.name} names {missing[0]} and {len(missing) - 1} more, which are in no file"] if not faults else []
        )
    return parameters, faults


def header(path: Path) -> tuple[dict[str, Any], str]:
    """The tensors that a safetensors file says it holds, and its fault, if any: missing, no such file, or cut short."""
    if not path.exists():
        return {}, f"{path} is missing"
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            return {}, f"{path} is no safetensors file, or cut short ({size} bytes)"
        tensors = json.loads(file.read(length))
    tensors.pop("__metadata__", None)
    end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    return tensors, f"{path} has {size} bytes of {end}: it is cut short" if size < end else ""


def product(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
