"""From the trainer's weights to the servers', and the proof that they arrived.

A channel has one method, ``send(version)``: the trainer makes the weights available (publish), every server takes them
(sync). Servers are paused while they do; if anything fails they stay paused, and the error says which server and why.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vime.config.sections import Config
from vime.inference.client import Completion, InferenceError, Server, fan_out
from vime.inference.server import on_gpu
from vime.training.client import Trainer

# Means seen with right weights: 1e-5 in float32 on a CPU; 2e-3 on an H200 (not from
# cuBLAS's tf32: switching that off changes nothing); 0.05 in bfloat16 on both. Weights of another model differ by whole nats.
MEAN_BOUNDS = {"float32": 1e-3, "bfloat16": 0.15}
GPU_MEAN_BOUNDS = {"float32": 1e-2, "bfloat16": 0.15}


def bound_of(config: Config) -> float:
    """The largest mean absolute log-probability difference between server and trainer that passes for rounding."""
    bounds = GPU_MEAN_BOUNDS if on_gpu() else MEAN_BOUNDS
    return config.weights.probe_max_mean_diff or bounds[config.model.dtype]


class ProbeError(Exception):
    """Server and trainer disagree: the weights that are served are not the trainer's."""


@dataclass
class ProbeResult:
    """Absolute log-probability differences between server and trainer, over the probe's tokens."""

    mean: float
    max: float


class SharedMemoryChannel:
    """safetensors in a memory-backed folder of the same host, a new folder a version; the one before is removed."""

    def __init__(self, config: Config, trainer: Trainer, servers: list[Server], folder: Path) -> None:
        self.trainer, self.servers, self.folder = trainer, servers, folder
        self.dtype = config.model.dtype
        folder.mkdir(parents=True, exist_ok=True)

    async def send(self, version: int) -> dict[str, float]:
        """Publishes and syncs; returns both times in seconds."""
        started = time.perf_counter()
        target = self.folder / f"v{version:06d}"
        draft = target.with_suffix(".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        await self.trainer.export(draft, self.dtype)
        draft.rename(target)
        published = time.perf_counter()

        async def take(server: Server) -> None:
            await server.pause()
            await server.update_weights({"path": str(target)}, version)
            held = await server.weight_version()
            if held not in (None, str(version)):
                raise InferenceError(
                    f"{server.url} says it holds version {held} after the update to {version}; it stays paused"
                )

        await fan_out(self.servers, take)
        await fan_out(self.servers, Server.resume)
        for old in self.folder.iterdir():
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
        return {"time/publish": published - started, "time/sync": time.perf_counter() - published}


CHANNELS = {"shared_memory": SharedMemoryChannel}


@dataclass
class Probe:
    """Proves a sync by a small real rollout: what each server samples, the trainer must find as likely as the server."""

    config: Config
    trainer: Trainer
    servers: list[Server]
    prompts: Sequence[list[int]]
    results: list[ProbeResult] = field(default_factory=list)
    failures: int = 0

    async def prove(self, version: int) -> ProbeResult:
        """The differences; ProbeError, with the servers paused, where their mean is over the bound."""
        sampling = {
            "temperature": self.config.rollout.temperature,
            "max_tokens": self.config.weights.probe_tokens,
            "ignore_eos": True,
        }
        timeout = self.config.inference.control_timeout_s

        async def sample(server: Server) -> list[Completion]:
            return await asyncio.gather(
                *(server.generate(prompt, sampling, timeout, version, direct=True) for prompt in self.prompts)
            )

        completions = [completion for some in await fan_out(self.servers, sample) for completion in some]
        prompts = list(self.prompts) * len(self.servers)
        rows = [
            {"prompt_ids": prompt, "response_ids": completion.token_ids}
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        mine = await self.trainer.logprobs(rows)
        pairs = [
            (theirs, ours)
            for completion, values in zip(completions, mine, strict=True)
            for theirs, ours in zip(completion.logprobs, values, strict=True)
        ]
        differences = [abs(theirs - ours) for theirs, ours in pairs]
        result = ProbeResult(sum(differences) / len(differences), max(differences))
        self.results.append(result)
        bound = bound_of(self.config)
        if not result.mean <= bound:
            self.failures += 1
            await fan_out(self.servers, Server.pause)
            theirs, ours = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
            raise ProbeError(
                f"version {version} is not what the servers serve: log-probabilities differ by {result.mean:.4g} on "
                f"average (bound {bound:g}); the worst token has {theirs:.4f} on the server, {ours:.4f} in the trainer. "
                "The servers stay paused. If the difference is rounding, raise weights.probe_max_mean_diff"
            )
        return result
