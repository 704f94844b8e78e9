"""What slime's functions are given and return: Sample and the outputs of filters and rollouts; to and from our own."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np

from vime import sample as native
from vime.sample import Task, VersionSpan


@dataclass
class Sample:
    """A prompt, and what has been made of it so far.

    ``tokens`` are the prompt's and the response's, ``response_length`` says how many are the response's; ``loss_mask`` (None:
    all 1) and ``rollout_log_probs`` have one entry for each of those. ``spans`` say which weights made which response tokens,
    as far as ``vime.slime.serving`` was asked for them.
    """

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: dict[str, Any] = field(default_factory=dict)
    prefix_cache_info: dict[str, Any] = field(default_factory=dict)
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward  # type: ignore[index]

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] = (),
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Lengthens the response, with loss mask and log-probabilities, which what the policy said must have and what it was
        told has not. ``meta_info`` may say why it ended: {"finish_reason": {"type": "stop", "length" or "abort"}}."""
        ids = [int(token) for token in tokens]
        if trainable and ids and (log_probs is None or len(log_probs) != len(ids)):
            found = "none" if log_probs is None else len(log_probs)
            raise ValueError(
                f"{len(ids)} tokens that are to be trained come with {found} log_probs; give one for each token"
            )
        if not trainable and log_probs is not None:
            raise ValueError("log_probs come with trainable=False; what the policy did not say has none")
        before = [1] * self.response_length if self.loss_mask is None else self.loss_mask
        held = [0.0] * self.response_length if self.rollout_log_probs is None else self.rollout_log_probs
        self.loss_mask = [*before, *[int(trainable)] * len(ids)]
        self.rollout_log_probs = [*held, *(map(float, log_probs) if log_probs is not None else [0.0] * len(ids))]
        self.tokens = [*self.tokens, *ids]
        self.response_length += len(ids)
        self.response += text or ""
        reason = (meta_info or {}).get("finish_reason")
        if update_terminal_info and reason:
            self.status = STATUS[reason["type"] if isinstance(reason, dict) else reason]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "status": self.status.value, "spans": [vars(span) for span in self.spans]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        known = {one.name for one in fields(cls)}
        sample = cls(**{name: value for name, value in data.items() if name in known})
        sample.status = cls.Status(data.get("status", "pending"))
        sample.spans = [VersionSpan(**span) for span in data.get("spans", [])]
        for name in data.keys() - known:
            setattr(sample, name, data[name])
        return sample


STATUS = {"stop": Sample.Status.COMPLETED, "length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED}
FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort"}


@dataclass
class DynamicFilterOutput:
    """What a dynamic filter says of a group."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


class SampleError(ValueError):
    """A function returned a sample that cannot be trained; the message says what is wrong with it."""


def prompt_of(task: Task, prompt: str | list[dict[str, Any]], group: int | None, index: int | None) -> Sample:
    """The task, before a response."""
    return Sample(
        group_index=group,
        index=index,
        prompt=copy.deepcopy(prompt),
        label=task.answer,
        metadata={
            **copy.deepcopy(task.metadata),
            **({"tools": copy.deepcopy(list(task.tools))} if task.tools else {}),
        },
    )


def from_native(
    task: Task, prompt: str | list[dict[str, Any]], group: int | None, index: int | None, made: native.Sample
) -> Sample:
    """A response of ours as slime has it."""
    sample = prompt_of(task, prompt, group, index)
    sample.tokens = [*made.prompt_ids, *made.response_ids]
    sample.response, sample.response_length = made.text, len(made.response_ids)
    sample.reward, sample.status = made.reward, STATUS[made.finish_reason]
    sample.loss_mask = list(made.loss_mask)
    sample.rollout_log_probs = [0.0 if math.isnan(value) else value for value in made.logprobs]
    sample.weight_versions = [str(span.version) for span in made.versions]
    sample.spans = list(made.versions)
    sample.rollout_routed_experts, sample.teacher_log_probs = made.experts, made.teacher
    sample.metadata |= made.metadata
    sample.rollout_id = index
    return sample


def to_native(sample: Any, version: int, reward_key: str | None = None) -> native.Sample:
    """What a function of slime's made, as ours; SampleError where it cannot be trained.

    Tokens of which nothing says by what weights they were made count as those of ``version``: the served one when they were
    begun, so never as newer than they are.
    """
    total, length = len(sample.tokens), sample.response_length
    if getattr(sample.status, "value", None) not in FINISH:
        raise SampleError(f"its status is {sample.status}; a finished one is COMPLETED or TRUNCATED")
    if not 0 < length < total:
        raise SampleError(f"response_length is {length} of {total} tokens; prompt and response need one at least")
    mask = [1] * length if sample.loss_mask is None else [int(value) for value in sample.loss_mask]
    if sample.remove_sample:
        mask = [0] * length
    if len(mask) != length:
        raise SampleError(f"loss_mask has {len(mask)} entries for response_length = {length}; they must be one to one")
    logprobs = sample.rollout_log_probs
    if logprobs is None and any(mask):
        raise SampleError(
            "rollout_log_probs is None: trained tokens need the log-probability that the server sampled them with; ask it for "
            "them (logprobs), or let vime.slime.serving.generate do so"
        )
    values = [math.nan] * length if logprobs is None else [float(value) for value in logprobs]
    if len(values) != length:
        raise SampleError(
            f"rollout_log_probs has {len(values)} entries for response_length = {length}; they must be one to one"
        )
    prompt = total - length
    return native.Sample(
        [int(token) for token in sample.tokens[:prompt]],
        [int(token) for token in sample.tokens[prompt:]],
        [value if keep else math.nan for value, keep in zip(values, mask, strict=True)],
        spans_of(sample, length, version),
        FINISH[sample.status.value],
        sample.response,
        loss_mask=mask,
        reward=None if sample.reward is None else reward_of(sample.reward, reward_key)[0],
        reward_parts={} if sample.reward is None else reward_of(sample.reward, reward_key)[1],
        teacher=sample.teacher_log_probs,
        metadata=dict(sample.metadata),
        experts=None if sample.rollout_routed_experts is None else np.asarray(sample.rollout_routed_experts),
    )


def spans_of(sample: Any, length: int, version: int) -> tuple[VersionSpan, ...]:
    """The sample's own spans, and ``version`` for what is between them."""
    spans: list[VersionSpan] = []
    end = 0
    for span in [*getattr(sample, "spans", []), VersionSpan(version, length, length)]:
        if span.start > end:
            spans.append(VersionSpan(version, end, min(span.start, length)))
        if span.end > span.start and span.end <= length:
            spans.append(span)
        end = max(end, span.end)
    return tuple(spans)


def reward_of(value: Any, key: str | None) -> tuple[float, dict[str, float]]:
    """The number, and the other numbers of a dict; SampleError where there is none."""
    if not isinstance(value, dict):
        value, others = {"reward": value}, {}
        key = "reward"
    else:
        if key is None or key not in value:
            raise SampleError(
                f"the reward is a dict with {', '.join(map(repr, value))}; set slime.reward_key to one of them"
            )
        others = {
            str(name): float(one)
            for name, one in value.items()
            if name != key and isinstance(one, (int, float)) and math.isfinite(one)
        }
    number = value[key]
    if isinstance(number, (str, bytes)) or number is None or not math.isfinite(float(number)):
        raise SampleError(f"the reward is {number!r:.60}; rewards are finite numbers")
    return float(number), others
