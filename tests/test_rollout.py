"""Batches against a real vLLM server: what is kept, what is filtered, what fails alone, what returns to the buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_config, make_tokenizer, scored_by
from vime.config.data import EvalSet
from vime.data.cursor import PromptCursor
from vime.data.journal import Journal, account
from vime.inference.requests import Requests
from vime.rollout.evaluate import evaluate_set
from vime.rollout.generate import Context
from vime.rollout.outcome import Outcome, rollout_metrics
from vime.rollout.scheduler import RolloutError, Scheduler
from vime.sample import Task
from vime.store.shared_memory import SharedMemoryStore

TASKS = [Task(f"t{i}", ({"role": "user", "content": "abc"[i % 3] * (i + 1)},), "x") for i in range(6)]


class Bench:
    """A scheduler on the shared server, with a reward of the test's own."""

    def __init__(self, run: Any, fleet: Any, folder: Path, reward: Callable[[Task, str], Any], **rollout: Any) -> None:
        section = {"groups": 3, "samples_per_group": 4, "max_tokens": 6, "retries": 0, "concurrency": 8}
        section |= {"request_timeout_s": 60, **rollout}
        self.config = make_config(folder, rollout=section)
        self.run = run
        self.context = Context(
            requests=Requests(fleet.front, fleet.gate, self.config.rollout),
            tokenizer=make_tokenizer(),
            score=scored_by(reward),
            sampling={"temperature": 1.0, "max_tokens": 6},
        )
        self.cursor = PromptCursor(TASKS, seed=0)
        self.journal = Journal(folder / "journal.jsonl")
        self.journal_path = folder / "journal.jsonl"
        self.store = SharedMemoryStore(folder / "store")
        self.scheduler = self.make()

    def make(self, **context: Any) -> Scheduler:
        self.context = replace(self.context, **context)
        return Scheduler(self.config, self.context, self.cursor, self.journal, self.store)

    def collect(self) -> list[Outcome]:
        return self.run(self.scheduler.collect())

    def account(self) -> dict[str, Any]:
        self.journal.offset()
        return account(self.journal_path)


@pytest.fixture
def bench(run: Any, fleets: Any, tmp_path: Path) -> Callable[..., Bench]:
    return lambda reward, **rollout: Bench(run, fleets("tied"), tmp_path, reward, **rollout)


def by_length(task: Task, text: str) -> float:
    return len(text) + sum(map(ord, text)) / 1e4


def test_a_batch_has_whole_groups_whose_payloads_are_what_the_server_sampled(bench: Any) -> None:
    made = bench(by_length)
    batch = made.collect()
    assert [len(outcome.rows) for outcome in batch] == [4, 4, 4]
    for outcome in batch:
        assert [row.reward for row in outcome.rows] == outcome.rewards
        for row in outcome.rows:
            payload = made.store.get(row.key, row.index)
            assert len(payload.response_ids) == len(payload.logprobs) == row.response_tokens
            assert (payload.logprobs < 0).all() and payload.loss_mask.all()


def test_an_evaluation_set_is_sampled_as_it_says(bench: Any) -> None:
    made = bench(by_length)

    def texts(**sampling: Any) -> list[list[str]]:
        section = EvalSet(source="", samples=4, **sampling)
        _, rows = made.run(evaluate_set("x", section, TASKS[:2], made.context, made.config, 0))
        return [[row["response"] for row in rows if row["task"] == task.id] for task in TASKS[:2]]

    greedy = texts()
    assert all(len(set(of_task)) == 1 for of_task in greedy)
    assert texts(temperature=1.0, top_k=1) == greedy and texts(temperature=1.0, top_p=1e-6) == greedy
    assert any(len(set(of_task)) > 1 for of_task in texts(temperature=1.0))


def test_prompts_end_as_trained(bench: Any) -> None:
    made = bench(by_length)
    made.scheduler.trained(made.collect(), step=1)
    counted = made.account()
    assert (counted["taken"], counted["trained"], counted["filtered"], counted["open"]) == (3, 3, {}, [])
    assert not made.cursor.open


def test_groups_without_variance_are_filtered_counted_and_replaced_up_to_the_limit(bench: Any) -> None:
    made = bench(lambda task, text: 1.0, filter="zero_variance", max_refills=1)
    batch = made.collect()
    assert [outcome.filtered for outcome in batch] == ["zero_variance"] * 6
    assert made.account()["filtered"] == {"zero_variance": 6}
    metrics = rollout_metrics(batch, 0, 1.0)
    assert metrics["rollout/filtered_zero_variance"] == 6 and metrics["reward/mean"] == 1.0


def test_one_bad_sample_fails_alone(bench: Any) -> None:
    calls = []

    def fails_first(task: Task, text: str) -> float:
        calls.append(text)
        if len(calls) == 1:
            raise ValueError("no")
        return by_length(task, text)

    made = bench(fails_first)
    batch = made.collect()
    assert sorted(len(outcome.rows) for outcome in batch) == [3, 4, 4]
    assert made.scheduler.failed_samples == 1 and "ValueError: no" in made.scheduler.last_error


def test_a_group_in_which_a_sample_failed_is_dropped_and_replaced_where_that_is_asked_for(bench: Any) -> None:
    failing = iter([True])

    def fails_first(task: Task, text: str) -> float:
        if next(failing, False):
            raise ValueError("no")
        return by_length(task, text)

    made = bench(fails_first, incomplete_groups="drop", max_refills=1)
    batch = made.collect()
    assert sorted((outcome.filtered or "", len(outcome.rows)) for outcome in batch) == [("", 4)] * 3 + [("failed", 0)]
    assert made.account()["filtered"] == {"failed": 1}


def test_when_no_sample_can_be_scored_the_batch_fails_with_the_cause(bench: Any) -> None:
    def never(task: Task, text: str) -> float:
        raise RuntimeError("the judge is down")

    made = bench(never, max_refills=0)
    with pytest.raises(RolloutError, match="12 samples failed; the last: .*the judge is down"):
        made.collect()
    assert made.account()["filtered"] == {"failed": 3}


def test_a_prompt_that_the_server_refuses_is_not_asked_again(bench: Any) -> None:
    made = bench(by_length, max_refills=0, retries=5)
    made.scheduler = made.make(sampling={"max_tokens": -5})
    with pytest.raises(RolloutError, match="answered 4"):
        made.collect()


def test_a_run_that_is_given_up_returns_its_prompts_under_their_group_ids(bench: Any) -> None:
    async def hangs(task: Task, text: str) -> float:
        await asyncio.sleep(60)
        return 0.0

    made = bench(hangs)

    async def give_up() -> None:
        task = asyncio.create_task(made.scheduler.collect())
        while len(made.cursor.open) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.scheduler.close()

    made.run(give_up())
    assert not made.cursor.open and [made.cursor.take()[0] for _ in range(4)] == [0, 1, 2, 3]
