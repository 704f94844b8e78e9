"""What state a server or the router is in, and what may follow: a pure state machine.

It owns no process and no connection. It is told what was seen and answers with the next state; the fleet acts on that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

REST_S = 5.0  # and as much more for every fall: one that answers and cannot be used is not given up within seconds


class State(StrEnum):
    """The only way to SERVING leads through WAITING and a proof (``proved``)."""

    STARTING = "starting"  # does not answer yet
    WAITING = "waiting"  # answers; the published weights are not proved on it
    SERVING = "serving"  # they are: requests go to it
    DOWN = "down"  # no longer answers; is started again, or waited for where it is not ours
    GONE = "gone"  # for good


class Answer(StrEnum):
    YES = "yes"
    NO = "no"  # refused the connection, or answered with an error
    SILENT = "silent"  # nothing in time


@dataclass(frozen=True)
class Limits:
    """Seconds, and how often something may go down."""

    start_s: float  # from its start to its first answer
    silent_s: float  # without an answer before it counts as hanging
    restarts: int  # in a window; one more is the end
    window_s: float


@dataclass(frozen=True)
class Life:
    """The state since ``since``; when it last answered; when it went down, within the window; why it is down or gone.

    Moments are seconds of one clock that never goes back.
    """

    limits: Limits
    ours: bool  # started here, so that it can be started again
    since: float
    heard: float
    state: State = State.STARTING
    falls: tuple[float, ...] = ()
    reason: str = ""

    @property
    def up(self) -> bool:
        return self.state in (State.WAITING, State.SERVING)

    def _to(self, state: State, now: float, reason: str = "") -> Life:
        return replace(self, state=state, since=now, heard=now, reason=reason)

    def seen(self, answer: Answer, now: float) -> Life:
        """After a look. One that is down and not ours is up again once it has rested and answers; ours must be ``started``."""
        if answer is Answer.YES:
            rested = not self.ours and now - self.since >= REST_S * len(self.falls)
            if self.state is State.STARTING or (self.state is State.DOWN and rested):
                return self._to(State.WAITING, now)
            return replace(self, heard=now) if self.up else self
        if self.state is State.STARTING and now - self.since > self.limits.start_s:
            return self.fell(f"was not ready in {self.limits.start_s:.0f} s (inference.start_timeout_s)", now)
        if self.up and answer is Answer.NO:
            return self.fell("no longer answers", now)
        if self.up and now - self.heard > self.limits.silent_s:
            return self.fell(f"has not answered for {self.limits.silent_s:.0f} s (inference.health_timeout_s)", now)
        return self

    def fell(self, reason: str, now: float) -> Life:
        """Down, or gone if that was once too often; what is down or gone already stays as it is."""
        if self.state in (State.DOWN, State.GONE):
            return self
        falls = (*(moment for moment in self.falls if now - moment < self.limits.window_s), now)
        fallen = replace(self, falls=falls)
        if len(falls) > self.limits.restarts:
            minutes = self.limits.window_s / 60
            return fallen.dismissed(
                f"{reason}; that was the {ordinal(len(falls))} time in {minutes:g} minutes (inference.max_restarts)",
                now,
            )
        return fallen._to(State.DOWN, now, reason)

    def started(self, now: float) -> Life:
        """Its process has been started again."""
        if not (self.ours and self.state is State.DOWN):
            raise ValueError(f"only what is ours and down is started again, not what is {self.state}")
        return self._to(State.STARTING, now)

    def proved(self, now: float) -> Life:
        """The published weights were proved on it. One that fell meanwhile stays down."""
        return self._to(State.SERVING, now) if self.state is State.WAITING else self

    def excused(self, now: float) -> Life:
        """It could not answer until now: that counts for nothing."""
        return replace(self, heard=now)

    def dismissed(self, reason: str, now: float) -> Life:
        """For good: by the user, for wrong weights, or because it fell too often."""
        return self if self.state is State.GONE else self._to(State.GONE, now, reason)


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
