"""A response that servers stop on its way: it goes on from where it was, and every token keeps what it was sampled with."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.tiny import make_tokenizer
from vime.config.sections import Rollout
from vime.inference.client import Choice, Completion, Generated, InferenceError, parse_completion
from vime.inference.gate import Gate
from vime.inference.requests import Requests
from vime.rollout import generate
from vime.rollout.generate import Context, respond
from vime.sample import Task, VersionSpan


class Stopped:
    """A server that gives its answers one after the other, (tokens, version, finish_reason), and notes what it was asked."""

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
