from __future__ import annotations

import re

from vime.sample import Task


def one_sentence(task: Task, response: str) -> float:
    """1 where the reply is one sentence on one line."""
    return float(re.fullmatch(r"[^.!?\n]+[.!?]", response.strip()) is not None)
