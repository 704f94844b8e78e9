"""A reward of one's own: called with the task and the text of one response, it returns a finite number."""

from __future__ import annotations

import re

from vime.sample import Task


def one_word(task: Task, response: str) -> float:
    """1 for the answer alone, 0.5 for the answer among other words, else 0. Case matters for tasks in capitals."""
    fold = str if task.metadata["kind"] == "capitals" else str.lower
    words = [fold(word) for word in re.findall(r"[A-Za-z]+", response)]
    if fold(task.answer or "") not in words:
        return 0.0
    return 1.0 if len(words) == 1 else 0.5
