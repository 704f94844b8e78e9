"""One prompt to one response. A generate function is ``async (Context, Task) -> Sample``; this is the single-turn one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vime.inference.client import InferenceError, RequestRefused, Server
from vime.rewards import Part, Reward, score
from vime.sample import Sample, Task, VersionSpan

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Context:
    """What a generate function has at hand: servers, tokenizer, reward, sampling, deadlines, the version served.

    ``slots`` bounds the requests in flight. ``session_id`` keeps a group on one server, whose cache holds its prompt.
    ``scorers`` are the servers of "reference" and "teacher", where there are any.
    """

    servers: list[Server]
    tokenizer: Any
    reward: Reward | dict[str, Part]
    sampling: dict[str, Any]
    request_timeout_s: float
    reward_timeout_s: float
    retries: int
    slots: asyncio.Semaphore
    version: int = 0
    session_id: str = ""
    prompts: dict[str, list[int]] = field(default_factory=dict)
    response_keys: tuple[str, ...] = ()
    scorers: dict[str, Server] = field(default_factory=dict)

    def prompt_ids(self, task: Task) -> list[int]:
        """Token ids of the task's messages under the tokenizer's own chat template, ready for the reply."""
        if task.id not in self.prompts:
            self.prompts[task.id] = self.tokenizer.apply_chat_template(
                list(task.messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        return self.prompts[task.id]

    @property
    def server(self) -> Server:
        """Where requests go: the only server, or any of several, since all of those lead to the router."""
        return self.servers[0]


async def requested(context: Context, call: Callable[[], Awaitable[Answer]]) -> Answer:
    """The answer to a request, which waits for a free slot and is made again, ``retries`` times, after a server's failure."""
    for attempt in range(context.retries):
        try:
            async with context.slots:
                return await call()
        except RequestRefused:
            raise
        except InferenceError:
            await asyncio.sleep(0.5 * 2**attempt)
    async with context.slots:
        return await call()


async def single_turn(context: Context, task: Task) -> Sample:
    """Samples one response, with retries on a server's failure, and scores it."""
    prompt_ids = context.prompt_ids(task)
    completion = await requested(
        context,
        lambda: context.server.generate(
            prompt_ids, context.sampling, context.request_timeout_s, context.version, context.session_id
        ),
    )
    text = context.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    sample = Sample(
        prompt_ids, completion.token_ids, completion.logprobs, completion.versions, completion.finish_reason, text
    )
    sample.reward, sample.reward_parts = await score(context.reward, task, text, context.reward_timeout_s)
    return sample


async def given(context: Context, task: Task, rank: int) -> Sample:
    """The response in the task's own column number ``rank``, as if it had been sampled; the first is worth 1, others 0."""
    text = task.metadata[context.response_keys[rank]]
    ids = [*context.tokenizer.encode(text, add_special_tokens=False), context.tokenizer.eos_token_id]
    span = VersionSpan(context.version, 0, len(ids))
    return Sample(
        context.prompt_ids(task),
        ids,
        [math.nan] * len(ids),
        (span,),
        "stop",
        text,
        reward=float(rank == 0),
    )


async def ask_others(context: Context, samples: Sequence[Sample]) -> None:
    """Reference's and teacher's log-probabilities of the samples, from their servers, where there are any."""

    async def ask(sample: Sample, name: str, server: Server) -> None:
        ids = sample.prompt_ids, sample.response_ids
        setattr(sample, name, await requested(context, lambda: server.score(*ids, context.request_timeout_s)))

    await asyncio.gather(*(ask(one, name, server) for name, server in context.scorers.items() for one in samples))
