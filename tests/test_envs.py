"""Environments of others: their rows, episodes and rewards, with every token as the server returned it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from tests.tiny import make_tokenizer
from vime.config.sections import Rollout
from vime.data import DataError
from vime.data.load import load_data
from vime.data.sources import load_tasks
from vime.inference.client import Completion
from vime.inference.gate import Gate
from vime.inference.requests import Requests
from vime.rollout.generate import Context, GenerateError, load_generate, samples_of
from vime.sample import Sample, Task, VersionSpan

TOKENIZER = make_tokenizer()
END = TOKENIZER.eos_token_id


class Scripted:
    """A server whose replies are a function of what it is asked, with log-probabilities that tell their place."""

    version = 0

    def __init__(self, reply: Callable[[str], str]) -> None:
        self.reply = reply
        self.made: list[list[int]] = []

    async def generate(self, prompt: list[int], sampling: Any, *_: Any, **__: Any) -> Completion:
        ids = [*TOKENIZER.encode(self.reply(TOKENIZER.decode(prompt))), END][: sampling["max_tokens"]]
        self.made.append(ids)
        reason = "stop" if ids[-1] == END else "length"
        return Completion(
            ids, [-float(len(prompt) + n) for n in range(len(ids))], (VersionSpan(0, 0, len(ids)),), reason
        )


def play(task: Task, reply: Callable[[str], str], max_tokens: int = 400) -> tuple[Sample, Scripted]:
    """One sample of the task's own generate function."""
    server = Scripted(reply)

    async def whole() -> Sample:
        requests = Requests(server, Gate(usable=True), Rollout())  # type: ignore[arg-type]
        context = Context(requests, TOKENIZER, None, {"max_tokens": max_tokens})  # type: ignore[arg-type]
        assert task.generate
        (sample,) = await samples_of(context, task, load_generate(task.generate, 60))
        return sample

    return asyncio.run(whole()), server


def check_exact(sample: Sample, server: Scripted) -> None:
    """What is trained is what the server returned, token by token; what the policy was told between is not."""
    trained = [token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]
    assert trained == [token for ids in server.made for token in ids]
    for place, (logprob, mask) in enumerate(zip(sample.logprobs, sample.loss_mask, strict=True)):
        assert logprob == -(len(sample.prompt_ids) + place) if mask else math.isnan(logprob)


# OpenEnv


class Guessing:
    """A game in the OpenEnv protocol: find the number that the seed chose."""

    def __init__(self, fickle: bool = False, right: float = 1.0) -> None:
        self.fickle, self.right, self.sessions, self.resets = fickle, right, 0, 0

    def app(self) -> web.Application:
        made = web.Application()
        made.add_routes([web.get("/ws", self.session), web.get("/schema", self.schema)])
        return made

    async def schema(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"action": {"properties": {"guess": {"type": "string"}, "metadata": {"type": "object"}}}}
        )

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sessions += 1
        secret = 0
        async for message in socket:
            if message.type != WSMsgType.TEXT:
                break
            asked = json.loads(message.data)
            if asked["type"] == "reset":
                self.resets += 1
                secret = asked["data"]["seed"] % 10
                text = f"Guess a number of {asked['data'].get('most', 9)}." + (
                    f" ({self.resets})" if self.fickle else ""
                )
                await self.tell(socket, text, None, False)
            elif not asked["data"].get("guess", "").isdigit():
                error = {"message": "guess is no number", "code": "VALIDATION_ERROR"}
                await socket.send_json({"type": "error", "data": error})
            else:
                guess = int(asked["data"]["guess"])
                text = "right" if guess == secret else "higher" if guess < secret else "lower"
                await self.tell(socket, text, self.right if guess == secret else -0.1, guess == secret)
        return socket

    async def tell(self, socket: web.WebSocketResponse, text: str, reward: float | None, done: bool) -> None:
        data = {"observation": {"text": text, "tries": 3}, "reward": reward, "done": done}
        await socket.send_json({"type": "observation", "data": data})


def served(game: Guessing) -> Iterator[str]:
    """The URL of a real server, in a thread of its own."""
    loop, ports = asyncio.new_event_loop(), []
    ready = threading.Event()

    async def start() -> None:
        runner = web.AppRunner(game.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(runner.addresses[0][1])
        ready.set()

    loop.create_task(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    ready.wait(30)
    yield f"http://127.0.0.1:{ports[0]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


@pytest.fixture
def game() -> Iterator[str]:
    yield from served(Guessing())


@pytest.fixture
def fickle() -> Iterator[str]:
    yield from served(Guessing(fickle=True))


def test_an_openenv_episode_is_one_sample_of_many_turns_with_the_servers_own_tokens(game: str) -> None:
    tasks = load_tasks(f"openenv:{game}", size=3, seed=3, options={"reset": {"most": 99}}, system="Play.")
    assert [task.metadata["episode"]["seed"] for task in tasks] == [3, 4, 5]
    assert [message["content"] for message in tasks[0].messages] == ["Play.", "Guess a number of 99."]

    def guess(told: str) -> str:
        return "7" if told.count("<|assistant|>") == 1 else "one" if "lower" not in told[-30:] else "4"

    sample, server = play(tasks[1], guess)
    texts = [message["content"] for message in sample.metadata["messages"]]
    assert texts == ["7", "lower", "4"] and sample.reward == pytest.approx(0.9)
    check_exact(sample, server)
    last, _ = play(load_tasks(f"openenv:{game}", size=1, seed=4, options={"reward": "last"})[0], guess)
    assert last.reward == 1.0


def test_a_reply_that_is_no_action_is_told_so_and_turns_are_limited(game: str) -> None:
    (task,) = load_tasks(f"openenv:{game}", size=1, seed=4, options={"max_turns": 2})
    sample, server = play(task, lambda told: "four")
    assert "This is no action" in sample.metadata["messages"][1]["content"] and sample.reward == 0.0
    assert len(server.made) == 2
    check_exact(sample, server)
    (task,) = load_tasks(f"openenv:{game}", size=1, seed=4, options={"action": "json"})
    sample, _ = play(task, lambda told: 'I say {"guess": "4"}' if "no action" in told else "4")
    assert sample.reward == 1.0 and len(sample.metadata["messages"]) == 3


def test_an_episode_without_room_for_more_ends_truncated(game: str) -> None:
    (task,) = load_tasks(f"openenv:{game}", size=1, seed=4)
    sample, server = play(task, lambda told: "0", max_tokens=20)
    assert sample.truncated and len(sample.response_ids) <= 20
    check_exact(sample, server)


def test_an_environment_that_does_not_heed_its_seed_fails_the_sample_with_the_reason(fickle: str) -> None:
    (task,) = load_tasks(f"openenv:{fickle}", size=1)
    with pytest.raises(Exception, match="the environment must heed its seed"):
        play(task, lambda told: "1")


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_of_an_environment_that_is_not_finite_fails_the_sample(reward: float) -> None:
    with contextlib.contextmanager(served)(Guessing(right=reward)) as url:
        (task,) = load_tasks(f"openenv:{url}", size=1, seed=4)
        with pytest.raises(GenerateError, match=f"has the reward {reward}; rewards are finite numbers"):
            play(task, lambda told: "4")


def test_prompts_that_read_alike_are_other_episodes(game: str) -> None:
    from tests.tiny import make_config

    sets = {"t": {"source": f"openenv:{game}", "size": 2, "seed": 1}}
    data = {"source": f"openenv:{game}", "size": 4, "seed": 0}
    train, held_out = load_data(make_config(Path("m"), data=data, eval={"sets": sets}))
    assert len(held_out["t"]) == 2
    assert [task.metadata["episode"]["seed"] for task in train[""]] == [0, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("http://127.0.0.1:1", {}, "cannot be reached: .*is an OpenEnv server there?"),
        ("http://127.0.0.1:1", {"max_turn": 3}, "has no option 'max_turn'; did you mean max_turns?"),
        ("http://127.0.0.1:1", {"reward": "mean"}, "reward = 'mean'; it is sum or last"),
    ],
)
def test_an_openenv_source_that_cannot_be_is_refused(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tasks(f"openenv:{url}", size=1, options=options)


# verifiers

ENVIRONMENTS = """
import time
import verifiers as vf
from datasets import Dataset

ADD = vf.Tool(name="add", description="adds", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})


def rows(count):
    return Dataset.from_list([{"question": f"{n} + {n}", "answer": str(2 * n)} for n in range(count)])


async def right(completion, answer):
    time.sleep(0.01)
    return float(completion[-1].content.strip() == answer)


async def turns(state):
    return float(len(state["trajectory"]))


class Calculator(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        calls = messages[-1].tool_calls
        if not calls:
            state["final_env_response"] = []
            return []
        assert calls[0].name == "add"
        return [vf.ToolMessage(role="tool", tool_call_id=calls[0].id, content="12")]


class Rewriter(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        messages[0].content = "other"
        return [vf.UserMessage(content="again")]


def load_environment(kind="single", count=7):
    rubric = vf.Rubric(funcs=[right, turns], weights=[1.0, 0.0])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=rows(count), eval_dataset=rows(2), system_prompt="Add.", rubric=rubric)
    made = Calculator if kind == "tools" else Rewriter
    return made(dataset=rows(count), rubric=rubric, tool_defs=[ADD], max_turns=4)
"""


@pytest.fixture
def verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package in the folder VERIFIERS (requirements/verifiers.txt), and environments of it."""
    if folder := os.environ.get("VERIFIERS"):
        monkeypatch.syspath_prepend(str(Path(folder).absolute()))
    pytest.importorskip("verifiers.types", reason="VERIFIERS names no folder with verifiers")
    (tmp_path / "tiny_adding.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("verifiers")
def test_the_rows_rewards_and_metrics_of_a_verifiers_environment_are_its_own() -> None:
    tasks = load_tasks("verifiers:tiny-adding", size=4)
    assert [message["content"] for message in tasks[3].messages] == ["Add.", "3 + 3"] and tasks[3].answer == "6"
    assert len(load_tasks("verifiers:tiny-adding", options={"split": "eval"})) == 2
    sample, server = play(tasks[3], lambda told: "6")
    assert sample.reward == 1.0 and sample.reward_parts == {"right": 1.0, "turns": 1.0, "num_turns": 1.0}
    check_exact(sample, server)
    assert play(tasks[3], lambda told: "7")[0].reward == 0.0


@pytest.mark.usefixtures("verifiers")
def test_a_verifiers_environment_with_tools_and_turns_is_one_exact_sample() -> None:
    (*_, task) = load_tasks("verifiers:tiny-adding", options={"args": {"kind": "tools"}})
    assert task.tools[0]["function"]["name"] == "add"
    call = 'So: <tool_call>{"name": "add", "arguments": {"a": 6}}</tool_call>'
    sample, server = play(task, lambda told: "12" if told.count("<|assistant|>") == 2 else call)
    assert [message["role"] for message in sample.metadata["messages"]] == ["assistant", "tool", "assistant"]
    assert sample.reward == 1.0 and sample.reward_parts["turns"] == 2.0 and sample.text == "12"
    check_exact(sample, server)
    cut, server = play(task, lambda told: call, max_tokens=70)
    assert cut.truncated and cut.reward == 0.0
    check_exact(cut, server)


@pytest.mark.usefixtures("verifiers")
def test_a_verifiers_environment_that_cannot_be_used_is_refused_with_the_reason() -> None:
    with pytest.raises(DataError, match="verifiers:tiny-adding has no option 'arg'; did you mean args?"):
        load_tasks("verifiers:tiny-adding", options={"arg": {}})
    with pytest.raises(DataError, match="verifiers:no-such cannot be made with args = {}: Could not import 'no-such'"):
        load_tasks("verifiers:no-such")
    with pytest.raises(DataError, match="split = 'test'; it is train or eval"):
        load_tasks("verifiers:tiny-adding", options={"split": "test"})
    (task, *_) = load_tasks("verifiers:tiny-adding", options={"args": {"kind": "rewrites"}})
    with pytest.raises(Exception, match="changes messages that the policy has seen"):
        play(task, lambda told: "1")


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="the package is here")
def test_without_the_package_the_way_to_install_it_is_said() -> None:
    code = "from vime.data.sources import load_tasks; load_tasks('verifiers:x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "pip install 'verifiers[all]>=0.2.1,<0.3'" in done.stderr
