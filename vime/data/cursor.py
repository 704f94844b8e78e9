"""Which prompt comes next, and which are on their way. Pure; its state is small and JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic

from vime.data.orders import CursorError, Epochs, Item, Prompts

__all__ = ["CursorError", "PromptCursor"]

Place = tuple[str, int]
"""a source's name, and a prompt's number in it"""


def equal(name: str, step: int) -> float:
    return 1.0


class PromptCursor(Generic[Item]):
    """Prompts of one source or of several by weight, in an order that depends on nothing but the seed, the steps in which
    they are taken, and, where sources heed it, how the responses passed.

    Of several, the one comes next that is furthest behind its share: after any number of prompts each source is within a few
    of its weight's part. A prompt taken is open until ``finish``. Prompts given back, and those open when the state was
    saved, come again before any new one, under the group id they had.
    """

    def __init__(
        self,
        sources: Sequence[Item] | Mapping[str, Prompts[Item]],
        seed: int,
        weight: Callable[[str, int], float] = equal,
    ) -> None:
        """``weight(name, step)`` of a source; a sequence of tasks is one source."""
        self.sources: Mapping[str, Prompts[Item]] = (
            sources if isinstance(sources, Mapping) else {"": Epochs(sources, seed)}
        )
        self.seed, self.weight = seed, weight
        self.drawn = 0  # new prompts drawn since the start; also the next group id
        self.open: dict[int, Place] = {}  # by group id
        self.buffer: list[tuple[int, Place]] = []
        self.behind = dict.fromkeys(self.sources, 0.0)  # prompts that each source is owed, below 0: has had too many
        self._identity = {name: source.identity() | {"seed": seed} for name, source in self.sources.items()}

    def _next(self, step: int) -> Place:
        weights = {name: weight for name in self.sources if (weight := self.weight(name, step)) > 0}
        for name, weight in weights.items():
            self.behind[name] += weight / sum(weights.values())
        name = max(weights, key=self.behind.__getitem__)
        self.behind[name] -= 1
        return name, self.sources[name].draw()

    def take(self, step: int = 0) -> tuple[int, Item]:
        """The next prompt with its group id; ``step`` is the one whose weights count."""
        if self.buffer:
            group_id, (name, number) = self.buffer.pop(0)
        else:
            group_id, (name, number) = self.drawn, self._next(step)
            self.drawn += 1
        self.open[group_id] = name, number
        return group_id, self.sources[name].item(number)

    def first(self, count: int) -> list[Item]:
        """Some prompts, of all sources in turn, without taking them."""
        found = [source.first(count) for source in self.sources.values()]
        return [some[place] for place in range(count) for some in found if place < len(some)][:count]

    def task_of(self, group_id: int) -> Item:
        """Of a prompt that is open."""
        name, number = self.open[group_id]
        return self.sources[name].item(number)

    def give_back(self, group_id: int) -> None:
        """The prompt was neither trained nor filtered: it comes again."""
        self.buffer.append((group_id, self._close(group_id)))
        self.buffer.sort()

    def finish(self, group_id: int, passed: float | None = None) -> None:
        """The prompt was trained or filtered; ``passed`` is the share of its responses that passed, where it is known."""
        name, number = self._close(group_id)
        self.sources[name].done(number, passed)

    def _close(self, group_id: int) -> Place:
        if group_id not in self.open:
            raise CursorError(f"group {group_id} is not out: it was never taken, or was finished or given back already")
        return self.open.pop(group_id)

    def state(self, held: Collection[int] = ()) -> dict[str, Any]:
        """JSON-serialisable; open prompts are in it as buffered, but for those of ``held`` groups, which are saved elsewhere."""
        again = [(group_id, place) for group_id, place in self.open.items() if group_id not in held]
        return {
            "identity": self._identity,
            "drawn": self.drawn,
            "buffer": sorted([*self.buffer, *again]),
            "held": [(group_id, self.open[group_id]) for group_id in held],
            "behind": self.behind,
            "sources": {name: source.state() for name, source in self.sources.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes up a saved state; CursorError where it is of other tasks or another seed."""
        if "identity" not in state:
            raise CursorError(
                "the checkpoint is of an earlier vime, whose order of prompts was another; start a new run"
            )
        was, mine = state["identity"], self._identity
        if was.keys() != mine.keys():
            before, now = (", ".join(filter(None, names)) or "one source" for names in (was, mine))
            raise CursorError(
                f"the checkpoint's data.mixture is another: it was of {before}, is of {now}; resume with the sources it was "
                "made with (a weight may be another, also 0)"
            )
        for name, identity in mine.items():
            for what, value in identity.items():
                if was[name].get(what) != value:
                    where = f"data.mixture.{name}: " if name else ""
                    raise CursorError(
                        f"the checkpoint's prompts are others: {where}{what} was {was[name].get(what)}, is {value}; "
                        "resume with the data, the evaluation sets and the seed it was made with"
                    )
        self.drawn, self.behind = state["drawn"], state["behind"]
        self.buffer = [(group_id, (name, number)) for group_id, (name, number) in state["buffer"]]
        self.open = {group_id: (name, number) for group_id, (name, number) in state["held"]}
        for name, source in self.sources.items():
            source.load(state["sources"][name])
