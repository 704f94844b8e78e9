"""When Python looks for garbage: not in the middle of thousands of requests.

Each request in flight is about a hundred objects. The collector would look through all of them, a tenth of a second and more,
whenever a quarter of them has changed. Nearly all garbage dies without it, by reference counts, and most of the rest young;
what gets old is looked for now and then, between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Self

YOUNG = 2_000
"""Objects made, less those gone, until the young are looked through: it takes less than a millisecond."""
YOUNGER = 1
"""Such looks until those that survived them are looked through as well: all of them, when thousands of requests begin."""
YOUNG_EVERY_S = 0.05
"""Between two looks by the clock: while as many old objects go as young ones come, as when responses end, Python counts none."""
NEVER = 1 << 30
OLD_EVERY_S = 1800.0
"""Between two looks through everything: a second in half an hour is not felt, and a run of many days does not fill up."""


class Garbage:
    """``with Garbage() as garbage``: inside, only young objects are looked through, and everything at ``between_steps`` where
    that is due. What there is at the start is set apart for good."""

    def __enter__(self) -> Self:
        self.before = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, YOUNGER, NEVER)
        self.looked = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self.before)
        gc.unfreeze()

    @contextlib.contextmanager
    def looked_for(self) -> Iterator[None]:
        """Inside, the running loop looks through the young now and then, so that they never become many."""
        task = asyncio.create_task(self._look_on())
        try:
            yield
        finally:
            task.cancel()

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(YOUNG_EVERY_S)
            gc.collect(1)

    def between_steps(self) -> None:
        if time.monotonic() - self.looked >= OLD_EVERY_S:
            gc.collect()
            self.looked = time.monotonic()
