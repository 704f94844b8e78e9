"""Which tokens of a conversation are learned: the assistant's turns, found in what any chat template renders.

A turn reaches from the end of the generation prompt to its end-of-turn token. It is found by rendering the messages before
it and up to it as text; a text is tokenised once, and offsets tell its tokens. A template with ``{% generation %}`` tags says
itself what in a turn is learned.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vime.sample import Message

TAGS = re.compile(r"\{%-?\s*generation\b")


class TurnError(Exception):
    """The chat template cannot be used for training; the message says what it does and what to do."""


@dataclass(frozen=True)
class Encoded:
    """Token ids (int32 [n]) up to the last learned one, and which of them are learned (uint8 [n])."""

    ids: np.ndarray
    learned: np.ndarray


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items the two have in common at their start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def render(tokenizer: Any, messages: list[Message], tools: Any, **options: Any) -> Any:
    """What the tokenizer's chat template makes of the messages; TurnError where it refuses them."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tools=tools, **options)
    except TemplateError as error:
        raise TurnError(f"the chat template refuses the messages: {error}") from None


class Turns:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise TurnError(
                f"{type(tokenizer).__name__} tells no offsets of its tokens; save a tokenizer.json beside it"
            )
        self.tokenizer = tokenizer
        named = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self.special = named | set(tokenizer.all_special_ids)

    def render(self, messages: list[Message], tools: Any, **options: Any) -> Any:
        return render(self.tokenizer, messages, tools, **options)

    def ids(self, messages: list[Message], tools: Any) -> list[int]:
        """The tokens of the whole conversation."""
        return self.render(messages, tools, tokenize=True, return_dict=False)

    def learned(self, messages: list[Message], tools: Any) -> list[Encoded]:
        """The conversation as few sequences, in which every assistant turn is learned once.

        One, unless the template renders an earlier turn otherwise once others follow (Qwen3 takes its thinking out): such a
        turn gets a sequence of its own, which ends with it and reads as the model is to write it.
        """
        texts: dict[int, tuple[str, list[tuple[int, int]]]] = {}  # by number of messages: the text, its turns' extents
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for index in reversed(turns):
            before = self.render(messages[:index], tools, tokenize=False, add_generation_prompt=True)
            text = self.render(messages[: index + 1], tools, tokenize=False)
            start = common(before, text)
            if start < len(before) and not self.tagged(tools):
                raise TurnError(
                    f"the chat template's generation prompt ends {before[-40:]!r}, but it renders the assistant's message "
                    f"as {text[max(0, start - 10) : start + 40]!r}: which part is to be learned cannot be told; add "
                    "{% generation %} tags to the template"
                )
            within = next((count for count, (longer, _) in texts.items() if longer.startswith(text)), index + 1)
            texts.setdefault(within, (text, []))[1].append((start, len(text)))
        return [self.encode(messages[:count], tools, *texts[count]) for count in sorted(texts)]

    def tagged(self, tools: Any) -> bool:
        return bool(TAGS.search(self.tokenizer.get_chat_template(None, tools)))

    def encode(self, messages: list[Message], tools: Any, text: str, turns: list[tuple[int, int]]) -> Encoded:
        if self.tagged(tools):
            options = {"tokenizer_kwargs": {"return_offsets_mapping": True}, "return_assistant_tokens_mask": True}
            found = self.render(messages, tools, tokenize=True, return_dict=True, **options)
        else:
            found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = np.asarray(found["input_ids"], np.int32), np.asarray(found["offset_mapping"]).reshape(-1, 2)
        learned = np.zeros(len(ids), np.uint8)
        for start, end in turns:
            inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end) & (offsets[:, 1] > offsets[:, 0]))
            learned[inside if self.tagged(tools) else self.to_end_of_turn(inside, ids, offsets, text)] = 1
        if self.tagged(tools):
            learned &= np.asarray(found["assistant_masks"], np.uint8)
        places = np.flatnonzero(learned)
        if not len(places) or not places[0]:
            raise TurnError("the chat template leaves no token to learn, or none before the first assistant turn")
        return Encoded(ids[: places[-1] + 1], learned[: places[-1] + 1])

    def to_end_of_turn(self, inside: np.ndarray, ids: np.ndarray, offsets: np.ndarray, text: str) -> np.ndarray:
        """A turn's tokens without the white space after its end-of-turn token, which a server never gets to see."""
        last = len(inside)
        while last and text[slice(*offsets[inside[last - 1]])].isspace():
            last -= 1
        ended = last and int(ids[inside[last - 1]]) in self.special
        return inside[:last] if ended else inside
