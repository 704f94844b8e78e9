"""Rewards shaped by length: the papers' formulas, what is kept of them, and that evaluation never sees them.

A stand-in server gives responses of lengths that a real one gives by chance only.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import make_config, make_tokenizer, scored_by
from vime.config.sections import Config, EvalSet, Rollout
from vime.data.cursor import PromptCursor
from vime.data.journal import Journal
from vime.inference.client import Completion
from vime.inference.gate import Gate
from vime.inference.requests import Requests
from vime.rewards.shaping import length_terms, overlong, shape
from vime.rollout.evaluate import evaluate_set
from vime.rollout.generate import Context
from vime.rollout.outcome import Outcome, rollout_metrics
from vime.rollout.scheduler import Scheduler
from vime.sample import Group, Sample, Task, VersionSpan
from vime.store.shared_memory import SharedMemoryStore

TASK = Task("t", ({"role": "user", "content": "?"},))
SCORED = st.lists(st.tuples(st.integers(1, 30), st.floats(-2, 2)), min_size=1, max_size=9)


def config_of(**sections: dict[str, Any]) -> Config:
    """Rewards pass from 0.5 on; at most 20 tokens."""
    return make_config(Path("model"), **({"eval": {"pass_reward": 0.5}, "rollout": {"max_tokens": 20}} | sections))


def group_of(*scored: tuple[int, float]) -> Group:
    """A group of responses of so many tokens, each with its reward."""
    samples = [
        Sample([1], [5] * n, [-1.0] * n, (VersionSpan(0, 0, n),), "stop", "", reward=reward, rollout=index)
        for index, (n, reward) in enumerate(scored)
    ]
    return Group(0, TASK, samples)


# overlong


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [
        (0, 0),
        (16383, 0),
        (16384, 0),
        (16385, -1 / 4096),
        (18432, -0.5),
        (20479, -4095 / 4096),
        (20480, -1),
        (20481, -1),
        (99999, -1),
    ],
)
def test_the_overlong_penalty_with_the_papers_own_lengths(tokens: int, penalty: float) -> None:
    assert overlong(tokens, limit=20480, buffer=4096) == penalty


@given(st.integers(0, 300), st.integers(2, 200), st.data())
def test_the_overlong_penalty_is_a_straight_line_across_the_buffer(tokens: int, limit: int, data: Any) -> None:
    buffer = data.draw(st.integers(1, limit - 1))
    assert overlong(tokens, limit, buffer) == pytest.approx(np.interp(tokens, [limit - buffer, limit], [0, -1]))


# length


def test_length_terms_worked_by_hand() -> None:
    assert length_terms([10, 15, 20, 30], [True] * 4) == [0.5, 0.25, 0.0, -0.5]
    assert length_terms([10, 15, 20, 30], [False] * 4) == [0.0, 0.0, 0.0, -0.5]
    assert length_terms([30, 10], [False, True]) == [-0.5, 0.5]


@given(st.lists(st.tuples(st.integers(0, 10_000), st.booleans()), min_size=2, max_size=9))
def test_length_terms_are_the_papers_formula(responses: list[tuple[int, bool]]) -> None:
    lengths, passed = map(np.array, zip(*responses, strict=True))
    if lengths.min() == lengths.max():
        expected = np.zeros(len(lengths))
    else:
        scale = 0.5 - (lengths - lengths.min()) / (lengths.max() - lengths.min())
        expected = np.where(passed, scale, np.minimum(0, scale))
    assert np.allclose(length_terms(lengths.tolist(), passed.tolist()), expected, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_responses_of_one_length_get_no_length_term(count: int) -> None:
    assert length_terms([7] * count, [True] * count) == [0.0] * count


# both on a group


def test_without_shaping_a_group_stays_as_it_is() -> None:
    group = group_of((20, 1.0), (3, 0.0))
    group.samples[0].reward_parts = {"raw": 7.0}
    shape(group, config_of())
    assert group.rewards == [1.0, 0.0] and [s.reward_parts for s in group.samples] == [{"raw": 7.0}, {}]


def test_the_terms_are_added_with_their_weights_and_kept_as_parts_beside_the_raw_reward() -> None:
    group = group_of((20, 1.0), (18, 0.25), (12, 0.5))
    group.samples[1].reward_parts = {"format": 0.25}
    shape(group, config_of(reward={"overlong_buffer": 4, "overlong_penalty": 0.8, "length_penalty": 0.2}))
    assert [sample.reward_parts for sample in group.samples] == [
        pytest.approx({"raw": 1.0, "overlong": -0.8, "length": -0.1}),
        pytest.approx({"format": 0.25, "raw": 0.25, "overlong": -0.4, "length": -0.05}),
        pytest.approx({"raw": 0.5, "overlong": 0.0, "length": 0.1}),
    ]
    assert group.rewards == pytest.approx([0.1, -0.2, 0.6])


def test_only_the_terms_that_are_on_are_kept() -> None:
    for option, name in (({"overlong_buffer": 4}, "overlong"), ({"length_penalty": 1.0}, "length")):
        group = group_of((20, 1.0), (3, 0.0))
        shape(group, config_of(reward=option))
        assert [set(sample.reward_parts) for sample in group.samples] == [{"raw", name}] * 2


def test_a_reward_at_the_pass_mark_passes_and_one_below_does_not() -> None:
    group = group_of((2, 0.5), (2, 0.49), (4, 1.0))
    shape(group, config_of(reward={"length_penalty": 1.0}))
    assert group.rewards == pytest.approx([1.0, 0.49, 0.5])


@given(SCORED)
def test_the_reward_is_the_raw_one_plus_its_terms_whatever_the_groups_size(scored: list[tuple[int, float]]) -> None:
    group, config = group_of(*scored), config_of(reward={"overlong_buffer": 8, "length_penalty": 0.5})
    shape(group, config)
    terms = length_terms([n for n, _ in scored], [reward >= 0.5 for _, reward in scored])
    for sample, (tokens, raw), term in zip(group.samples, scored, terms, strict=True):
        assert sample.reward_parts["raw"] == raw
        assert sample.reward == pytest.approx(raw + overlong(tokens, 20, 8) + 0.5 * term)


def test_a_group_without_a_sample_has_nothing_to_shape() -> None:
    group = group_of()
    shape(group, config_of(reward={"length_penalty": 1.0}))
    assert group.samples == []


# in the loop


class Scripted:
    """A server whose responses have the lengths of a script, over and over."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = itertools.cycle(lengths)

    version = 0

    async def generate(self, *_: Any, **__: Any) -> Completion:
        length = next(self.lengths)
        return Completion([64] * length, [-0.5] * length, (VersionSpan(self.version, 0, length),), "stop")


def context_of(lengths: list[int], reward: Any) -> Context:
    section = Rollout(concurrency=1, request_timeout_s=5, retries=0)
    return Context(
        requests=Requests(Scripted(lengths), Gate(usable=True), section),  # type: ignore[arg-type]
        tokenizer=make_tokenizer(),
        score=scored_by(reward),
        sampling={"max_tokens": 20},
    )


def collect(folder: Path, lengths: list[int], function: Any, **sections: dict[str, Any]) -> tuple[list[Outcome], Any]:
    """A batch of one group, without refills, of responses of these lengths; and the journal's file."""
    rollout = {"groups": 1, "samples_per_group": len(lengths), "max_tokens": 20, "max_refills": 0}
    config = config_of(**(sections | {"rollout": rollout | sections.get("rollout", {})}))
    journal = Journal(folder / "journal.jsonl")
    cursor, store = PromptCursor([TASK], seed=0), SharedMemoryStore(folder / "store")
    batch = asyncio.run(Scheduler(config, context_of(lengths, function), cursor, journal, store).collect())
    journal.close()
    return batch, (folder / "journal.jsonl").read_text()


def short_is_right(_task: Task, text: str) -> float:
    return float(len(text) <= 10)


def test_what_is_trained_on_is_the_shaped_reward_and_the_raw_one_is_measured_beside_it(tmp_path: Path) -> None:
    batch, _ = collect(tmp_path, [4, 8, 16], short_is_right, reward={"overlong_buffer": 8, "length_penalty": 0.3})
    shaped = [1 + 0.15, 1 + 0.3 * (0.5 - 4 / 12), 0 - 0.5 - 0.15]
    assert [row.reward for row in batch[0].rows] == pytest.approx(shaped)
    assert [row["reward"] for row in batch[0].log_rows] == pytest.approx(shaped)
    metrics = rollout_metrics(batch, 0, 1.0)
    assert metrics["reward/mean"] == pytest.approx(np.mean(shaped))
    assert metrics["reward/raw_mean"] == pytest.approx(2 / 3)
    assert metrics["reward/overlong_mean"] == pytest.approx(-0.5 / 3)
    assert metrics["reward/length_mean"] == pytest.approx(0.05 / 3)


def test_without_shaping_no_raw_reward_is_measured(tmp_path: Path) -> None:
    batch, _ = collect(tmp_path, [4, 8, 16], short_is_right)
    assert [name for name in rollout_metrics(batch, 0, 1.0) if name.startswith("reward/")] == [
        "reward/mean",
        "reward/std",
        "reward/zero_variance_fraction",
    ]


def test_the_mean_of_a_part_is_over_the_responses_to_which_it_applies(tmp_path: Path) -> None:
    def reward(_task: Task, text: str) -> dict[str, float]:
        return {"reward": 1.0, **({"brief": 0.5} if len(text) < 5 else {})}

    batch, _ = collect(tmp_path, [4, 8, 16], reward)
    assert rollout_metrics(batch, 0, 1.0)["reward/brief_mean"] == 0.5


def test_zero_variance_looks_at_the_rewards_that_are_trained_on(tmp_path: Path) -> None:
    def right(_task: Task, _text: str) -> float:
        return 1.0

    (tmp_path / "a").mkdir()
    dropped, journal = collect(tmp_path / "a", [4, 8], right, rollout={"filter": "zero_variance"})
    assert dropped[0].filtered == "zero_variance" and '"reason": "zero_variance"' in journal
    section = {"rollout": {"filter": "zero_variance"}, "reward": {"length_penalty": 0.1}}
    assert collect(tmp_path, [4, 8], right, **section)[0][0].filtered is None


def test_a_group_outside_the_accuracy_band_is_dropped_and_counted_by_its_raw_rewards(tmp_path: Path) -> None:
    shaping = {"overlong_buffer": 16, "overlong_penalty": 2.0}  # the right response of 10 tokens is worth 1 - 0.75
    section: dict[str, Any] = {"rollout": {"filter": "accuracy_band"}, "reward": shaping}
    (tmp_path / "a").mkdir()
    dropped, journal = collect(tmp_path / "a", [14, 16], short_is_right, **section)
    assert rollout_metrics(dropped, 0, 1.0)["rollout/filtered_accuracy_band"] == 1
    assert dropped[0].filtered == "accuracy_band" and '"reason": "accuracy_band"' in journal
    kept, _ = collect(tmp_path, [10, 16], short_is_right, **section)
    assert kept[0].filtered is None and max(kept[0].rewards) < 0.5


def test_evaluation_keeps_the_raw_reward(tmp_path: Path) -> None:
    config = config_of(reward={"overlong_buffer": 16, "length_penalty": 1.0})
    section = EvalSet(source="x", samples=2, temperature=1.0)
    metrics, rows = asyncio.run(
        evaluate_set("held_out", section, [TASK], context_of([10, 16], short_is_right), config, 0)
    )
    assert [row["reward"] for row in rows] == [1.0, 0.0] and not any("reward_parts" in row for row in rows)
    assert metrics["eval/held_out/reward_mean"] == metrics["eval/held_out/pass@1"] == 0.5
