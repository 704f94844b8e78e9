"""Collects one batch of groups: takes prompts, samples and scores their responses, filters, stores the payloads.

Every prompt taken ends here as kept, as filtered with a counted reason, or, if the batch is given up, back in the buffer.
Once a group is kept its tokens lie in the store; the driver goes on with its numbers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from vime.config.sections import Config
from vime.data.cursor import PromptCursor
from vime.data.journal import Journal
from vime.inference.client import InferenceError
from vime.rewards import RewardError
from vime.rewards.shaping import shape
from vime.rollout.filters import FILTERS
from vime.rollout.generate import Context, ask_others, given, single_turn
from vime.sample import Group, Sample, Task
from vime.store.shared_memory import SharedMemoryStore
from vime.training.advantages import COMPARING
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


def log_row(split: str, group_id: int, task: Task, sample: Sample) -> dict[str, Any]:
    """One line of samples.jsonl; the trainer's advantage comes to it after the step (``note_advantages``)."""
    return {
        "split": split,
        "group": group_id,
        "task": task.id,
        "prompt": task.messages[-1]["content"],
        "response": sample.text,
        "answer": task.answer,
        "reward": sample.reward,
        "advantage": None,
        "tokens": len(sample.response_ids),
        "finish": sample.finish_reason,
        "version": sample.versions[-1].version,
        **({"reward_parts": sample.reward_parts} if sample.reward_parts else {}),
    }


FAILED = "failed"  # fewer samples of the group could be made than the advantage needs


def store_key(group_id: int) -> str:
    return f"g{group_id}"


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
        self.least_samples = 2 if config.algorithm.advantage in COMPARING else 1
        self.mask_stale = config.algorithm.mask_stale
        self.config, self.filter = config, FILTERS[config.rollout.filter]
        self.failed_samples = self.stale_tokens = 0
        self.last_error = ""

    async def collect(self, version: int, progress: Callable[[int, int], None] = lambda *_: None) -> list[Outcome]:
        """One batch: ``rollout.groups`` groups to train on, fewer only where refills ran out, and those filtered.

        Groups that are filtered are replaced at once by further prompts. Raises RolloutError when no group could be made
        because sampling or scoring failed; prompts without an end return to the buffer on any error.
        """
        self.failed_samples = self.stale_tokens = 0
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
        if context.response_keys:
            calls = [given(context, task, rank) for rank in range(len(context.response_keys))]
        else:
            calls = [single_turn(context, task) for _ in range(self.section.samples_per_group)]
        outcomes = await asyncio.gather(*(self._sample(context, call) for call in calls), return_exceptions=True)
        samples: list[Sample] = []
        for rollout, outcome in enumerate(outcomes):
            if isinstance(outcome, (InferenceError, RewardError)):
                self.failed_samples += 1
                self.last_error = str(outcome)
                self.journal.write("failed_sample", group_id, reason=str(outcome)[:300])
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                samples += [replace(one, rollout=rollout) for one in outcome]
        return self._outcome(Group(group_id, task, samples), version)

    async def _sample(self, context: Context, call: Awaitable[Sample | list[Sample]]) -> list[Sample]:
        """The samples of one generate call, with what other models' servers make of them."""
        made = await call
        samples = made if isinstance(made, list) else [made]
        await ask_others(context, samples)
        return samples

    def _outcome(self, group: Group, version: int) -> Outcome:
        shape(group, self.config)
        samples = group.samples
        too_few = len({sample.rollout for sample in samples}) < self.least_samples
        reason = FAILED if too_few else self.section.filter if self.filter(group, self.config) else None
        rows = []
        if reason:
            self.cursor.finish(group.id)
            self.journal.write("filtered", group.id, reason=reason)
        else:
            key = store_key(group.id)
            if self.mask_stale:
                self.stale_tokens += sum(sample.mask_stale(version) for sample in samples)
            self.store.put(key, samples)
            rows = [
                Row(key, i, s.rollout, len(s.prompt_ids), len(s.response_ids), sum(s.loss_mask), s.reward or 0.0)
                for i, s in enumerate(samples)
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
            [log_row("train", group.id, group.task, sample) for sample in samples],
        )

    def trained(self, batch: list[Outcome], step: int) -> None:
        """The prompts that were trained on end so; their payloads are dropped."""
        kept = [outcome.group_id for outcome in batch if outcome.filtered is None]
        for group_id in kept:
            self.cursor.finish(group_id)
            self.journal.write("trained", group_id, step=step)
        self.store.drop([store_key(group_id) for group_id in kept])


def note_advantages(batch: list[Outcome], advantages: Sequence[tuple[str, int, float]]) -> None:
    """Writes the trainer's advantages, as [group, index, value], to the batch's log rows."""
    log_rows = {store_key(outcome.group_id): outcome.log_rows for outcome in batch}
    for key, index, value in advantages:
        log_rows[key][index]["advantage"] = value


def rollout_metrics(batch: list[Outcome], failed_samples: int, seconds: float) -> dict[str, float]:
    """What the batch was like, filtered groups included; lengths in tokens."""
    whole = [outcome for outcome in batch if outcome.rewards]
    rewards = [reward for outcome in whole for reward in outcome.rewards]
    lengths = [length for outcome in whole for length in outcome.response_tokens]
    finishes = [reason for outcome in whole for reason in outcome.finish_reasons]
    staleness = [behind for outcome in whole for behind in outcome.staleness]
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
        "rollout/tokens_per_s": sum(lengths) / seconds,
        "rollout/staleness_mean": fmean(staleness),
        "rollout/staleness_max": max(staleness),
        "rollout/failed_samples": failed_samples,
        "rollout/filtered": sum(filtered.values()),
        **{f"rollout/filtered_{reason}": count for reason, count in sorted(filtered.items())},
    }
