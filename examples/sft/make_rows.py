"""Writes conversations and pairs about sums: python examples/sft/make_rows.py FOLDER

train.jsonl   chats, a quarter of them with two questions: {"messages": [...]}
test.jsonl    one chat for each question of the demo's evaluation set
pairs.jsonl   a short reply and one that talks around it: {"prompt": ..., "chosen": ..., "rejected": ...}

No question of the evaluation set is in the other two.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import reasoning_gym

SUMS = {
    "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "operators": ["+"], "allow_parentheses": False,
    "allow_negation": False,
}  # fmt: skip


def sums(size: int, seed: int) -> dict[str, str]:
    """Answers by expression, such as "3 + 58"."""
    entries = reasoning_gym.create_dataset("basic_arithmetic", size=size, seed=seed, **SUMS)
    return {entry["metadata"]["expression"]: entry["answer"] for entry in entries}


def turns(expression: str, answer: str) -> list[dict[str, str]]:
    question = f"State the final answer to the following arithmetic problem: {expression} ="
    return [{"role": "user", "content": question}, {"role": "assistant", "content": f"{expression} = {answer}"}]


def main(folder: Path) -> None:
    draw = random.Random(0)
    test = sums(320, seed=2)
    train = [turns(e, a) for e, a in sums(3000, seed=11).items() if e not in test]
    chats = train[:640]
    second = iter(train[640:800])
    chats = [chat + next(second) if index % 4 == 3 else chat for index, chat in enumerate(chats)]
    pairs: list[dict[str, Any]] = []
    for question, reply in train[:400]:
        around = draw.choice(("Let me think about that.", "That is a good question!", "I am not sure, but maybe"))
        rejected = f"{around} {reply['content']}, or something close to it."
        pairs.append({"prompt": question["content"], "chosen": reply["content"], "rejected": rejected})
    rows = {
        "train": [{"messages": chat} for chat in chats],
        "test": [{"messages": turns(e, a)} for e, a in test.items()],
        "pairs": pairs,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        print(f"{folder / name}.jsonl: {len(found)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
