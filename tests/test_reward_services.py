"""Rewards that ask others: a reward server, a judge, a reward model, each stood for by a real HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from vime.rewards import RewardError, service
from vime.rewards.load import load_reward
from vime.rewards.service import ServiceError
from vime.sample import Task

TASK = Task(
    "t1", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2? {x}"}), "4", {"kind": "sum"}
)


class Remote:
    """A server whose ``answer``, of path and body, is a JSON value, or (status, text); it notes what it was asked."""

    def __init__(self) -> None:
        self.answer: Callable[[str, Any], Any] = lambda path, body: {}
        self.asked: list[tuple[str, Any]] = []
        self.headers: Any = {}

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.path, body))
        self.headers = request.headers
        answer = self.answer(request.path, body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        return (
            web.Response(status=answer[0], text=answer[1]) if isinstance(answer, tuple) else web.json_response(answer)
        )

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"


@pytest.fixture
def remote(run: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    monkeypatch.setattr(service, "WAIT_S", 0.01)
    made = Remote()
    run(made.start())
    yield made
    run(made.runner.cleanup())


def failure(run: Any, reward: Any, text: str = "x") -> str:
    with pytest.raises(ServiceError) as caught:
        run(reward(TASK, text))
    return str(caught.value)


# a reward server


def test_responses_of_a_short_time_are_sent_together_and_each_gets_its_own_reward(run: Any, remote: Remote) -> None:
    def answer(path: str, body: Any) -> Any:
        return {
            "rewards": [
                {"reward": len(one["response"]), "kind": one["metadata"]["kind"] == "sum"} for one in body["samples"]
            ]
        }

    remote.answer = answer
    reward = load_reward("http", {"url": f"{remote.url}/score", "batch": 4, "window_ms": 200})

    async def ask() -> list[Any]:
        return await asyncio.gather(*(reward(TASK, "x" * count) for count in range(10)))

    assert run(ask()) == [{"reward": count, "kind": True} for count in range(10)]
    assert sorted(len(body["samples"]) for _, body in remote.asked) == [2, 4, 4]
    path, body = remote.asked[0]
    assert path == "/score" and body["samples"][0] == {
        "id": "t1",
        "messages": [dict(message) for message in TASK.messages],
        "answer": "4",
        "metadata": {"kind": "sum"},
        "response": "",
    }


def test_an_error_of_one_entry_fails_that_response_alone_and_null_says_that_none_applies(
    run: Any, remote: Remote
) -> None:
    remote.answer = lambda path, body: {"rewards": [1, {"error": "no such tool"}, None]}
    reward = load_reward("http", {"url": remote.url, "batch": 3, "window_ms": 60000})

    async def ask() -> list[Any]:
        return await asyncio.gather(*(reward(TASK, "x") for _ in range(3)), return_exceptions=True)

    one, other, none = run(ask())
    assert (one, none) == (1, None) and str(other) == "no such tool"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1], 'not {"rewards": [...]} with 1 entries'),
        ({"rewards": [1, 2]}, 'not {"rewards": [...]} with 1 entries'),
        ((200, "<html>"), "answered no JSON: <html>"),
        ((404, "no such path"), "failed: HTTP 404: no such path"),
    ],
)
def test_a_wrong_answer_is_told_with_what_it_was_and_not_asked_for_again(
    run: Any, remote: Remote, answer: Any, said: str
) -> None:
    remote.answer = lambda path, body: answer
    text = failure(run, load_reward("http", {"url": remote.url}))
    assert said in text and remote.url in text and len(remote.asked) == 1


def test_a_busy_server_is_asked_again_and_given_up_in_the_end(run: Any, remote: Remote) -> None:
    remote.answer = lambda path, body: (503, "loading") if len(remote.asked) < 3 else {"rewards": [7]}
    assert run(load_reward("http", {"url": remote.url, "retries": 2})(TASK, "x")) == 7
    assert len(remote.asked) == 3
    remote.answer = lambda path, body: (429, "slowly")
    assert "HTTP 429: slowly" in failure(run, load_reward("http", {"url": remote.url, "retries": 1}))
    assert len(remote.asked) == 5


def test_a_server_that_is_not_there_or_silent_is_an_error_before_the_call_is_late(run: Any, remote: Remote) -> None:
    remote.answer = lambda path, body: asyncio.sleep(600)
    silent = load_reward("http", {"url": remote.url}, deadline_s=0.5)
    assert f"{remote.url}: no answer within 0.45 s" in failure(run, silent)
    assert "ClientConnectorError" in failure(run, load_reward("http", {"url": "http://127.0.0.1:9", "retries": 1}))


def test_a_cancelled_call_does_not_take_the_others_of_its_batch_along(run: Any, remote: Remote) -> None:
    remote.answer = lambda path, body: {"rewards": [1] * len(body["samples"])}
    reward = load_reward("http", {"url": remote.url, "batch": 3, "window_ms": 60000})

    async def ask() -> list[Any]:
        calls = [asyncio.create_task(reward(TASK, "x")) for _ in range(3)]
        await asyncio.sleep(0)
        calls[0].cancel()
        return await asyncio.gather(*calls, return_exceptions=True)

    assert run(ask())[1:] == [1, 1]


def test_the_key_comes_from_the_environment(run: Any, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RewardError, match="there is no such environment variable; export it"):
        load_reward("http", {"url": remote.url, "key_env": "VIME_TEST_KEY"})
    monkeypatch.setenv("VIME_TEST_KEY", "k1")
    remote.answer = lambda path, body: {"rewards": [1]}
    run(load_reward("http", {"url": remote.url, "key_env": "VIME_TEST_KEY"})(TASK, "x"))
    assert remote.headers["Authorization"] == "Bearer k1"


def test_options_of_services_are_checked() -> None:
    for options, said in (
        ({"url": "localhost:1"}, "does not start with http:// or https://"),
        ({"url": "http://x", "batch": 0}, "batch must be >= 1"),
        ({"url": "http://x", "retries": -1}, "retries must be >= 0"),
        ({}, "missing 1 required keyword-only argument: 'url'"),
    ):
        with pytest.raises(RewardError, match=said):
            load_reward("http", options)


# a judge


def judging(remote: Remote, reply: str | None, **options: Any) -> Any:
    def answer(path: str, body: Any) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "the-judge"}]}
        return {"choices": [{"message": {"role": "assistant", "content": reply}}]}

    remote.answer = answer
    return load_reward("judge", {"url": f"{remote.url}/v1", **options})


def test_the_judge_sees_prompt_answer_and_response_and_its_last_score_counts(run: Any, remote: Remote) -> None:
    assert run(judging(remote, "I would say score: 3. No.\n**Score:** 7.5")(TASK, "It is {4}")) == 7.5
    (models, _), (path, body) = remote.asked
    assert (models, path) == ("/v1/models", "/v1/chat/completions")
    assert body["model"] == "the-judge" and body["temperature"] == 0
    text = body["messages"][-1]["content"]
    assert "2+2? {x}" in text and "It is {4}" in text and "\n4\n" in text


def test_the_prompt_names_columns_and_the_whole_conversation(run: Any, remote: Remote) -> None:
    options = {"prompt": "{kind}|{messages}|{response}", "system": "Judge.", "model": "m", "extra": {"seed": 1}}
    assert run(judging(remote, "Score: 1", **options)(TASK, "r")) == 1
    ((_, body),) = remote.asked
    assert body["messages"] == [
        {"role": "system", "content": "Judge."},
        {"role": "user", "content": "sum|system: Be brief.\n\nuser: 2+2? {x}|r"},
    ]
    assert body["seed"] == 1 and body["model"] == "m"
    with pytest.raises(ValueError, match="names {level}, which the row does not have: kind, prompt"):
        run(judging(remote, "", prompt="{level} {response}", model="m")(TASK, "r"))


@pytest.mark.parametrize(
    ("reply", "options", "score"),
    [
        ("verdict: <7>", {"pattern": "<(\\d+)>"}, 7),
        ('First {"score": 1}, then ```{"why": {"a": 1}, "score": "4"}```', {"key": "score"}, 4),
        ("Score: 5", {"low": 0, "high": 10}, 0.5),
        ("Score: 50", {"low": 0, "high": 10, "unreadable": -1}, -1),
        ("no idea", {"unreadable": 0}, 0),
        (None, {"unreadable": 0}, 0),
    ],
)
def test_the_score_is_read_by_pattern_or_from_json_and_put_between_bounds(
    run: Any, remote: Remote, reply: Any, options: Any, score: float
) -> None:
    assert run(judging(remote, reply, **options)(TASK, "x")) == score


def test_a_reply_without_a_score_fails_the_response_where_nothing_else_is_said(run: Any, remote: Remote) -> None:
    text = failure(run, judging(remote, "I cannot say."))
    assert "no score that can be read: 'I cannot say.'; options.unreadable gives one" in text
    remote.answer = lambda path, body: {"error": "x"}
    assert "/v1/models lists no model" in failure(run, load_reward("judge", {"url": remote.url}))
    assert "no chat completion" in failure(run, load_reward("judge", {"url": remote.url, "model": "m"}))


def test_options_of_a_judge_are_checked() -> None:
    for options, said in (
        ({"pattern": "x", "key": "score"}, "pattern and key are both set"),
        ({"low": 0}, "they are set together"),
        ({"low": 3, "high": 1}, "low under high"),
        ({"prompt": "Judge {prompt}"}, "has no {response}"),
        ({"prompt": "{response} {"}, "reward 'judge': "),
        ({"pattern": "(a)(b)"}, "has 2 groups"),
    ):
        with pytest.raises(RewardError, match=said):
            load_reward("judge", {"url": "http://x", **options})


# a reward model


def scoring(remote: Remote, scores: Any) -> Any:
    remote.answer = lambda path, body: {"data": [{"index": 0, "probs": scores}]}
    return load_reward("reward_model", {"url": remote.url, "model": "rm"})


def test_a_reward_model_scores_the_conversation_without_activation(run: Any, remote: Remote) -> None:
    assert run(scoring(remote, [-1.25])(TASK, "4")) == -1.25
    ((path, body),) = remote.asked
    assert path == "/classify" and body == {
        "model": "rm",
        "messages": [*map(dict, TASK.messages), {"role": "assistant", "content": "4"}],
        "use_activation": False,
    }


def test_a_conversation_of_many_turns_is_scored_whole(run: Any, remote: Remote) -> None:
    turns = [
        {"role": "assistant", "content": "calc"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4"},
    ]
    task = Task("t1", TASK.messages, tools=({"type": "function"},), metadata={"messages": turns})
    run(scoring(remote, [1.0])(task, "It is 4"))
    body = remote.asked[0][1]
    assert body["messages"][2:] == turns and body["chat_template_kwargs"] == {"tools": [{"type": "function"}]}


def test_a_model_that_gives_no_single_score_is_an_error(run: Any, remote: Remote) -> None:
    assert "no single score, as of a model with one label" in failure(run, scoring(remote, [0.1, 0.9]))
