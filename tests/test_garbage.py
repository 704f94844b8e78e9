"""Garbage while requests are in flight: the young is found, the old now and then, and after it all is as it was."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from vime.observe import garbage as module
from vime.observe.garbage import YOUNG, Garbage


class Thing:
    """Something that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_young_garbage_is_found_and_the_whole_heap_is_never_looked_through() -> None:
    looks = []

    def note(phase: str, info: dict[str, int]) -> None:
        looks.append(info["generation"])

    with Garbage():
        gone = weakref.ref(Thing())
        gc.callbacks.append(note)
        kept = [[] for _ in range(30 * YOUNG)]
        gc.callbacks.remove(note)
        assert kept and gone() is None
    assert looks and max(looks) == 1


def test_no_look_is_through_many_objects_while_all_live() -> None:
    """As when thousands of requests begin: a tenth of a second went by in one look through a hundred thousand."""
    looked_through = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looked_through.append(sum(len(gc.get_objects(one)) for one in range(info["generation"] + 1)))

    with Garbage():
        gc.callbacks.append(note)
        kept = [[] for _ in range(30 * YOUNG)]
        gc.callbacks.remove(note)
        assert kept
    assert len(looked_through) >= 10 and max(looked_through) <= 4 * YOUNG


def test_the_young_do_not_become_many_while_as_many_old_ones_go() -> None:
    """As when responses end: half a second went by in the first look after a rollout."""

    async def run() -> int:
        most = 0
        with Garbage() as garbage, garbage.looked_for():
            old = [[] for _ in range(100 * YOUNG)]
            gc.collect(1)
            young: list[list[int]] = []
            while old:
                for _ in range(YOUNG // 5):
                    old.pop()
                    young.append([])
                most = max(most, len(gc.get_objects(0)) + len(gc.get_objects(1)))
                await asyncio.sleep(module.YOUNG_EVERY_S / 10)
        return most

    assert asyncio.run(run()) < 50 * YOUNG


@pytest.mark.parametrize(("every_s", "found"), [(0.0, True), (1e9, False)])
def test_old_garbage_is_found_between_steps_once_that_is_due(
    monkeypatch: pytest.MonkeyPatch, every_s: float, found: bool
) -> None:
    monkeypatch.setattr(module, "OLD_EVERY_S", every_s)
    with Garbage() as garbage:
        old = Thing()
        gone = weakref.ref(old)
        gc.collect(1)  # it has become old
        del old
        gc.collect(1)
        assert gone() is not None
        garbage.between_steps()
        assert (gone() is None) is found


def test_afterwards_it_is_as_before() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with Garbage():
        assert gc.get_freeze_count() > before[1]
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
