"""Held-out evaluation: pass@1 and pass@k of each set, with the rows for the samples file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from vime.config.sections import Config, EvalSet
from vime.inference.client import InferenceError
from vime.rewards import RewardError
from vime.rollout.collect import RolloutError, log_row
from vime.rollout.generate import Context, single_turn
from vime.sample import Sample, Task


def set_sampling(section: EvalSet, config: Config) -> dict[str, Any]:
    return {
        "temperature": section.temperature,
        "max_tokens": section.max_tokens or config.rollout.max_tokens,
        "stop_token_ids": config.rollout.stop_token_ids,
    }


async def evaluate_set(
    name: str, section: EvalSet, tasks: Sequence[Task], context: Context, config: Config
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics ``eval/NAME/...`` and one row a response. A response that failed counts as not passed, and is counted."""
    context = replace(context, sampling=set_sampling(section, config))

    async def answer(index: int, task: Task) -> list[Sample | Exception]:
        here = replace(context, session_id=f"eval-{name}-{index}")
        return await asyncio.gather(*(single_turn(here, task) for _ in range(section.samples)), return_exceptions=True)  # type: ignore[return-value]

    outcomes = await asyncio.gather(*(answer(i, task) for i, task in enumerate(tasks)))
    passes: list[list[bool]] = []
    samples: list[Sample] = []
    rows, failures = [], []
    for index, (task, group) in enumerate(zip(tasks, outcomes, strict=True)):
        passed = []
        for outcome in group:
            if isinstance(outcome, Sample):
                samples.append(outcome)
                rows.append(log_row("eval", index, task, outcome) | {"set": name})
                passed.append((outcome.reward or 0.0) >= config.eval.pass_reward)
            elif isinstance(outcome, (InferenceError, RewardError)):
                failures.append(outcome)
                passed.append(False)
            else:
                raise outcome
        passes.append(passed)
    if not samples:
        raise RolloutError(f"evaluation set {name}: every response failed; the last: {failures[-1]}")
    metrics = {
        f"eval/{name}/pass@1": fmean(fmean(passed) for passed in passes),
        f"eval/{name}/reward_mean": fmean(sample.reward or 0.0 for sample in samples),
        f"eval/{name}/response_tokens_mean": fmean(len(sample.response_ids) for sample in samples),
        f"eval/{name}/truncated_fraction": fmean(sample.truncated for sample in samples),
        f"eval/{name}/prompts": float(len(tasks)),
        f"eval/{name}/failed": float(len(failures)),
    }
    if section.samples > 1:
        metrics[f"eval/{name}/pass@{section.samples}"] = fmean(any(passed) for passed in passes)
    return metrics, rows


async def evaluate(
    config: Config, tasks: dict[str, list[Task]], context: Context
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """All sets of the configuration, one after the other."""
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for name, section in config.eval.sets.items():
        of_set, its_rows = await evaluate_set(name, section, tasks[name], context, config)
        metrics |= of_set
        rows += its_rows
    return metrics, rows
