"""Task, Sample, Group, VersionSpan: the words everything else uses.

Pure data: imports neither torch nor a network. Token ids are the ids the server returned, never re-tokenised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""One chat message in the OpenAI form: ``{"role": ..., "content": ...}``."""


@dataclass(frozen=True)
class Task:
    """One prompt row: what is asked, and what a reward needs to judge the reply.

    ``id`` is stable across runs and resumes: it names the row, not the draw. ``messages`` is what the chat template
    renders; ``answer`` is the reference answer as text, or None; ``metadata`` is JSON-serialisable and is passed to the
    reward untouched.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens ``[start, end)`` were made by weights ``version``."""

    version: int
    start: int
    end: int


@dataclass
class Sample:
    """One response to one prompt.

    ``prompt_ids`` and ``response_ids`` are token ids; ``logprobs`` (behaviour log-probabilities, natural log, under the
    sampling temperature; NaN where no server sampled the response) and ``loss_mask`` (1: trained) have one entry per
    response token, and so have ``reference`` and ``teacher``, the log-probabilities of other models, where a server was
    asked for them; ``versions`` are spans over response tokens. ``finish_reason`` is "stop", "length" or "abort".
    ``rollout`` numbers the generate call within the group: samples of one call share it.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    text: str
    loss_mask: list[int] = field(default_factory=list)
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    rollout: int = 0
    reference: list[float] | None = None
    teacher: list[float] | None = None

    def __post_init__(self) -> None:
        self.loss_mask = self.loss_mask or [1] * len(self.response_ids)
        for name in ("logprobs", "loss_mask"):
            found, expected = len(getattr(self, name)), len(self.response_ids)
            if found != expected:
                raise ValueError(f"{name} has {found} entries for {expected} response tokens; they must be one to one")

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.versions)

    def mask_stale(self, version: int) -> int:
        """Takes response tokens of weights older than ``version`` out of the loss; returns how many of them were in it."""
        before = sum(self.loss_mask)
        for span in self.versions:
            if span.version < version:
                self.loss_mask[span.start : span.end] = [0] * (span.end - span.start)
        return before - sum(self.loss_mask)


@dataclass
class Group:
    """All samples of one draw of one prompt. ``id`` is unique in a run; advantages are formed over it, by id."""

    id: int
    task: Task
    samples: list[Sample]

    @property
    def rewards(self) -> list[float]:
        return [sample.reward for sample in self.samples if sample.reward is not None]
