"""Requests in rounds: what the server gets, in which order, does not depend on when who asks."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from vime.inference.client import InferenceError
from vime.inference.rounds import Rounds


class Seen:
    """A server that notes what it is told; the requests it holds while paused are what a round is."""

    url = "http://seen"
    timeout_s = 5.0
    version = 3

    def __init__(self, slow_to_forget: bool = False) -> None:
        self.slow_to_forget, self.answered = slow_to_forget, 0
        self.rounds: list[tuple[int, list[tuple[int, str]]]] = []
        self.held: list[tuple[int, str]] = []
        self.resumed = asyncio.Event()
        self.refuses_pause = False

    async def pause(self) -> None:
        if self.refuses_pause:
            raise InferenceError("no")
        self.resumed.clear()

    async def seed_sampling(self, seed: int) -> None:
        self.seed = seed

    async def held_requests(self) -> int:
        await asyncio.sleep(0)
        counted = len(self.held) + self.answered
        self.answered = max(0, self.answered - 1)
        return counted

    async def resume(self) -> None:
        self.rounds.append((self.seed, sorted(self.held)))
        self.answered = (
            len(self.held) if self.slow_to_forget else 0
        )  # it counts them for a while after they are answered
        self.held = []
        self.resumed.set()

    async def generate(self, priority: int, text: str) -> None:
        self.held.append((priority, text))
        await self.resumed.wait()


def play(
    seed: int, chance: random.Random, turns: dict[str, int], refused: str = "", slow_to_forget: bool = False
) -> Any:
    """The rounds of responses that make so many requests each, at moments that chance chooses."""

    async def whole() -> Any:
        server: Any = Seen(slow_to_forget)
        rounds = Rounds(server, seed, settle_s=0)

        async def response(name: str) -> None:
            for turn in range(turns[name]):
                for _ in range(chance.randrange(9)):
                    await asyncio.sleep(0)
                async with rounds.turn((name, 0)) as priority:
                    if slow_to_forget:
                        await asyncio.sleep(chance.random() / 100)  # on its way
                    if name != refused:
                        await server.generate(priority, f"{name}{turn}")
            rounds.leave()

        rounds.expect(len(turns))
        names = list(turns)
        chance.shuffle(names)
        await asyncio.wait_for(asyncio.gather(*map(response, names)), 20)
        return server.rounds

    return asyncio.run(whole())


TURNS = {"a": 1, "b": 3, "c": 2, "d": 0}


def test_whoever_comes_first_the_rounds_are_the_same() -> None:
    found = [play(7, random.Random(run), TURNS) for run in range(10)]
    assert all(one == found[0] for one in found)
    assert [[text for _, text in requests] for _, requests in found[0]] == [["a0", "b0", "c0"], ["b1", "c1"], ["b2"]]
    assert len({seed for seed, _ in found[0]}) == 3


def test_another_seed_of_the_run_is_another_for_the_server() -> None:
    one, other = (play(seed, random.Random(0), TURNS) for seed in (7, 8))
    assert [requests for _, requests in one] == [requests for _, requests in other]
    assert all(a != b for (a, _), (b, _) in zip(one, other, strict=True))


def test_a_request_that_ends_at_once_holds_nothing_up() -> None:
    found = play(7, random.Random(0), TURNS, refused="b")
    assert [[text for _, text in requests] for _, requests in found] == [["a0", "c0"], ["c1"], []]


def test_answered_requests_that_the_server_still_counts_do_not_stand_for_new_ones() -> None:
    turns = {"a": 3, "b": 3, "c": 3}
    found = play(7, random.Random(0), turns, slow_to_forget=True)
    assert [[text for _, text in requests] for _, requests in found] == [[f"{n}{t}" for n in "abc"] for t in range(3)]


def test_what_the_server_refuses_is_every_requests_error() -> None:
    async def refused() -> None:
        server: Any = Seen()
        server.refuses_pause = True
        rounds = Rounds(server, 0)
        rounds.expect(1)
        async with rounds.turn(("a", 0)):
            raise AssertionError("it has no turn")

    with pytest.raises(InferenceError, match="no"):
        asyncio.run(refused())
