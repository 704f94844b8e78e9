"""Which prompt comes next, and which are on their way. Pure; its state is small and JSON."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from vime.sample import Task


class CursorError(Exception):
    """A saved state belongs to other data; the message says what differs."""


class PromptCursor:
    """Shuffled epochs over the tasks. The order of epoch e depends on (seed, e) only.

    A prompt taken is open until ``finish``. Prompts given back, and those open when the state was saved, come again
    before any new one, under the group id they had.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self.tasks, self.seed = tasks, seed
        self.drawn = 0  # new prompts drawn since the start; also the next group id
        self.open: dict[int, int] = {}  # group id -> task index
        self.buffer: list[tuple[int, int]] = []
        self._order: tuple[int, list[int]] = (-1, [])

    def _index(self, draw: int) -> int:
        epoch, place = divmod(draw, len(self.tasks))
        if self._order[0] != epoch:
            order = list(range(len(self.tasks)))
            random.Random(f"{self.seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][place]

    def take(self) -> tuple[int, Task]:
        """The next prompt with its group id."""
        if self.buffer:
            group_id, index = self.buffer.pop(0)
        else:
            group_id, index = self.drawn, self._index(self.drawn)
            self.drawn += 1
        self.open[group_id] = index
        return group_id, self.tasks[index]

    def give_back(self, group_id: int) -> None:
        """The prompt was neither trained nor filtered: it comes again."""
        self.buffer.append((group_id, self.open.pop(group_id)))
        self.buffer.sort()

    def finish(self, group_id: int) -> None:
        """The prompt was trained or filtered."""
        del self.open[group_id]

    def _digest(self) -> str:
        return hashlib.sha256("\n".join(task.id for task in self.tasks).encode()).hexdigest()[:16]

    def state(self) -> dict[str, Any]:
        """JSON-serialisable; open prompts are in it as buffered."""
        return {
            "tasks": len(self.tasks),
            "digest": self._digest(),
            "seed": self.seed,
            "drawn": self.drawn,
            "buffer": sorted([*self.buffer, *self.open.items()]),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes up a saved state; CursorError where it is of other tasks or another seed."""
        for name, mine in (("tasks", len(self.tasks)), ("digest", self._digest()), ("seed", self.seed)):
            if state[name] != mine:
                raise CursorError(
                    f"the checkpoint's prompts are others: {name} was {state[name]}, is {mine}; "
                    "resume with the data, the evaluation sets and the seed it was made with"
                )
        self.drawn = state["drawn"]
        self.buffer = [(group_id, index) for group_id, index in state["buffer"]]
        self.open = {}
