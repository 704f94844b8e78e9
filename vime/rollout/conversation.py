"""One sample of many turns: token-exact bookkeeping for generate functions that talk with tools or an environment."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from vime.data.turns import TurnError, render
from vime.rollout.generate import Context, respond
from vime.sample import Message, Sample, Task, VersionSpan

REPLY = "@@reply@@"  # stands for the policy's reply where what follows it is rendered


def following(tokenizer: Any, messages: list[Message], tools: Any) -> list[int]:
    """Token ids of ``messages`` after an assistant's reply: the end of its turn, the messages, the next generation prompt.

    The reply itself is never rendered: its tokens are the server's. TurnError where the chat template refuses the messages.
    """
    before = [{"role": "user", "content": "."}, {"role": "assistant", "content": REPLY}]
    text = render(tokenizer, [*before, *messages], tools, tokenize=False, add_generation_prompt=True)
    _, found, after = text.partition(REPLY)
    if not found:
        raise TurnError("the chat template does not render an assistant's message that others follow")
    ids: list[int] = tokenizer.encode(after, add_special_tokens=False)
    return ids


class Conversation:
    """The policy's replies and what it is told between them, as one sample.

    Replies are the server's own tokens, never tokenised again; they are trained, what is appended is not. All of it after
    the prompt together may have ``rollout.max_tokens`` tokens.
    """

    def __init__(self, context: Context, task: Task) -> None:
        self.context, self.task = context, task
        self.prompt_ids = context.prompt_ids(task)
        self.messages: list[Message] = []
        """all that followed the prompt: replies, and what was appended"""
        self.truncated = False
        """there is no room for more: the last reply was cut, or what was appended since did not fit"""
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._mask: list[int] = []
        self._versions: list[VersionSpan] = []
        self._experts: np.ndarray | None = None
        self._unsaid: list[Message] = []

    @property
    def room(self) -> int:
        """Tokens that the rest of the conversation may have."""
        return int(self.context.sampling["max_tokens"]) - len(self._ids)

    def append(self, *messages: Message) -> None:
        """Messages that the policy reads before its next reply: of a tool, the user, the environment."""
        if not self._ids:
            raise ValueError("messages follow a reply; what comes before the first is the task's messages")
        self._unsaid += messages
        self.messages += messages

    async def respond(self, max_tokens: int | None = None) -> str:
        """The policy's next reply, of ``max_tokens`` tokens at most; "" where there is no room for one (``truncated``)."""
        between: list[int] = []
        if self._ids:
            if not self._unsaid:
                raise ValueError("the policy has replied; append a message before its next reply")
            between = following(self.context.tokenizer, self._unsaid, list(self.task.tools) or None)
            if between[:1] == self._ids[-1:]:  # the server returned the token that ended the turn
                between = between[1:]
        room = self.room - len(between)
        if room <= 0:
            self.truncated = True
            return ""
        most = min(room, max_tokens or room)
        context = replace(self.context, sampling={**self.context.sampling, "max_tokens": most})
        made = await respond(context, self.prompt_ids + self._ids + between)
        self._add(between, [math.nan] * len(between), trained=0)
        start = len(self._ids)
        self._add(made.token_ids, made.logprobs, trained=1)
        self._versions += [replace(span, start=start + span.start, end=start + span.end) for span in made.versions]
        self._experts = made.experts
        self._unsaid = []
        self.truncated = made.finish_reason == "length" and self.room <= 0
        reply: str = self.context.tokenizer.decode(made.token_ids, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": reply})
        return reply

    def _add(self, ids: list[int], logprobs: list[float], trained: int) -> None:
        self._ids += ids
        self._logprobs += logprobs
        self._mask += [trained] * len(ids)

    def sample(self, reward: float | None = None, **metadata: Any) -> Sample:
        """The conversation up to the last reply. Without a ``reward`` the run's reward scores that reply; it finds ``metadata``
        and the ``messages`` in the task's."""
        if not self._ids:
            raise ValueError(f"the policy has not replied to task {self.task.id}: rollout.max_tokens leaves no room")
        replies = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return Sample(
            self.prompt_ids,
            self._ids,
            self._logprobs,
            tuple(self._versions),
            "length" if self.truncated else "stop",
            replies[-1],
            loss_mask=self._mask,
            reward=reward,
            metadata={"messages": self.messages, **metadata},
            experts=self._experts,
        )
