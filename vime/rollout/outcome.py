"""A finished group without its tokens, and what a batch of them was like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import msgspec

from vime.sample import Group, Sample, Task, VersionSpan
from vime.store.shared_memory import SharedMemoryStore
from vime.training.plan import Row

FAILED = "failed"  # fewer samples of the group could be made than the advantage needs
STALE = "stale"  # its oldest token was made by weights more than rollout.max_staleness versions ago
GROUPS = "groups.json"  # in a folder of groups: all of them, without their payloads


def store_key(group_id: int) -> str:
    return f"g{group_id}"


def log_row(split: str, group_id: int, task: Task, sample: Sample) -> dict[str, Any]:
    """One line of samples.jsonl; the trainer's advantage comes to it after the step (``note_advantages``)."""
    return {
        "split": split,
        "group": group_id,
        "task": task.id,
        **({"source": task.source} if task.source else {}),
        "prompt": task.messages[-1]["content"],
        "response": sample.text,
        "answer": task.answer,
        "reward": sample.reward,
        "advantage": None,
        "tokens": len(sample.response_ids),
        "finish": sample.finish_reason,
        "version": sample.versions[-1].version,
        **({"reward_parts": sample.reward_parts} if sample.reward_parts else {}),
        **({"metadata": sample.metadata} if sample.metadata else {}),
    }


@dataclass(frozen=True)
class Outcome:
    """A finished group without its tokens: numbers and texts for the log, and, unless filtered, rows for the trainer.

    ``versions`` has the spans of each response; ``passed`` is the share of responses that passed, None where there is none.
    JSON-serialisable.
    """

    group_id: int
    filtered: str | None
    rows: list[Row]
    rewards: list[float]
    prompt_tokens: int
    response_tokens: list[int]
    finish_reasons: list[str]
    versions: list[tuple[VersionSpan, ...]]
    log_rows: list[dict[str, Any]]
    source: str = ""
    passed: float | None = None

    @classmethod
    def of(cls, group: Group, filtered: str | None, passed: float | None = None) -> Outcome:
        samples = group.samples
        key = store_key(group.id)
        rows = [
            Row(key, i, s.rollout, len(s.prompt_ids), len(s.response_ids), sum(s.loss_mask), s.reward or 0.0)
            for i, s in enumerate(samples)
        ]
        return cls(
            group.id,
            filtered,
            [] if filtered else rows,
            group.rewards,
            len(samples[0].prompt_ids) if samples else 0,
            [len(sample.response_ids) for sample in samples],
            [sample.finish_reason for sample in samples],
            [sample.versions for sample in samples],
            [log_row("train", group.id, group.task, sample) for sample in samples],
            group.task.source,
            passed,
        )

    @cached_property
    def oldest_version(self) -> int:
        return min(span.version for spans in self.versions for span in spans)

    @cached_property
    def newest_version(self) -> int:
        return max(span.version for spans in self.versions for span in spans)

    def dropped(self, reason: str) -> Outcome:
        return replace(self, filtered=reason, rows=[])


def write_groups(folder: Path, groups: Sequence[Outcome], store: SharedMemoryStore) -> None:
    """Writes groups, and the payloads of those that are not filtered, into a folder."""
    folder.mkdir(exist_ok=True)
    with (folder / GROUPS).open("wb") as file:  # group by group, so that other threads come to their turn
        for place, one in enumerate(groups):
            file.write((b"," if place else b"[") + msgspec.json.encode(one))
        file.write(b"]" if groups else b"[]")
    store.copy_to(folder, stored_keys(groups))


def read_groups(folder: Path, store: SharedMemoryStore) -> list[Outcome]:
    """Takes up what ``write_groups`` wrote."""
    groups = msgspec.json.decode((folder / GROUPS).read_bytes(), type=list[Outcome])
    store.copy_from(folder, stored_keys(groups))
    return groups


def stored_keys(groups: Iterable[Outcome]) -> list[str]:
    """Keys of the payloads that lie in the store."""
    return [store_key(outcome.group_id) for outcome in groups if outcome.filtered is None]


def note_advantages(batch: list[Outcome], advantages: Sequence[tuple[str, int, float]]) -> None:
    """Writes the trainer's advantages, as [group, index, value], to the batch's log rows."""
    log_rows = {store_key(outcome.group_id): outcome.log_rows for outcome in batch}
    for key, index, value in advantages:
        log_rows[key][index]["advantage"] = value


def rollout_metrics(batch: list[Outcome], version: int, seconds: float) -> dict[str, float]:
    """What the batch of ``version``, made in so many seconds, was like, filtered groups included; lengths in tokens, staleness
    in versions."""
    whole = [outcome for outcome in batch if outcome.rewards]
    rewards = [reward for outcome in whole for reward in outcome.rewards]
    lengths = [length for outcome in whole for length in outcome.response_tokens]
    finishes = [reason for outcome in whole for reason in outcome.finish_reasons]
    filtered = Counter(outcome.filtered for outcome in batch if outcome.filtered)
    parts: dict[str, list[float]] = {}
    for name, value in (item for o in whole for row in o.log_rows for item in row.get("reward_parts", {}).items()):
        parts.setdefault(name, []).append(value)
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/zero_variance_fraction": fmean(max(o.rewards) == min(o.rewards) for o in whole),
        **{f"reward/{name}_mean": fmean(values) for name, values in parts.items()},
        "rollout/groups": len(batch),
        "rollout/samples": len(rewards),
        "rollout/response_tokens": sum(lengths),
        "rollout/response_tokens_mean": fmean(lengths),
        "rollout/response_tokens_max": max(lengths),
        "rollout/prompt_tokens_mean": fmean(outcome.prompt_tokens for outcome in whole),
        "rollout/truncated_fraction": finishes.count("length") / len(finishes),
        "rollout/seconds": seconds,
        "rollout/tokens_per_s": sum(lengths) / seconds,
        **source_metrics(whole),
        **staleness_metrics(batch, version),
        "rollout/filtered": sum(filtered.values()),
        **{f"rollout/filtered_{reason}": count for reason, count in sorted(filtered.items())},
    }


def source_metrics(whole: Sequence[Outcome]) -> dict[str, float]:
    """Of a mixture, by source: how many groups there were, and what their responses were worth."""
    by_source: dict[str, list[Outcome]] = {}
    for outcome in whole:
        by_source.setdefault(outcome.source, []).append(outcome)
    by_source.pop("", None)
    return {
        name: value
        for source, outcomes in sorted(by_source.items())
        for name, value in {
            f"source/{source}/groups": len(outcomes),
            f"source/{source}/reward_mean": fmean(reward for outcome in outcomes for reward in outcome.rewards),
            f"source/{source}/passed": fmean(outcome.passed or 0.0 for outcome in outcomes),
        }.items()
    }


def staleness_metrics(batch: list[Outcome], version: int) -> dict[str, float]:
    """How many versions the tokens of trained groups are behind, as mean, maximum and the fraction at each distance; and how
    long the responses of groups are that were dropped for their staleness: where these are longer, training leans to
    short answers."""

    def spans(outcome: Outcome) -> Iterator[VersionSpan]:
        return (span for of_response in outcome.versions for span in of_response)

    behind: Counter[int] = Counter()
    for span in (span for outcome in batch if outcome.filtered is None for span in spans(outcome)):
        behind[version - span.version] += span.end - span.start
    tokens = behind.total()
    dropped = [outcome for outcome in batch if outcome.filtered == STALE]
    stale = [length for outcome in dropped for length in outcome.response_tokens]
    return {
        "rollout/staleness_mean": sum(distance * count for distance, count in behind.items()) / (tokens or 1),
        "rollout/staleness_max": max(behind, default=0),
        **{f"rollout/staleness_{distance}": count / tokens for distance, count in sorted(behind.items())},
        **({"rollout/stale_stopped": sum(not outcome.rewards for outcome in dropped)} if dropped else {}),
        **({"rollout/stale_response_tokens_mean": fmean(stale)} if stale else {}),
    }
