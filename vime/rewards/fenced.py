"""Blocks between lines of three backticks in a reply."""

from __future__ import annotations

import re

FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```[^\S\n]*$", re.DOTALL | re.MULTILINE)


def last_block(text: str) -> str | None:
    """What is in the last fenced block that is closed; None where there is none."""
    blocks: list[str] = FENCED.findall(text)
    return blocks[-1] if blocks else None
