"""The limiter: never more inside than the cap, in order, whoever gives up; fair to the event loop when thousands come."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.inference.limiter import BURST, Limiter


async def turns(count: int = 100) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Guest:
    """A task that stays inside until told to leave."""

    def __init__(self, limiter: Limiter, order: list[int], number: int) -> None:
        self.limiter, self.order, self.number = limiter, order, number
        self.left = asyncio.Event()
        self.task = asyncio.create_task(self.visit())

    async def visit(self) -> None:
        async with self.limiter:
            self.order.append(self.number)
            await self.left.wait()


STEPS = st.lists(
    st.tuples(st.sampled_from(["come", "leave", "cancel", "cap"]), st.integers(0, 9), st.integers(0, 2)), max_size=60
)


@given(STEPS)
def test_no_more_are_inside_than_the_cap_allowed_and_none_is_forgotten(steps: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        limiter, order, guests = Limiter(3), [], []
        allowed = 3
        for step, number, settle in steps:
            if step == "come":
                guests.append(Guest(limiter, order, len(guests)))
            elif step == "cap":
                limiter.cap = number + 1
            elif guests:
                guest = guests[number % len(guests)]
                guest.left.set() if step == "leave" else guest.task.cancel()
            allowed = max(limiter.cap, limiter.inside)
            await turns(settle)
            assert limiter.inside <= allowed
        for guest in guests:
            guest.left.set()
        limiter.cap = 1
        await turns(10 * len(guests) + 10)
        assert all(guest.task.done() for guest in guests)
        assert (limiter.inside, limiter.waiting) == (0, 0)
        assert order == sorted(order)

    asyncio.run(play())


def test_a_lower_cap_drives_nobody_out_and_a_higher_one_lets_in_at_once() -> None:
    async def play() -> None:
        limiter, order = Limiter(4), []
        guests = [Guest(limiter, order, i) for i in range(8)]
        await turns()
        limiter.cap = 2
        await turns()
        assert (limiter.inside, limiter.peak, limiter.waiting) == (4, 4, 4)
        for guest in guests[:2]:
            guest.left.set()
        await turns()
        assert (limiter.inside, limiter.ended, order) == (2, 2, [0, 1, 2, 3])
        limiter.cap = 100
        await turns()
        assert (limiter.inside, limiter.waiting) == (6, 0)
        for guest in guests:
            guest.left.set()
        await asyncio.gather(*(guest.task for guest in guests))

    asyncio.run(play())


def test_thousands_that_come_at_once_are_let_in_few_a_turn_of_the_loop() -> None:
    async def play() -> int:
        limiter, entered, most = Limiter(5000), 0, 0

        async def visit() -> None:
            nonlocal entered
            async with limiter:
                entered += 1

        tasks = [asyncio.create_task(visit()) for _ in range(2000)]
        while entered < 2000:
            before = entered
            await asyncio.sleep(0)
            most = max(most, entered - before)
        await asyncio.gather(*tasks)
        return most

    assert asyncio.run(play()) <= BURST


def test_one_that_fails_inside_leaves_its_place() -> None:
    async def play() -> None:
        limiter = Limiter(1)
        with pytest.raises(ValueError):
            async with limiter:
                raise ValueError
        async with asyncio.timeout(5):
            async with limiter:
                pass
        assert limiter.ended == 2

    asyncio.run(play())
