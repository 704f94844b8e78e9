"""Which sample goes to which rank and micro-batch. Pure: no torch, no network.

Samples of one group that meet in a micro-batch share their prompt: it is computed once, its responses are branches after
it. So a micro-batch's cost in tokens is, for each group in it, the prompt once plus every response (less its last token,
which predicts nothing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Row:
    """One sample for the trainer: where its payload lies, its lengths in tokens, its reward.

    ``key`` is its group, ``index`` its place there, ``rollout`` the run of the generate function that made it: several
    samples may come from one. ``weight`` multiplies each trained token's loss: 1 / (global denominator), computed over the
    whole update.
    """

    key: str
    index: int
    rollout: int
    prompt_tokens: int
    response_tokens: int
    trained_tokens: int
    reward: float
    weight: float = 0.0

    @property
    def branch_tokens(self) -> int:
        return self.response_tokens - 1


MicroBatch = list[Row]
PlanJson = list[list[list[dict[str, Any]]]]  # [rank][micro-batch][row]


def tokens(rows: Sequence[Row]) -> int:
    """Cost of a micro-batch in tokens: each distinct prompt once, each branch."""
    prompts = {row.key: row.prompt_tokens for row in rows}
    return sum(prompts.values()) + sum(row.branch_tokens for row in rows)


def weigh(rows: Sequence[Row], reduction: str, fixed_length: int = 1) -> list[Row]:
    """Rows with their weights, so that the sum of weighted token losses is, with N trained tokens in all:

    - "token": the mean over tokens, 1/N. DAPO (arXiv 2503.14476), equation 8.
    - "sequence": the mean over the S sequences of their token means, 1/(S n_s). GRPO (arXiv 2402.03300), equation 3.
    - "rollout", "group": the same over rollouts (all samples of one generate call) and over groups.
    - "fixed": the sum over tokens divided by S fixed_length. Dr. GRPO (arXiv 2503.20783), section 3.2.

    Sequences, rollouts and groups without a trained token do not count.
    """
    units: dict[str, Callable[[Row], Hashable]] = {
        "token": lambda row: None,
        "sequence": lambda row: (row.key, row.index),
        "rollout": lambda row: (row.key, row.rollout),
        "group": lambda row: row.key,
    }
    if reduction == "fixed":
        sequences = sum(row.trained_tokens > 0 for row in rows)
        return [replace(row, weight=1 / max(sequences * fixed_length, 1)) for row in rows]
    unit = units[reduction]
    counts: Counter[Hashable] = Counter()
    for row in rows:
        counts[unit(row)] += row.trained_tokens
    filled = sum(count > 0 for count in counts.values())
    return [replace(row, weight=1 / max(filled * counts[unit(row)], 1)) for row in rows]


def pairs(rows: Sequence[Row]) -> list[Row]:
    """The best and the worst row of each group, by reward; no row of a group whose rewards are all equal."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    chosen = []
    for members in groups.values():
        best, worst = max(members, key=lambda row: row.reward), min(members, key=lambda row: row.reward)
        chosen += [best, worst] if best.reward > worst.reward else []
    return chosen


def chunks(rows: Sequence[Row], budget: int, whole_groups: bool) -> list[MicroBatch]:
    """Rows of the same group together, cut where the budget is reached unless groups stay whole."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    if whole_groups:
        return list(groups.values())
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


def plan(rows: Sequence[Row], ranks: int, budget: int, whole_groups: bool = False) -> list[list[MicroBatch]]:
    """Micro-batches for every rank: ``result[rank][i]`` is a list of rows.

    Invariants (asserted by the tests):
    - every row is in exactly one micro-batch;
    - every rank has the same number of micro-batches (collectives meet); one may be empty where rows are too few;
    - a micro-batch is within the budget, or holds a single row, or, where groups stay whole, a single group;
    - where groups stay whole (objectives that compare their samples), each is in one micro-batch;
    - the result depends on the arguments only.
    """
    parts = chunks(rows, budget, whole_groups)
    while not whole_groups and len(parts) < ranks and halve_largest(parts):
        pass
    parts.sort(key=tokens, reverse=True)
    count = max(ranks, min(-(-sum(map(tokens, parts)) // max(budget, 1)), len(parts)))
    while True:
        count = -(-count // ranks) * ranks
        bins: list[list[MicroBatch]] = [[] for _ in range(count)]
        loads = [0] * count
        for part in parts:
            lightest = loads.index(min(loads))
            bins[lightest].append(part)
            loads[lightest] += tokens(part)
        if all(load <= budget or len(held) == 1 for load, held in zip(loads, bins, strict=True)):
            micro = [[row for part in held for row in part] for held in bins]
            return [micro[rank::ranks] for rank in range(ranks)]
        count += 1


def plan_json(plans: list[list[MicroBatch]]) -> PlanJson:
    """A plan as it goes to the trainer."""
    return [[[asdict(row) for row in micro] for micro in rank] for rank in plans]
