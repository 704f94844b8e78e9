"""Environments of the ``verifiers`` package: rows, episodes and rewards are the environment's, the tokens are the servers'.

An environment runs on an event loop of its own, in a thread: what blocks in it does not hold up the driver. It asks for replies
through a client that continues one Conversation: nothing that the policy said is tokenised again.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from vime.config.nearest import nearest
from vime.data import DataError
from vime.rollout.conversation import Conversation
from vime.rollout.generate import Context
from vime.sample import Message, Sample, Task

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
INSTALL = "install it by `pip install 'verifiers[all]>=0.2.1,<0.3'`, docs/environments.md"


@cache
def environment(name: str, args: str) -> Any:
    """The environment ``name`` made with the JSON ``args``; once a process."""
    try:
        import verifiers

        load = verifiers.load_environment
    except (ImportError, AttributeError) as error:
        raise DataError(f"verifiers:{name} needs the package verifiers: {error}; {INSTALL}") from None
    try:
        made = load(name, **json.loads(args))
    except Exception as error:
        raise DataError(f"verifiers:{name} cannot be made with args = {args}: {error}") from None
    if getattr(made, "requires_group_rollouts", False):
        raise DataError(
            f"verifiers:{name} scores whole groups at once; only environments that score each rollout are taken"
        )
    return made


def rows(name: str, size: int | None, seed: int, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of the environment's training data, or of its evaluation data (option ``split = "eval"``)."""
    for option in options:
        if option not in ("args", "split"):
            raise DataError(f"verifiers:{name} has no option {option!r}{nearest(option, ['args', 'split'])}")
    args, split = json.dumps(options.get("args", {}), sort_keys=True), options.get("split", "train")
    if split not in ("train", "eval"):
        raise DataError(f"verifiers:{name}: split = {split!r}; it is train or eval")
    made = environment(name, args)
    try:
        data = made.get_dataset() if split == "train" else made.get_eval_dataset()
    except Exception as error:
        raise DataError(f"verifiers:{name} has no {split} data: {error}") from None
    for row in data:
        info = row.get("info") or {}
        own = (json.loads(info) if isinstance(info, str) else info).get("tool_defs")
        yield {
            "prompt": row["prompt"],
            "answer": row.get("answer"),
            "tools": [openai_tool(tool) for tool in own or made.tool_defs or []],
            "generate": "vime.envs.verifiers:generate",
            "verifiers": {"name": name, "args": args, "input": row},
        }


def openai_tool(tool: Any) -> dict[str, Any]:
    fields = tool if isinstance(tool, dict) else tool.model_dump()
    return {"type": "function", "function": {key: fields[key] for key in ("name", "description", "parameters")}}


@cache
def loop() -> asyncio.AbstractEventLoop:
    """The event loop that environments run on."""
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, name="environments of verifiers", daemon=True).start()
    return made


async def generate(context: Context, task: Task) -> Sample:
    """One rollout of the environment, with its reward; its metrics are the reward's parts."""
    section = task.metadata["verifiers"]
    made = environment(section["name"], section["args"])
    turns = Turns(context, task)
    rollout = made.run_rollout(dict(section["input"]), client_of(turns), "policy", {})
    output = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(rollout, loop()))
    if output.get("error"):
        raise ValueError(f"the environment failed: {output['error']}")
    if turns.conversation is None:
        raise ValueError("the environment ended before the policy replied")
    sample = turns.conversation.sample(reward=float(output["reward"]))
    parts = {name: float(value) for name, value in (output.get("metrics") or {}).items() if value is not None}
    sample.reward_parts = {name: value for name, value in parts.items() if name != "reward"}
    return sample


class Turns:
    """The environment's conversation, turn by turn; used on the driver's event loop."""

    def __init__(self, context: Context, task: Task) -> None:
        self.context, self.task = context, task
        self.driver = asyncio.get_running_loop()
        self.conversation: Conversation | None = None
        self.so_far: list[Message] = []  # as the environment has them

    async def reply(self, messages: list[Message]) -> str | None:
        """The policy's reply to messages that continue those before; None where there is no room for one."""
        if self.conversation is None:
            task = replace(self.task, messages=tuple(messages))
            self.conversation = Conversation(self.context, task)
        else:
            if messages[: len(self.so_far)] != self.so_far:
                raise ValueError(
                    "the environment changes messages that the policy has seen; its conversations are no longer one sample"
                )
            self.conversation.append(*messages[len(self.so_far) :])
        text = await self.conversation.respond()
        self.so_far = messages
        return text if text or not self.conversation.truncated else None

    def said(self, message: Message) -> None:
        self.so_far = [*self.so_far, message]


def wire(message: Any) -> Message:
    """A message of the package's in the OpenAI form."""
    fields: Message = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    if calls := fields.get("tool_calls"):
        form = [
            {"id": one["id"], "type": "function", "function": {"name": one["name"], "arguments": one["arguments"]}}
            for one in calls
        ]
        return {**fields, "tool_calls": form}
    return fields


def calls_in(text: str) -> list[tuple[str, str]]:
    """Names and arguments, as JSON, of the calls in a reply: ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``."""
    found = []
    for match in CALL.finditer(text):
        try:
            call = json.loads(match.group(1))
            arguments = call.get("arguments", {})
            found.append((str(call["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments)))
        except (ValueError, KeyError):
            continue  # no call: the text stays in the reply, where the environment sees it
    return found


def client_of(turns: Turns) -> Any:
    """The package's client for one rollout, which asks our servers."""
    from verifiers.clients.client import Client
    from verifiers.errors import OverlongPromptError
    from verifiers.types import Response, ResponseMessage, ToolCall

    class TokenClient(Client):  # type: ignore[misc, type-arg]
        async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
            asked = asyncio.run_coroutine_threadsafe(turns.reply([wire(one) for one in prompt]), turns.driver)
            text = await asyncio.wrap_future(asked)
            if text is None:
                raise OverlongPromptError("rollout.max_tokens leaves no room for a reply")
            found = calls_in(text) if tools else []
            calls = [ToolCall(id=f"call_{i}", name=name, arguments=args) for i, (name, args) in enumerate(found)]
            cut = turns.conversation is not None and turns.conversation.truncated
            message = ResponseMessage(
                content=text,
                tool_calls=calls or None,
                finish_reason="length" if cut else "tool_calls" if calls else "stop",
                is_truncated=cut,
            )
            made = {"role": "assistant", "content": text}
            turns.said(wire(made | {"tool_calls": [call.model_dump() for call in calls]} if calls else made))
            return Response(id="", created=0, model=model, message=message)

        def setup_client(self, config: Any) -> Any: ...

        async def to_native_tool(self, tool: Any) -> Any: ...

        async def to_native_prompt(self, messages: Any) -> Any: ...

        async def get_native_response(self, *_: Any, **__: Any) -> Any: ...

        async def raise_from_native_response(self, response: Any) -> None: ...

        async def from_native_response(self, response: Any) -> Any: ...

        async def close(self) -> None: ...

    return TokenClient(None)
