"""The cap on requests in flight, against a model of servers: within its bounds, near what the servers can take, again so
after servers went or came."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.rollout.admission import CUT, FULL, GROWTH, PATIENCE, ROOM, START, Admission, Demand, Load

CALM = Load(running=10, waiting=0, kv_use=0.1, preemptions=0, kv_tokens=1 << 20)


@dataclass
class ModelServer:
    """A server that runs ``slots`` responses of 20 to 200 tokens, one token a second each, while they fit its cache."""

    slots: int
    kv_tokens: int
    prompt: int = 20
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    running: list[list[int]] = field(default_factory=list)  # [tokens held, tokens at the end]
    waiting: list[list[int]] = field(default_factory=list)
    preemptions: int = 0
    ended: int = 0

    def held(self) -> int:
        return sum(held for held, _ in self.running)

    def take(self, count: int) -> None:
        self.waiting += [[self.prompt, self.prompt + self.rng.randint(20, 200)] for _ in range(count)]

    def second(self) -> None:
        while self.waiting and len(self.running) < self.slots and self.held() + self.waiting[0][0] <= self.kv_tokens:
            self.running.append(self.waiting.pop(0))
        for request in self.running:
            request[0] += 1
        while self.held() > self.kv_tokens:
            self.waiting.insert(0, self.running.pop())
            self.preemptions += 1
        done = [request for request in self.running if request[0] >= request[1]]
        self.running = [request for request in self.running if request[0] < request[1]]
        self.ended += len(done)

    def load(self) -> Load:
        return Load(
            len(self.running), len(self.waiting), self.held() / self.kv_tokens, self.preemptions, self.kv_tokens
        )

    def takes(self) -> float:
        """Responses at once without a preemption, on average: half of a response has been sampled."""
        return min(self.slots, self.kv_tokens / (self.prompt + 110 / 2))


class Driver:
    """Has always more to ask for; sends each request to the server with the fewest."""

    def __init__(self, servers: list[ModelServer], maximum: int = 10**6) -> None:
        self.servers, self.admission = servers, Admission(maximum, response_tokens=200)
        self.before = 0
        self.observe(0)

    def in_flight(self) -> int:
        return sum(len(server.running) + len(server.waiting) for server in self.servers)

    def seconds(self, count: int) -> list[int]:
        """The caps of the next seconds."""
        caps = []
        for _ in range(count):
            for _ in range(self.admission.cap - self.in_flight()):
                min(self.servers, key=lambda one: len(one.running) + len(one.waiting)).take(1)
            peak = self.in_flight()
            for server in self.servers:
                server.second()
            self.observe(peak)
            caps.append(self.admission.cap)
        return caps

    def observe(self, peak: int) -> None:
        ended = self.before + sum(server.ended for server in self.servers)
        loads = {str(id(server)): server.load() for server in self.servers}
        self.admission.observe(len(self.servers), loads, Demand(peak, 10**6, ended))

    def remove(self) -> None:
        """One server is gone, what it ran with it."""
        self.before += self.servers.pop().ended


@given(
    st.integers(1, 50),
    st.lists(
        st.tuples(
            st.integers(0, 8),
            st.dictionaries(
                st.sampled_from("abc"),
                st.builds(
                    Load,
                    st.integers(0, 500),
                    st.integers(0, 500),
                    st.floats(0, 1),
                    st.integers(0, 9),
                    st.integers(0, 10**6),
                ),
            ),
            st.builds(Demand, st.integers(0, 9999), st.integers(0, 9999), st.integers(0, 9999)),
        ),
        max_size=30,
    ),
)
def test_the_cap_is_never_above_the_maximum_and_never_under_one_a_server(maximum: int, observations: list) -> None:
    admission = Admission(maximum, 100)
    for servers, loads, demand in observations:
        admission.observe(servers, loads, demand)
        assert min(maximum, max(servers, 1)) <= admission.cap <= maximum


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("slots", "kv_tokens"), [(32, 10**6), (1000, 40_000), (1000, 4_000), (64, 3_000), (600, 10**6), (16, 1_000)]
)
def test_it_settles_near_what_the_servers_can_take(slots: int, kv_tokens: int, count: int) -> None:
    driver = Driver([ModelServer(slots, kv_tokens, rng=random.Random(i)) for i in range(count)])
    driver.seconds(2000)
    ended, preemptions = (sum(getattr(one, what) for one in driver.servers) for what in ("ended", "preemptions"))
    caps = driver.seconds(1000)
    ended = sum(one.ended for one in driver.servers) - ended
    preemptions = sum(one.preemptions for one in driver.servers) - preemptions
    takes = sum(one.takes() for one in driver.servers)
    assert 0.5 * takes <= fmean(caps) and max(caps) <= 1.2 * takes + count
    assert 0.33 * takes <= min(caps)  # of few responses the lengths differ much from second to second
    assert preemptions <= 0.2 * ended


def test_long_prompts_fill_the_cache_at_once_and_the_cap_follows() -> None:
    server = ModelServer(256, 20_000, prompt=2_000)
    driver = Driver([server])
    driver.seconds(2000)
    caps = driver.seconds(500)
    assert max(caps) <= 1.2 * server.takes() + 1 and fmean(caps) >= 0.6 * server.takes()


def test_the_cap_follows_servers_that_go_and_come_and_is_then_what_it_was() -> None:
    driver = Driver([ModelServer(64, 6_000, rng=random.Random(i)) for i in range(4)])
    before = driver.seconds(2000)[-1]
    for _ in range(3):
        driver.remove()
    assert driver.seconds(1)[-1] == pytest.approx(before / 4, abs=2)
    driver.seconds(500)
    driver.servers += [ModelServer(64, 6_000, rng=random.Random(9 + i)) for i in range(3)]
    after = driver.seconds(1000)
    assert after[0] > 2 * before / 4 and after[-1] == pytest.approx(before, rel=0.4)


def test_a_maximum_bounds_servers_that_could_take_more() -> None:
    driver = Driver([ModelServer(500, 10**6)], maximum=40)
    assert set(driver.seconds(300)) == {40}


def test_the_start_is_what_surely_fits_and_at_most_what_a_server_runs() -> None:
    admission = Admission(10**6, response_tokens=1000)
    admission.observe(2, {"a": CALM, "b": Load(0, 0, 0.0, 0, kv_tokens=50_000)}, Demand(0, 0, 0))
    assert admission.cap == 2 * 50
    admission = Admission(10**6, response_tokens=1000)
    admission.observe(2, {"a": CALM}, Demand(0, 0, 0))
    assert admission.cap == 2 * START


def test_servers_that_tell_nothing_change_nothing() -> None:
    admission = Admission(10**6, 100)
    for _ in range(20):
        admission.observe(1, {}, Demand(peak=256, waiting=99, ended=9999))
    assert admission.cap == START


def grown(admission: Admission, load: Load = CALM, waiting: int = 1, ended: int = START) -> int:
    admission.observe(1, {"a": load}, Demand(START, waiting, ended))
    return admission.cap


def test_it_grows_only_after_a_turnover_with_room_and_with_requests_that_wait() -> None:
    assert grown(Admission(10**6, 100)) == int(START * GROWTH)
    assert grown(Admission(10**6, 100), ended=START - 1) == START
    assert grown(Admission(10**6, 100), waiting=0) == START
    assert grown(Admission(10**6, 100), Load(10, 0, ROOM, 0, 1 << 20)) == START
    assert grown(Admission(10**6, 100), Load(10, 2, 0.1, 0, 1 << 20)) == START


def test_a_full_cache_cuts_once_until_fewer_are_in_flight() -> None:
    admission = Admission(10**6, 100)
    for _ in range(10):
        admission.observe(1, {"a": Load(100, 0, FULL, 0, 1 << 20)}, Demand(peak=200, waiting=9, ended=0))
        assert admission.cap == CUT * 200
    for ended in (150, 300, 450):
        admission.observe(1, {"a": Load(100, 0, FULL, 0, 1 << 20)}, Demand(peak=150, waiting=9, ended=ended))
    assert admission.cap == int(CUT * 150)


def test_the_last_long_responses_of_a_batch_do_not_cut_the_next() -> None:
    admission = Admission(10**6, 100)
    for ended in range(0, 200, 10):
        full = Load(10, 0, FULL if ended > 180 else 0.5, 0, 1 << 20)
        admission.observe(1, {"a": full}, Demand(peak=200 - ended, waiting=0, ended=ended))
    assert admission.cap == CUT * 200


def test_a_preemption_cuts_also_where_it_was_over_before_the_next_look() -> None:
    admission = Admission(10**6, 100)
    admission.observe(1, {"a": CALM}, Demand(100, 0, 0))
    admission.observe(1, {"a": Load(10, 0, 0.1, 7, 1 << 20)}, Demand(100, 0, 0))
    assert admission.cap == CUT * 100


def preempts(admission: Admission, preemptions: int, ended: int = 0) -> bool:
    before = admission.cap
    admission.observe(1, {"a": Load(10, 0, 0.1, preemptions, 1 << 20)}, Demand(100, 0, ended))
    return admission.cap < before


def test_preemptions_for_an_update_are_excused_and_no_others() -> None:
    admission = Admission(10**6, 100)
    assert not preempts(admission, 5)
    admission.updated(in_flight=80, ended=0)
    assert not preempts(admission, 5 + 50)
    assert not preempts(admission, 5 + 80)
    assert preempts(admission, 5 + 81)


def test_when_the_requests_of_an_update_have_ended_nothing_is_excused_any_more() -> None:
    admission = Admission(10**6, 100)
    assert not preempts(admission, 0)
    admission.updated(in_flight=80, ended=0)
    assert not preempts(admission, 1, ended=80)
    assert preempts(admission, 2, ended=81)


def test_a_server_that_was_restarted_counts_anew() -> None:
    admission = Admission(10**6, 100)
    assert not preempts(admission, 60)
    assert not preempts(admission, 0)
    assert preempts(admission, 1)


def queue_for(seconds: int, loads: list[Load]) -> int:
    admission = Admission(10**6, 100)
    for _ in range(seconds):
        admission.observe(len(loads), {str(i): load for i, load in enumerate(loads)}, Demand(200, 9, 0))
    return admission.cap


def test_servers_that_run_all_they_can_get_no_more() -> None:
    driver = Driver([ModelServer(32, 10**6)])
    driver.seconds(1000)
    assert set(driver.seconds(1000)) == {36}


def test_a_queue_is_cut_when_it_stays_and_only_where_every_server_has_one() -> None:
    queued = Load(100, 60, 0.3, 0, 1 << 20)
    assert queue_for(PATIENCE - 1, [queued]) == START
    assert queue_for(PATIENCE, [queued]) == 110
    assert queue_for(PATIENCE * 4, [queued, CALM]) == 2 * START


def test_a_queue_that_servers_still_work_off_is_let_be() -> None:
    admission = Admission(10**6, 100)
    for running in range(10, 100, 10):
        admission.observe(1, {"a": Load(running, 60, 0.3, 0, 1 << 20)}, Demand(200, 9, 0))
    assert admission.cap == START


def test_a_growth_never_causes_the_next_cut_and_a_cut_leaves_no_room_for_two_growths() -> None:
    assert ROOM * GROWTH < FULL and FULL * CUT * GROWTH >= ROOM and ceil(FULL * CUT * 100) <= 100 * ROOM
