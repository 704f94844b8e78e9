"""Numbers with their nouns."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1 hunk``, ``2 hunks``, ``1 entry``, ``2 entries``, ``0 days``."""
    if number == 1:
        return f"1 {noun}"
    ies = noun.endswith("y") and noun[-2] not in "aeiou"
    return f"{number} {noun[:-1]}ies" if ies else f"{number} {noun}s"
