"""What a response is worth: the configured rewards, which run in worker processes, each call with a deadline."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from vime.config.nearest import nearest
from vime.config.sections import RewardFunction, RewardSection
from vime.rewards import RewardError
from vime.rewards.builtin import BUILTIN
from vime.rewards.load import Numbers
from vime.sample import Sample, Task
from vime.workers.pool import Pool
from vime.workers.worker import COMMAND, CallError, CallLate, Function, WorkerError

Scored = tuple[float, dict[str, float]]
"""a reward, and its named parts"""
GroupScore = Callable[[Sequence[Sample]], Awaitable[list[Scored | RewardError]]]
"""what the samples of one group are worth, those that have no reward yet, seen together"""


@dataclass(frozen=True)
class Asked:
    """One reward: what workers and what errors call it, the option with its deadline, its weight among others."""

    key: str
    title: str
    option: str
    section: RewardFunction
    weight: float = 1.0


def rewards_of(section: RewardSection) -> dict[str, Asked]:
    """The run's reward, under the name "", or its parts."""
    if not section.parts:
        single = RewardFunction(function=section.function, options=section.options, group=section.group)
        return {"": Asked("run", section.function.rpartition(":")[2], "reward.timeout_s", single)}
    return {name: asked(f"parts.{name}", part, part.weight) for name, part in section.parts.items()}


def asked(name: str, section: RewardFunction, weight: float = 1.0) -> Asked:
    option = "reward.timeout_s" if section.timeout_s is None else f"reward.{name}.timeout_s"
    return Asked(name, name, option, section, weight)


def row_rewards(section: RewardSection, names: Iterable[str]) -> dict[str, Asked]:
    """The rewards of [reward.named], and those that rows name themselves: built-ins and functions by path. RewardError for a
    name that is none of these."""
    found = {name: asked(f"named.{name}", one) for name, one in section.named.items()}
    for name in section.named:
        if name in BUILTIN or ":" in name:
            what = "a path" if ":" in name else "a built-in reward"
            raise RewardError(
                f"reward.named.{name}: {name!r} is {what}, which rows may name as it is; choose another name"
            )
    for name in sorted(set(names) - set(found)):
        if name not in BUILTIN and ":" not in name:
            hint = nearest(name, [*section.named, *BUILTIN])
            raise RewardError(
                f"a row names the reward {name!r}, which is neither a [reward.named] nor a built-in{hint}"
            )
        found[name] = Asked(f"row.{name}", name, "reward.timeout_s", RewardFunction(function=name))
    return found


class Rewards:
    """The configured rewards, and those that ``tasks`` name, in a pool of workers, whose output is in files of ``logs``.

    ``async with`` starts the workers; RewardError where a reward cannot be loaded.
    """

    def __init__(self, section: RewardSection, logs: Path, tasks: Iterable[Task] = ()) -> None:
        self.section = section
        self.run = rewards_of(section)
        self.rows = row_rewards(section, {task.reward for task in tasks if task.reward})
        functions = {one.key: self._function(one.section) for one in (*self.run.values(), *self.rows.values())}
        self.pool = Pool("reward", functions, section.workers, section.memory_mb, logs, section.concurrency)

    def _function(self, one: RewardFunction) -> Function:
        wanted = {"name": one.function, "options": one.options, "deadline_s": self._deadline_s(one), "group": one.group}
        return Function("vime.rewards.load:scorer", wanted)

    def _deadline_s(self, one: RewardFunction) -> float:
        return one.timeout_s or self.section.timeout_s

    async def __aenter__(self) -> Self:
        try:
            await self.pool.__aenter__()
        except WorkerError as error:
            raise RewardError(str(error)) from None
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.pool.__aexit__(*error)

    def counts(self) -> dict[str, float]:
        """What has been counted since the last call."""
        restarts, self.pool.restarts = self.pool.restarts, 0
        return {"reward/worker_restarts": restarts}

    def of(self, task: Task) -> dict[str, Asked]:
        """The rewards that score a task: the one that its row names, under the name "", or the run's."""
        if task.reward and task.reward not in self.rows:
            raise RewardError(
                f"task {task.id} names the reward {task.reward!r}, which no row named at the start; add it as "
                "[reward.named.NAME], whose rewards are always loaded"
            )
        return {"": self.rows[task.reward]} if task.reward else self.run

    async def score(self, task: Task, text: str) -> Scored:
        """The reward of a response and its named parts. All parts are asked at once; the first that fails fails the sample.

        RewardError as in ``ask``, and where no reward applies to the task, or one needs the whole group.
        """
        wanted = self.of(task)
        if group := next((one for one in wanted.values() if one.section.group), None):
            raise RewardError(
                f"reward {group.title} has group = true: it cannot score a response of task {task.id} alone; leave the "
                "reward of samples None, and the group is scored when it is whole"
            )
        calls = [asyncio.ensure_future(self.ask(one, task, text)) for one in wanted.values()]
        try:
            results = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        return combined(task, wanted, results)

    def group_score(self, task: Task) -> GroupScore | None:
        """How a group of the task is scored, where that takes all its responses together."""
        try:
            together = any(one.section.group for one in self.of(task).values())
        except RewardError:  # as ``score`` will say of each response
            together = False
        return partial(self.score_group, task) if together else None

    async def score_group(self, task: Task, samples: Sequence[Sample]) -> list[Scored | RewardError]:
        """The reward of each response, or why it has none. Rewards of groups are asked once, others for each response."""
        wanted = self.of(task)

        async def one(reward: Asked, sample: Sample) -> Numbers | RewardError | None:
            try:
                return await self.ask(reward, seen_with(task, sample), sample.text)
            except RewardError as error:
                return error

        async def all_by(reward: Asked) -> Sequence[Numbers | RewardError | None]:
            if not reward.section.group:
                return await asyncio.gather(*(one(reward, sample) for sample in samples))
            seen = replace(task, metadata={**task.metadata, "samples": [sample.metadata for sample in samples]})
            try:
                return await self.ask(reward, seen, [sample.text for sample in samples])
            except RewardError as error:
                return [error] * len(samples)

        columns = await asyncio.gather(*(all_by(reward) for reward in wanted.values()))
        scored: list[Scored | RewardError] = []
        for results in zip(*columns, strict=True):
            try:
                scored.append(combined(task, wanted, results))
            except RewardError as error:
                scored.append(error)
        return scored

    async def ask(self, reward: Asked, task: Task, response: str | list[str]) -> Any:
        """What one reward gives, as named numbers with "reward" among them, None where it does not apply; of a group's
        responses a list of these.

        RewardError, with the reward, the task and the cause, where it raises, is late or ends its worker even when it is
        asked again, or returns anything but finite numbers.
        """
        deadline_s, title = self._deadline_s(reward.section), reward.title
        fields = {name: getattr(task, name) for name in ("id", "messages", "answer", "metadata", "tools")}
        try:
            found = await self.pool.call(reward.key, [fields, response], deadline_s, self.section.retries)
        except CallLate:
            raise RewardError(
                f"reward {title} took over {deadline_s:g} s on task {task.id} ({reward.option})"
            ) from None
        except CallError as error:
            raise RewardError(f"reward {title} failed on task {task.id}: {error}") from None
        for numbers in found if reward.section.group else [found]:
            for name, value in (numbers or {}).items():
                if not math.isfinite(value):
                    what = "" if name == "reward" else f"{name} = "
                    raise RewardError(
                        f"reward {title} gave {what}{value} for task {task.id}; rewards are finite numbers"
                    )
        return found


def seen_with(task: Task, sample: Sample) -> Task:
    """The task as the rewards of one sample see it."""
    return replace(task, metadata={**task.metadata, **sample.metadata})


def combined(task: Task, wanted: Mapping[str, Asked], results: Sequence[Numbers | RewardError | None]) -> Scored:
    """One response's reward from what the rewards of its task gave; RewardError where one failed or none applies."""
    for result in results:
        if isinstance(result, RewardError):
            raise result
    applying = {name: one for name, one in zip(wanted, results, strict=True) if isinstance(one, dict)}
    if not applying and "" in wanted:
        raise RewardError(
            f"reward {wanted[''].title} failed on task {task.id}: it returned None, which says that it does not apply; return "
            "a number, or have several [reward.parts], of which one applies"
        )
    if not applying:
        raise RewardError(
            f"reward failed on task {task.id}: none of its parts applies, {', '.join(wanted)} returned None; add one of "
            "[reward.parts] that does"
        )
    if "" in wanted:
        return applying[""]["reward"], {name: value for name, value in applying[""].items() if name != "reward"}
    return weighted_sum({name: one.weight for name, one in wanted.items()}, applying)


def weighted_sum(weights: Mapping[str, float], found: Mapping[str, dict[str, float]]) -> Scored:
    """Sum of weight times reward over the parts that were found, not divided by their weights; and each part without its
    weight, those within a part as ``PART/NAME``."""
    parts: dict[str, Any] = {
        name if own == "reward" else f"{name}/{own}": value
        for name, numbers in found.items()
        for own, value in numbers.items()
    }
    return sum(weights[name] * numbers["reward"] for name, numbers in found.items()), parts


async def check_rewards(section: RewardSection) -> list[str]:
    """Loads the rewards in a worker as a run would. Returns a line for each of the run's workers; RewardError where it cannot."""
    with tempfile.TemporaryDirectory() as logs:
        async with Rewards(section.model_copy(update={"workers": 1}), Path(logs)) as rewards:
            kinds = rewards.pool.kinds()
    return [f"worker of {kind} rewards {i}: {' '.join(COMMAND)}" for kind in kinds for i in range(section.workers)]
