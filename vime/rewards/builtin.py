"""Built-in rewards. Each maker takes its options and returns ``(task, response) -> float``; one line each in BUILTIN."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from vime.sample import Task

Scorer = Callable[[Task, str], Any]
_NUMBER = re.compile(r"(?:(?<![\w.)\]])-)?\d[\d,]*(?:\.\d+)?")


def last_number_of(text: str) -> Decimal | None:
    """The last number in a text: ``1,234``, ``-7``, ``28.``; the minus of ``13 - 5`` or ``13-5`` is no sign."""
    found = _NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
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


def exact(ignore_case: bool = False) -> Scorer:
    """1 where the reply is the answer, white space around it apart."""

    def normal(text: str) -> str:
        return text.strip().lower() if ignore_case else text.strip()

    return lambda task, response: float(normal(response) == normal(task.answer or ""))


def regex(pattern: str) -> Scorer:
    """1 where the last match of ``pattern`` (its first group, if it has one) is the answer."""
    compiled = re.compile(pattern, re.DOTALL)

    def reward(task: Task, response: str) -> float:
        found = [m.group(1) if compiled.groups else m.group(0) for m in compiled.finditer(response)]
        return float(bool(found) and found[-1].strip() == (task.answer or "").strip())

    return reward


def math_verify() -> Scorer:
    """1 where math-verify finds reply and answer equal. Its own time-outs need signals, so of the main thread, and are off:
    the deadline is ``reward.timeout_s``."""
    from math_verify import parse, verify

    def reward(task: Task, response: str) -> float:
        wanted = parse(task.answer or "", parsing_timeout=None)
        return float(verify(wanted, parse(response, parsing_timeout=None), timeout_seconds=None))

    return reward


def answer_of(response: str, extract: str) -> str:
    """The part of a reply that is scored: "answer_tag" (the last <answer>...</answer>, else all), "last_number", "whole"."""
    if extract == "last_number":
        number = last_number_of(response)
        return "" if number is None else str(number)
    tags = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL) if extract == "answer_tag" else []
    return (tags[-1] if tags else response).strip()


def reasoning_gym(extract: str = "answer_tag") -> Scorer:
    """The data set's own scorer, on the extracted answer."""
    from reasoning_gym import get_score_answer_fn

    if extract not in ("answer_tag", "last_number", "whole"):
        raise ValueError(f"extract = {extract!r}; it is answer_tag, last_number or whole")

    def reward(task: Task, response: str) -> float:
        if "reasoning_gym" not in task.metadata:
            raise ValueError(f"task {task.id} is not from reasoning-gym; use data.source = 'reasoning-gym:NAME'")
        scorer = get_score_answer_fn(task.metadata["reasoning_gym"])
        return float(scorer(answer_of(response, extract), task.metadata["entry"]))

    return reward


BUILTIN: dict[str, Callable[..., Scorer]] = {
    "last_number": last_number,
    "exact": exact,
    "regex": regex,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}
