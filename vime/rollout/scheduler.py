"""Keeps groups of responses in flight and ships them to the trainer in batches.

Takes prompts, samples and scores their responses, filters, stores the payloads. With rollout.max_staleness over 0 groups go
on being made while the trainer learns. Every prompt taken ends as trained, as filtered with a counted reason, or, when the
run ends, back in the buffer. Once a group is ready its tokens lie in the store; the driver goes on with its numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Set
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from vime.beside import beside
from vime.config.sections import Config
from vime.data import DataError
from vime.data.cursor import PromptCursor
from vime.data.journal import Journal
from vime.inference.client import Late
from vime.inference.limiter import Limiter
from vime.inference.requests import Requests
from vime.observe import trace
from vime.rewards.shaping import shape
from vime.rollout.filters import FILTERS, passed
from vime.rollout.generate import Context, Generate, generate_of, given, group_of, load_generate
from vime.rollout.outcome import FAILED, STALE, Outcome, read_groups, store_key, write_groups
from vime.rollout.staleness import in_time, room
from vime.sample import Group, Sample, Task
from vime.store.shared_memory import SharedMemoryStore
from vime.training.advantages import COMPARING

STARTED_AT_ONCE = 32
"""Groups begun in one turn of the event loop."""
BUFFER_FILTER = "buffer_filter"  # the reason of groups that slime.buffer_filter_path took out


class RolloutError(Exception):
    """No group of the batch could be made; the message holds the last cause."""


def least_samples(config: Config) -> int:
    """Of a group that is trained, by ``rollout.incomplete_groups``."""
    if config.rollout.incomplete_groups == "drop":
        return len(config.data.response_keys) or config.rollout.samples_per_group
    return 2 if config.algorithm.advantage in COMPARING else 1


class Scheduler:
    """Groups from the taking of their prompt to the end of their training.

    ``running`` groups have a task and the version they were started under; ``ready`` ones wait for their batch; ``filtered``
    ones are those dropped since the last batch.
    """

    def __init__(
        self, config: Config, context: Context, cursor: PromptCursor, journal: Journal, store: SharedMemoryStore
    ) -> None:
        self.config, self.context, self.cursor, self.journal, self.store = config, context, cursor, journal, store
        self.section = config.rollout
        self.filter = FILTERS[config.rollout.filter]
        self.least_samples = least_samples(config)
        self.size = len(config.data.response_keys) or self.section.samples_per_group
        self.generate = generate_of(context, self.section.generate, self.section.generate_timeout_s)
        self.load_generate = cache(partial(load_generate, timeout_s=self.section.generate_timeout_s))
        self.deterministic = config.run.deterministic
        self.running: dict[int, tuple[asyncio.Task[Outcome], Requests]] = {}
        self.ready: dict[int, Outcome] = {}
        self.filtered: list[Outcome] = []
        self.shipped = 0  # the number of the next batch
        self.failed_samples = self.late_responses = self.stale_tokens = 0  # since the last ``counts``
        self.last_error = ""
        self.began = 0.0  # when the making of the next batch began: at its call, or with the shipping of the one before
        self.seconds = 0.0  # that the making of the last batch took
        self.entrance = Limiter(1)
        self._changed = asyncio.Event()
        self._filling: asyncio.Handle | None = None
        self._broken: BaseException | None = None

    @property
    def version(self) -> int:
        """Of the weights that are served."""
        return self.context.requests.version

    @property
    def batch_version(self) -> int:
        """Of the weights that the batch shipped last trains."""
        return self.shipped - 1

    async def collect(self, progress: Callable[[int, int], None] = lambda *_: None) -> list[Outcome]:
        """The batch that the served version trains: ``rollout.groups`` groups to train on, fewer only where refills ran out,
        and those filtered meanwhile.

        Raises RolloutError when no group could be made because sampling or scoring failed, and whatever broke a group.
        """
        self.shipped = self.version
        if not self.running and not self.ready:
            self.began = time.perf_counter()
        while True:
            self._drop_stale()
            self._fill()
            if self._broken:
                raise self._broken
            progress(min(len(self.ready), self.section.groups), self.section.groups)
            self._changed.clear()
            chosen = await self._chosen()
            if chosen is not None and (batch := self._ship(chosen)) is not None:
                return batch
            await self._changed.wait()

    def _fill(self) -> None:
        """Starts the groups that there is room for, up to those of the run's last batch; of many a few, and the others in the
        turns of the event loop that follow."""
        if self._filling:
            self._filling.cancel()
            self._filling = None
        if self._broken:
            return
        outstanding = len(self.running) + len(self.ready) + self._unreplaced()
        wanted = self.section.groups
        free = room(wanted, self.section.max_staleness, self.version, self.shipped, outstanding)
        to_the_end = wanted * (self.config.run.steps - self.shipped) - outstanding
        if self.deterministic and self.running:  # which group ends first must not decide what is begun next
            return
        missing = min(free, to_the_end)
        for _ in range(missing if self.deterministic else min(missing, STARTED_AT_ONCE)):
            try:
                group_id, task = self.cursor.take(self.shipped)
            except DataError as error:  # of a source of the user's; who called is perhaps nobody who could raise it
                self._broken = error
                self._changed.set()
                return
            self.context.requests.expect(self.size)
            self.journal.write("taken", group_id, task=task.id)
            requests = self.context.requests.of_group()
            started = asyncio.create_task(self._group(group_id, task, requests))
            self.running[group_id] = started, requests
            started.add_done_callback(lambda done, group_id=group_id: self._ended(group_id, done))  # type: ignore[misc]
        if missing > STARTED_AT_ONCE and not self.deterministic:
            self._filling = asyncio.get_running_loop().call_soon(self._fill)

    def _unreplaced(self) -> int:
        """Places of the next batch that stay empty: groups filtered since the last one, beyond those that refills replace."""
        filtered = sum(outcome.filtered != STALE for outcome in self.filtered)
        return max(0, filtered - self.section.groups * self.section.max_refills)

    def _ended(self, group_id: int, done: asyncio.Task[Outcome]) -> None:
        if group_id not in self.running:  # who cancelled it has seen to its prompt
            return
        if done.cancelled():
            self._broken = RolloutError(f"group {group_id} was cancelled by what it called")
        elif error := done.exception():
            self._broken = error
        else:
            del self.running[group_id]
            outcome = done.result()
            if outcome.filtered:
                self._filtered(outcome)
            else:
                self.ready[group_id] = outcome
            self._fill()
        self._changed.set()

    def _filtered(self, outcome: Outcome) -> None:
        self.filtered.append(outcome)
        self.cursor.finish(outcome.group_id, outcome.passed)
        self.journal.write("filtered", outcome.group_id, reason=outcome.filtered)

    def _by_age(self) -> list[int]:
        """The groups that are ready, those with the oldest tokens first."""
        return sorted(self.ready, key=lambda group_id: (self.ready[group_id].oldest_version, group_id))

    async def _chosen(self) -> list[int] | None:
        """The groups of the next batch: of those that are ready the oldest, or what a function of slime's takes; None where
        others are to be waited for."""
        slime, wanted = self.context.slime, self.section.groups
        if self.running and len(self.ready) + self._unreplaced() < wanted:
            return None
        by_age = self._by_age()
        if slime is None or "buffer_filter" not in slime:
            return by_age[:wanted]
        chosen, dropped = await slime.choose(self, by_age)
        self.filtered += [self.drop(self.ready.pop(group_id), BUFFER_FILTER) for group_id in dropped]
        self._fill()
        return None if self.running and len(chosen) + self._unreplaced() < wanted else chosen

    def _ship(self, chosen: list[int]) -> list[Outcome] | None:
        """These groups as the next batch, if it can go."""
        if self.running and not self._may_leave(self.ready.keys() - set(chosen)):
            return None
        if not chosen and not any(one.rewards for one in self.filtered if one.filtered != FAILED):
            raise RolloutError(
                f"no group could be made: {self.failed_samples} samples failed; the last: {self.last_error}"
            )
        batch = [self._masked(self.ready.pop(group_id)) for group_id in chosen] + self.filtered
        self.shipped += 1
        trace.batch(self.shipped, [f"g{group_id}" for group_id in chosen])
        self.filtered = []
        now = time.perf_counter()
        self.seconds, self.began = now - self.began, now
        return sorted(batch, key=lambda outcome: outcome.group_id)

    def drop(self, outcome: Outcome, reason: str) -> Outcome:
        """A group that was ready and is not trained on: it ends as filtered."""
        self.cursor.finish(outcome.group_id, outcome.passed)
        self.journal.write("filtered", outcome.group_id, reason=reason)
        self.store.drop([store_key(outcome.group_id)])
        return outcome.dropped(reason)

    def _may_leave(self, ready: Set[int]) -> bool:
        """Whether later batches can train these groups, and those that are running, before they are stale."""
        if self.section.stale != "wait":
            return True
        versions = [self.ready[group_id].oldest_version for group_id in ready]
        versions += [self._oldest(requests) for _, requests in self.running.values()]
        deadlines = (version + self.section.max_staleness for version in versions)
        return in_time(deadlines, self.shipped + 1, self.section.groups)

    def _oldest(self, requests: Requests) -> int:
        """The version of the oldest token that a running group has or can get: it may be waiting to be asked for its first."""
        return self.version if requests.begun is None else requests.begun

    def _drop_stale(self) -> None:
        """Drops groups that the batch to be shipped, and so every later one, comes too late for, finished or not."""
        oldest = self.shipped - self.section.max_staleness
        for group_id, outcome in list(self.ready.items()):
            if (outcome.newest_version if self.section.stale == "mask" else outcome.oldest_version) < oldest:
                del self.ready[group_id]
                self.filtered.append(self.drop(outcome, STALE))
        for group_id, (task, requests) in list(self.running.items()):
            if self._oldest(requests) < oldest and self.section.stale == "drop":
                del self.running[group_id]
                task.cancel()
                self.store.drop([store_key(group_id)])  # it may have ended in this very moment
                self._filtered(Outcome(group_id, STALE, [], [], 0, [], [], [], []))

    def _masked(self, outcome: Outcome) -> Outcome:
        """The group with its tokens of too old weights taken out of the loss, in the store and in its rows."""
        oldest = self.shipped - (0 if self.config.algorithm.mask_stale else self.section.max_staleness)
        if outcome.oldest_version >= oldest:
            return outcome
        key = store_key(outcome.group_id)
        payloads = [self.store.get(key, row.index) for row in outcome.rows]
        for payload, spans in zip(payloads, outcome.versions, strict=True):
            before = int(payload.loss_mask.sum())
            for span in spans:
                if span.version < oldest:
                    payload.loss_mask[span.start : span.end] = 0
            self.stale_tokens += before - int(payload.loss_mask.sum())
        self.store.put(key, payloads)
        trained = [int(payload.loss_mask.sum()) for payload in payloads]
        rows = [replace(row, trained_tokens=count) for row, count in zip(outcome.rows, trained, strict=True)]
        kept = [tuple(span for span in spans if span.version >= oldest) for spans in outcome.versions]
        return replace(outcome, rows=rows, versions=kept)

    async def _group(self, group_id: int, task: Task, requests: Requests) -> Outcome:
        context = replace(self.context, session_id=f"g{group_id}", group=group_id, requests=requests)
        began = trace.now()
        await self.entrance.passed()  # thousands that start at once would hold up all that goes on beside them
        samples: list[Sample] = []
        for rollout, outcome in enumerate(await group_of(context, task, self._calls(task))):
            if isinstance(outcome, Exception):
                self._failed(group_id, outcome)
            else:
                samples += [replace(one, rollout=rollout) for one in outcome]
        made = await self._outcome(Group(group_id, task, samples))
        trace.group(context.session_id, began, made.filtered)
        return made

    def _failed(self, group_id: int, error: Exception) -> None:
        self.failed_samples += 1
        self.late_responses += isinstance(error, Late)
        self.last_error = str(error)
        self.journal.write("failed_sample", group_id, reason=str(error)[:300])

    def _calls(self, task: Task) -> list[Generate]:
        """What makes a group's samples."""
        if self.config.data.response_keys:
            return [partial(given, rank=rank) for rank in range(self.size)]
        return [self.load_generate(task.generate) if task.generate else self.generate] * self.size

    async def _outcome(self, group: Group) -> Outcome:
        shape(group, self.config)
        share = passed(group, self.config) if group.samples else None
        reason = await self._reason(group)
        if reason is None:
            self.store.put(store_key(group.id), group.samples)
        elif self.context.slime is not None:
            self.context.slime.note_dropped(group)
        return Outcome.of(group, reason, share)

    async def _reason(self, group: Group) -> str | None:
        """Why the finished group is not trained on; None where it is."""
        if len({sample.rollout for sample in group.samples}) < self.least_samples:
            return FAILED
        if self.filter(group, self.config):
            return self.section.filter
        slime = self.context.slime
        return None if slime is None else await slime.drops(self.context, group)

    def trained(self, batch: list[Outcome], step: int) -> None:
        """The prompts that were trained on end so; nobody needs their payloads any more."""
        for outcome in batch:
            if outcome.filtered is None:
                self.cursor.finish(outcome.group_id, outcome.passed)
                self.journal.write("trained", outcome.group_id, step=step)

    def counts(self) -> dict[str, float]:
        """What has been counted since the last call."""
        counted = {
            "rollout/failed_samples": self.failed_samples,
            "rollout/late_responses": self.late_responses,
            "rollout/stale_tokens_masked": self.stale_tokens,
        }
        self.failed_samples = self.late_responses = self.stale_tokens = 0
        return {**counted, "rollout/ready": len(self.ready), "rollout/running": len(self.running)}

    async def save(self, folder: Path) -> None:
        """Writes the groups that are ready into a checkpoint's folder."""
        await beside(write_groups, folder, list(self.ready.values()), self.store)

    def restore(self, folder: Path) -> None:
        """Takes up the groups that were ready when the checkpoint was made."""
        self.ready = {outcome.group_id: outcome for outcome in read_groups(folder, self.store)}
        self.began = time.perf_counter()

    async def close(self) -> None:
        """Ends what runs; the prompts of all groups that are neither trained nor filtered return to the buffer."""
        if self._filling:
            self._filling.cancel()
        running, self.running = self.running, {}
        for task, _ in running.values():
            task.cancel()
        await asyncio.gather(*(task for task, _ in running.values()), return_exceptions=True)
        for group_id in [*running, *self.ready]:
            self.cursor.give_back(group_id)
            self.store.drop([store_key(group_id)])
        self.ready = {}
