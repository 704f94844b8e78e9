"""Groups that run ahead of training: the bound on their age, what waits, what is dropped, that none is lost."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vime.rollout.scheduler
from tests.tiny import make_config
from vime.data import DataError
from vime.data.cursor import PromptCursor
from vime.data.journal import Journal, account
from vime.data.orders import Epochs
from vime.data.sources import task_of
from vime.data.streams import TaskStream
from vime.inference.client import InferenceError, Late, Server
from vime.inference.gate import Gate
from vime.inference.requests import Requests
from vime.rollout.generate import GENERATE, Context
from vime.rollout.outcome import Outcome, rollout_metrics, stored_keys
from vime.rollout.scheduler import STARTED_AT_ONCE, RolloutError, Scheduler
from vime.sample import Sample, Task, VersionSpan
from vime.store.shared_memory import SharedMemoryStore

TASKS = [Task(f"t{i}", ({"role": "user", "content": "?"},), "x") for i in range(5)]


class Run:
    """A scheduler, and a trainer of ``busy`` ticks a step.

    A response waits ``queue()`` ticks until a server is asked for it, then takes ``ticks()`` ticks and has two tokens for each,
    of the weights that are served in it; its reward is ``reward()``. A tick is a turn of the event loop: the order of all that
    happens is the script's, not the machine's.
    """

    def __init__(
        self,
        folder: Path,
        ticks: Callable[[], int],
        busy: int = 3,
        reward: Any = None,
        steps: int = 99,
        queue: Callable[[], int] = lambda: 0,
        **rollout: Any,
    ) -> None:
        section = {"groups": 2, "samples_per_group": 2, "max_staleness": 1, **rollout}
        self.config = make_config(folder, rollout=section, run={"steps": steps})
        self.folder, self.ticks, self.busy, self.queue = folder, ticks, busy, queue
        self.reward = reward or random.Random(1).random
        self.requests = Requests(Server("", None, 1), Gate(usable=True), self.config.rollout)  # type: ignore[arg-type]
        self.cursor = PromptCursor(TASKS, seed=0)
        self.journal = Journal(folder / "journal.jsonl")
        self.store = SharedMemoryStore(folder / "store")
        context = Context(self.requests, None, None, {})
        self.scheduler = Scheduler(self.config, context, self.cursor, self.journal, self.store)
        self.batches: list[list[Outcome]] = []

    async def respond(self, context: Context, task: Task) -> Sample:
        made: list[int] = []
        for _ in range(self.queue()):
            await asyncio.sleep(0)
        if context.requests.begun is None:
            context.requests.begun = self.requests.version
        for _ in range(self.ticks()):
            await asyncio.sleep(0)
            made += [self.requests.version] * 2
        places = [(version, made.index(version), made.count(version)) for version in sorted(set(made))]
        spans = tuple(VersionSpan(version, start, start + count) for version, start, count in places)
        return Sample([1], [65] * len(made), [-0.5] * len(made), spans, "stop", "", reward=self.reward())

    async def steps(self, count: int) -> None:
        for _ in range(count):
            batch = await asyncio.wait_for(self.scheduler.collect(), 60)
            self.batches.append(batch)
            for _ in range(self.busy):
                await asyncio.sleep(0)
            self.scheduler.trained(batch, self.requests.version + 1)
            self.store.drop(stored_keys(batch))
            self.requests.front.version += 1

    def go(self, count: int) -> None:
        """So many steps, and the end."""

        async def whole() -> None:
            try:
                await self.steps(count)
            finally:
                await self.scheduler.close()

        asyncio.run(whole())

    def trained(self) -> list[Outcome]:
        return [outcome for batch in self.batches for outcome in batch if outcome.filtered is None]

    def account(self) -> dict[str, Any]:
        self.journal.offset()
        return account(self.folder / "journal.jsonl")


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def respond(context: Any, task: Task) -> Sample:
        return await RUN[0].respond(context, task)

    monkeypatch.setitem(GENERATE, "single_turn", respond)


RUN: list[Run] = []


def make(folder: Path, ticks: Callable[[], int], **settings: Any) -> Run:
    RUN[:] = [Run(folder, ticks, **settings)]
    return RUN[0]


def behind(run: Run) -> Counter[int]:
    """Trained tokens by the number of versions they were behind."""
    found: Counter[int] = Counter()
    for number, batch in enumerate(run.batches):
        for outcome in batch:
            for row, spans in zip(outcome.rows, outcome.versions, strict=False):
                assert row.trained_tokens == sum(span.end - span.start for span in spans)
                for span in spans:
                    found[number - span.version] += span.end - span.start
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3),
    st.sampled_from(["wait", "drop", "mask"]),
    st.sampled_from(["none", "zero_variance"]),
    st.sampled_from([0, 1, 4]),
    st.integers(1, 4),
    st.integers(0, 8),
    st.sampled_from([1, STARTED_AT_ONCE]),
    st.randoms(use_true_random=False),
)
def test_no_token_is_trained_too_late_and_no_prompt_is_lost_or_used_twice(
    bound: int, stale: str, filtering: str, refills: int, groups: int, busy: int, at_once: int, chance: random.Random
) -> None:
    lengths = [1, 1, 2, 3, 5, 40]
    with TemporaryDirectory() as folder, patch.object(vime.rollout.scheduler, "STARTED_AT_ONCE", at_once):
        run = make(
            Path(folder),
            lambda: chance.choice(lengths),
            busy=busy,
            queue=lambda: chance.choice([0, 0, 0, 6, 30]),
            reward=lambda: float(chance.random() < 0.7),
            groups=groups,
            max_staleness=bound,
            stale=stale,
            filter=filtering,
            max_refills=refills,
        )

        run.go(12)
        found = behind(run)
        assert max(found, default=0) <= bound and min(found, default=0) >= 0
        counted = run.account()
        assert counted["twice"] == [] and counted["trained"] == len(run.trained())
        assert counted["open"] == [group for group, _ in run.cursor.buffer] and not run.cursor.open
        assert not list(run.store.folder.iterdir())
        if stale == "wait":
            assert "stale" not in counted["filtered"]
        if filtering == "none" and stale != "drop":
            assert [len([o for o in batch if not o.filtered]) for batch in run.batches] == [groups] * 12


def one_long(length: int) -> Callable[[], int]:
    """The first response is long, all others take one tick."""
    script = iter([length])
    return lambda: next(script, 1)


def test_groups_are_made_while_the_trainer_learns(tmp_path: Path) -> None:
    run = make(tmp_path, lambda: 2, busy=20)

    async def two_steps() -> None:
        await run.steps(1)
        assert len(run.scheduler.ready) == 2, "the next batch is there before it is asked for"
        await run.steps(1)

    asyncio.run(two_steps())
    assert [outcome.oldest_version for outcome in run.batches[1]] == [0, 0]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_no_batch_waits_for_what_would_replace_a_filtered_group_where_none_is_to_be_replaced(
    tmp_path: Path, ahead: int
) -> None:
    rewards = itertools.cycle([0.0, 1.0, 0.5, 0.5])  # every second group has no variance
    run = make(
        tmp_path,
        lambda: 2,
        busy=20,
        reward=lambda: next(rewards),
        groups=4,
        max_staleness=ahead,
        filter="zero_variance",
        max_refills=0,
    )
    waits: list[bool] = []

    async def whole() -> None:
        for _ in range(8):
            waits.append(len(run.scheduler.ready) + len(run.scheduler.filtered) < 4)
            await run.steps(1)

    asyncio.run(whole())
    trained = [sum(not outcome.filtered for outcome in batch) for batch in run.batches]
    assert trained == [2] * 8 if ahead == 0 else min(trained) == 2, "with no refill, no batch waits for more"
    assert any(waits[1:]) is (ahead == 0), "running ahead, the next batch is ready when it is asked for"


def test_a_batch_waits_for_the_response_that_would_otherwise_be_too_old(tmp_path: Path) -> None:
    run = make(tmp_path, one_long(400))
    run.go(4)
    assert [[o.group_id for o in batch] for batch in run.batches][:2] == [[1, 2], [0, 3]]
    long = run.batches[1][0]
    assert long.response_tokens[0] == 800 and len(long.versions[0]) == 2, "it went on under the next weights"


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    spans = [(VersionSpan(4, 0, 1), VersionSpan(5, 1, 2)), (VersionSpan(3, 0, 1),)]
    assert Outcome(0, None, [], [], 0, [2, 1], [], spans, []).oldest_version == 3


def test_a_dropped_response_is_counted_and_how_long_it_was_is_told(tmp_path: Path) -> None:
    run = make(tmp_path, one_long(400), busy=20, stale="drop", max_staleness=1)
    run.go(5)
    assert run.account()["filtered"] == {"stale": 1}
    batch = next(batch for batch in run.batches if any(o.filtered for o in batch))
    metrics = rollout_metrics(batch, 2, 1.0)
    assert metrics["rollout/filtered_stale"] == metrics["rollout/stale_stopped"] == 1, "stopped: of no known length"
    assert "rollout/stale_response_tokens_mean" not in metrics


def test_a_group_that_no_server_was_asked_for_yet_is_not_stale(tmp_path: Path) -> None:
    waits = iter([200, 200])
    run = make(tmp_path, lambda: 1, busy=20, queue=lambda: next(waits, 0), stale="drop", max_staleness=1)
    run.go(14)
    assert run.account()["filtered"] == {}
    first = next(outcome for outcome in run.trained() if outcome.group_id == 0)
    assert first.oldest_version > 2


def failing(run: Run, after: int, error: BaseException) -> None:
    """Every response after so many raises this."""
    respond, calls = run.respond, itertools.count()

    async def fails(context: Context, task: Task) -> Sample:
        if next(calls) >= after:
            raise error
        return await respond(context, task)

    run.respond = fails  # type: ignore[method-assign]


def test_a_batch_of_which_all_failed_or_was_stopped_as_stale_says_why(tmp_path: Path) -> None:
    run = make(tmp_path, one_long(10000), stale="drop", max_refills=0)
    failing(run, 10, InferenceError("no server answers"))
    with pytest.raises(RolloutError, match="no group could be made: .* samples failed; the last: no server answers"):
        run.go(9)
    assert run.account()["filtered"]["stale"] == 1
    assert len(run.batches) == 2 and all(rollout_metrics(batch, 0, 1.0) for batch in run.batches)


def test_a_late_response_fails_and_is_counted_as_late(tmp_path: Path) -> None:
    run = make(tmp_path, lambda: 1, samples_per_group=4)
    failing(run, 7, Late("gave no answer in 600 s"))
    run.go(1)
    counts = run.scheduler.counts()
    assert counts["rollout/late_responses"] == counts["rollout/failed_samples"] > 0
    assert run.scheduler.counts()["rollout/late_responses"] == 0


def test_a_group_that_is_cancelled_by_what_it_calls_ends_the_run_and_does_not_stall_it(tmp_path: Path) -> None:
    def cancels(*_: Any) -> bool:
        raise asyncio.CancelledError

    run = make(tmp_path, lambda: 1)
    run.scheduler.filter = cancels
    with pytest.raises(RolloutError, match=r"group \d+ was cancelled by what it called"):
        run.go(3)


def test_a_finished_group_that_is_too_old_is_dropped_with_its_length(tmp_path: Path) -> None:
    run = make(tmp_path, lambda: 3, stale="drop")

    async def left_lying() -> None:
        await run.steps(1)
        for _ in range(50):
            await asyncio.sleep(0)
        run.requests.front.version += 5
        await run.steps(1)

    asyncio.run(left_lying())
    metrics = rollout_metrics(run.batches[1], 6, 1.0)
    assert metrics["rollout/filtered_stale"] == 2 and metrics["rollout/stale_response_tokens_mean"] == 6
    assert metrics["rollout/stale_stopped"] == 0
    assert metrics["rollout/staleness_max"] == 0


def test_too_old_tokens_are_taken_out_of_the_loss_and_counted(tmp_path: Path) -> None:
    run = make(tmp_path, one_long(30), busy=4, stale="mask", max_staleness=1)
    run.go(8)
    (long,) = [outcome for outcome in run.trained() if outcome.response_tokens[0] == 60]
    masked = sum(long.response_tokens) - sum(row.trained_tokens for row in long.rows)
    assert 0 < long.rows[0].trained_tokens < 60 and run.scheduler.counts()["rollout/stale_tokens_masked"] == masked
    assert max(behind(run)) == 1


def test_all_but_the_steps_own_tokens_can_be_taken_out_of_the_loss(tmp_path: Path) -> None:
    run = make(tmp_path, one_long(30), busy=4)
    run.scheduler.config = make_config(tmp_path, algorithm={"mask_stale": True})
    run.go(4)
    assert set(behind(run)) == {0} and run.scheduler.counts()["rollout/stale_tokens_masked"] > 0


def test_the_masked_payload_is_what_the_trainer_reads(tmp_path: Path) -> None:
    run = make(tmp_path, one_long(30), busy=4, stale="mask")

    async def until_masked() -> None:
        for _ in range(6):
            batch = await run.scheduler.collect()
            for outcome in batch:
                for row in outcome.rows:
                    assert int(run.store.get(row.key, row.index).loss_mask.sum()) == row.trained_tokens
            for _ in range(4):
                await asyncio.sleep(0)
            run.scheduler.trained(batch, run.requests.version + 1)
            run.requests.front.version += 1

    asyncio.run(until_masked())
    assert run.scheduler.stale_tokens > 0


def test_no_more_groups_are_made_than_the_run_can_train(tmp_path: Path) -> None:
    run = make(tmp_path, lambda: 1, steps=3, max_staleness=5)
    run.go(3)
    counted = run.account()
    assert (counted["taken"], counted["trained"], counted["filtered"], counted["open"]) == (6, 6, {}, [])


def test_of_many_groups_few_are_begun_in_one_turn_of_the_event_loop_and_all_in_the_end(tmp_path: Path) -> None:
    """The end of the scheduler in the middle of that begins no more."""
    run = make(tmp_path, lambda: 1000, groups=100)

    async def begun() -> list[int]:
        collecting = asyncio.create_task(run.scheduler.collect())
        counts = []
        for _ in range(20):
            counts.append(len(run.scheduler.running))
            await asyncio.sleep(0)
        collecting.cancel()
        run.requests.front.version += 1
        run.scheduler._fill()
        await run.scheduler.close()
        await asyncio.sleep(0.01)
        return counts

    counts = asyncio.run(begun())
    assert max(after - before for before, after in itertools.pairwise(counts)) == STARTED_AT_ONCE and counts[-1] == 200
    assert not run.scheduler.running and run.account()["taken"] == 200 + STARTED_AT_ONCE
    assert len(run.cursor.buffer) == 200 + STARTED_AT_ONCE and not run.cursor.open


def test_ready_groups_survive_in_a_checkpoint_and_their_prompts_are_not_asked_again(tmp_path: Path) -> None:
    run = make(tmp_path, lambda: 2, busy=20)

    async def save() -> tuple[list[Outcome], dict[str, Any]]:
        await run.steps(1)
        state = list(run.scheduler.ready.values()), run.cursor.state(list(run.scheduler.ready))
        await run.scheduler.save(tmp_path / "saved")
        before = {row.key: run.store.get(row.key, 0) for o in run.scheduler.ready.values() for row in o.rows}
        await run.scheduler.close()
        assert len(before) == 2
        return state

    ready, cursor = asyncio.run(save())
    (tmp_path / "again").mkdir()
    again = make(tmp_path / "again", lambda: 2, busy=20)
    again.cursor.load(cursor)
    again.scheduler.restore(tmp_path / "saved")
    assert list(again.scheduler.ready.values()) == ready
    again.requests.front.version = 1

    async def go_on() -> None:
        batch = await again.scheduler.collect()
        assert again.scheduler.seconds < 60, "since it was resumed"
        assert [outcome.group_id for outcome in batch] == [outcome.group_id for outcome in ready]
        assert all(again.store.get(row.key, row.index).logprobs.any() for o in batch for row in o.rows)
        again.scheduler.trained(batch, 2)
        await again.scheduler.close()

    asyncio.run(go_on())
    drawn = {group for group, _ in again.cursor.buffer}
    assert drawn.isdisjoint(outcome.group_id for outcome in ready)


def test_what_breaks_a_group_while_the_trainer_learns_is_raised_by_the_next_batch(tmp_path: Path) -> None:
    calls = iter(range(99))

    def ticks() -> int:
        if next(calls) >= 6:
            raise ZeroDivisionError("in the user's code")
        return 1

    run = make(tmp_path, ticks)
    with pytest.raises(ZeroDivisionError, match="in the user's code"):
        run.go(4)


def test_a_source_that_fails_in_the_middle_of_a_run_ends_it_with_its_error(tmp_path: Path) -> None:
    class Failing:
        def take(self, count: int) -> list[dict[str, Any]]:
            self.takes = getattr(self, "takes", 0) + 1
            if self.takes > 1:
                raise OSError("the disk is gone")
            return [{"prompt": f"{n}", "answer": n} for n in range(count)]

        def state(self) -> None: ...

        def load(self, state: None) -> None: ...

    run = make(tmp_path, lambda: 1)
    run.scheduler.cursor = PromptCursor({"": TaskStream("own.py:Failing", Failing(), task_of)}, 0)
    with pytest.raises(DataError, match=r"own.py:Failing: take\(\) failed: OSError: the disk is gone"):
        run.go(20)
    assert 12 <= len([outcome for batch in run.batches for outcome in batch]) <= 16, "all that were drawn before"


def test_the_cursor_is_told_the_step_of_each_prompt_and_how_its_responses_passed(tmp_path: Path) -> None:
    steps, rates = [], []

    class Noting(PromptCursor[Task]):
        def take(self, step: int = 0) -> tuple[int, Task]:
            steps.append(step)
            return super().take(step)

        def finish(self, group_id: int, passed: float | None = None) -> None:
            rates.append(passed)
            super().finish(group_id, passed)

    rewards = iter([1.0, 0.0, 1.0, 1.0, 0.5, 0.0, 0.0, 1.0])
    run = make(tmp_path, lambda: 1, reward=lambda: next(rewards), max_staleness=0, steps=2)
    run.scheduler.cursor = Noting(TASKS, 0)
    run.go(2)
    assert steps == [0, 0, 1, 1] and sorted(rates) == [0.0, 0.5, 0.5, 1.0]


def test_groups_of_a_mixture_say_their_source_in_the_log_and_in_the_metrics(tmp_path: Path) -> None:
    run = make(tmp_path, lambda: 1, reward=lambda: 1.0, groups=4, max_staleness=0, steps=2)
    tasks = {name: [Task(f"{name}/0", TASKS[0].messages, source=name)] for name in ("a", "b")}
    weights = {"a": 3.0, "b": 1.0}
    run.scheduler.cursor = PromptCursor(
        {name: Epochs(some, name) for name, some in tasks.items()}, 0, lambda name, step: weights[name]
    )
    run.go(2)
    for batch in run.batches:
        metrics = rollout_metrics(batch, 0, 1.0)
        assert (metrics["source/a/groups"], metrics["source/b/groups"]) == (3, 1)
        assert metrics["source/a/reward_mean"] == metrics["source/b/passed"] == 1.0
        assert {row["source"] + "/0" == row["task"] for outcome in batch for row in outcome.log_rows} == {True}
