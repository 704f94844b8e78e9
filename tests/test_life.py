"""The states of a server: only what was proved serves, what falls too often is given up, nothing else is lost for good."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.inference.life import REST_S, Answer, Life, Limits, State, ordinal

LIMITS = Limits(start_s=100, silent_s=10, restarts=3, window_s=1000)
EVENTS = ("look", "fell", "started", "proved", "dismissed")


def life(ours: bool = True, state: State = State.STARTING) -> Life:
    return replace(Life(LIMITS, ours, 0.0, 0.0), state=state)


def after(one: Life, event: str, answer: Answer, now: float) -> Life:
    if event == "look":
        return one.seen(answer, now)
    if event == "started":
        return one.started(now) if one.ours and one.state is State.DOWN else one
    if event == "proved":
        return one.proved(now)
    return one.fell("broke", now) if event == "fell" else one.dismissed("removed", now)


STEPS = st.lists(
    st.tuples(st.sampled_from(EVENTS[:-1]), st.sampled_from(Answer), st.floats(0.1, 400)), min_size=1, max_size=40
)


@given(ours=st.booleans(), steps=STEPS)
def test_what_serves_was_proved_after_it_last_answered_and_gone_stays_gone(ours: bool, steps: list) -> None:
    one, now = life(ours), 0.0
    for event, answer, seconds in steps:
        now += seconds
        before, one = one, after(one, event, answer, now)
        if one.state is State.SERVING and before.state is not State.SERVING:
            assert event == "proved" and before.state is State.WAITING
        if one.state is State.WAITING and before.state is not State.WAITING:
            assert answer is Answer.YES and event == "look"
        if before.state is State.DOWN and ours:
            assert one.state in (State.DOWN, State.STARTING)
        if before.state is State.GONE:
            assert one == before


@given(ours=st.booleans(), steps=STEPS)
def test_it_is_given_up_exactly_when_it_falls_too_often_within_the_window(ours: bool, steps: list) -> None:
    one, now, falls = life(ours), 0.0, []
    for event, answer, seconds in steps:
        now += seconds
        before, one = one, after(one, event, answer, now)
        if before.state not in (State.DOWN, State.GONE) and one.state in (State.DOWN, State.GONE):
            falls.append(now)
            recent = [moment for moment in falls if now - moment < LIMITS.window_s]
            assert (one.state is State.GONE) == (len(recent) > LIMITS.restarts)
            assert one.reason


@given(ours=st.booleans(), steps=STEPS)
def test_what_is_not_gone_serves_again_once_it_answers_and_is_proved(ours: bool, steps: list) -> None:
    one, now = life(ours), 0.0
    for event, answer, seconds in steps:
        now += seconds
        one = after(one, event, answer, now)
    if one.state is not State.GONE:
        if one.ours and one.state is State.DOWN:
            one = one.started(now)
        now += REST_S * LIMITS.restarts
        assert one.seen(Answer.YES, now).proved(now).state is State.SERVING


def test_a_start_may_take_its_time_and_no_more() -> None:
    starting = life().seen(Answer.NO, 99.0)
    assert starting.state is State.STARTING
    fallen = starting.seen(Answer.SILENT, 101.0)
    assert fallen.state is State.DOWN and fallen.reason == "was not ready in 100 s (inference.start_timeout_s)"


def test_silence_is_borne_for_a_while_a_refused_connection_is_not() -> None:
    serving = life(state=State.SERVING).seen(Answer.YES, 50.0)
    assert serving.seen(Answer.SILENT, 59.0).state is State.SERVING
    assert serving.seen(Answer.SILENT, 61.0).reason == "has not answered for 10 s (inference.health_timeout_s)"
    assert serving.seen(Answer.SILENT, 59.0).excused(60.0).seen(Answer.SILENT, 69.0).state is State.SERVING
    assert serving.seen(Answer.NO, 51.0).state is State.DOWN


def test_only_what_is_ours_is_started_again() -> None:
    with pytest.raises(ValueError, match="only what is ours and down is started again, not what is starting"):
        life().started(1.0)
    down = life(ours=False, state=State.SERVING).seen(Answer.NO, 1.0)
    with pytest.raises(ValueError):
        down.started(2.0)
    assert down.seen(Answer.YES, 2.0).state is State.DOWN, "it rests for some seconds"
    assert down.seen(Answer.YES, 1.0 + REST_S).state is State.WAITING


def test_the_reason_for_giving_up_counts() -> None:
    one = life(state=State.SERVING)
    for moment in (1.0, 2.0, 3.0, 4.0):
        one = replace(one, state=State.SERVING).fell("ended with exit code 137", moment)
    assert one.state is State.GONE
    assert one.reason == ("ended with exit code 137; that was the 4th time in 16.6667 minutes (inference.max_restarts)")
    assert [ordinal(n) for n in (1, 2, 3, 11, 21, 113)] == ["1st", "2nd", "3rd", "11th", "21st", "113th"]
