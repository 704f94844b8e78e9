"""In which order the prompts of one source come: shuffled epochs, from which some may rest. Pure; its state is small and JSON."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


class Drawn(Protocol):
    """What a cursor hands out: a prompt's task, or an example to learn from."""

    @property
    def identity(self) -> list[Any]:
        """What tells it from others, as JSON."""
        ...


Item = TypeVar("Item", bound=Drawn)


class CursorError(Exception):
    """No tasks, a saved state of other data, or a prompt that is not out; the message says which."""


class Prompts(Protocol[Item]):
    """Prompts of one source, each under a number by which it is asked for again."""

    def draw(self) -> int:
        """The number of the next one."""
        ...

    def item(self, number: int) -> Item: ...

    def done(self, number: int, passed: float | None) -> None:
        """It was trained or filtered; the share of its responses that passed, where that is known."""
        ...

    def first(self, count: int) -> list[Item]:
        """Some that are at hand, without drawing them."""
        ...

    def identity(self) -> dict[str, Any]:
        """What it is, as JSON: a state is refused where it has another."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Band:
    """Prompts whose pass rate is outside come only in every ``rest``-th epoch."""

    low: float
    high: float
    rest: int


class Epochs(Generic[Item]):
    """Shuffled epochs over a source's tasks. The order of epoch e depends on (seed, e) only.

    Without a band every task comes once an epoch. With one, a task whose group ends in epoch e with a pass rate outside the
    band is passed over until epoch e + rest. Invariants (asserted by the tests): none comes twice in an epoch; one that is
    in the band, or whose pass rate is not known, comes in the next.
    """

    def __init__(self, tasks: Sequence[Item], seed: int | str, band: Band | None = None) -> None:
        if not tasks:
            raise CursorError("there are no tasks to take prompts from; see data.source")
        self.tasks, self.seed, self.band = tasks, seed, band
        self.epoch, self.place = 0, 0  # of the next one
        self.rests: dict[int, int] = {}  # task -> the epoch until which it is passed over
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.tasks)))
        random.Random(f"{self.seed}:{self.epoch}").shuffle(order)
        return order

    def draw(self) -> int:
        while True:  # ends: every rest does
            if self.place == len(self._order):
                self.epoch, self.place = self.epoch + 1, 0
                self._order = self._shuffled()
            index = self._order[self.place]
            self.place += 1
            if self.rests.get(index, 0) <= self.epoch:
                self.rests.pop(index, None)
                return index

    def item(self, number: int) -> Item:
        return self.tasks[number]

    def done(self, number: int, passed: float | None) -> None:
        if self.band and passed is not None and not self.band.low <= passed <= self.band.high:
            self.rests[number] = self.epoch + self.band.rest

    def first(self, count: int) -> list[Item]:
        return list(self.tasks[:count])

    def identity(self) -> dict[str, Any]:
        content = json.dumps([task.identity for task in self.tasks], sort_keys=True)
        return {"tasks": len(self.tasks), "digest": hashlib.sha256(content.encode()).hexdigest()[:16]}

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place, "rests": sorted(self.rests.items())}

    def load(self, state: dict[str, Any]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]
        self.rests = {index: epoch for index, epoch in state["rests"]}
        self._order = self._shuffled()
