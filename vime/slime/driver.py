"""What the driver calls of ``[slime]`` for one response and for one group: generate, sample hooks, rewards, dynamic filter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from vime.config.sections import Config
from vime.data.turns import render
from vime.rewards import RewardError
from vime.rewards.scoring import GroupScore, Scored
from vime.rollout.generate import Context, GenerateError
from vime.sample import Group, Task
from vime.sample import Sample as Native
from vime.slime import batch
from vime.slime.args import Args
from vime.slime.calls import HookError, call
from vime.slime.hooks import HOOKS, TRAINER, WORKER, configured, has, load_hook
from vime.slime.sample import Sample, SampleError, from_native, prompt_of, reward_of, to_native
from vime.slime.serving import sampling_of
from vime.workers.pool import Pool
from vime.workers.worker import CallError, CallLate, Function, WorkerError

if TYPE_CHECKING:
    from vime.job import Job
    from vime.rollout.scheduler import Scheduler

RM = "custom_rm"


class Hooks:
    """The functions of ``[slime]``. ``async with`` starts the workers of custom_rm_path, whose output is in files of ``logs``.

    ``dropped`` are the groups filtered since the last batch, where a function wants to see them; ``evaluated`` the samples of
    an evaluation by set, likewise.
    """

    def __init__(self, config: Config, logs: Path) -> None:
        self.config, self.section = config, config.slime
        self.functions: dict[str, list[Callable[..., Any]]] = {}
        for kind, path in configured(config):
            if HOOKS[kind].process not in (WORKER, TRAINER):
                self.functions.setdefault(kind, []).append(load_hook(kind, path))
        self.pool: Pool | None = None
        if reward := self.section.custom_rm_path:
            options = {"path": reward, "group": self.section.group_rm, "config": config.model_dump(mode="json")}
            made = {RM: Function("vime.slime.worker:scorer", options)}
            self.pool = Pool("reward", made, config.reward.workers, config.reward.memory_mb, logs)
        self.dropped: list[Group] = []
        self.evaluated: dict[str, list[Sample]] = {}

    async def __aenter__(self) -> Self:
        if self.pool:
            try:
                await self.pool.__aenter__()
            except WorkerError as error:
                raise RewardError(str(error)) from None
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.pool:
            await self.pool.__aexit__(*error)

    def __contains__(self, kind: str) -> bool:
        return kind in self.functions

    async def call(self, kind: str, *arguments: Any, **named: Any) -> Any:
        """The result of the only function of the kind."""
        return await call(HOOKS[kind].option, self.section.timeout_s, self.functions[kind][0], *arguments, **named)

    def args(self, context: Context) -> Args:
        front = context.requests.front.url
        return Args(self.config, front, _context=context, _loop=asyncio.get_running_loop())

    def prompt(self, context: Context, task: Task) -> str | list[dict[str, Any]]:
        if not self.section.apply_chat_template:
            return list(task.messages)
        messages, tools = list(task.messages), list(task.tools) or None
        text: str = render(context.tokenizer, messages, tools, tokenize=False, add_generation_prompt=True)
        return text

    def index(self, context: Context) -> int | None:
        """Of a response among all of the run."""
        return None if context.group is None else self.index_in(context.group, context.number)

    def index_in(self, group: int, number: int) -> int:
        return group * self.config.rollout.samples_per_group + number

    def seen(self, context: Context, task: Task, made: Native) -> Sample:
        """A response as slime's functions see it."""
        sample = from_native(task, self.prompt(context, task), context.group, self.index(context), made)
        key = self.reward_key(context.evaluation)
        if key is not None and made.reward is not None:
            sample.reward = {**made.reward_parts, key: made.reward}
        return sample

    def made(self, task: Task, sample: Any, version: int, evaluation: bool = False) -> Native:
        """What one of them made, as ours; SampleError where it cannot be trained."""
        if getattr(sample, "custom_rm_path", None):
            raise SampleError(f"it names a reward of its own, {sample.custom_rm_path!r}; set slime.custom_rm_path")
        made = to_native(sample, version, self.reward_key(evaluation))
        own = {k: v for k, v in made.metadata.items() if k != "tools" and task.metadata.get(k, ...) != v}
        try:
            json.dumps(own)
        except (TypeError, ValueError) as error:
            raise SampleError(f"its metadata is no JSON: {error}") from None
        return replace(made, metadata=own)

    def reward_key(self, evaluation: bool) -> str | None:
        return (self.section.eval_reward_key if evaluation else None) or self.section.reward_key

    # One response

    async def generate(self, context: Context, task: Task) -> list[Native]:
        """``custom_generate_function_path`` as a generate function of ours."""
        (function,) = self.functions["generate"]
        args, version = self.args(context), context.requests.version
        context.requests.begun = version  # it asks the servers itself
        sample = prompt_of(task, self.prompt(context, task), context.group, self.index(context))
        sample.session_id = context.session_id
        named = {"evaluation": context.evaluation} if has(function, "evaluation") else {}
        timeout_s = self.config.rollout.generate_timeout_s
        option = HOOKS["generate"].option
        try:
            made = await call(option, timeout_s, function, args, sample, sampling_of(args, context), **named)
            samples = made if isinstance(made, list) else [made]
            if not samples or not all(hasattr(one, "response_length") for one in samples):
                raise SampleError(f"it returned {made!r:.80}; return a Sample, or a list of them")
            return [self.made(task, one, version, context.evaluation) for one in samples]
        except (HookError, SampleError) as error:
            about = "" if isinstance(error, HookError) else f"slime.{option}: "
            raise GenerateError(f"{about}{error}, on task {task.id}") from error

    async def hooked(self, context: Context, task: Task, made: Native) -> Native:
        """The sample after all ``rollout_sample_hook_path``."""
        if "sample" not in self:
            return made
        version = min((span.version for span in made.versions), default=context.requests.version)
        sample, option = self.seen(context, task, made), HOOKS["sample"].option
        named = {"rollout_id": None if context.evaluation else version, "evaluation": context.evaluation}
        try:
            for function in self.functions["sample"]:
                found = await call(option, self.section.timeout_s, function, self.args(context), sample, **named)
                sample = sample if found is None else found
            return replace(self.made(task, sample, version, context.evaluation), reference=made.reference)
        except (HookError, SampleError) as error:
            about = "" if isinstance(error, HookError) else f"slime.{option}: "
            raise GenerateError(f"{about}{error}, on task {task.id}") from error

    async def sampled(self, context: Context, task: Task, samples: Sequence[Native]) -> list[Native]:
        """The samples of one generate call after the sample hooks."""
        return list(await asyncio.gather(*(self.hooked(context, task, one) for one in samples)))

    # Rewards

    async def score(self, context: Context, task: Task, sample: Native) -> Scored:
        """The reward of a sample and its named parts; RewardError as that of rewards of ours."""
        return (await self.asked(context, task, [sample]))[0]

    async def asked(self, context: Context, task: Task, samples: Sequence[Native]) -> list[Scored]:
        """The rewards of the samples by one call of custom_rm_path."""
        assert self.pool
        rows = [replace(one, experts=None) for one in samples]
        fields = [self.seen(context, task, one).to_dict() for one in rows]
        section = self.config.reward
        try:
            arguments = [context.requests.front.url, fields]
            found = await self.pool.call(RM, arguments, section.timeout_s, section.retries)
            return [reward_of(value, self.reward_key(context.evaluation)) for value in found]
        except CallLate:
            cause = f"took over {section.timeout_s:g} s on task {task.id} (reward.timeout_s)"
            raise RewardError(f"slime.custom_rm_path {cause}") from None
        except (CallError, SampleError) as error:
            raise RewardError(f"slime.custom_rm_path failed on task {task.id}: {error}") from None

    def group_score(self, context: Context, task: Task) -> GroupScore | None:
        """With group_rm: how the samples of a group that have no reward yet are scored together."""

        async def score(samples: Sequence[Native]) -> list[Scored | RewardError]:
            try:
                return [*await self.asked(context, task, samples)]
            except RewardError as error:
                return [error] * len(samples)

        return score if self.section.group_rm else None

    @property
    def scores(self) -> bool:
        """Whether rewards are given here."""
        return self.pool is not None

    def restarts(self) -> float:
        """Workers replaced since the last call."""
        if not self.pool:
            return 0
        restarts, self.pool.restarts = self.pool.restarts, 0
        return restarts

    # One group

    async def drops(self, context: Context, group: Group) -> str | None:
        """Why the group is dropped, by the dynamic filter; None where it is not."""
        if "dynamic_filter" not in self:
            return None
        own = [replace(context, group=group.id, number=number) for number in range(len(group.samples))]
        samples = [self.seen(one, group.task, made) for one, made in zip(own, group.samples, strict=True)]
        return dropped_for(await self.call("dynamic_filter", self.args(context), samples))

    async def choose(self, scheduler: Scheduler, ready: list[int]) -> tuple[list[int], list[int]]:
        """Which of the groups that are ready make up the next batch, and which are dropped, by the buffer filter."""
        return await batch.choose(self, scheduler, ready)

    def note_dropped(self, group: Group) -> None:
        if "all_samples" in self:
            self.dropped.append(group)

    def metrics(self, scheduler: Scheduler) -> dict[str, float]:
        """What has been counted since the last call, and what a rollout function measured."""
        given: dict[str, float] = getattr(scheduler, "metrics", {})
        return given | ({"reward/worker_restarts": self.restarts()} if self.pool else {})

    async def log_evaluation(self, job: Job, step: int, metrics: dict[str, float]) -> tuple[str, ...]:
        """Calls the function that logs evaluations; what it adds to the metrics is recorded. Gives what sinks are not to get."""
        samples, self.evaluated = self.evaluated, {}
        if "eval_log" not in self:
            return ()
        data = {
            name: {
                "rewards": [reward_of(sample.reward, self.reward_key(True))[0] for sample in found],
                "truncated": [sample.status is Sample.Status.TRUNCATED for sample in found],
                "samples": found,
            }
            for name, found in samples.items()
        }
        quiet = await self.call("eval_log", step, self.args(job.context), data, metrics)
        return ("eval/",) if quiet else ()

    def note_evaluated(self, context: Context, name: str, task: Task, made: Native) -> None:
        if "eval_log" in self:
            self.evaluated.setdefault(name, []).append(self.seen(context, task, made))


def dropped_for(found: Any) -> str | None:
    """Why a group is dropped, by what a dynamic filter returned; None where it is kept."""
    option = f"slime.{HOOKS['dynamic_filter'].option}"
    keep = found if isinstance(found, bool) else getattr(found, "keep", None)
    if keep is None:
        raise HookError(f"{option} returned {found!r:.60}; return DynamicFilterOutput(keep, reason)")
    if keep:
        return None
    if getattr(found, "keep_when_insufficient", False):
        raise HookError(
            f"{option} asks to keep a group where others do not suffice; rollout.max_refills says how many more prompts a step "
            "takes before it trains on fewer"
        )
    return getattr(found, "reason", None) or "dynamic_filter"
