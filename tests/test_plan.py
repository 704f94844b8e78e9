"""Which sample goes to which micro-batch: the invariants of the plan, and weights that average over an update."""

import math
from collections import Counter
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.training.plan import Row, pairs, plan, plan_json, tokens, weigh, work


def row(key: str, index: int, prompt: int, response: int, trained: int | None = None) -> Row:
    return Row(key, index, index, prompt, response, response if trained is None else trained, 1.0)


@st.composite
def updates(draw: st.DrawFn) -> list[Row]:
    """Rows of up to five groups, their prompts and responses of any length, some tokens masked."""
    rows = []
    for group in range(draw(st.integers(1, 5))):
        prompt = draw(st.integers(1, 30))
        for index in range(draw(st.integers(1, 6))):
            response = draw(st.integers(1, 40))
            rows.append(row(str(group), index, prompt, response, draw(st.integers(0, response))))
    return rows


def name(row: Row) -> tuple[str, int]:
    return row.key, row.index


ARGUMENTS = (updates(), st.integers(1, 4), st.integers(1, 120))


@given(*ARGUMENTS)
def test_every_row_is_in_exactly_one_micro_batch(rows: list[Row], ranks: int, budget: int) -> None:
    placed = Counter(name(r) for micros in plan(rows, ranks, budget) for micro in micros for r in micro)
    assert placed == Counter(map(name, rows))


@given(*ARGUMENTS)
def test_every_rank_has_the_same_number_of_micro_batches(rows: list[Row], ranks: int, budget: int) -> None:
    result = plan(rows, ranks, budget)
    assert len(result) == ranks
    assert len({len(micros) for micros in result}) == 1


@given(*ARGUMENTS)
def test_every_rank_has_work_where_there_are_rows_enough(rows: list[Row], ranks: int, budget: int) -> None:
    with_work = sum(any(micros) for micros in plan(rows, ranks, budget))
    assert with_work == min(ranks, len(rows))


@given(*ARGUMENTS)
def test_a_micro_batch_is_within_the_budget_or_a_single_row(rows: list[Row], ranks: int, budget: int) -> None:
    for micro in (micro for micros in plan(rows, ranks, budget) for micro in micros):
        assert tokens(micro) <= budget or len(micro) == 1


@given(*ARGUMENTS)
def test_the_plan_depends_on_its_arguments_only(rows: list[Row], ranks: int, budget: int) -> None:
    before = [asdict(r) for r in rows]
    assert plan(rows, ranks, budget) == plan(list(rows), ranks, budget)
    assert [asdict(r) for r in rows] == before


def test_a_group_that_fits_shares_its_prompt_in_one_micro_batch() -> None:
    rows = [row(key, index, 50, 11) for key in "ab" for index in range(4)]
    result = plan(rows, 1, 90)
    assert [{r.key for r in micro} for micro in result[0]] in ([{"a"}, {"b"}], [{"b"}, {"a"}])


def test_groups_that_fit_together_meet_in_one_micro_batch() -> None:
    rows = [row(key, index, 5, 11) for key in "abc" for index in range(2)]
    assert len(plan(rows, 1, 75)[0]) == 1


@given(*ARGUMENTS)
def test_no_more_micro_batches_are_made_than_ranks_need_or_rows_fill(rows: list[Row], ranks: int, budget: int) -> None:
    micros = [micro for rank in plan(rows, ranks, budget) for micro in rank]
    assert sum(not micro for micro in micros) < ranks or len(rows) < ranks


def test_ranks_without_rows_get_empty_micro_batches() -> None:
    assert sorted(map(len, sum(plan([row("a", 0, 3, 3)], 3, 100), []))) == [0, 0, 1]


def test_no_rows_are_an_empty_micro_batch_for_every_rank() -> None:
    assert plan([], 2, 100) == [[[]], [[]]]


def test_a_micro_batch_costs_each_prompt_once_and_each_response_less_its_last_token() -> None:
    assert tokens([row("a", 0, 10, 4), row("a", 1, 10, 1), row("b", 0, 7, 3)]) == 10 + 3 + 0 + 7 + 2
    assert tokens([]) == 0


@given(*ARGUMENTS, st.integers(1, 64))
def test_micro_batches_come_by_work_so_that_ranks_meet_after_like_amounts(
    rows: list[Row], ranks: int, budget: int, hidden_size: int
) -> None:
    result = plan(rows, ranks, budget, hidden_size=hidden_size)
    works = [[work(micro, hidden_size) for micro in rank] for rank in result]
    for i in range(len(works[0]) - 1):
        assert min(rank[i] for rank in works) >= max(rank[i + 1] for rank in works)


def test_work_is_tokens_and_the_pairs_that_attention_sees() -> None:
    assert work([row("a", 0, 10, 5), row("a", 1, 10, 3)], 2) == 10 + 4 + 2 + (50 + 4 * (10 + 2) + 2 * (10 + 1)) / 12


def test_long_sequences_are_dealt_by_flops_where_tokens_would_not_tell() -> None:
    rows = [row("long", 0, 1, 1001), *(row(f"short{i}", 0, 1, 11) for i in range(1000))]
    loads = [work([r for micro in rank for r in micro], 8) for rank in plan(rows, 2, 100_000, hidden_size=8)]
    assert max(loads) < 1.01 * min(loads)


def test_the_plan_as_json_is_rows_of_plain_values() -> None:
    rows = [row("a", 0, 3, 3)]
    assert plan_json(plan(rows, 1, 10)) == [[[asdict(rows[0])]]]


@given(updates())
def test_by_token_the_weights_of_all_trained_tokens_are_equal_and_sum_to_one(rows: list[Row]) -> None:
    weighed = weigh(rows, "token")
    assert len({r.weight for r in weighed}) == 1
    trained = sum(r.trained_tokens for r in rows)
    assert sum(r.weight * r.trained_tokens for r in weighed) == pytest.approx(1.0 if trained else 0.0)


@given(updates())
def test_by_sequence_every_sequence_with_trained_tokens_has_an_equal_share(rows: list[Row]) -> None:
    trained = [r for r in weigh(rows, "sequence") if r.trained_tokens]
    for r in trained:
        assert r.weight * r.trained_tokens == pytest.approx(1 / len(trained))


@given(updates())
def test_by_group_every_group_has_an_equal_share_whatever_its_size(rows: list[Row]) -> None:
    shares: dict[str, float] = {}
    for r in weigh(rows, "group"):
        shares[r.key] = shares.get(r.key, 0.0) + r.weight * r.trained_tokens
    filled = [share for share in shares.values() if share]
    assert filled == pytest.approx([1 / max(len(filled), 1)] * len(filled))


def test_by_rollout_the_samples_of_one_generate_call_share_its_weight() -> None:
    rows = [Row("a", 0, 0, 5, 9, 3, 1.0), Row("a", 1, 0, 5, 9, 5, 1.0), Row("a", 2, 1, 5, 9, 2, 1.0)]
    assert [r.weight for r in weigh(rows, "rollout")] == pytest.approx([1 / 16, 1 / 16, 1 / 4])
    assert [r.weight for r in weigh(rows, "sequence")] == pytest.approx([1 / 9, 1 / 15, 1 / 6])


def test_by_fixed_length_every_token_weighs_one_over_sequences_times_length() -> None:
    rows = [row("a", 0, 5, 9, 3), row("a", 1, 5, 9, 5), row("b", 0, 5, 9, 0)]
    assert [r.weight for r in weigh(rows, "fixed", 64)] == pytest.approx([1 / 128] * 3)


@given(*ARGUMENTS)
def test_groups_that_stay_whole_are_never_cut_even_over_the_budget(rows: list[Row], ranks: int, budget: int) -> None:
    result = plan(rows, ranks, budget, whole_groups=True)
    micros = [micro for rank in result for micro in rank]
    assert Counter(name(r) for micro in micros for r in micro) == Counter(map(name, rows))
    assert all(sum(any(r.key == key for r in micro) for micro in micros) == 1 for key in {r.key for r in rows})
    assert all(tokens(micro) <= budget or len({r.key for r in micro}) == 1 for micro in micros)
    assert len({len(rank) for rank in result}) == 1


def test_pairs_are_the_best_and_the_worst_of_each_group_that_has_a_difference() -> None:
    rows = [replace(row(key, i, 3, 3), reward=r) for key, i, r in [("a", 0, 0.5), ("a", 1, 1.0), ("a", 2, 0.0)]]
    rows += [replace(row("b", i, 3, 3), reward=0.5) for i in range(3)]
    assert [name(r) for r in pairs(rows)] == [("a", 1), ("a", 2)]


@pytest.mark.parametrize("reduction", ["token", "sequence", "rollout", "group", "fixed"])
@given(rows=updates())
def test_weighing_changes_nothing_but_the_weight_and_is_always_finite(reduction: str, rows: list[Row]) -> None:
    weighed = weigh(rows, reduction)
    assert [{**asdict(r), "weight": 0.0} for r in weighed] == [asdict(r) for r in rows]
    assert all(math.isfinite(r.weight) for r in weighed)
