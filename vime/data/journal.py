"""What became of every prompt: one line when it is taken, one when it ends. The proof that none is lost, none used twice."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vime.observe.metrics import read_lines

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
    """The ``tally`` of a journal; a last line that was not written to its end is passed over."""
    return tally(read_lines(path))


def tally(entries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts of a journal's lines: taken, trained, filtered by reason; and group ids: open (taken and not ended), twice (ended
    twice), untaken (ended and never taken), mixed (taken with more than one task)."""
    tasks: defaultdict[int, set[str]] = defaultdict(set)
    ended: Counter[int] = Counter()
    trained, filtered = 0, Counter[str]()
    for entry in entries:
        if entry["event"] == "taken":
            tasks[entry["group"]].add(entry.get("task", ""))
        elif entry["event"] in ENDS:
            ended[entry["group"]] += 1
            trained += entry["event"] == "trained"
            filtered[entry.get("reason", "")] += entry["event"] == "filtered"
    return {
        "taken": len(tasks),
        "trained": trained,
        "filtered": {reason: count for reason, count in filtered.items() if count},
        "open": sorted(tasks.keys() - ended.keys()),
        "twice": sorted(group for group, count in ended.items() if count > 1),
        "untaken": sorted(ended.keys() - tasks.keys()),
        "mixed": sorted(group for group, its in tasks.items() if len(its) > 1),
    }
