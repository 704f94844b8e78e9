"""The hint in a refusal: what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def nearest(word: str, known: Sequence[str]) -> str:
    """``"; did you mean X?"`` for the closest known word, or the known words."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"
