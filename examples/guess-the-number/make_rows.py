"""Writes games as rows, no range twice: python examples/guess-the-number/make_rows.py runs/guess-rows"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

PROMPT = "I think of a whole number from {low} to {high}. Guess it. Reply with one number only."


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    draw = random.Random(seed)
    lows = draw.sample(range(1, 900), count)
    return [
        {"id": f"from-{low}", "prompt": PROMPT.format(low=low, high=low + 8), "answer": str(low + draw.randrange(9))}
        for low in lows
    ]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    games = rows(464)
    for name, part in (("train", games[:400]), ("test", games[400:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
