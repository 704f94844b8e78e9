"""Batches and evaluations made by functions written for slime, instead of by the scheduler and by ``rollout.evaluate``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vime.inference.client import InferenceError
from vime.rewards import RewardError
from vime.rollout.generate import rate
from vime.rollout.outcome import Outcome
from vime.rollout.scheduler import RolloutError, Scheduler
from vime.sample import Group, Task
from vime.sample import Sample as Native
from vime.slime.calls import HookError, call
from vime.slime.hooks import HOOKS
from vime.slime.sample import SampleError, prompt_of
from vime.slime.sources import PromptSource

if TYPE_CHECKING:
    from vime.job import Job
    from vime.slime.driver import Hooks


class RolloutFunction(Scheduler):
    """Asks ``rollout_function_path`` for each batch. Groups that it takes and does not return stay on their way: they may
    come with a later batch, and else come again when the run ends or resumes."""

    source: PromptSource
    metrics: dict[str, float]

    async def collect(self, progress: Callable[[int, int], None] = lambda *_: None) -> list[Outcome]:
        self.shipped = self.version
        self.began = time.perf_counter()
        if len(self.ready) < self.section.groups:
            for group in await self._returned():
                group_id = group.id
                outcome = await self._outcome(group)
                if outcome.filtered:
                    self._filtered(outcome)
                else:
                    self.ready[group_id] = outcome
        self._drop_stale()
        progress(min(len(self.ready), self.section.groups), self.section.groups)
        batch = self._ship(self._by_age()[: self.section.groups])
        if not batch:
            raise RolloutError(f"slime.{HOOKS['rollout'].option} returned no group that can be trained")
        return batch

    async def _returned(self) -> list[Group]:
        hooks = self.context.slime
        assert hooks is not None
        option = HOOKS["rollout"].option
        found = await ask(hooks, "rollout", self.context, self.version, self.source, False)
        self.metrics = {name: float(value) for name, value in (getattr(found, "metrics", None) or {}).items()}
        groups = getattr(found, "samples", found)
        if not isinstance(groups, list) or not all(isinstance(group, list) and group for group in groups):
            raise HookError(
                f"slime.{option} returned {found!r:.60}; return RolloutFnTrainOutput(samples=[[Sample, ...]])"
            )
        made = [await self._group_of(hooks, group) for group in groups]
        for group in made:
            await self._score_together(hooks, group)
        return made

    async def _score_together(self, hooks: Hooks, group: Group) -> None:
        unscored = [sample for sample in group.samples if sample.reward is None]
        score = self.context.group_score(replace(self.context, group=group.id), group.task)
        if score is None or not unscored:
            return
        for sample, result in zip(unscored, await score(unscored), strict=True):
            if isinstance(result, RewardError):
                self._failed(group.id, result)
                group.samples.remove(sample)
            else:
                sample.reward, sample.reward_parts = result

    async def _group_of(self, hooks: Hooks, found: list[Any]) -> Group:
        """The group as ours; its samples without a reward get the run's."""
        samples = [one for entry in found for one in (entry if isinstance(entry, list) else [entry])]
        group_id = samples[0].group_index
        if group_id not in self.source.begun:
            raise HookError(
                f"slime.{HOOKS['rollout'].option} returned a group with group_index {group_id}, which is not one that it took "
                "from data_source; return the samples that get_samples gave, or copies of them"
            )
        version, task = self.source.begun.pop(group_id), self.cursor.task_of(group_id)
        rollouts = [one.index if one.rollout_id is None else one.rollout_id for one in samples]
        made: list[Native] = []
        for sample, rollout in zip(samples, rollouts, strict=True):
            try:
                one = replace(hooks.made(task, sample, version), rollout=rollouts.index(rollout))
                await rate(replace(self.context, group=group_id), task, [one])
                made.append(one)
            except (SampleError, RewardError, InferenceError) as error:
                self._failed(group_id, error)
        return Group(group_id, task, made)


async def ask(hooks: Hooks, kind: str, context: Any, rollout_id: int, source: Any, evaluation: bool) -> Any:
    """Calls a rollout function; one that is a coroutine runs on the driver's event loop."""
    timeout_s = hooks.config.rollout.generate_timeout_s
    function, args = hooks.functions[kind][0], hooks.args(context)
    return await call(HOOKS[kind].option, timeout_s, function, args, rollout_id, source, evaluation=evaluation)


async def evaluated_by(hooks: Hooks, job: Job, names: list[str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics and rows of an evaluation by ``eval_function_path``."""
    option = HOOKS["eval"].option
    sampling = {**job.context.sampling, "temperature": 0.0}
    context = replace(job.context, routed=False, scorers={}, sampling=sampling)
    found = await ask(hooks, "eval", context, job.step, EvalSource(hooks, job, names), True)
    data = getattr(found, "data", None)
    if not isinstance(data, dict) or not data:
        raise HookError(
            f"slime.{option} returned {found!r:.60}; return RolloutFnEvalOutput(data={{set: {{rewards: ...}}}})"
        )
    metrics = {f"eval/{name}": float(value) for name, value in (getattr(found, "metrics", None) or {}).items()}
    rows: list[dict[str, Any]] = []
    for name, one in data.items():
        rewards = [float(value) for value in one["rewards"]]
        if not rewards:
            raise HookError(f"slime.{option}: set {name!r} has no rewards")
        metrics[f"eval/{name}/pass@1"] = fmean(value >= job.config.eval.pass_reward for value in rewards)
        metrics[f"eval/{name}/reward_mean"] = fmean(rewards)
        metrics[f"eval/{name}/prompts"] = float(len(rewards))
        if one.get("truncated"):
            metrics[f"eval/{name}/truncated_fraction"] = fmean(map(float, one["truncated"]))
        rows += [row(name, index, sample) for index, sample in enumerate(one.get("samples") or [])]
        hooks.evaluated[name] = list(one.get("samples") or [])
    return metrics, rows


def row(name: str, index: int, sample: Any) -> dict[str, Any]:
    return {
        "split": "eval",
        "set": name,
        "group": index,
        "task": str(sample.index),
        "prompt": sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"],
        "response": sample.response,
        "answer": sample.label,
        "reward": sample.reward if isinstance(sample.reward, (int, float)) else None,
        "advantage": None,
        "tokens": sample.response_length,
        "finish": sample.status.value,
        "version": None,
    }


class EvalSource:
    """``data_source`` of an evaluation: ``sets`` has the samples of each evaluation set, a group a prompt."""

    def __init__(self, hooks: Hooks, job: Job, names: list[str]) -> None:
        def group(index: int, task: Task, size: int) -> list[Any]:
            prompt = hooks.prompt(job.context, task)
            return [prompt_of(task, prompt, index, index * size + number) for number in range(size)]

        self.sets = {
            name: [
                group(index, task, job.config.eval.sets[name].samples)
                for index, task in enumerate(job.eval_tasks[name])
            ]
            for name in names
        }
