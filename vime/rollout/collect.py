"""Collects one batch of groups: takes prompts, samples and scores their responses, filters, stores the payloads.

Every prompt taken ends here as kept, as filtered with a counted reason, or, if the batch is given up, back in the buffer.
Once a group is kept its tokens lie in the store; the driver goes on with its numbers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from vime.config.sections import Config
from vime.data.cursor import PromptCursor
from vime.data.journal import Journal
from vime.inference.client import InferenceError
from vime.rewards import RewardError
from vime.rollout.generate import Context, single_turn
from vime.sample import Group, Sample, Task
from vime.store.shared_memory import SharedMemoryStore
from vime.training.advantages import ESTIMATORS
from vime.training.plan import Row


class RolloutError(Exception):
    """No group of the batch could be made; the message holds the last cause."""


@dataclass
class Outcome:
    """A finished group without its tokens: numbers and texts for the log, and, unless filtered, rows for the trainer."""

    group_id: int
    filtered: str | None
    rows: list[Row]
    rewards: list[float]
    prompt_tokens: int
    response_tokens: list[int]
    finish_reasons: list[str]
    staleness: list[int]
    log_rows: list[dict[str, Any]]


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
        **({"reward_parts": sample.reward_parts} if sample.reward_parts else {}),
    }


FAILED = "failed"  # fewer than two samples of the group could be made


def store_key(group_id: int) -> str:
    return f"g{group_id}"


def zero_variance(group: Group) -> bool:
    return max(group.rewards) == min(group.rewards)


FILTERS: dict[str, Callable[[Group], bool]] = {"none": lambda group: False, "zero_variance": zero_variance}


class Collector:
    """Makes batches of groups."""

    def __init__(
        self,
        config: Config,
        context: Context,
        cursor: PromptCursor,
        journal: Journal,
        store: SharedMemoryStore,
    ) -> None:
        self.section, self.context, self.cursor, self.journal, self.store = (
            config.rollout,
            context,
            cursor,
            journal,
            store,
        )
        self.estimator = ESTIMATORS[config.algorithm.advantage]
        self.filter = FILTERS[config.rollout.filter]
        self.failed_samples = 0
        self.last_error = ""

    async def collect(self, version: int, progress: Callable[[int, int], None] = lambda *_: None) -> list[Outcome]:
        """One batch: ``rollout.groups`` groups to train on, fewer only where refills ran out, and those filtered.

        Groups that are filtered are replaced at once by further prompts. Raises RolloutError when no group could be made
        because sampling or scoring failed; prompts without an end return to the buffer on any error.
        """
        self.failed_samples = 0
        outcomes: list[Outcome] = []
        running: dict[asyncio.Task[Outcome], int] = {}
        wanted = self.section.groups
        allowance = wanted * (1 + self.section.max_refills)
        kept = 0
        try:
            while True:
                while kept + len(running) < wanted and allowance:
                    allowance -= 1
                    group_id, task = self.cursor.take()
                    self.journal.write("taken", group_id, task=task.id)
                    running[asyncio.create_task(self._group(group_id, task, version))] = group_id
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for finished in done:
                    outcome = finished.result()
                    del running[finished]
                    outcomes.append(outcome)
                    kept += outcome.filtered is None
                progress(kept, wanted)
        except BaseException:
            kept_ids = [outcome.group_id for outcome in outcomes if outcome.filtered is None]
            self.store.drop(map(store_key, kept_ids))
            for group_id in [*kept_ids, *running.values()]:
                self.cursor.give_back(group_id)
            for pending in running:
                pending.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise
        if all(outcome.filtered == FAILED for outcome in outcomes):
            raise RolloutError(
                f"no group could be made: {self.failed_samples} samples failed; the last: {self.last_error}"
            )
        return sorted(outcomes, key=lambda outcome: outcome.group_id)

    async def _group(self, group_id: int, task: Task, version: int) -> Outcome:
        context = replace(self.context, version=version, session_id=f"g{group_id}")
        outcomes = await asyncio.gather(
            *(single_turn(context, task) for _ in range(self.section.samples_per_group)), return_exceptions=True
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
        return self._outcome(Group(group_id, task, samples), version)

    def _outcome(self, group: Group, version: int) -> Outcome:
        samples = group.samples
        reason = FAILED if len(samples) < 2 else self.section.filter if self.filter(group) else None
        advantages = [0.0] * len(samples) if reason else self.estimator(group.rewards)
        rows = []
        if reason:
            self.cursor.finish(group.id)
            self.journal.write("filtered", group.id, reason=reason)
        else:
            key = store_key(group.id)
            self.store.put(key, samples)
            rows = [
                Row(key, i, len(s.prompt_ids), len(s.response_ids), sum(s.loss_mask), advantage, 0.0)
                for i, (s, advantage) in enumerate(zip(samples, advantages, strict=True))
            ]
        return Outcome(
            group.id,
            reason,
            rows,
            group.rewards,
            len(samples[0].prompt_ids) if samples else 0,
            [len(sample.response_ids) for sample in samples],
            [sample.finish_reason for sample in samples],
            [version - sample.oldest_version for sample in samples],
            [log_row("train", group.id, group.task, s, a) for s, a in zip(samples, advantages, strict=True)],
        )

    def trained(self, batch: list[Outcome], step: int) -> None:
        """The prompts that were trained on end so; their payloads are dropped."""
        kept = [outcome.group_id for outcome in batch if outcome.filtered is None]
        for group_id in kept:
            self.cursor.finish(group_id)
            self.journal.write("trained", group_id, step=step)
        self.store.drop([store_key(group_id) for group_id in kept])


def rollout_metrics(batch: list[Outcome], failed_samples: int, seconds: float) -> dict[str, float]:
    """What the batch was like, filtered groups included; lengths in tokens."""
    whole = [outcome for outcome in batch if outcome.rewards]
    rewards = [reward for outcome in whole for reward in outcome.rewards]
    lengths = [length for outcome in whole for length in outcome.response_tokens]
    finishes = [reason for outcome in whole for reason in outcome.finish_reasons]
    staleness = [behind for outcome in whole for behind in outcome.staleness]
    filtered = Counter(outcome.filtered for outcome in batch if outcome.filtered)
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/zero_variance_fraction": fmean(max(o.rewards) == min(o.rewards) for o in whole),
        "rollout/groups": len(batch),
        "rollout/samples": len(rewards),
        "rollout/response_tokens": sum(lengths),
        "rollout/response_tokens_mean": fmean(lengths),
        "rollout/response_tokens_max": max(lengths),
        "rollout/prompt_tokens_mean": fmean(outcome.prompt_tokens for outcome in whole),
        "rollout/truncated_fraction": finishes.count("length") / len(finishes),
        "rollout/tokens_per_s": sum(lengths) / seconds,
        "rollout/staleness_mean": fmean(staleness),
        "rollout/staleness_max": max(staleness),
        "rollout/failed_samples": failed_samples,
        "rollout/filtered": sum(filtered.values()),
        **{f"rollout/filtered_{reason}": count for reason, count in sorted(filtered.items())},
    }
