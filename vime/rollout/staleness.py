"""How far generation may run ahead of training, and which finished groups a batch takes. Pure: no torch, no network.

Batch number b is trained by weights of version b and makes version b + 1. A group whose oldest token was made by version v
may be trained by batch v + max_staleness at the latest: that is its deadline. ``room`` bounds what is started, ``in_time``
tells whether a batch may go without a group that is not ready, so that none need ever be thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable


def room(groups: int, max_staleness: int, version: int, shipped: int, outstanding: int) -> int:
    """How many more groups may start under ``version``, when ``shipped`` batches of ``groups`` have gone to the trainer and
    ``outstanding`` groups are running or finished.

    The next one is trained, if all before it are trained first, in batch ``shipped + outstanding // groups``, which must be
    at most ``version + max_staleness``. With max_staleness = 0 a batch is started only under the weights that it trains.
    """
    return groups * (max_staleness + 1 - (shipped - version)) - outstanding


def in_time(deadlines: Iterable[int], batch: int, groups: int) -> bool:
    """Whether groups with these deadlines can all be trained by ``batch`` and the batches after it, ``groups`` at a time, the
    earliest deadline first."""
    return all(batch + place // groups <= deadline for place, deadline in enumerate(sorted(deadlines)))
