"""Task, Sample, Group, VersionSpan: the words everything else uses.

Pure data: imports neither torch nor a network. Token ids are the ids the server returned, never re-tokenised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Message = dict[str, Any]
"""One chat message in the OpenAI form: ``{"role": ..., "content": ...}``."""
SHIFTED = "shift the spans of each further completion by the response tokens before it, as Conversation does"


@dataclass(frozen=True)
class Task:
    """One prompt row: what is asked, and what a reward needs to judge the reply.

    ``id`` is stable across runs and resumes: it names the row, not the draw. ``messages`` is what the chat template
    renders, with ``tools``, in the OpenAI form; ``answer`` is the reference answer as text, or None; ``metadata`` is
    JSON-serialisable and is passed to the reward untouched. ``reward`` and ``generate`` name the row's own functions, where
    they are not the run's. ``source`` is its source's name in a mixture.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    reward: str | None = None
    generate: str | None = None
    source: str = ""

    @property
    def identity(self) -> list[Any]:
        """What tells it from others, as JSON."""
        return [self.id, self.messages, self.answer, self.metadata, self.tools, self.reward, self.generate]


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
    ``experts`` says, of a model with experts, where each token but the last was routed when it was sampled: uint8 or uint16
    [prompt + response - 1, layers, experts a token]; None where no server told.
    ``rollout`` numbers the generate call within the group: samples of one call share it. ``metadata``, JSON, is what a
    generate function wants the reward to see beside the task's own.
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
    metadata: dict[str, Any] = field(default_factory=dict)
    experts: np.ndarray | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.loss_mask = self.loss_mask or [1] * len(self.response_ids)
        self._check_lengths()

    def _check_lengths(self) -> None:
        for name in ("logprobs", "loss_mask"):
            found, expected = len(getattr(self, name)), len(self.response_ids)
            if found != expected:
                raise ValueError(f"{name} has {found} entries for {expected} response tokens; they must be one to one")
        tokens = len(self.prompt_ids) + len(self.response_ids)
        if self.experts is not None and len(self.experts) != tokens - 1:
            raise ValueError(
                f"experts has {len(self.experts)} entries for {tokens} tokens; all but the last must have one"
            )

    def check(self) -> None:
        """ValueError where lists are not one to one, or where a trained token is in no version span or in several: how old it is
        would not be known."""
        self._check_lengths()
        if not self.versions:
            raise ValueError("versions is empty; give the spans of the completions that the response is made of")
        end, length = 0, len(self.response_ids)
        for span in self.versions:
            if not isinstance(span.version, int):
                raise ValueError(
                    f"versions has the version {span.version!r}; give the integer of the completion's span"
                )
            if not end <= span.start < span.end <= length:
                raise ValueError(
                    f"versions has [{span.start}, {span.end}) where it must be within [{end}, {length}); {SHIFTED}"
                )
            end = span.end
        edges = [0, *(edge for span in self.versions for edge in (span.start, span.end)), length]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if any(self.loss_mask[start:end]):
                raise ValueError(f"versions leaves out [{start}, {end}), where tokens are trained; {SHIFTED}")

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass
class Group:
    """All samples of one draw of one prompt. ``id`` is unique in a run; advantages are formed over it, by id."""

    id: int
    task: Task
    samples: list[Sample]

    @property
    def rewards(self) -> list[float]:
        return [sample.reward for sample in self.samples if sample.reward is not None]
