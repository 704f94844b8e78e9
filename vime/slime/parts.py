"""The parts of a run where ``[slime]`` names functions that stand in their places: rewards, prompts, the scheduler."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.config.sections import Config
from vime.functions import cause_of
from vime.rewards.scoring import GroupScore, Rewards, Scored, check_rewards, seen_with
from vime.rollout.generate import Context, Score
from vime.rollout.scheduler import Scheduler
from vime.sample import Sample, Task
from vime.slime.args import Args
from vime.slime.calls import HookError
from vime.slime.driver import Hooks
from vime.slime.hooks import configured
from vime.slime.rollout import RolloutFunction
from vime.slime.sources import PromptSource, SourceCursor
from vime.workers.worker import COMMAND

if TYPE_CHECKING:
    from vime.job import Job


def make_hooks(config: Config, logs: Path) -> Hooks | None:
    """The functions of [slime], if there are any; their workers are not started."""
    return Hooks(config, logs) if any(configured(config)) else None


@contextlib.asynccontextmanager
async def open_rewards(
    config: Config, logs: Path, tasks: Iterable[Task], hooks: Hooks | None
) -> AsyncIterator[Rewards]:
    """The rewards, with their workers: those of [reward], unless a function of [slime] stands instead."""
    rewards = Rewards(config.reward, logs, tasks)
    async with contextlib.AsyncExitStack() as stack:
        if hooks is not None:
            await stack.enter_async_context(hooks)
        if hooks is None or not hooks.scores:
            await stack.enter_async_context(rewards)
        yield rewards


def scoring(rewards: Rewards, hooks: Hooks | None) -> tuple[Score, Callable[[Context, Task], GroupScore | None]]:
    """What scores a sample, and what scores a group together: the run's rewards, or the function of [slime]."""
    if hooks is not None and hooks.scores:
        return hooks.score, hooks.group_score

    async def score(context: Context, task: Task, sample: Sample) -> Scored:
        return await rewards.score(seen_with(task, sample), sample.text)

    return score, lambda context, task: rewards.group_score(task)


async def check_workers(config: Config) -> list[str]:
    """Loads the rewards in a worker as a run would; a line for each of the run's workers."""
    if not config.slime.custom_rm_path:
        return await check_rewards(config.reward)
    fewer = config.model_copy(update={"reward": config.reward.model_copy(update={"workers": 1})})
    with tempfile.TemporaryDirectory() as logs:
        async with Hooks(fewer, Path(logs)):
            return [f"worker of slime.custom_rm_path {i}: {' '.join(COMMAND)}" for i in range(config.reward.workers)]


def with_source(cursor: Any, config: Config, hooks: Hooks | None) -> Any:
    """The cursor, or that of a data source of slime's kind."""
    if hooks is None or "data_source" not in hooks:
        return cursor
    try:
        return SourceCursor(hooks.functions["data_source"][0](Args(config)), cursor.first)
    except Exception as error:
        raise HookError(f"slime.data_source_path cannot be made: {cause_of(error)}") from error


def make_scheduler(job: Job) -> Scheduler:
    hooks = job.context.slime
    kind = RolloutFunction if hooks is not None and "rollout" in hooks else Scheduler
    scheduler = kind(job.config, job.context, job.cursor, job.journal, job.store)
    job.prompt_source = PromptSource(
        job.cursor,
        job.journal,
        lambda task: hooks.prompt(job.context, task) if hooks else task.messages,
        lambda: scheduler.version,
        job.config.rollout.samples_per_group,
    )
    if isinstance(scheduler, RolloutFunction):
        scheduler.source = job.prompt_source
    return scheduler
