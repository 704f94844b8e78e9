"""Environments that are served in the OpenEnv protocol: an episode is one WebSocket session, reset and then stepped by replies.

The protocol is spoken here, so that no package is needed: JSON messages ``{type: reset | step, data}`` to ``URL/ws``, answered
by ``{type: observation, data: {observation, reward, done}}`` or ``{type: error, data: {message, code}}``; ``URL/schema`` tells
what an action is made of.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Self

import aiohttp

from vime.config.nearest import nearest
from vime.data import DataError
from vime.rollout.conversation import Conversation
from vime.rollout.generate import Context
from vime.sample import Sample, Task

DEFAULTS: dict[str, Any] = {
    "action": None,  # the field of an action that a reply becomes; "json": a reply holds the action as JSON
    "observation": None,  # format string of an observation's fields; default: its only text, else all as JSON
    "reset": {},  # further arguments of reset
    "reward": "sum",  # of an episode: the sum of its steps' rewards, or the "last"
    "max_turns": 32,
    "sessions": 8,  # episodes at once: what the server allows
    "timeout_s": 60,  # deadline of one answer of the environment
}
JSON = "json"


class EnvironmentFault(Exception):
    """The environment cannot be reached, is late, or answers with an error; ``code`` is the error's."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class Session:
    """One session with the environment at ``url``."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s

    async def __aenter__(self) -> Self:
        self.http = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(self.timeout_s):
                self.socket = await self.http.ws_connect(f"{self.url}/ws", max_msg_size=100 << 20)
        except (aiohttp.ClientError, TimeoutError) as error:
            await self.http.close()
            raise EnvironmentFault(f"{self.url}/ws cannot be reached: {type(error).__name__}: {error}") from None
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.socket.close()
        await self.http.close()

    async def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """What the environment answers: observation, reward and done."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.socket.send_json({"type": kind, "data": data})
                answer = await self.socket.receive_json()
        except TimeoutError:
            raise EnvironmentFault(f"{self.url} took over {self.timeout_s:g} s to {kind} (options.timeout_s)") from None
        except (aiohttp.ClientError, ConnectionError, TypeError, ValueError) as error:
            raise EnvironmentFault(f"{self.url} ended the session: {error}") from None
        found = answer.get("data", {})
        if answer.get("type") == "error":
            raise EnvironmentFault(f"{self.url} cannot {kind}: {found.get('message')}", found.get("code", ""))
        return dict(found)

    async def action_field(self) -> str:
        """The text that an action is made of, "json" where it has more than that."""
        async with asyncio.timeout(self.timeout_s), self.http.get(f"{self.url}/schema") as answer:
            fields: dict[str, Any] = (await answer.json())["action"].get("properties", {})
        names = [name for name in fields if name != "metadata"]
        return names[0] if len(names) == 1 and fields[names[0]].get("type") == "string" else JSON


def seen(answer: dict[str, Any], template: str | None) -> str:
    """An observation as the policy reads it."""
    fields = answer.get("observation") or {}
    if template is not None:
        return template.format(**fields)
    texts = [value for value in fields.values() if isinstance(value, str) and value]
    return texts[0] if len(texts) == 1 else json.dumps(fields)


def rows(url: str, size: int | None, seed: int, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row an episode: what the policy sees after a reset with seed, seed + 1, ..."""
    what = f"openenv:{url}"
    for option in options:
        if option not in DEFAULTS:
            raise DataError(f"{what} has no option {option!r}{nearest(option, list(DEFAULTS))}")
    settings = {**DEFAULTS, **options, "url": url}
    if settings["reward"] not in ("sum", "last"):
        raise DataError(f"{what}: reward = {settings['reward']!r}; it is sum or last")
    if size is None:
        raise DataError(f"{what} is generated and needs a size; set data.size (or the evaluation set's)")
    episodes = [{"seed": seed + number, **settings["reset"]} for number in range(size)]
    with ThreadPoolExecutor(1) as thread:  # this one may run an event loop already
        try:
            settings["action"], first = thread.submit(asyncio.run, beginnings(settings, episodes)).result()
        except (EnvironmentFault, aiohttp.ClientError, LookupError, TimeoutError, ValueError) as error:
            raise DataError(f"{what}: {type(error).__name__}: {error}; is an OpenEnv server there?") from None
    for episode, text in zip(episodes, first, strict=True):
        yield {
            "prompt": text,
            "generate": "vime.envs.openenv:generate",
            "openenv": {**settings, "first": text},
            "episode": {"url": url, **episode},
        }


async def beginnings(settings: dict[str, Any], episodes: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The field of an action, and what the policy sees first in each episode."""
    async with Session(settings["url"], settings["timeout_s"]) as session:
        action = settings["action"] or await session.action_field()
        return action, [seen(await session.ask("reset", episode), settings["observation"]) for episode in episodes]


@cache
def sessions(url: str, count: int, loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    return asyncio.Semaphore(count)


async def generate(context: Context, task: Task) -> Sample:
    """One episode: each reply is an action, each observation the next message."""
    settings = task.metadata["openenv"]
    episode = {name: value for name, value in task.metadata["episode"].items() if name != "url"}
    url, free = settings["url"], sessions(settings["url"], settings["sessions"], asyncio.get_running_loop())
    rewards = [0.0]
    async with free, Session(url, settings["timeout_s"]) as session:
        first = seen(await session.ask("reset", episode), settings["observation"])
        if first != settings["first"]:
            raise ValueError(
                f"reset({episode}) showed {first!r:.80}, at the start of the run {settings['first']!r:.80}: the responses of a "
                "group must have one prompt; the environment must heed its seed, or options.observation leave out what differs"
            )
        conversation = Conversation(context, task)
        for _ in range(settings["max_turns"]):
            reply = await conversation.respond()
            if conversation.truncated:
                break
            told, done = await act(session, settings, reply, rewards)
            if done:
                break
            conversation.append({"role": "user", "content": told})
    return conversation.sample(reward=rewards[-1] if settings["reward"] == "last" else sum(rewards))


async def act(session: Session, settings: dict[str, Any], reply: str, rewards: list[float]) -> tuple[str, bool]:
    """Takes the step; what the policy is told, and whether the episode is over. A reply that is no action is told so."""
    action: Any = {settings["action"]: reply}
    if settings["action"] == JSON:
        found = re.search(r"\{.*\}", reply, re.DOTALL)
        try:
            action = json.loads(found.group() if found else "")
        except ValueError:
            return "This is no action: reply with one JSON object.", False
    try:
        answer = await session.ask("step", action)
    except EnvironmentFault as error:
        if error.code == "VALIDATION_ERROR":
            return f"This is no action: {error}", False
        raise
    rewards.append(float(answer.get("reward") or 0.0))
    return seen(answer, settings["observation"]), bool(answer.get("done"))
