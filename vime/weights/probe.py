"""The proof that a server serves the trainer's weights: what it samples, the trainer must find as likely as it did."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from vime.config.sections import Config
from vime.inference.alive import while_it_lives
from vime.inference.client import Completion, InferenceError, Server
from vime.inference.commands import on_gpu
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


@dataclass
class Probe:
    """A small real rollout by each server. ``results`` and ``failures`` are of the proofs so far."""

    config: Config
    trainer: Trainer
    prompts: Sequence[list[int]]
    results: list[ProbeResult] = field(default_factory=list)
    failures: int = 0

    async def prove(self, version: int, servers: Sequence[Server]) -> list[ProbeResult | InferenceError]:
        """How far each server differs, or why it did not answer.

        ProbeError where the mean of one is over the bound; that server is paused, or its adapter unloaded.
        """
        silent_s = self.config.inference.health_timeout_s
        samples = (while_it_lives(server, self._sample, silent_s) for server in servers)
        sampled = await asyncio.gather(*samples, return_exceptions=True)
        rows = [
            {"prompt_ids": prompt, "response_ids": completion.token_ids}
            for completions in sampled
            if not isinstance(completions, BaseException)
            for prompt, completion in zip(self.prompts, completions, strict=True)
        ]
        mine = iter(await self.trainer.logprobs(rows) if rows else [])
        results: list[ProbeResult | InferenceError] = []
        for server, completions in zip(servers, sampled, strict=True):
            if isinstance(completions, InferenceError):
                results.append(completions)
            elif isinstance(completions, BaseException):
                raise completions
            else:
                theirs = [value for completion in completions for value in completion.logprobs]
                ours = [value for _ in completions for value in next(mine)]
                results.append(await self._judge(version, server, list(zip(theirs, ours, strict=True))))
        return results

    async def _sample(self, server: Server) -> list[Completion]:
        """One completion a prompt, past the router. Each may have to wait behind responses that are under way."""
        sampling = {
            "temperature": self.config.rollout.temperature,
            "max_tokens": self.config.weights.probe_tokens,
            "ignore_eos": True,
        }
        timeout = self.config.rollout.request_timeout_s

        async def ask(prompt: list[int]) -> Completion:
            for _ in range(self.config.rollout.retries):
                with contextlib.suppress(InferenceError):
                    return await server.generate(prompt, sampling, timeout)
            return await server.generate(prompt, sampling, timeout)

        return await asyncio.gather(*map(ask, self.prompts))

    async def _judge(self, version: int, server: Server, pairs: list[tuple[float, float]]) -> ProbeResult:
        differences = [abs(theirs - ours) for theirs, ours in pairs]
        result = ProbeResult(sum(differences) / len(differences), max(differences))
        self.results.append(result)
        bound = bound_of(self.config)
        if not result.mean <= bound:
            self.failures += 1
            with contextlib.suppress(InferenceError):
                await server.withhold()
            stopped = "It stays paused" if server.adapter is None else "The adapter is unloaded"
            theirs, ours = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
            raise ProbeError(
                f"version {version} is not what {server.url} serves: log-probabilities differ by {result.mean:.4g} on "
                f"average (bound {bound:g}); the worst token has {theirs:.4f} on the server, {ours:.4f} in the trainer. "
                f"{stopped}. If the difference is rounding, raise weights.probe_max_mean_diff"
            )
        return result
