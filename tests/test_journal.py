"""The journal read back: as far as it was written, as far as a checkpoint goes, and what it must say for nothing to be lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import PROMPTS, journal_until, verdict
from vime.data.cursor import PromptCursor
from vime.data.journal import Journal, account
from vime.sample import Task

DRAWN, TRAINED = PROMPTS + 10, range(PROMPTS + 6)
FILTERED, HELD = PROMPTS + 6, PROMPTS + 7
BUFFERED = range(PROMPTS + 8, DRAWN)
Entries = list[dict[str, Any]]


def stopped_run(folder: Path) -> dict[str, Any]:
    """A journal of an epoch and a part of the next, of whose groups most were trained; returns its checkpoint's state."""
    cursor, journal = PromptCursor([Task(f"t{i}", ()) for i in range(PROMPTS)], 0), Journal(folder / "journal.jsonl")
    for _ in range(DRAWN):
        group, task = cursor.take()
        journal.write("taken", group, task=task.id)
    for group in TRAINED:
        cursor.finish(group)
        journal.write("trained", group, step=group // 4)
    cursor.finish(FILTERED)
    journal.write("filtered", FILTERED, reason="zero_variance")
    state = {"step": 14, "cursor": cursor.state([HELD]), "offsets": {"journal.jsonl": journal.offset()}}
    journal.close()
    return json.loads(json.dumps(state))


def faults(entries: Entries, state: dict[str, Any]) -> tuple[int, int, int]:
    found = verdict(entries, state)
    return found["lost"], found["duplicated"], found["misdealt"]


def test_nothing_is_lost_of_a_run_that_stopped(tmp_path: Path) -> None:
    state = stopped_run(tmp_path)
    assert verdict(journal_until(state, tmp_path), state) == {
        "steps": 14, "taken": DRAWN, "trained": len(TRAINED), "filtered": {"zero_variance": 1}, "buffered": 3,
        "lost": 0, "duplicated": 0, "misdealt": 0,
    }  # fmt: skip


def taken(entries: Entries, group: int) -> dict[str, Any]:
    return next(entry for entry in entries if (entry["event"], entry["group"]) == ("taken", group))


def without_a_trace(entries: Entries, state: Any) -> None:
    entries[:] = [entry for entry in entries if entry["group"] != TRAINED[-1]]


def without_its_end(entries: Entries, state: Any) -> None:
    entries.remove({"event": "filtered", "group": FILTERED, "reason": "zero_variance"})


def ended_but_never_taken(entries: Entries, state: Any) -> None:
    entries.append({"event": "trained", "group": DRAWN + 9, "step": 14})


def taken_but_never_drawn(entries: Entries, state: Any) -> None:
    entries.append({"event": "taken", "group": DRAWN, "task": "t0"})
    entries.append({"event": "trained", "group": DRAWN, "step": 14})


def ended_and_in_the_buffer(entries: Entries, state: Any) -> None:
    entries.append({"event": "trained", "group": BUFFERED[0], "step": 14})


def in_the_buffer_twice(entries: Entries, state: Any) -> None:
    state["cursor"]["buffer"].append(state["cursor"]["buffer"][0])


def held_and_in_the_buffer(entries: Entries, state: Any) -> None:
    state["cursor"]["held"].append(state["cursor"]["buffer"][0])


def of_two_tasks(entries: Entries, state: Any) -> None:
    entries.insert(0, {"event": "taken", "group": BUFFERED[0], "task": "another"})


def of_a_task_that_its_epoch_has(entries: Entries, state: Any) -> None:
    taken(entries, PROMPTS)["task"] = taken(entries, PROMPTS + 1)["task"]


def of_a_task_that_there_is_not(entries: Entries, state: Any) -> None:
    taken(entries, PROMPTS)["task"] = "another"


@pytest.mark.parametrize(
    ("tamper", "found"),
    [
        (without_a_trace, (1, 0, 0)),
        (without_its_end, (1, 0, 0)),
        (ended_but_never_taken, (0, 1, 0)),
        (taken_but_never_drawn, (0, 1, 0)),
        (ended_and_in_the_buffer, (0, 1, 0)),
        (in_the_buffer_twice, (0, 1, 0)),
        (held_and_in_the_buffer, (0, 1, 0)),
        (of_two_tasks, (0, 0, 1)),
        (of_a_task_that_its_epoch_has, (0, 0, 2)),
        (of_a_task_that_there_is_not, (0, 0, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_journal_does_not_pass_with_a_group(
    tamper: Callable[[Entries, Any], None], found: tuple[int, int, int], tmp_path: Path
) -> None:
    state = stopped_run(tmp_path)
    entries = journal_until(state, tmp_path)
    tamper(entries, state)
    assert faults(entries, state) == found


def test_what_follows_the_checkpoint_is_not_counted(tmp_path: Path) -> None:
    """The run goes on while its state is written: groups end that the state has in its buffer, others are taken."""
    state = stopped_run(tmp_path)
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("filtered", BUFFERED[0], reason="zero_variance")
    journal.write("taken", DRAWN, task="t0")
    journal.close()
    assert faults(journal_until(state, tmp_path), state) == (0, 0, 0)


def test_a_last_line_that_was_not_written_to_its_end_is_passed_over(tmp_path: Path) -> None:
    stopped_run(tmp_path)
    whole = account(tmp_path / "journal.jsonl")
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"event": "tra')
    assert account(tmp_path / "journal.jsonl") == whole
