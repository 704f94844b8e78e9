"""What became of every prompt: one line when it is taken, one when it ends. The proof that none is lost, none used twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

ENDS = ("trained", "filtered")


class Journal:
    """Append-only ``journal.jsonl``: taken, trained (step), filtered (reason), failed_sample (reason); by group id."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, event: str, group_id: int, **details: Any) -> None:
        self._file.write(json.dumps({"event": event, "group": group_id, **details}) + "\n")

    def offset(self) -> int:
        """Length of the file in bytes."""
        self._file.flush()
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def account(path: Path) -> dict[str, Any]:
    """Counts of the journal: taken, trained, filtered by reason, open (taken and not ended), twice (ended twice)."""
    taken: set[int] = set()
    ended: Counter[int] = Counter()
    trained, filtered = 0, Counter[str]()
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry["event"] == "taken":
            taken.add(entry["group"])
        elif entry["event"] in ENDS:
            ended[entry["group"]] += 1
            trained += entry["event"] == "trained"
            filtered[entry.get("reason", "")] += entry["event"] == "filtered"
    return {
        "taken": len(taken),
        "trained": trained,
        "filtered": {reason: count for reason, count in filtered.items() if count},
        "open": sorted(taken - ended.keys()),
        "twice": sorted(group for group, count in ended.items() if count > 1),
    }
