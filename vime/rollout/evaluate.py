"""Held-out evaluation: pass@1 and pass@k of each set, with the rows for the samples file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import fmean
from typing import Any

from vime.config.sections import Config, EvalSet
from vime.inference.limiter import Limiter
from vime.rollout.generate import Context, generate_of, group_of, load_generate
from vime.rollout.outcome import log_row
from vime.rollout.scheduler import RolloutError
from vime.sample import Sample, Task


def set_sampling(section: EvalSet, config: Config) -> dict[str, Any]:
    return {
        "temperature": section.temperature,
        "top_p": section.top_p,
        "top_k": section.top_k,
        "max_tokens": section.max_tokens or config.rollout.max_tokens,
        "stop_token_ids": config.rollout.stop_token_ids,
    }


def version_metrics(name: str, samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Which weights made the responses, and the share of those that are not by ``version`` alone."""
    made = [{span.version for span in sample.versions} for sample in samples]
    return {
        f"eval/{name}/mixed_fraction": fmean(versions != {version} for versions in made),
        f"eval/{name}/version_min": min(min(versions) for versions in made),
        f"eval/{name}/version_max": max(max(versions) for versions in made),
    }


async def evaluate_set(
    name: str, section: EvalSet, tasks: Sequence[Task], context: Context, config: Config, version: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics ``eval/NAME/...`` and one row a response. A response that failed counts as not passed, and is counted."""
    context = replace(context, sampling=set_sampling(section, config), routed=False, scorers={})
    entrance = Limiter(1)  # as in the scheduler

    timeout_s = config.rollout.generate_timeout_s
    own = generate_of(context, config.rollout.generate, timeout_s)
    load = cache(partial(load_generate, timeout_s=timeout_s))

    async def answer(index: int, task: Task) -> list[Sample | Exception]:
        """Of each generate call its last sample, which has its end."""
        await entrance.passed()
        calls = [load(task.generate) if task.generate else own] * section.samples
        made = await group_of(replace(context, session_id=f"eval-{name}-{index}"), task, calls)
        return [one if isinstance(one, Exception) else one[-1] for one in made]

    context.requests.expect(len(tasks) * section.samples)

    outcomes = await asyncio.gather(*(answer(i, task) for i, task in enumerate(tasks)))
    passes: list[list[bool]] = []
    samples: list[Sample] = []
    rows, failures = [], []
    for index, (task, group) in enumerate(zip(tasks, outcomes, strict=True)):
        passed = []
        for outcome in group:
            if isinstance(outcome, Sample):
                samples.append(outcome)
                if context.slime is not None:
                    context.slime.note_evaluated(context, name, task, outcome)
                rows.append(log_row("eval", index, task, outcome) | {"set": name})
                passed.append((outcome.reward or 0.0) >= config.eval.pass_reward)
            else:
                failures.append(outcome)
                passed.append(False)
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
    if config.eval.background:
        metrics |= version_metrics(name, samples, version)
    if section.samples > 1:
        metrics[f"eval/{name}/pass@{section.samples}"] = fmean(any(passed) for passed in passes)
    return metrics, rows


async def evaluate(
    config: Config, tasks: dict[str, list[Task]], context: Context
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The sets with these tasks, one after the other."""
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    version = context.requests.version
    for name, of_name in tasks.items():
        of_set, its_rows = await evaluate_set(name, config.eval.sets[name], of_name, context, config, version)
        metrics |= of_set
        rows += its_rows
    return metrics, rows
