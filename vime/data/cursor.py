"""Which prompt comes next, and which are on their way. Pure; its state is small and JSON."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any

from vime.sample import Task


class CursorError(Exception):
    """No tasks, a saved state of other data, or a prompt that is not out; the message says which."""


class PromptCursor:
    """Shuffled epochs over the tasks. The order of epoch e depends on (seed, e) only.

    A prompt taken is open until ``finish``. Prompts given back, and those open when the state was saved, come again
    before any new one, under the group id they had.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise CursorError("there are no tasks to take prompts from; see data.source")
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
        self.buffer.append((group_id, self._close(group_id)))
        self.buffer.sort()

    def finish(self, group_id: int) -> None:
        """The prompt was trained or filtered."""
        self._close(group_id)

    def _close(self, group_id: int) -> int:
        if group_id not in self.open:
            raise CursorError(f"group {group_id} is not out: it was never taken, or was finished or given back already")
        return self.open.pop(group_id)

    def _digest(self) -> str:
        rows = [[task.id, task.messages, task.answer] for task in self.tasks]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]

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
        mine = self.state()
        for name in ("tasks", "digest", "seed"):
            was = state[name]
            if was != mine[name]:
                raise CursorError(
                    f"the checkpoint's prompts are others: {name} was {was}, is {mine[name]}; "
                    "resume with the data, the evaluation sets and the seed it was made with"
                )
        self.drawn = state["drawn"]
        self.buffer = [(group_id, index) for group_id, index in state["buffer"]]
        self.open = {}
