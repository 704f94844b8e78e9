"""A language model as judge, behind any OpenAI-compatible server."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Awaitable, Callable
from typing import Any

from vime.rewards.service import Service, ServiceError
from vime.sample import Task

PROMPT = """\
Judge the answer to a question.

Question:
{prompt}

Right answer:
{answer}

Answer to judge:
{response}

Say in one sentence what is right or wrong about the answer to judge. Then end with a line "Score: N", where N is a number from \
0 (wrong) to 10 (right)."""
PATTERN = r"(?i)score\W*(-?\d+(?:\.\d+)?)"


def judge(
    *,
    url: str,
    model: str | None = None,
    prompt: str = PROMPT,
    system: str | None = None,
    pattern: str | None = None,
    key: str | None = None,
    low: float | None = None,
    high: float | None = None,
    unreadable: float | None = None,
    max_tokens: int = 512,
    extra: dict[str, Any] | None = None,
    retries: int = 2,
    key_env: str | None = None,
    deadline_s: float,
) -> Callable[[Task, str], Awaitable[float]]:
    """Asks ``model`` (default: the first the server lists) at temperature 0 what a response is worth.

    The score is the last match of ``pattern`` in the judge's reply, or entry ``key`` of its last JSON object. With ``low`` and
    ``high``, another score is none, and the reward is where it lies between them, 0 to 1. Where there is no score the sample
    fails, or is worth ``unreadable``.
    """
    if pattern is not None and key is not None:
        raise ValueError("pattern and key are both set: the score is read by one of them; remove the other")
    if (low is None) != (high is None) or (low is not None and high is not None and low >= high):
        raise ValueError(f"low = {low}, high = {high}: they are set together, low under high")
    if "response" not in [name for _, name, _, _ in string.Formatter().parse(prompt)]:
        raise ValueError("prompt has no {response}: the judge would not see what it judges; a literal brace is doubled")
    compiled = re.compile(PATTERN if pattern is None else pattern)
    if compiled.groups > 1:
        raise ValueError(
            f"pattern = {pattern!r} has {compiled.groups} groups; the score is the first, write (?:...) for others"
        )
    service = Service(url.rstrip("/").removesuffix("/v1"), deadline_s, retries, key_env)

    def read(text: str) -> float | None:
        score = last_object_entry(text, key) if key is not None else last_match(text, compiled)
        if score is None or low is None or high is None:
            return score
        return (score - low) / (high - low) if low <= score <= high else None

    async def reward(task: Task, response: str) -> float:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": filled(prompt, task, response)})
        name = model or await service.model()
        body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": max_tokens, **(extra or {})}
        answer = await service.ask("/v1/chat/completions", body)
        try:
            text = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise ServiceError(f"{url} answered no chat completion: {answer!s:.200}") from None
        score = read(text)
        if score is None and unreadable is None:
            raise ServiceError(
                f"the judge's reply has no score that can be read: {text[-200:]!r}; options.unreadable gives one"
            )
        return unreadable if score is None else score  # type: ignore[return-value]

    return reward


def filled(prompt: str, task: Task, response: str) -> str:
    """The template with {prompt} (the last message of the user), {messages} (all), {answer}, {response} and the row's columns."""
    asked = [message for message in task.messages if message["role"] == "user"]
    values = {
        **task.metadata,
        "prompt": text_of(asked[-1]) if asked else "",
        "messages": "\n\n".join(f"{message['role']}: {text_of(message)}" for message in task.messages),
        "answer": "" if task.answer is None else task.answer,
        "response": response,
    }
    try:
        return prompt.format(**values)
    except KeyError as error:
        raise ValueError(
            f"the judge's prompt names {{{error.args[0]}}}, which the row does not have: {', '.join(values)}"
        ) from None


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def last_match(text: str, pattern: re.Pattern[str]) -> float | None:
    """The number in the last match, its first group if it has one."""
    found = [match.group(1) if pattern.groups else match.group(0) for match in pattern.finditer(text)]
    return number(found[-1]) if found else None


def last_object_entry(text: str, key: str) -> float | None:
    """Entry ``key`` of the last JSON object in a text that has it."""
    decoder = json.JSONDecoder()
    for start in reversed([match.start() for match in re.finditer(r"\{", text)]):
        try:
            found, _ = decoder.raw_decode(text, start)
        except ValueError:
            continue
        if key in found:
            return number(found[key])
    return None


def number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
