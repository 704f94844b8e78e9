"""Prompts of an endless source: tasks as they are asked for, and what a checkpoint needs to go on with the same ones."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any

from vime.data import DataError
from vime.data.own import Endless, Row, asked, taken
from vime.data.sources import content, row_id
from vime.sample import Task

AHEAD = 16  # rows that a source is asked for at once
MOST_HELD_OUT = 1000  # evaluation prompts one after the other, after which a source is given up


class TaskStream:
    """The tasks of an endless source, each drawn once. Those that are evaluation prompts are left out.

    Rows are read a few ahead. They, those that are open and the source's own state make up the state: a resumed run draws
    the same tasks. A row's id names it: two rows of one id are one task.
    """

    def __init__(
        self, name: str, source: Endless, make: Callable[[str, Row, str], Task], held_out: Collection[str] = ()
    ) -> None:
        self.name, self.source, self.make, self.held_out = name, source, make, held_out
        self.read = self.drawn = 0
        self.ahead: deque[Task] = deque()
        self.out: dict[int, Task] = {}  # drawn and not done, by number
        self._fill(AHEAD)
        self._state()  # a state that is not JSON is refused at once

    def _fill(self, count: int) -> None:
        skipped = 0
        while len(self.ahead) < count:
            for row in taken(self.source, self.name, AHEAD):
                task = self.make(row_id(row, self.name, self.read), row, f"{self.name}, row {self.read}")
                self.read += 1
                if content(task) in self.held_out:
                    skipped += 1
                else:
                    self.ahead.append(task)
            if skipped > MOST_HELD_OUT:
                raise DataError(
                    f"{self.name}: {skipped} rows one after the other are evaluation prompts; use other data"
                )

    def draw(self) -> int:
        self._fill(1)
        self.out[self.drawn] = self.ahead.popleft()
        self.drawn += 1
        return self.drawn - 1

    def item(self, number: int) -> Task:
        return self.out[number]

    def done(self, number: int, passed: float | None) -> None:
        del self.out[number]

    def first(self, count: int) -> list[Task]:
        return list(self.ahead)[:count]

    def identity(self) -> dict[str, Any]:
        return {"source": self.name}

    def _state(self) -> Any:
        with asked(self.name, "state()"):
            state = self.source.state()
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self.name}: state() is no JSON, {error}; return numbers, text, lists and dicts"
            ) from None

    def state(self) -> dict[str, Any]:
        return {
            "read": self.read,
            "drawn": self.drawn,
            "ahead": [asdict(task) for task in self.ahead],
            "out": [(number, asdict(task)) for number, task in self.out.items()],
            "source": self._state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.read, self.drawn = state["read"], state["drawn"]
        self.ahead = deque(map(task_again, state["ahead"]))
        self.out = {number: task_again(fields) for number, fields in state["out"]}
        with asked(self.name, "load()"):
            self.source.load(state["source"])


def task_again(fields: dict[str, Any]) -> Task:
    return Task(**fields | {"messages": tuple(fields["messages"]), "tools": tuple(fields["tools"])})
