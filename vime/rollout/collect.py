"""Collects one batch of groups: takes prompts, samples and scores their responses, filters, stores the payloads.

Every prompt taken ends here as kept, as filtered with a counted reason, or, if the batch is given up, back in the buffer.
Once a group is kept its tokens lie in the store; the driver goes on with its numbers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import Any

from vime.data.cursor import PromptCursor
from vime.data.journal import Journal
from vime.inference.client import InferenceError
from vime.rewards import RewardError
from vime.rollout.generate import Context, single_turn
from vime.sample import Group, Sample, Task
from vime.store.shared_memory import SharedMemoryStore
from vime.training.advantages import Estimator
from vime.training.plan import Row


class RolloutError(Exception):
    """No group of the batch could be made; the message holds the last cause."""


@dataclass
class Kept:
    """A finished group without its tokens: rows for the trainer, numbers for the log, texts for the samples file."""

    group_id: int
    rows: list[Row]
    rewards: list[float]
    finish_reasons: list[str]
    staleness: list[int]
    log_rows: list[dict[str, Any]] = field(default_factory=list)


def log_row(split: str, group_id: int, task: Task, sample: Sample, advantage: float | None) -> dict[str, Any]:
    """One line of samples.jsonl."""
    return {
        "split": split,
        "group": group_id,
        "task": task.id,
        "prompt": task.messages[-1]["content"],
        "response": sample.text,
        "answer": task.answer,
        "reward": sample.reward,
        "advantage": advantage,
        "tokens": len(sample.response_ids),
        "finish": sample.finish_reason,
        "version": sample.versions[-1].version,
    }


def zero_variance(group: Group) -> bool:
    return max(group.rewards) == min(group.rewards)


FILTERS: dict[str, Callable[[Group], bool]] = {"none": lambda group: False, "zero_variance": zero_variance}


class Collector:
    """Makes batches. ``filtered`` counts the groups that were dropped in this batch, by reason."""

    def __init__(
        self,
        context: Context,
        cursor: PromptCursor,
        journal: Journal,
        store: SharedMemoryStore,
        estimator: Estimator,
        groups: int,
        samples_per_group: int,
        filter_name: str,
        max_refills: int,
    ) -> None:
        self.context, self.cursor, self.journal, self.store, self.estimator = context, cursor, journal, store, estimator
        self.groups, self.samples_per_group, self.max_refills = groups, samples_per_group, max_refills
        self.filter_name = filter_name
        self.filtered: Counter[str] = Counter()
        self.failed_samples = 0
        self.last_error = ""

    async def collect(self, version: int, progress: Callable[[int, int], None] = lambda *_: None) -> list[Kept]:
        """One batch of ``groups`` groups, fewer only where refills ran out.

        Groups that are filtered are replaced at once by further prompts. Raises RolloutError when nothing could be
        kept because sampling or scoring failed; unfinished prompts return to the buffer on any error.
        """
        self.filtered.clear()
        self.failed_samples = 0
        kept: list[Kept] = []
        running: dict[asyncio.Task[Kept | None], int] = {}
        allowance = self.groups * (1 + self.max_refills)
        try:
            while True:
                while len(kept) + len(running) < self.groups and allowance:
                    allowance -= 1
                    group_id, task = self.cursor.take()
                    self.journal.write("taken", group_id, task=task.id)
                    running[asyncio.create_task(self._group(group_id, task, version))] = group_id
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for finished in done:
                    group_id = running[finished]
                    result = finished.result()
                    del running[finished]
                    if result is not None:
                        kept.append(result)
                progress(len(kept), self.groups)
        except BaseException:
            for pending, group_id in running.items():
                pending.cancel()
                self.cursor.give_back(group_id)
            for one in kept:
                self.cursor.give_back(one.group_id)
            await asyncio.gather(*running, return_exceptions=True)
            raise
        if not kept and self.failed_samples:
            raise RolloutError(f"no group could be made, {self.failed_samples} samples failed; the last: {self.last_error}")
        return sorted(kept, key=lambda one: one.group_id)

    async def _group(self, group_id: int, task: Task, version: int) -> Kept | None:
        context = replace(self.context, version=version, session_id=f"g{group_id}")
        outcomes = await asyncio.gather(
            *(single_turn(context, task) for _ in range(self.samples_per_group)), return_exceptions=True
        )
        samples = []
        for outcome in outcomes:
            if isinstance(outcome, (InferenceError, RewardError)):
                self.failed_samples += 1
                self.last_error = str(outcome)
                self.journal.write("failed_sample", group_id, reason=str(outcome)[:300])
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                samples.append(outcome)
        group = Group(group_id, task, samples)
        if len(samples) < 2:
            return self._drop(group, "failed")
        if FILTERS[self.filter_name](group):
            return self._drop(group, self.filter_name)
        return self._keep(group, version)

    def _drop(self, group: Group, reason: str) -> None:
        self.filtered[reason] += 1
        self.cursor.finish(group.id)
        self.journal.write("filtered", group.id, reason=reason)

    def _keep(self, group: Group, version: int) -> Kept:
        key = f"g{group.id}"
        self.store.put(key, group.samples)
        advantages = self.estimator(group.rewards)
        pairs = list(zip(group.samples, advantages, strict=True))
        return Kept(
            group.id,
            [
                Row(key, i, len(s.prompt_ids), len(s.response_ids), sum(s.loss_mask), advantage, 0.0)
                for i, (s, advantage) in enumerate(pairs)
            ],
            group.rewards,
            [sample.finish_reason for sample in group.samples],
            [version - sample.oldest_version for sample in group.samples],
            [log_row("train", group.id, group.task, s, advantage) for s, advantage in pairs],
        )

    def trained(self, batch: list[Kept], step: int) -> None:
        """The batch's prompts end as trained; their payloads are dropped."""
        for one in batch:
            self.cursor.finish(one.group_id)
            self.journal.write("trained", one.group_id, step=step)
        self.store.drop([f"g{one.group_id}" for one in batch])


def rollout_metrics(batch: list[Kept], collector: Collector, seconds: float) -> dict[str, float]:
    """What the batch was like; lengths in tokens."""
    rewards = [reward for one in batch for reward in one.rewards]
    rows = [row for one in batch for row in one.rows]
    lengths = [row.response_tokens for row in rows]
    finishes = [reason for one in batch for reason in one.finish_reasons]
    staleness = [behind for one in batch for behind in one.staleness]
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/zero_variance_fraction": fmean(max(one.rewards) == min(one.rewards) for one in batch),
        "rollout/groups": len(batch),
        "rollout/samples": len(rows),
        "rollout/response_tokens_mean": fmean(lengths),
        "rollout/response_tokens_max": max(lengths),
        "rollout/prompt_tokens_mean": fmean(row.prompt_tokens for row in rows),
        "rollout/truncated_fraction": finishes.count("length") / len(finishes),
        "rollout/tokens_per_s": sum(lengths) / seconds,
        "rollout/staleness_mean": fmean(staleness),
        "rollout/staleness_max": max(staleness),
        "rollout/failed_samples": collector.failed_samples,
        "rollout/filtered": sum(collector.filtered.values()),
        **{f"rollout/filtered_{reason}": count for reason, count in sorted(collector.filtered.items())},
    }
