"""Requests to a server: asked again after a failure, not after a refusal, never more often than said."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vime.inference.client import InferenceError, RequestRefused
from vime.rollout.generate import Context, requested


def ask(monkeypatch: Any, retries: int, failures: list[Exception]) -> tuple[str, int]:
    """The answer after these failures, and how often the server was asked."""
    asked = 0
    context = Context([], None, lambda task, text: 0.0, {}, 1.0, 1.0, retries, asyncio.Semaphore(1))

    async def call() -> str:
        nonlocal asked
        asked += 1
        if failures:
            raise failures.pop(0)
        return "answer"

    async def at_once(seconds: float) -> None:
        pass

    monkeypatch.setattr("vime.rollout.generate.asyncio.sleep", at_once)
    try:
        return asyncio.run(requested(context, call)), asked
    except InferenceError as error:
        return str(error), asked


@pytest.mark.parametrize(("retries", "failures", "found"), [(0, 0, 1), (2, 1, 2), (2, 2, 3)])
def test_a_failed_request_is_made_again(monkeypatch: Any, retries: int, failures: int, found: int) -> None:
    assert ask(monkeypatch, retries, [InferenceError("down")] * failures) == ("answer", found)


def test_after_the_last_retry_the_failure_is_the_answer(monkeypatch: Any) -> None:
    assert ask(monkeypatch, 2, [InferenceError("down")] * 9) == ("down", 3)


def test_a_refused_request_is_not_made_again(monkeypatch: Any) -> None:
    assert ask(monkeypatch, 2, [RequestRefused("too long")]) == ("too long", 1)
