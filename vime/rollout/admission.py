"""How many requests are in flight, decided from what the servers say of their load. Pure: no network, no clock.

Too few leave servers without work. Too many are worse than they look: a server whose KV cache is full throws away what it
has computed of one response to go on with another (a preemption), and one with a long queue lets deadlines pass. So the
cap grows while there is room and demand, and is cut on a preemption, a full cache or a queue. Its unit is requests a
server: servers that go or come change the whole at once and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

START = 256
"""Requests a server at the start, at most: what a vLLM server runs at once unless told otherwise (max-num-seqs)."""
GROWTH = 1.25
"""Factor of one growth: from under ROOM it ends under FULL, so that a growth is never what causes the next cut."""
ROOM = 0.7
"""Share of the KV cache in use under which there is room for more."""
FULL = 0.9
"""Share of the KV cache in use at which the cap is cut before the server preempts: running responses still lengthen."""
CUT = 0.75
"""Factor of one cut: from FULL it ends just under ROOM, where the cap rests or grows once."""
QUEUE = 0.1
"""Waiting requests a running one that are left to a server: the next is there when one ends, and deadlines are not spent."""
PATIENCE = 5
"""Observations in a row that show a queue before it is believed: many prompts that arrive at once wait for a moment."""


@dataclass(frozen=True)
class Load:
    """What one server says of itself; of its engines the sum, of their KV caches the fullest.

    ``kv_use`` is the share of the cache that running requests hold, ``kv_tokens`` its size (0: not told), ``preemptions``
    their number since the server started, ``spent`` the seconds that requests which have ended spent in its queue, in prefill
    and in decode.
    """

    running: int
    waiting: int
    kv_use: float
    preemptions: int
    kv_tokens: int = 0
    spent: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def queued(self) -> bool:
        return self.waiting > ceil(QUEUE * self.running)

    @property
    def room(self) -> bool:
        """Whether it could run more: with half of the queue that is left to it, it runs all it can."""
        return self.kv_use < ROOM and 2 * self.waiting <= ceil(QUEUE * self.running)


@dataclass(frozen=True)
class Demand:
    """What the driver has asked for: most requests in flight since the last observation, requests that wait for a slot now,
    and those that have ended since the start."""

    peak: int
    waiting: int
    ended: int


class Admission:
    """Told observations, asked for ``cap``: the most requests to have in flight.

    A turnover is the time in which as many requests end as may be in flight: all that run then were admitted under the
    present cap, and the KV cache shows what it amounts to.

    Invariants (asserted by the tests):
    - the cap is at most ``maximum`` and, within that, at least one a server;
    - it is proportional to the number of servers;
    - it grows only where it is what holds requests back, and once a turnover;
    - a full cache or preemptions cut it to CUT of the most that were in flight in this turnover and the last, so again only
      when fewer are;
    - a server that tells nothing changes nothing.
    """

    def __init__(self, maximum: int, response_tokens: int) -> None:
        self.maximum, self.response_tokens = maximum, response_tokens
        self.servers = 1
        self.each = float(START)  # requests a server
        self.started = False  # whether a server has told the size of its cache
        self.changed_at = 0  # requests that had ended when the cap last changed
        self.turned_at = 0  # and when this turnover began
        self.peaks = (0, 0)  # most requests in flight in the last turnover and in this one
        self.preempted: dict[str, int] = {}  # preemptions by server, when last told
        self.excused, self.excused_till = (
            0,
            0,
        )  # preemptions that an update made, told before so many requests have ended
        self.ended = 0  # requests, at the last observation
        self.queues: deque[int] = deque(maxlen=PATIENCE)  # requests that ran in the last observations, all with a queue

    @property
    def cap(self) -> int:
        return min(self.maximum, max(self.servers, int(self.each * self.servers)))

    def updated(self, in_flight: int, ended: int) -> None:
        """The weights were updated under ``in_flight`` requests: each may have been preempted for it, which the servers tell
        when it goes on, and meanwhile all queued. That is no measure of load."""
        self.excused, self.excused_till = in_flight, ended + in_flight
        self.queues.clear()

    def observe(self, servers: int, loads: Mapping[str, Load], demand: Demand) -> None:
        """``servers`` serve now; ``loads`` are of those that have answered, by URL."""
        self.servers = max(1, servers)
        self._turn(demand)
        if not loads:
            return
        self._start(loads)
        preempted, queued = self._preempted(loads, demand.ended), self._queued(loads)
        full = preempted or max(load.kv_use for load in loads.values()) >= FULL
        if full and (peak := max(self.peaks)):
            self._cut(CUT * peak / self.servers, demand)
        if queued:
            most = max(self.queues)
            self._cut((most + ceil(QUEUE * most)) / len(loads), demand)
            self.queues.clear()
        elif not full and all(load.room for load in loads.values()):
            self._grow(demand)

    def _turn(self, demand: Demand) -> None:
        if demand.ended - self.turned_at >= self.cap:
            self.peaks = (self.peaks[1], 0)
            self.turned_at = demand.ended
        self.peaks = (self.peaks[0], max(self.peaks[1], demand.peak))

    def _start(self, loads: Mapping[str, Load]) -> None:
        """As many as surely fit, each at its full length; known only once a server has told the size of its cache."""
        sizes = [load.kv_tokens for load in loads.values() if load.kv_tokens]
        if sizes and not self.started:
            self.started = True
            self.each = min(self.each, max(1.0, min(sizes) / self.response_tokens))

    def _preempted(self, loads: Mapping[str, Load], ended: int) -> bool:
        """Whether servers have preempted since they were last heard; one heard for the first time has not."""
        before, self.ended = self.ended, ended
        more = sum(max(0, load.preemptions - self.preempted.get(url, load.preemptions)) for url, load in loads.items())
        self.preempted |= {url: load.preemptions for url, load in loads.items()}
        excused = min(more, self.excused if before < self.excused_till else 0)
        self.excused -= excused
        return more > excused

    def _queued(self, loads: Mapping[str, Load]) -> bool:
        """Whether every server has had a queue for a while without running more and more.

        A queue at one alone is the router's doing: fewer requests would leave the others without work.
        """
        if not all(load.queued for load in loads.values()):
            self.queues.clear()
            return False
        self.queues.append(sum(load.running for load in loads.values()))
        return len(self.queues) == PATIENCE and self.queues[-1] <= self.queues[0]

    def _grow(self, demand: Demand) -> None:
        if demand.waiting and demand.ended - self.changed_at >= self.cap < self.maximum:
            self.each *= GROWTH
            self.changed_at = demand.ended

    def _cut(self, each: float, demand: Demand) -> None:
        if each < self.each:
            self.each = max(1.0, each)
            self.changed_at = demand.ended
