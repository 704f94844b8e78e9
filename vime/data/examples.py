"""What is trained on, in tokens: sequences for SFT, pairs for a reward model; and the limit on their length."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vime.config.supervised import Batches
from vime.data import DataError
from vime.data.turns import TurnError, Turns, common
from vime.sample import Task
from vime.store.shared_memory import Payload, SharedMemoryStore
from vime.training.plan import Row


@dataclass(frozen=True)
class Example:
    """The first tokens (int32), and the ways they go on: (ids int32 [n], loss mask uint8 [n]), two for a pair."""

    id: str
    prompt_ids: np.ndarray
    responses: tuple[tuple[np.ndarray, np.ndarray], ...]

    @property
    def length(self) -> int:
        """Of the longest way, in tokens."""
        return len(self.prompt_ids) + max(len(ids) for ids, _ in self.responses)

    @property
    def identity(self) -> list[str]:
        arrays = [self.prompt_ids, *(array for response in self.responses for array in response)]
        return [self.id, hashlib.sha256(b"|".join(array.tobytes() for array in arrays)).hexdigest()]

    def put(self, store: SharedMemoryStore, key: str) -> list[Row]:
        """Writes the payload; the rows, the first of which is worth 1, the other 0."""
        unsampled = [np.full(len(ids), np.nan, np.float32) for ids, _ in self.responses]
        store.put(
            key,
            [
                Payload(self.prompt_ids, ids, nan, mask)
                for (ids, mask), nan in zip(self.responses, unsampled, strict=True)
            ],
        )
        return [
            Row(key, index, index, len(self.prompt_ids), len(ids), int(mask.sum()), float(index == 0))
            for index, (ids, mask) in enumerate(self.responses)
        ]


def sequences(task: Task, turns: Turns) -> list[Example]:
    """The task's reply as sequences, in which its assistant turns are learned."""
    (reply,) = task.metadata["replies"]
    found = turns.learned([*task.messages, *reply], task.metadata["tools"])
    examples = []
    for number, one in enumerate(found):
        first = int(np.flatnonzero(one.learned)[0])
        name = task.id if len(found) == 1 else f"{task.id}#{number}"
        examples.append(Example(name, one.ids[:first], ((one.ids[first:], one.learned[first:]),)))
    return examples


def pair(task: Task, turns: Turns) -> list[Example]:
    """The chosen and the rejected conversation. A score is read at the last token: the loss mask marks one more token after
    it, which stands for what would follow and is never read by the model."""
    both = [turns.ids([*task.messages, *reply], task.metadata["tools"]) for reply in task.metadata["replies"]]
    shared = common(*both)
    responses = []
    for ids in both:
        rest = np.asarray([*ids[shared:], ids[-1]], np.int32)
        responses.append((rest, np.eye(1, len(rest), len(rest) - 1, dtype=np.uint8)[0]))
    return [Example(task.id, np.asarray(both[0][:shared], np.int32), tuple(responses))]


def make_examples(tasks: Sequence[Task], turns: Turns, pairs: bool, section: Batches) -> tuple[list[Example], int]:
    """The examples of all tasks that are within the length, and how many are not. DataError names the row."""
    made, dropped = [], 0
    for task in tasks:
        try:
            found = (pair if pairs else sequences)(task, turns)
        except TurnError as error:
            raise DataError(f"{task.id}: {error}") from None
        for example in found:
            length = example.length - pairs
            if length <= section.max_length:
                made.append(example)
            elif section.too_long == "refuse":
                raise DataError(
                    f"{example.id} has {length} tokens, over batch.max_length = {section.max_length}; raise it, or set "
                    'batch.too_long = "drop"'
                )
            else:
                dropped += 1
    if not made:
        raise DataError(f"all {dropped} sequences are over batch.max_length = {section.max_length} tokens; raise it")
    return made, dropped
