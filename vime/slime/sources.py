"""Prompts for and from functions written for slime: what they take prompts from, and a data source of theirs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

from vime.data.cursor import CursorError
from vime.data.journal import Journal
from vime.data.streams import task_again
from vime.functions import cause_of
from vime.sample import Task
from vime.slime.sample import Sample, prompt_of


class DataSource:
    """What a class at ``data_source_path`` has; it need not be derived from this."""

    def __init__(self, args: Any) -> None:
        self.args = args

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """So many groups, each of a prompt's samples without responses."""
        raise NotImplementedError

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Groups that come again."""
        raise NotImplementedError

    def save(self, rollout_id: int) -> None: ...

    def load(self, rollout_id: int | None = None) -> None: ...

    def __len__(self) -> int:
        raise NotImplementedError


class SourceCursor:
    """A user's data source in the place of ``PromptCursor``: it is asked for one prompt at a time, and what is taken and not
    ended is in a checkpoint, to come again.

    Its own state is kept in the checkpoint where it has ``state_dict`` and ``load_state_dict``; else by its ``save`` and
    ``load``, with the number of prompts it had given.
    """

    def __init__(self, source: Any, first: Callable[[int], list[Task]] = lambda count: []) -> None:
        """``first`` gives some prompts at hand, which the source does not."""
        self.source, self.first = source, first
        self.drawn = 0
        self.open: dict[int, Task] = {}
        self.buffer: list[tuple[int, Task]] = []

    def _asked(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self.source, name)(*arguments)
        except Exception as error:
            raise CursorError(f"slime.data_source_path: {name} failed: {cause_of(error)}") from error

    def take(self, step: int = 0) -> tuple[int, Task]:
        if self.buffer:
            group_id, task = self.buffer.pop(0)
        else:
            groups = self._asked("get_samples", 1)
            if not groups or (isinstance(groups[0], list) and not groups[0]):
                raise CursorError("slime.data_source_path: get_samples(1) gave no group; a data source does not end")
            group_id, self.drawn = self.drawn, self.drawn + 1
            sample = groups[0][0] if isinstance(groups[0], list) else groups[0]
            messages = [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else sample.prompt
            label = None if sample.label is None else str(sample.label)
            task = Task(f"source/{group_id}", tuple(messages), label, dict(sample.metadata or {}))
        self.open[group_id] = task
        return group_id, task

    def task_of(self, group_id: int) -> Task:
        return self.open[group_id]

    def give_back(self, group_id: int) -> None:
        self.buffer.append((group_id, self.open.pop(group_id)))
        self.buffer.sort(key=lambda one: one[0])

    def finish(self, group_id: int, passed: float | None = None) -> None:
        del self.open[group_id]

    def state(self, held: Collection[int] = ()) -> dict[str, Any]:
        again = [*self.buffer, *((group, task) for group, task in self.open.items() if group not in held)]
        own = None
        if hasattr(self.source, "state_dict"):
            own = self._asked("state_dict")
            try:
                json.dumps(own)
            except (TypeError, ValueError) as error:
                raise CursorError(f"slime.data_source_path: state_dict() is no JSON: {error}") from None
        else:
            self._asked("save", self.drawn)
        return {
            "drawn": self.drawn,
            "source": own,
            "buffer": [(group, asdict(task)) for group, task in sorted(again, key=lambda one: one[0])],
            "held": [(group, asdict(self.open[group])) for group in held],
        }

    def load(self, state: dict[str, Any]) -> None:
        if "source" not in state:
            raise CursorError("the checkpoint's prompts are not of slime.data_source_path; resume it without")
        self.drawn = state["drawn"]
        self.buffer = [(group, task_again(fields)) for group, fields in state["buffer"]]
        self.open = {group: task_again(fields) for group, fields in state["held"]}
        if state["source"] is None:
            self._asked("load", self.drawn)
        else:
            self._asked("load_state_dict", state["source"])


class PromptSource:
    """``data_source`` as functions get it: prompts of the run's cursor, each with its group's samples without responses.

    What it hands out stays on the way until it is trained, filtered, or given back.
    """

    def __init__(
        self,
        cursor: Any,
        journal: Journal,
        prompt: Callable[[Task], Any],
        version: Callable[[], int],
        group_size: int,
    ) -> None:
        self.cursor, self.journal, self.prompt, self.version = cursor, journal, prompt, version
        self.group_size = group_size
        self.begun: dict[int, int] = {}  # the version that was served when a group was taken

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = []
        for _ in range(num_samples):
            group_id, task = self.cursor.take(self.version())
            self.journal.write("taken", group_id, task=task.id)
            self.begun[group_id] = self.version()
            first = group_id * self.group_size
            prompt = self.prompt(task)
            groups.append([prompt_of(task, prompt, group_id, first + i) for i in range(self.group_size)])
        return groups

    def add_samples(self, samples: Sequence[Sequence[Sample]]) -> None:
        """Gives prompts back: they come again from their beginning, before new ones."""
        for group in samples:
            group_id = group[0].group_index
            if group_id not in self.begun:
                raise ValueError(f"group_index {group_id} is not on its way; add_samples takes groups of get_samples")
            del self.begun[group_id]
            self.cursor.give_back(group_id)

    def __len__(self) -> int:
        source = getattr(self.cursor, "source", None)
        if source is not None:
            return len(source)
        return sum(one.identity().get("tasks", 0) for one in self.cursor.sources.values())

    def __getattr__(self, name: str) -> Any:
        if name != "cursor" and hasattr(self.cursor, "source"):
            return getattr(self.cursor.source, name)
        raise AttributeError(f"data_source has no {name!r}; it has get_samples, add_samples and len()")
