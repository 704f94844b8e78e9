"""Requests to a server: they wait for one, are asked again after a failure, not after a refusal, never more often than said."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vime.config.sections import Rollout
from vime.inference.client import ANSWERS_AT_ONCE, InferenceError, Late, RequestRefused, Server
from vime.inference.gate import Gate
from vime.inference.requests import LOST_LIMIT, Requests


def ask(
    monkeypatch: Any, retries: int, failures: list[Exception], lost: int = 0, late_again: bool = True
) -> tuple[str, int]:
    """The answer after these failures, during the first ``lost`` of which a server is lost, and how often was asked."""
    asked, gate = 0, Gate(usable=True)
    requests = Requests(None, gate, Rollout(retries=retries, concurrency=1))  # type: ignore[arg-type]

    async def call() -> str:
        nonlocal asked
        asked += 1
        gate.disturbances += asked <= lost
        if failures:
            raise failures.pop(0)
        return "answer"

    async def at_once(seconds: float) -> None:
        pass

    monkeypatch.setattr("vime.inference.requests.asyncio.sleep", at_once)
    try:
        return asyncio.run(requests.made(call, late_again)), asked
    except InferenceError as error:
        return str(error), asked


@pytest.mark.parametrize(("retries", "failures", "found"), [(0, 0, 1), (2, 1, 2), (2, 2, 3)])
def test_a_failed_request_is_made_again(monkeypatch: Any, retries: int, failures: int, found: int) -> None:
    assert ask(monkeypatch, retries, [InferenceError("down")] * failures) == ("answer", found)


def test_after_the_last_retry_the_failure_is_the_answer(monkeypatch: Any) -> None:
    assert ask(monkeypatch, 2, [InferenceError("down")] * 9) == ("down", 3)


def test_a_refused_request_is_not_made_again(monkeypatch: Any) -> None:
    assert ask(monkeypatch, 2, [RequestRefused("too long")]) == ("too long", 1)


def test_the_loss_of_a_server_uses_up_no_retry(monkeypatch: Any) -> None:
    assert ask(monkeypatch, 0, [InferenceError("gone")] * 5, lost=5) == ("answer", 6)
    assert ask(monkeypatch, 1, [InferenceError("gone")] * 5 + [InferenceError("bad")] * 2, lost=5) == ("bad", 7)


def test_a_request_under_which_servers_are_lost_again_and_again_fails(monkeypatch: Any) -> None:
    assert ask(monkeypatch, 0, [InferenceError("gone")] * 99, lost=99) == ("gone", LOST_LIMIT + 1)


def test_a_late_response_is_asked_for_again_only_where_a_server_was_lost(monkeypatch: Any) -> None:
    """Of the second try only what is shorter would come back, and the run would learn from that."""
    assert ask(monkeypatch, 2, [Late("slow")], late_again=False) == ("slow", 1)
    assert ask(monkeypatch, 2, [Late("slow")] * 2, lost=1, late_again=False) == ("slow", 2)
    assert ask(monkeypatch, 2, [Late("slow")], lost=1, late_again=False) == ("answer", 2)
    assert ask(monkeypatch, 2, [Late("slow")]) == ("answer", 2)


class Slow:
    """A session whose requests are answered after ten minutes."""

    def __init__(self) -> None:
        self.asked = 0

    async def __aenter__(self) -> Slow:
        self.asked += 1
        raise TimeoutError

    async def __aexit__(self, *_: object) -> None: ...

    def request(self, *_: Any, **__: Any) -> Slow:
        return self


def test_a_response_that_does_not_end_in_time_is_late_and_one_that_is_only_scored_is_tried_again(
    monkeypatch: Any,
) -> None:
    async def at_once(seconds: float) -> None: ...

    monkeypatch.setattr("vime.inference.requests.asyncio.sleep", at_once)
    slow = Slow()
    server = Server("http://x", slow, 1)  # type: ignore[arg-type]
    requests = Requests(server, Gate(usable=True), Rollout(retries=2))
    with pytest.raises(Late, match=r"gave no answer in 600 s \(rollout.request_timeout_s\)"):
        asyncio.run(requests.generate([1], {}))
    assert slow.asked == 1
    with pytest.raises(Late):
        asyncio.run(requests.score(server, [1], [2]))
    assert slow.asked == 4


def test_a_group_is_as_old_as_the_first_response_that_was_asked_for() -> None:
    class Front:
        version = 3

        async def generate(self, *_: Any) -> None:
            self.version += 1

    async def play() -> None:
        gate = Gate(usable=True)
        shared = Requests(Front(), gate, Rollout(concurrency=2))  # type: ignore[arg-type]
        one, other = shared.of_group(), shared.of_group()
        with gate.held():
            waiting = asyncio.create_task(one.generate([1], {}))
            await asyncio.sleep(0.01)
            assert one.begun is None
            shared.front.version = 5
        await waiting
        await one.generate([1], {})
        assert (one.begun, other.begun, shared.begun) == (5, None, None)
        await other.generate([1], {})
        assert (one.begun, other.begun, one.of_group().begun) == (5, 7, None)

    asyncio.run(play())


def test_requests_wait_while_no_server_serves_or_the_gate_is_held() -> None:
    async def scenario() -> None:
        gate = Gate()
        requests = Requests(None, gate, Rollout(concurrency=2))  # type: ignore[arg-type]
        sent: list[int] = []

        async def call() -> None:
            sent.append(1)

        async def pending() -> asyncio.Task[None]:
            task = asyncio.create_task(requests.made(call))
            await asyncio.sleep(0.01)
            return task

        first = await pending()
        assert not sent
        gate.usable(True)
        await first
        with gate.held():
            second = await pending()
            gate.usable(True)  # a server that joins meanwhile opens nothing
            await asyncio.sleep(0.01)
            assert len(sent) == 1
        await second
        gate.usable(False)
        third = await pending()
        assert len(sent) == 2
        third.cancel()

    asyncio.run(scenario())


class Answering:
    """A session whose requests are all answered at once."""

    status = 200

    def request(self, *_: Any, **__: Any) -> Answering:
        return self

    async def __aenter__(self) -> Answering:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def read(self) -> bytes:
        return b""


def test_of_many_answers_that_come_at_once_few_are_taken_up_in_one_turn_of_the_event_loop() -> None:
    """An update of the weights may end thousands of responses."""

    async def play() -> int:
        server, taken, most = Server("http://x", Answering(), 1), list[bytes](), 0  # type: ignore[arg-type]
        calls = [asyncio.create_task(server._call("POST", "", 1, parse=taken.append)) for _ in range(200)]
        while len(taken) < 200:
            before = len(taken)
            await asyncio.sleep(0)
            most = max(most, len(taken) - before)
        await asyncio.gather(*calls)
        return most

    assert asyncio.run(play()) == ANSWERS_AT_ONCE
