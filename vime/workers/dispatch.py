"""Which call goes to which worker, and what the end of a worker means for the calls in it. Pure: it is told what happened.

Workers of one kind: of plain functions, which a worker runs one at a time in the order they came; or of coroutines, which it
runs side by side. What holds:

- A call is in one place: it waits, or it is with one worker.
- Calls begin in the order they came, those that are asked again because of another's fault first.
- Short plain calls are sent ahead; those that come to lie behind a long one are taken back for other workers. Their worker
  does not know, and may make such a call a second time: a copy of it that is ``recalled`` stays with it.
- A call is charged with a failure when it ran alone as its worker ended, or was late. After ``retries`` + 1 it has failed.
- Calls that ran side by side as their worker ended are not charged. Any may have ended it, so each comes again among fewer,
  ``AT_ONCE``, an eighth of that, and so on to 1: the one that ends workers is found, and the others are answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

Worker = TypeVar("Worker", bound=Hashable)
AT_ONCE = 256
"""coroutines of one worker: a judge over HTTP has many under way, and each holds a connection"""
FEWER = 8
"""by which suspects are divided: from 256 to 1 in three steps"""
AHEAD_S = 0.01
"""seconds of plain calls that lie with a worker beyond the one it runs, so that it need not wait for the driver: as long as a
busy driver's event loop takes to come round. None go behind a call that has run for so long"""
AHEAD = 32
"""and at most so many calls"""


@dataclass(eq=False)
class Call:
    """One call; ``message`` is what its worker is told."""

    id: int
    message: bytes
    deadline_s: float
    retries: int
    failures: int = 0
    beside: int = AT_ONCE  # how many may run in its worker, itself among them
    began: float = 0.0
    worker: str = ""  # the name of the one that answered it
    cancelled: float | None = None  # when its worker was told so, until that says that it heard
    given_up: bool = False  # nobody waits for it
    recalled: bool = False  # another copy of it counts


@dataclass
class Desk:
    """A worker's calls, in the order they were sent."""

    sent: dict[int, Call] = field(default_factory=dict)
    limit: int = AT_ONCE  # the least ``beside`` among them
    closed: bool = False  # its worker is ending
    mean_s: float = 2 * AHEAD_S  # of its plain calls, the newer weigh more; at first one at a time

    def recount(self) -> None:
        self.limit = min((call.beside for call in self.sent.values()), default=AT_ONCE)

    def ahead(self, now: float) -> int:
        """How many plain calls may lie here."""
        long = any(now - call.began > AHEAD_S for call in list(self.sent.values())[:1])
        return 1 if long else min(AHEAD, int(AHEAD_S / self.mean_s) + 1)


class Dispatch(Generic[Worker]):
    """The calls that wait, and those with workers."""

    def __init__(self, concurrent: bool) -> None:
        self.concurrent = concurrent
        self.waiting: deque[Call] = deque()
        self.desks: dict[Worker, Desk] = {}

    def open(self, worker: Worker) -> None:
        """The worker is ready for calls."""
        self.desks[worker] = Desk()

    def next(self, now: float) -> tuple[Worker, Call] | None:
        """The call that begins now, and its worker, the one with the fewest; None where no call waits or no worker has room."""
        while self.waiting and self.waiting[0].given_up:
            self.waiting.popleft()
        desks = self._open()
        if not self.waiting or not desks:
            return None
        call = self.waiting[0]
        worker, desk = min(desks, key=lambda item: len(item[1].sent))
        if len(desk.sent) >= (min(desk.limit, call.beside) if self.concurrent else desk.ahead(now)):
            return None
        self.waiting.popleft()
        call.began = now  # a plain one that waits behind others begins when they are done
        desk.sent[call.id] = call
        desk.limit = min(desk.limit, call.beside)
        return worker, call

    def done(self, worker: Worker, number: int, now: float) -> Call | None:
        """The call of that number, which the worker has ended; None where it has none such, or no more."""
        desk = self.desks[worker]
        call = desk.sent.pop(number, None)
        if call is None:
            return None
        if call.beside < AT_ONCE:
            desk.recount()
        if not self.concurrent:
            desk.mean_s += (max(now - call.began, 1e-6) - desk.mean_s) / 8
            for following in self._running(desk):
                following.began = now
        return None if call.recalled else call

    def recall(self, now: float) -> None:
        """Takes back the plain calls that lie behind one that has run for AHEAD_S; they wait again, as the first."""
        for desk in self.desks.values():
            if self.concurrent or desk.ahead(now) > 1:
                continue
            behind = [call for call in list(desk.sent.values())[1:] if not call.recalled]
            desk.sent |= {call.id: replace(call, recalled=True) for call in behind}
            self.waiting.extendleft(reversed(behind))

    def late(self, now: float) -> list[tuple[Worker, Call]]:
        """Running calls past their deadline, with their workers, where those are not ending already."""
        return [
            (worker, call)
            for worker, desk in self._open()
            for call in self._running(desk)
            if now > call.began + call.deadline_s
        ]

    def where(self, call: Call) -> Worker | None:
        """The worker that has it, unless that is ending."""
        return next((worker for worker, desk in self._open() if desk.sent.get(call.id) is call), None)

    def charge(self, call: Call) -> bool:
        """Counts a failure of the call's own. True where it has failed; else it waits to be made again, after the others."""
        call.failures += 1
        call.cancelled = None
        if call.failures > call.retries or call.given_up:
            return True
        self.waiting.append(call)
        return False

    def close(self, worker: Worker) -> None:
        """The worker is ending: it gets no more calls."""
        self.desks[worker].closed = True

    def lost(self, worker: Worker, suspect: bool = True) -> list[Call]:
        """The worker has ended: its calls wait again, less those that have failed, which are returned.

        ``suspect``: what it ran may have ended it.
        """
        desk = self.desks.pop(worker)
        running = self._running(desk) if suspect else []
        again, failed = [], []
        for call in desk.sent.values():
            if call.recalled:
                continue
            call.cancelled = None
            if running == [call]:
                failed += [call] if self.charge(call) else []
                continue
            if call in running:
                call.beside = max(1, call.beside // FEWER)
            again.append(call)
        self.waiting.extendleft(reversed(again))
        return failed

    def _open(self) -> list[tuple[Worker, Desk]]:
        return [(worker, desk) for worker, desk in self.desks.items() if not desk.closed]

    def _running(self, desk: Desk) -> list[Call]:
        calls = list(desk.sent.values())
        return calls if self.concurrent else calls[:1]
