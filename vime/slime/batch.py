"""What the driver calls of ``[slime]`` for a whole batch. Its samples are read from the store for these functions alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vime.config.nearest import nearest
from vime.rollout.outcome import Outcome, rollout_metrics, store_key
from vime.sample import Sample as Native
from vime.slime.calls import HookError, in_thread
from vime.slime.hooks import HOOKS
from vime.slime.sample import Sample, to_native
from vime.store.shared_memory import Payload
from vime.training.plan import Row

if TYPE_CHECKING:
    from vime.job import Job
    from vime.rollout.scheduler import Scheduler
    from vime.slime.driver import Hooks

Groups = list[list[Sample]]
NEEDED = ("tokens", "response_lengths", "rewards", "loss_masks", "rollout_log_probs", "sample_indices")
TOLD = ("raw_reward", "truncated", "rollout_ids", "metadata", "source_names")  # what training does not need
CONVERTED = "converted"  # a group of which custom_convert_samples_to_train_data_path left nothing


async def collected(hooks: Hooks, job: Job, batch: list[Outcome]) -> list[Outcome]:
    """The batch after all functions that look at batches. A group that one of them takes out ends as filtered."""
    if not hooks.section.reads_batches:
        return batch
    args = hooks.args(job.context)
    kept = [outcome for outcome in batch if outcome.filtered is None]
    groups: Groups = await in_thread(lambda: [read(hooks, job.scheduler, outcome) for outcome in kept])
    if "sample_filter" in hooks:
        await hooks.call("sample_filter", args, groups)
        kept = [removed(job, outcome, group) for outcome, group in zip(kept, groups, strict=True)]
    if "all_samples" in hooks:
        dropped, hooks.dropped = hooks.dropped, []
        filtered = [
            [
                hooks.seen(replace(job.context, group=group.id, number=number), group.task, one)
                for number, one in enumerate(group.samples)
            ]
            for group in dropped
        ]
        await hooks.call("all_samples", args, [*groups, *(group for group in filtered if group)], job.prompt_source)
    flat = [sample for group in groups for sample in group]
    if "reward_post_process" in hooks and flat:
        kept = rewarded(kept, await hooks.call("reward_post_process", args, flat))
        for sample, row in zip(flat, (row for outcome in kept for row in outcome.rows), strict=True):
            sample.reward = row.reward
    if "convert" in hooks and flat:
        data = await hooks.call("convert", args, flat)
        kept = converted(hooks, job, kept, data)
    after = {outcome.group_id: outcome for outcome in kept}
    batch = [after.get(outcome.group_id, outcome) for outcome in batch]
    if "rollout_log" in hooks:
        await logged(hooks, job, batch, flat)
    return batch


def read(hooks: Hooks, scheduler: Scheduler, outcome: Outcome) -> list[Sample]:
    """A group's samples, with their tokens."""
    task, key = scheduler.cursor.task_of(outcome.group_id), store_key(outcome.group_id)
    samples = []
    for row, log in zip(outcome.rows, outcome.log_rows, strict=True):
        payload = scheduler.store.get(key, row.index)
        made = Native(
            payload.prompt_ids.tolist(),
            payload.response_ids.tolist(),
            payload.logprobs.tolist(),
            outcome.versions[row.index],
            outcome.finish_reasons[row.index],
            log["response"],
            payload.loss_mask.tolist(),
            row.reward,
            log.get("reward_parts", {}),
            metadata=log.get("metadata", {}),
            teacher=None if payload.teacher is None else payload.teacher.tolist(),
            experts=payload.experts,
        )
        context = replace(scheduler.context, group=outcome.group_id, number=row.index)
        sample = hooks.seen(context, copy.deepcopy(task), made)
        sample.rollout_id = hooks.index_in(outcome.group_id, row.rollout)
        samples.append(sample)
    return samples


async def choose(hooks: Hooks, scheduler: Scheduler, ready: list[int]) -> tuple[list[int], list[int]]:
    """Of the groups that are ready, those that buffer_filter_path returns, and those that it took out beside them."""
    outcomes = [scheduler.ready[group_id] for group_id in ready]
    buffer: Groups = await in_thread(lambda: [read(hooks, scheduler, outcome) for outcome in outcomes])
    args, count = hooks.args(scheduler.context), scheduler.section.groups
    found = await hooks.call("buffer_filter", args, scheduler.version, buffer, count)
    return taken(found, buffer, ready, count)


def taken(found: Any, buffer: Groups, ready: list[int], count: int) -> tuple[list[int], list[int]]:
    """Of the groups ``ready``, those that a buffer filter found, ``count`` at most, and those that it left nowhere."""

    def ids(groups: Any) -> list[int]:
        if not isinstance(groups, list) or not all(group and group[0].group_index in ready for group in groups):
            raise HookError(f"slime.{HOOKS['buffer_filter'].option} returned {groups!r:.60}; return groups of buffer")
        return list(dict.fromkeys(group[0].group_index for group in groups))

    chosen, left = ids(found)[:count], ids(buffer)
    kept = {*ids(found), *left}
    return chosen, [group_id for group_id in ready if group_id not in kept]


def removed(job: Job, outcome: Outcome, group: Sequence[Sample]) -> Outcome:
    """The group with the samples that are marked taken out of the loss; they count in its advantages."""
    if not any(sample.remove_sample for sample in group):
        return outcome
    key = store_key(outcome.group_id)
    payloads, rows = [job.store.get(key, row.index) for row in outcome.rows], list(outcome.rows)
    for index, sample in enumerate(group):
        if sample.remove_sample:
            payloads[index].loss_mask[:] = 0
            rows[index] = replace(rows[index], trained_tokens=0)
    job.store.put(key, payloads)
    return replace(outcome, rows=rows)


def rewarded(kept: Sequence[Outcome], found: Any) -> list[Outcome]:
    """The batch with the second of (raw rewards, rewards) as its rewards."""
    remaining = iter(processed(found, sum(len(outcome.rows) for outcome in kept)))
    return [replace(o, rows=[replace(row, reward=next(remaining)) for row in o.rows]) for o in kept]


def processed(found: Any, count: int) -> list[float]:
    """The rewards that custom_reward_post_process_path returned for so many samples; HookError where it did not."""
    option = HOOKS["reward_post_process"].option
    try:
        raw, rewards = found
        values = np.asarray(rewards, dtype=float).reshape(-1)
        sizes = (len(raw), len(values))
    except (TypeError, ValueError) as error:
        raise HookError(f"slime.{option} returned {found!r:.60}; return (raw rewards, rewards): {error}") from None
    if sizes != (count, count):
        raise HookError(f"slime.{option} returned {sizes[0]} raw rewards and {sizes[1]} rewards for {count} samples")
    if not np.isfinite(values).all():
        raise HookError(f"slime.{option} returned a reward that is {values[~np.isfinite(values)][0]}")
    return values.tolist()  # type: ignore[no-any-return]


def converted(hooks: Hooks, job: Job, kept: Sequence[Outcome], data: Any) -> list[Outcome]:
    """The batch made of the dict of lists: its payloads are written, each row to the group of its ``sample_indices``."""
    option, size = f"slime.{HOOKS['convert'].option}", job.config.rollout.samples_per_group
    entries = entries_of(data)
    by_group: dict[int, list[tuple[int, Native]]] = {outcome.group_id: [] for outcome in kept}
    for place, index in enumerate(data["sample_indices"]):
        group, number = divmod(int(index), size)
        if group not in by_group:
            raise HookError(f"{option}: sample_indices[{place}] = {index} is the index of no sample of the batch")
        by_group[group].append((number, entries[place]))
    return [with_rows(hooks, job, outcome, by_group[outcome.group_id]) for outcome in kept]


def entries_of(data: Any) -> list[Native]:
    """The rows of what custom_convert_samples_to_train_data_path returned; HookError where they cannot be trained."""
    option = f"slime.{HOOKS['convert'].option}"
    if not isinstance(data, dict):
        raise HookError(f"{option} returned {data!r:.60}; return a dict with {', '.join(NEEDED)}")
    for name in NEEDED:
        if name not in data:
            raise HookError(f"{option} returned no {name!r}; it has {', '.join(map(repr, data))}")
        if len(data[name]) != len(data["tokens"]):
            raise HookError(f"{option}: {name} has {len(data[name])} entries, tokens {len(data['tokens'])}")
    if unknown := sorted(map(str, data.keys() - {*NEEDED, *TOLD})):
        raise HookError(f"{option}: {unknown[0]!r} cannot be trained on{nearest(unknown[0], [*NEEDED, *TOLD])}")
    return [entry(option, data, place) for place in range(len(data["tokens"]))]


def entry(option: str, data: dict[str, Any], place: int) -> Native:
    """One row of the dict, as a sample."""
    given = [data[name][place] for name in NEEDED]
    tokens, length, reward, mask, logprobs = given[:5]
    status = Sample.Status.COMPLETED
    sample = Sample(tokens=list(tokens), response_length=int(length), reward=float(reward), status=status)
    sample.loss_mask, sample.rollout_log_probs = [int(one) for one in mask], [float(one) for one in logprobs]
    try:
        return to_native(sample, 0)
    except ValueError as error:
        raise HookError(f"{option}, entry {place}: {error}") from None


def with_rows(hooks: Hooks, job: Job, outcome: Outcome, entries: Sequence[tuple[int, Native]]) -> Outcome:
    key = store_key(outcome.group_id)
    if not entries:
        return job.scheduler.drop(outcome, CONVERTED)
    rows = [
        Row(
            key,
            index,
            outcome.rows[number].rollout,
            len(one.prompt_ids),
            len(one.response_ids),
            sum(one.loss_mask),
            one.reward or 0.0,
        )
        for index, (number, one) in enumerate(entries)
    ]
    job.store.put(key, [payload_of(one) for _, one in entries])
    return replace(outcome, rows=rows, log_rows=[dict(outcome.log_rows[number]) for number, _ in entries])


def payload_of(sample: Native) -> Payload:
    return Payload(
        np.asarray(sample.prompt_ids, np.int32),
        np.asarray(sample.response_ids, np.int32),
        np.asarray(sample.logprobs, np.float32),
        np.asarray(sample.loss_mask, np.uint8),
    )


async def logged(hooks: Hooks, job: Job, batch: list[Outcome], flat: Sequence[Sample]) -> None:
    """Calls the function that logs. What it adds to the metrics is recorded; true takes ours from the sinks."""
    metrics: dict[str, Any] = dict(rollout_metrics(batch, job.step, job.scheduler.seconds))
    known = set(metrics)
    seconds = job.scheduler.seconds
    quiet = await hooks.call("rollout_log", job.step, hooks.args(job.context), list(flat), metrics, seconds)
    job.metrics |= {name: float(value) for name, value in metrics.items() if name not in known}
    job.unsent = ("rollout/", "reward/") if quiet else ()
