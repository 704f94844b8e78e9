"""A response that servers stop on its way: it goes on from where it was, and every token keeps what it was sampled with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import make_tokenizer
from vime.config.sections import Rollout
from vime.inference.client import Choice, Completion, Generated, InferenceError, parse_completion
from vime.inference.gate import Gate
from vime.inference.requests import Requests
from vime.rollout import generate
from vime.rollout.generate import Context, GenerateError, group_of, load_generate, respond, samples_of
from vime.sample import Sample, Task, VersionSpan


class Stopped:
    """A server that gives its answers one after the other, (tokens, version, finish_reason), and notes what it was asked."""

    version = 0

    def __init__(self, *answers: tuple[int, int, str], routed: bool = False) -> None:
        self.answers, self.routed = list(answers), routed
        self.asked: list[tuple[int, int]] = []

    async def generate(self, prompt: list[int], sampling: Any, *_: Any, **__: Any) -> Completion:
        self.asked.append((len(prompt), sampling["max_tokens"]))
        count, version, reason = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        spans = (VersionSpan(version, 0, count),) if count else ()
        experts = np.full((len(prompt) + count - 1, 1, 1), version, np.uint8) if self.routed and count else None
        return Completion([version] * count, [-float(version)] * count, spans, reason, experts)


def response(server: Stopped) -> Completion:
    context = Context(Requests(server, Gate(usable=True), Rollout()), None, None, {"max_tokens": 10})  # type: ignore
    return asyncio.run(respond(context, [1, 2, 3]))


def test_an_aborted_response_goes_on_from_where_it_stopped() -> None:
    server = Stopped((4, 7, "abort"), (2, 8, "abort"), (3, 8, "stop"))
    made = response(server)
    assert server.asked == [(3, 10), (7, 6), (9, 4)]
    assert made.token_ids == [7] * 4 + [8] * 5 and made.logprobs == [-7.0] * 4 + [-8.0] * 5
    assert made.versions == (VersionSpan(7, 0, 4), VersionSpan(8, 4, 9)) and made.finish_reason == "stop"


def test_one_that_was_stopped_before_its_first_token_begins_again() -> None:
    made = response(Stopped((0, 7, "abort"), (2, 8, "length")))
    assert made.token_ids == [8, 8] and made.versions == (VersionSpan(8, 0, 2),) and made.finish_reason == "length"


def test_one_that_was_stopped_at_its_last_token_is_whole() -> None:
    server = Stopped((6, 7, "abort"), (4, 7, "abort"))
    made = response(server)
    assert made.finish_reason == "length" and made.versions == (VersionSpan(7, 0, 10),) and len(server.asked) == 2


def test_every_token_keeps_the_experts_it_was_sampled_with() -> None:
    made = response(Stopped((4, 7, "abort"), (0, 7, "abort"), (2, 8, "stop"), routed=True))
    assert made.experts is not None and made.experts[:, 0, 0].tolist() == [7] * 6 + [8] * 2


def test_one_that_is_stopped_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MOST_ABORTS", 5)
    with pytest.raises(InferenceError, match="aborted 5 times; after 0 tokens"):
        response(Stopped((0, 7, "abort")))


def test_an_empty_answer_is_one_only_of_an_aborted_request() -> None:
    def body(reason: str) -> Generated:
        return Generated([Choice([], reason)])

    assert parse_completion(body("abort"), 3) == Completion([], [], (), "abort")
    for reason in ("stop", "length"):
        with pytest.raises(InferenceError, match="0 token ids"):
            parse_completion(body(reason), 3)


def test_tasks_of_one_id_have_each_its_own_prompt_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a training and an evaluation set may be called alike."""
    monkeypatch.setattr(generate, "KEPT_PROMPTS", 2)
    tokenizer = make_tokenizer()
    context = Context(None, tokenizer, None, {})  # type: ignore[arg-type]
    tasks = [Task("same", ({"role": "user", "content": text},)) for text in "abca"]
    for task in tasks:
        assert task.messages[0]["content"] in tokenizer.decode(context.prompt_ids(task))
        assert len(context.prompts) <= 2


# functions of the user's

FUNCTIONS = """
import asyncio
from dataclasses import replace
from vime.sample import Sample, VersionSpan

async def good(context, task):
    return Sample([1], [2, 3], [-0.5, -0.5], (VersionSpan(7, 0, 2),), "stop", "ab")
async def cancels_what_it_awaits(context, task):
    other = asyncio.create_task(asyncio.sleep(60))
    other.cancel()
    await other
async def cancels_itself(context, task):
    asyncio.current_task().cancel()
    await asyncio.sleep(60)
async def waits(context, task):
    await asyncio.sleep(60)
async def without_spans(context, task):
    return replace(await good(context, task), versions=())
async def of_two_calls(context, task):
    return [await good(context, task), replace(await good(context, task), versions=(VersionSpan(7, 0, 1),) * 2)]
async def with_tuples(context, task):
    return replace(await good(context, task), versions=((7, 0, 2),))
"""
TASK = Task("t", ({"role": "user", "content": "?"},))


def context_of(reward: Any = 5.0, **more: Any) -> Context:
    """Responses without a reward get this one."""
    requests = Requests(None, Gate(usable=True), Rollout())  # type: ignore[arg-type]

    async def score(*_: Any) -> Any:
        return reward, {}

    return Context(requests, None, score, {}, **more)


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], Any]:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return lambda name: load_generate(f"{tmp_path}/functions.py:{name}", 30)


FAULTS = [
    ("cancels_what_it_awaits", "failed on task t: it cancelled itself"),
    ("cancels_itself", "a response to task t failed: it cancelled itself"),
    ("without_spans", "made a sample 1 of 1 for task t that cannot be trained: versions is empty"),
    ("of_two_calls", "made a sample 2 of 2 for task t that cannot be trained: versions has [0, 1) where"),
    (
        "with_tuples",
        "made a sample 1 of 1 for task t that cannot be trained: 'tuple' object has no attribute 'version'",
    ),
]


@pytest.mark.parametrize(("name", "message"), FAULTS, ids=[name for name, _ in FAULTS])
def test_a_function_that_cancels_itself_or_makes_what_cannot_be_trained_fails_alone(
    load: Callable[[str], Any], name: str, message: str
) -> None:
    calls = [load("good"), load(name), load("good")]
    first, failed, last = asyncio.run(asyncio.wait_for(group_of(context_of(), TASK, calls), 30))
    assert isinstance(failed, GenerateError) and message in str(failed)
    assert [one.reward for made in (first, last) for one in made] == [5.0, 5.0]  # type: ignore[union-attr]


def test_a_function_is_cancelled_with_what_called_it(load: Callable[[str], Any]) -> None:
    async def cancelled(made: Awaitable[Any]) -> bool:
        task = asyncio.ensure_future(made)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    async def both() -> list[bool]:
        waits = load("waits")
        return [await cancelled(waits(context_of(), TASK)), await cancelled(group_of(context_of(), TASK, [waits] * 2))]

    assert asyncio.run(both()) == [True, True]


def giving(reward: Any, parts: dict[str, Any] | None = None) -> Any:
    async def generate(context: Context, task: Task) -> Sample:
        return Sample([1], [2], [-0.5], (VersionSpan(7, 0, 1),), "stop", "", reward=reward, reward_parts=parts or {})

    return generate


NO_REWARDS = [math.nan, math.inf, -math.inf, "1.0", [1.0], 10**400, np.float32("nan")]


@pytest.mark.parametrize("reward", NO_REWARDS, ids=lambda value: f"{type(value).__name__} {value!s:.9}")
@pytest.mark.parametrize("way", ["generate", "part", "reward", "group"])
def test_a_reward_that_is_no_finite_number_fails_its_sample_alone(way: str, reward: Any) -> None:
    async def together(samples: Any) -> Any:
        return [(reward, {}) for _ in samples]

    bad = {"generate": giving(reward), "part": giving(1.0, {"style": reward})}.get(way, giving(None))
    context = context_of(reward, group_score=lambda *_: together if way == "group" else None)
    good, failed = asyncio.run(group_of(context, TASK, [giving(0.5), bad]))
    assert isinstance(failed, GenerateError) and "; rewards are finite numbers" in str(failed)
    assert ("style = " in str(failed)) == (way == "part")
    assert good[0].reward == 0.5  # type: ignore[index]


def test_rewards_of_other_kinds_of_numbers_are_floats() -> None:
    for reward in (1, True, np.float32(1), np.int64(1)):
        (made,) = asyncio.run(samples_of(context_of(), TASK, giving(reward, {"style": reward})))
        assert type(made.reward) is float and made.reward == 1.0
        assert type(made.reward_parts["style"]) is float
