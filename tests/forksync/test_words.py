from __future__ import annotations

import pytest

from forksync.words import counted


@pytest.mark.parametrize(("number", "noun", "said"), [
    (1, "hunk", "1 hunk"), (2, "hunk", "2 hunks"), (1, "entry", "1 entry"), (0, "entry", "0 entries"), (0, "day", "0 days"),
])  # fmt: skip
def test_numbers_with_their_nouns(number: int, noun: str, said: str) -> None:
    assert counted(number, noun) == said
