"""Given conversations: rows to tasks that hold the replies beside the prompt, in ``metadata["replies"]``: lists of messages,
one for SFT, the chosen and the rejected for a reward model. ``metadata["tools"]`` is what the chat template gets."""

from __future__ import annotations

from typing import Any

from vime.config.nearest import nearest
from vime.config.supervised import Conversations
from vime.data import DataError
from vime.data.sources import each_row, given_tools, is_messages, plain, prompt_messages, without_nulls
from vime.sample import Message, Task

Messages = list[Message]


def load_conversations(section: Conversations, pairs: bool) -> list[Task]:
    """All conversations of a source, or all pairs of them, in its order. Raises DataError."""
    read = pair if pairs else conversation

    def task(name: str, row: dict[str, Any], where: str) -> Task:
        prompt, replies = read(row, section, where)
        tools = given_tools(row, section.tools_key, where) or None
        return Task(name, tuple(prompt), metadata=plain({"replies": replies, "tools": tools}, where))

    return each_row(section.source, section.size, section.seed, section.options, task)


def conversation(row: dict[str, Any], section: Conversations, where: str) -> tuple[Messages, list[Messages]]:
    """A row's prompt, which ends before the first assistant message, and the rest of it up to the last one."""
    if section.messages_key not in row:
        for key, meant in ((section.prompt_key, section.messages_key), (section.response_key, section.response_key)):
            if key not in row:
                raise DataError(
                    f"{where}: neither a column {section.messages_key!r} (data.messages_key) nor {key!r}"
                    f"{nearest(meant, list(row))}"
                )
        prompt = prompt_of(row, section, where)
        return prompt, [reply(row, section.response_key, prompt, where)]
    messages = whole(row, section.messages_key, section, where)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DataError(f"{where}: no message of {section.messages_key!r} is the assistant's: nothing is to be learned")
    if turns[0] == 0:
        raise DataError(
            f"{where}: {section.messages_key!r} starts with the assistant; put the user's or system message first"
        )
    return messages[: turns[0]], [messages[turns[0] : turns[-1] + 1]]


def pair(row: dict[str, Any], section: Conversations, where: str) -> tuple[Messages, list[Messages]]:
    """A row's prompt, given or what its two conversations have in common, and the chosen and the rejected reply."""
    keys = section.chosen_key, section.rejected_key
    for key in keys:
        if key not in row:
            raise DataError(f"{where}: no column {key!r}{nearest(key, list(row))}")
    if section.prompt_key in row:
        prompt = prompt_of(row, section, where)
        return prompt, [reply(row, key, prompt, where) for key in keys]
    both = [whole(row, key, section, where) for key in keys]
    common = 0
    while common < min(map(len, both)) - 1 and both[0][common] == both[1][common]:
        common += 1
    if not common:
        raise DataError(
            f"{where}: {keys[0]!r} and {keys[1]!r} have no first message in common; a pair is two replies to one prompt"
        )
    return both[0][:common], [messages[common:] for messages in both]


def prompt_of(row: dict[str, Any], section: Conversations, where: str) -> Messages:
    return list(prompt_messages(row, section.prompt_key, section.system, section.template, where))


def whole(row: dict[str, Any], key: str, section: Conversations, where: str) -> Messages:
    """A column's list of messages, with the system message put in."""
    if not is_messages(row[key]):
        raise DataError(f"{where}: {key!r} is no list of messages {{role, content}}: {row[key]!r:.80}")
    messages: Messages = without_nulls(row[key])
    if section.system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": section.system})
    return messages


def reply(row: dict[str, Any], key: str, prompt: Messages, where: str) -> Messages:
    """A column's reply to the prompt: text, or messages, which may have the prompt before them."""
    value = row[key]
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if not is_messages(value):
        raise DataError(f"{where}: {key!r} is neither text nor a list of messages: {value!r:.80}")
    messages: Messages = without_nulls(value)
    for start in (prompt, prompt[1:]):  # a system message may have been put before it
        if start and messages[: len(start)] == start:
            messages = messages[len(start) :]
            break
    if not messages or messages[-1]["role"] != "assistant":
        raise DataError(f"{where}: {key!r} does not end with a message of the assistant")
    return messages
