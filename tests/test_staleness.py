"""What may start and what may be left waiting, so that no group is ever trained too late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vime.rollout.staleness import in_time, room

SIZES = st.integers(1, 5)


def test_the_synchronous_loop_starts_one_batch_a_version_and_none_while_it_trains() -> None:
    assert room(4, 0, version=7, shipped=7, outstanding=0) == 4
    assert room(4, 0, version=7, shipped=7, outstanding=3) == 1
    assert room(4, 0, version=7, shipped=8, outstanding=0) <= 0


def test_each_version_of_staleness_lets_one_more_batch_run_ahead() -> None:
    assert [room(4, k, version=0, shipped=0, outstanding=0) for k in range(3)] == [4, 8, 12]
    assert [room(4, k, version=0, shipped=1, outstanding=0) for k in range(3)] == [0, 4, 8]


@given(SIZES, st.integers(0, 4), st.integers(0, 9), st.integers(0, 1), st.integers(0, 30))
def test_the_last_group_there_is_room_for_is_in_time_and_one_more_would_not_be(
    groups: int, bound: int, version: int, ahead: int, outstanding: int
) -> None:
    shipped = version + ahead
    free = room(groups, bound, version, shipped, outstanding)
    deadline = version + bound  # of all alike: the latest that any outstanding group can have
    if free >= 0:
        assert in_time([deadline] * (outstanding + free), shipped, groups)
        assert not in_time([deadline] * (outstanding + free + 1), shipped, groups)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 9), SIZES)
def test_in_time_is_what_training_the_earliest_first_comes_to(deadlines: list[int], batch: int, groups: int) -> None:
    waiting, now, late = sorted(deadlines), batch, False
    while waiting:
        trained, waiting = waiting[:groups], waiting[groups:]
        late |= any(deadline < now for deadline in trained)
        now += 1
    assert in_time(deadlines, batch, groups) is not late
