"""Which sample goes to which rank and micro-batch. Pure: no torch, no network.

Samples of one group that meet in a micro-batch share their prompt: it is computed once, its responses are branches after
it. So a micro-batch's cost in tokens is, for each group in it, the prompt once plus every response (less its last token,
which predicts nothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One sample for the trainer: where its payload lies, its lengths in tokens, its advantage.

    ``weight`` multiplies each trained token's loss: 1 / (global denominator), computed over the whole update.
    """

    key: str
    index: int
    prompt_tokens: int
    response_tokens: int
    trained_tokens: int
    advantage: float
    weight: float

    @property
    def branch_tokens(self) -> int:
        return self.response_tokens - 1


MicroBatch = list[Row]
PlanJson = list[list[list[dict[str, Any]]]]  # [rank][micro-batch][row]


def tokens(rows: Sequence[Row]) -> int:
    """Cost of a micro-batch in tokens: each distinct prompt once, each branch."""
    prompts = {row.key: row.prompt_tokens for row in rows}
    return sum(prompts.values()) + sum(row.branch_tokens for row in rows)


def weigh(rows: Sequence[Row], reduction: str) -> list[Row]:
    """Rows with their weights: "token": 1/N of all N trained tokens; "sequence": 1/(S n_s) for S sequences of n_s."""
    total = sum(row.trained_tokens for row in rows)
    sequences = sum(row.trained_tokens > 0 for row in rows)
    weights = {
        "token": lambda row: 1 / max(total, 1),
        "sequence": lambda row: 1 / max(sequences * row.trained_tokens, 1),
    }
    return [Row(**{**asdict(row), "weight": weights[reduction](row)}) for row in rows]


def chunks(rows: Sequence[Row], budget: int) -> list[MicroBatch]:
    """Rows of the same group together, cut where the budget is reached. A row longer than the budget is alone."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    cut: list[MicroBatch] = []
    for members in groups.values():
        current: MicroBatch = []
        for row in members:
            if current and tokens([*current, row]) > budget:
                cut.append(current)
                current = []
            current.append(row)
        cut.append(current)
    return cut


def halve_largest(parts: list[MicroBatch]) -> bool:
    """Cuts the part with the most rows in two; False where every part has one row."""
    largest = max(parts, key=len, default=[])
    if len(largest) < 2:
        return False
    parts.remove(largest)
    parts += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return True


def plan(rows: Sequence[Row], ranks: int, budget: int) -> list[list[MicroBatch]]:
    """Micro-batches for every rank: ``result[rank][i]`` is a list of rows.

    Invariants (asserted by the tests):
    - every row is in exactly one micro-batch;
    - every rank has the same number of micro-batches (collectives meet); one may be empty where rows are too few;
    - a micro-batch is within the budget, or holds a single row;
    - the result depends on the arguments only.
    """
    parts = chunks(rows, budget)
    while len(parts) < ranks and halve_largest(parts):
        pass
    parts.sort(key=tokens, reverse=True)
    count = max(ranks, -(-sum(map(tokens, parts)) // max(budget, 1)))
    while True:
        count = -(-count // ranks) * ranks
        bins: list[MicroBatch] = [[] for _ in range(count)]
        loads = [0] * count
        for part in parts:
            lightest = loads.index(min(loads))
            bins[lightest] += part
            loads[lightest] += tokens(part)
        if all(load <= budget or len(rows_) == 1 for load, rows_ in zip(loads, bins, strict=True)):
            return [bins[rank::ranks] for rank in range(ranks)]
        count += 1


def plan_json(plans: list[list[MicroBatch]]) -> PlanJson:
    """A plan as it goes to the trainer."""
    return [[[asdict(row) for row in micro] for micro in rank] for rank in plans]
