"""Which sample goes to which rank and micro-batch. Pure: no torch, no network.

Samples of one group that meet in a micro-batch share their prompt: it is computed once, its responses are branches after
it. So a micro-batch's cost in tokens is, for each group in it, the prompt once plus every response (less its last token,
which predicts nothing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
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


def work(rows: Sequence[Row], hidden_size: int) -> float:
    """Cost of a micro-batch in FLOPs, as the number of tokens that cost as much without attention.

    A decoder layer of width h takes about 24 h^2 FLOPs a token and 4 h a pair of query and key (Megatron-LM, arXiv
    2104.04473, section 3, which counts every pair of a sequence; causal attention sees half of them).
    """
    prompts = {row.key: row.prompt_tokens for row in rows}
    pairs = sum(p * p / 2 for p in prompts.values())
    pairs += sum(row.branch_tokens * (row.prompt_tokens + row.branch_tokens / 2) for row in rows)
    return tokens(rows) + pairs / (6 * hidden_size)


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
        size = 0
        for row in members:
            if current and size + row.branch_tokens > budget:
                cut.append(current)
                current, size = [], 0
            size += row.branch_tokens + (0 if current else row.prompt_tokens)
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


def plan(
    rows: Sequence[Row], ranks: int, budget: int, whole_groups: bool = False, hidden_size: int = 1024
) -> list[list[MicroBatch]]:
    """Micro-batches for every data rank: ``result[rank][i]`` is a list of rows. The budget, in tokens, limits memory; within
    it ``work`` is balanced, since ranks wait for each other in every micro-batch.

    Invariants (asserted by the tests):
    - every row is in exactly one micro-batch;
    - every rank has the same number of micro-batches (collectives meet); one may be empty where rows are too few;
    - a micro-batch is within the budget, or holds a single row, or, where groups stay whole, a single group;
    - micro-batches come by work, the largest first: no rank's i-th has less than any rank's next;
    - where groups stay whole (objectives that compare their samples), each is in one micro-batch;
    - the result depends on the arguments only.
    """
    parts = chunks(rows, budget, whole_groups)
    while not whole_groups and len(parts) < ranks and halve_largest(parts):
        pass
    sized = sorted(
        ((work(part, hidden_size), tokens(part), part) for part in parts), key=lambda one: one[:2], reverse=True
    )
    count = max(ranks, min(-(-sum(size for _, size, _ in sized) // max(budget, 1)), len(parts)))
    count = -(-count // ranks) * ranks
    while (bins := deal(sized, count, budget)) is None:
        count += -(-(1 + count // 100) // ranks) * ranks
    bins.sort(key=lambda rows: work(rows, hidden_size), reverse=True)
    return [bins[rank::ranks] for rank in range(ranks)]


def deal(parts: Sequence[tuple[float, int, MicroBatch]], count: int, budget: int) -> list[MicroBatch] | None:
    """``count`` micro-batches of (work, tokens, rows), each part to the one with the least work that has room; None where one
    finds none."""
    bins: list[MicroBatch] = [[] for _ in range(count)]
    sizes = [0] * count
    lightest = [(0.0, i) for i in range(count)]  # a heap
    smallest = min((size for _, size, _ in parts), default=0)
    for load, size, rows in parts:
        passed = []
        while lightest:
            before, i = heappop(lightest)
            if not bins[i] or sizes[i] + size <= budget:
                break
            passed.append((before, i))
        else:
            return None
        bins[i] += rows
        sizes[i] += size
        for entry in [*passed, (before + load, i)]:
            if sizes[entry[1]] + smallest <= budget:  # else it is full
                heappush(lightest, entry)
    return bins


def plan_json(plans: list[list[MicroBatch]]) -> PlanJson:
    """A plan as it goes to the trainer."""
    return [[[dict(vars(row)) for row in micro] for micro in rank] for rank in plans]
