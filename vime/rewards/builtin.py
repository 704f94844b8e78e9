"""Built-in rewards. Each maker takes its options, returns ``(task, response) -> float``, and is a line in BUILTIN.

A maker with an argument ``deadline_s`` gets that of a call there. A function that waits for others is async.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

from vime.rewards.code import code
from vime.rewards.http import http
from vime.rewards.json_schema import json_schema
from vime.rewards.judge import judge
from vime.rewards.reward_model import reward_model
from vime.sample import Task

Scorer = Callable[[Task, str], Any]
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])(?<!\d\s)[-−])?"  # a sign, unless something to subtract from stands before it
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
)


def last_number_of(text: str) -> Decimal | None:
    """The last number in a text: ``1,234``, ``-7``, ``28.``, ``.5``.

    The minus of ``13 - 5``, ``13 -5`` or ``13-5`` is no sign. A comma groups thousands, else it separates: the last of
    ``1,2,3`` is 3.
    """
    found = _NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "").replace("−", "-")) if found else None
    except InvalidOperation:
        return None


def last_number() -> Scorer:
    """1 where the last number of the reply equals the answer."""

    def reward(task: Task, response: str) -> float:
        wanted = last_number_of(task.answer or "")
        if wanted is None:
            raise ValueError(f"the answer {task.answer!r} holds no number")
        return float(last_number_of(response) == wanted)

    return reward


def answer_to(task: Task) -> str:
    """The task's answer; ValueError where it has none, lest an empty reply be right."""
    if task.answer is None:
        raise ValueError("the task has no answer; name its column in data.answer_key")
    return task.answer


def exact(ignore_case: bool = False) -> Scorer:
    """1 where the reply is the answer, white space around it apart."""

    def normal(text: str) -> str:
        return text.strip().lower() if ignore_case else text.strip()

    return lambda task, response: float(normal(response) == normal(answer_to(task)))


def regex(pattern: str) -> Scorer:
    """1 where the last match of ``pattern`` (its first group, if it has one) is the answer."""
    compiled = re.compile(pattern, re.DOTALL)

    def reward(task: Task, response: str) -> float:
        found = [m.group(1) if compiled.groups else m.group(0) for m in compiled.finditer(response)]
        return float(bool(found) and found[-1].strip() == answer_to(task).strip())

    return reward


def math_verify() -> Scorer:
    """1 where math-verify finds reply and answer equal. An answer without ``$`` or a box is read as LaTeX as a whole.

    Its own time-outs are off: a reply such as ``$9^{9^{9}}$`` makes one computation in C, which no signal interrupts. The
    worker's deadline ends it.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the time-outs

    def reward(task: Task, response: str) -> float:
        answer = answer_to(task)
        wanted = parse(answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=0)
        if not wanted:
            raise ValueError(f"math-verify cannot read the answer {answer!r:.80}")
        return float(verify(wanted, parse(response, parsing_timeout=0), timeout_seconds=0))

    return reward


def answer_of(response: str, extract: str) -> str:
    """The part of a reply that is scored: "answer_tag" (the last <answer>, else all), "last_number", "whole"."""
    if extract == "last_number":
        number = last_number_of(response)
        return "" if number is None else f"{number:f}"
    tags = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL) if extract == "answer_tag" else []
    return (tags[-1] if tags else response).strip()


GRIDS = ("arc_agi", "rearc")
"""their scorers compare with tuples, which are lists in a task's JSON metadata"""


@cache
def scorer_of(name: str) -> Callable[[str, dict[str, Any]], float]:
    """A data set's scorer; making one takes up to a second."""
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(name)


def reasoning_gym(extract: str = "answer_tag") -> Scorer:
    """The data set's own scorer, on the extracted answer."""
    if extract not in ("answer_tag", "last_number", "whole"):
        raise ValueError(f"extract = {extract!r}; it is answer_tag, last_number or whole")
    import reasoning_gym  # noqa: F401  (takes a second, which is no call's)

    def reward(task: Task, response: str) -> float:
        if "reasoning_gym" not in task.metadata:
            raise ValueError(f"task {task.id} is not from reasoning-gym; use data.source = 'reasoning-gym:NAME'")
        name, entry = task.metadata["reasoning_gym"], task.metadata["entry"]
        if name in GRIDS:
            output = tuple(tuple(row) for row in entry["metadata"]["output"])
            entry = {**entry, "metadata": {**entry["metadata"], "output": output}}
        return float(scorer_of(name)(answer_of(response, extract), entry))

    return reward


BUILTIN: dict[str, Callable[..., Scorer]] = {
    "last_number": last_number,
    "exact": exact,
    "regex": regex,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "json_schema": json_schema,
    "code": code,
    "http": http,
    "judge": judge,
    "reward_model": reward_model,
}
