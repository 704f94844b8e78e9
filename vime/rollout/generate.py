"""One prompt to its response. A generate function is ``async (Context, Task) -> Sample | list[Sample]``; the user's own, and the
single-turn one. It leaves a sample without a reward where the run's reward is to score it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import numbers
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.config.nearest import nearest
from vime.data.turns import render
from vime.functions import FunctionError, cause_of, told_to_end, user_function
from vime.inference.client import Completion, InferenceError, Server
from vime.inference.requests import Requests
from vime.observe import trace
from vime.rewards import RewardError
from vime.rewards.scoring import GroupScore, Scored
from vime.sample import Sample, Task, VersionSpan
from vime.tools.calls import Tools
from vime.workers.child import is_coroutine_function

if TYPE_CHECKING:
    from vime.slime.driver import Hooks

KEPT_PROMPTS = 4096  # rendered ones: a group's responses share theirs, and evaluations come again
MOST_ABORTS = 1000  # a response that is stopped at every update of a long run has as many
CallTool = Callable[[str, list[Any], dict[str, Any]], Awaitable[Any]]
"""a tool by name, with its arguments by position and by name; ToolError where it fails"""


class GenerateError(Exception):
    """A generate function of the user's failed on one task; the message names it, the task and the cause."""


FAILURES = (InferenceError, RewardError, GenerateError)
"""of one sample, which fails alone"""


@dataclass(frozen=True)
class Context:
    """What a generate function has at hand: the servers, tokenizer, rewards, tools, sampling.

    ``session_id`` is the group's, ``number`` the response's in it. ``score`` tells what a sample is worth, ``group_score`` of
    a task how its groups are scored where that is not one by one. ``scorers`` are the servers of "reference" and "teacher",
    where there are any. ``routed``: samples need their experts. ``group`` is the group's id in training. ``slime`` are
    functions written for slime, where there are any.
    """

    requests: Requests
    tokenizer: Any
    score: Score
    sampling: dict[str, Any]
    session_id: str = ""
    number: int = 0
    prompts: dict[str, list[int]] = field(default_factory=dict)
    response_keys: tuple[str, ...] = ()
    scorers: dict[str, Server] = field(default_factory=dict)
    routed: bool = False
    group_score: Callable[[Context, Task], GroupScore | None] = lambda context, task: None
    call_tool: CallTool = Tools({}, Path()).call
    group: int | None = None
    slime: Hooks | None = None

    @property
    def evaluation(self) -> bool:
        return self.group is None

    @property
    def key(self) -> tuple[str, int]:
        return self.session_id, self.number

    def prompt_ids(self, task: Task) -> list[int]:
        """Token ids of the task's messages and tools under the tokenizer's own chat template, ready for the reply."""
        key = json.dumps([task.messages, task.tools])  # not the id: another set may have a task of the same
        if key not in self.prompts:
            if len(self.prompts) >= KEPT_PROMPTS:
                del self.prompts[next(iter(self.prompts))]
            self.prompts[key] = render(
                self.tokenizer,
                list(task.messages),
                list(task.tools) or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        return self.prompts[key]

    async def tool(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """What the tool `[tools.NAME]` returns for JSON arguments. ToolError where it raises, is late or ends its worker."""
        return await self.call_tool(name, list(arguments), named)


Generate = Callable[[Context, Task], Awaitable[Sample | list[Sample]]]
Score = Callable[[Context, Task, Sample], Awaitable[Scored]]
"""what a response is worth, and the named parts of that; RewardError where that cannot be said"""


async def respond(context: Context, prompt_ids: list[int]) -> Completion:
    """One response to its end: where a server stopped it ("abort", for an update of its weights), it goes on from there as a
    new request, of the same server or another, under whatever weights are served then."""
    made = Completion([], [], (), "abort")
    most = context.sampling["max_tokens"]
    for _ in range(MOST_ABORTS):
        left = {**context.sampling, "max_tokens": most - len(made.token_ids)}
        ids = prompt_ids + made.token_ids
        made = made.followed_by(await context.requests.generate(ids, left, context.key, context.routed))
        if made.finish_reason != "abort":
            return made
        if len(made.token_ids) == most:
            return replace(made, finish_reason="length")
    raise InferenceError(
        f"a response was aborted {MOST_ABORTS} times; after {len(made.token_ids)} tokens it is given up"
    )


async def single_turn(context: Context, task: Task) -> Sample:
    """Samples one response."""
    prompt_ids = context.prompt_ids(task)
    completion = await respond(context, prompt_ids)
    text = context.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    return Sample(
        prompt_ids,
        completion.token_ids,
        completion.logprobs,
        completion.versions,
        completion.finish_reason,
        text,
        experts=completion.experts,
    )


async def given(context: Context, task: Task, rank: int) -> Sample:
    """The response in the task's own column number ``rank``, as if it had been sampled; the first is worth 1, others 0."""
    text = task.metadata[context.response_keys[rank]]
    ids = [*context.tokenizer.encode(text, add_special_tokens=False), context.tokenizer.eos_token_id]
    span = VersionSpan(context.requests.version, 0, len(ids))
    return Sample(
        context.prompt_ids(task),
        ids,
        [math.nan] * len(ids),
        (span,),
        "stop",
        text,
        reward=float(rank == 0),
    )


GENERATE: dict[str, Generate] = {"single_turn": single_turn}


def load_generate(name: str, timeout_s: float) -> Generate:
    """A built-in by name, or a user's ``module:function`` or ``file.py:function``, each of whose calls has a deadline and
    fails alone. FunctionError where it cannot be loaded."""
    if name in GENERATE:
        return GENERATE[name]
    if ":" not in name:
        hint = nearest(name, list(GENERATE))
        raise FunctionError(f"no generate function is called {name!r}{hint}; your own is module:function")
    function = user_function(name, 2)
    if not is_coroutine_function(function):
        raise FunctionError(f"{name} is a plain function; a generate function is `async def f(context, task)`")

    async def generate(context: Context, task: Task) -> list[Sample]:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                made = await function(context, task)
        except (InferenceError, RewardError):
            raise
        except asyncio.CancelledError:
            if told_to_end():
                raise
            raise GenerateError(f"{name} failed on task {task.id}: it cancelled itself") from None
        except Exception as error:
            if deadline.expired():
                cause = f"took over {timeout_s:g} s on task {task.id} (rollout.generate_timeout_s)"
            else:
                cause = f"failed on task {task.id}: {cause_of(error)}"
            raise GenerateError(f"{name} {cause}") from None
        samples = made if isinstance(made, list) else [made]
        if not samples or not all(isinstance(one, Sample) for one in samples):
            raise GenerateError(f"{name} returned {made!r:.80} for task {task.id}; return a Sample, or a list of them")
        for place, one in enumerate(samples):
            try:
                one.check()
            except (AttributeError, TypeError, ValueError) as error:
                which = f"sample {place + 1} of {len(samples)}"
                raise GenerateError(
                    f"{name} made a {which} for task {task.id} that cannot be trained: {error}"
                ) from None
        return samples

    return generate


def generate_of(context: Context, name: str, timeout_s: float) -> Generate:
    """What makes the run's responses: ``rollout.generate``, or the function written for slime that stands instead."""
    if context.slime is not None and "generate" in context.slime:
        return context.slime.generate
    return load_generate(name, timeout_s)


async def samples_of(context: Context, task: Task, generate: Generate) -> list[Sample]:
    """The samples of one generate call, with their rewards and what other models' servers make of them."""
    with trace.sample(context.session_id, context.number, task.id) as traced:
        try:
            made = await generate(context, task)
        finally:
            context.requests.ended()
        samples = made if isinstance(made, list) else [made]
        if context.slime is not None:
            samples = await context.slime.sampled(context, task, samples)
        await rate(context, task, samples)
        for one in samples:
            if one.reward is not None:
                check_reward(one, task)
        traced.made = samples
    return samples


async def rate(context: Context, task: Task, samples: Sequence[Sample]) -> None:
    """Sets the samples' rewards, where they have none and their group need not be whole, and what other models' servers make of
    them."""

    async def score(sample: Sample) -> None:
        sample.reward, sample.reward_parts = await context.score(context, task, sample)

    if not context.group_score(context, task):
        await asyncio.gather(*(score(one) for one in samples if one.reward is None))
    await ask_others(context, samples)


def check_reward(sample: Sample, task: Task) -> None:
    """Makes the sample's reward and its parts floats; GenerateError where one is no finite number."""

    def number(value: Any, what: str = "") -> float:
        with contextlib.suppress(OverflowError):  # of an integer that no float holds
            if isinstance(value, numbers.Real) and math.isfinite(value):
                return float(value)
        raise GenerateError(
            f"a response to task {task.id} has the reward {what}{value!r:.80}; rewards are finite numbers"
        )

    sample.reward = number(sample.reward)
    sample.reward_parts = {name: number(value, f"{name} = ") for name, value in sample.reward_parts.items()}


async def group_of(context: Context, task: Task, calls: Sequence[Generate]) -> list[list[Sample] | Exception]:
    """What each of a group's calls made, with rewards, or why it failed; whatever else went wrong is raised."""
    made = (samples_of(replace(context, number=i), task, call) for i, call in enumerate(calls))
    outcomes = await asyncio.gather(*made, return_exceptions=True)
    for i, outcome in enumerate(outcomes):
        if isinstance(outcome, asyncio.CancelledError):  # by what it called: nobody else knows its task
            outcomes[i] = GenerateError(f"a response to task {task.id} failed: it cancelled itself")
        elif isinstance(outcome, BaseException) and not isinstance(outcome, FAILURES):
            raise outcome
    if score := context.group_score(context, task):
        await score_together(score, task, outcomes)
    return outcomes  # type: ignore[return-value]


async def score_together(score: GroupScore, task: Task, outcomes: list[Any]) -> None:
    """Rewards of all samples that have none; where that fails for one, its call has failed."""
    unscored = [
        (i, one) for i, made in enumerate(outcomes) if isinstance(made, list) for one in made if one.reward is None
    ]
    if not unscored:
        return
    for (i, sample), result in zip(unscored, await score([sample for _, sample in unscored]), strict=True):
        try:
            if isinstance(result, RewardError):
                raise result
            sample.reward, sample.reward_parts = result
            check_reward(sample, task)
        except (RewardError, GenerateError) as error:
            outcomes[i] = error


async def ask_others(context: Context, samples: Sequence[Sample]) -> None:
    """Reference's and teacher's log-probabilities of the samples, from their servers, where there are any."""

    async def ask(sample: Sample, name: str, server: Server) -> None:
        setattr(sample, name, await context.requests.score(server, sample.prompt_ids, sample.response_ids))

    await asyncio.gather(*(ask(one, name, server) for name, server in context.scorers.items() for one in samples))
