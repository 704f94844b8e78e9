"""Which tokens of a conversation are learned, under chat templates of many kinds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiny import make_tokenizer
from vime.data.turns import TurnError, Turns

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING = (  # as Qwen3's: what was thought before the last question is taken out
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PLAIN = (  # no end-of-turn token: the new line is the end
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
LAST_TURN = (  # as gpt-oss's: the last turn ends otherwise
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{{ '<|user|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORCED = CHATML.replace("<|assistant|>\n{% endif %}", "<|assistant|>\n<think>\n{% endif %}")  # as DeepSeek-R1's
TWO_TURNS = [
    {"role": "system", "content": "be good"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello", "reasoning_content": "greet"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": " 2\n é", "reasoning_content": "sum"},
]
WITH_TOOL = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "call", "reasoning_content": "ask"},
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "sunny", "reasoning_content": "say"},
]


def turns(template: str) -> Turns:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return Turns(tokenizer)


def learned(template: str, messages: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Of each sequence its text and the runs of it that are learned."""
    found = turns(template)
    seen = []
    for one in found.learned(messages, None):
        runs: list[list[int]] = []
        for place, (token, inside) in enumerate(zip(one.ids.tolist(), one.learned.tolist(), strict=True)):
            if inside:
                if not place or not one.learned[place - 1]:
                    runs.append([])
                runs[-1].append(token)
        seen.append((found.tokenizer.decode(one.ids), [found.tokenizer.decode(run) for run in runs]))
    return seen


def test_every_assistant_turn_is_learned_with_its_end_and_nothing_else() -> None:
    ((text, runs),) = learned(CHATML, TWO_TURNS)
    assert runs == ["hello<|end|>", " 2\n é<|end|>"]
    assert text == (
        "<|system|>\nbe good<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\nhello<|end|>\n"
        "<|user|>\n1+1?<|end|>\n<|assistant|>\n 2\n é<|end|>"
    )


def test_the_tokens_are_those_of_one_tokenisation_of_the_whole_text() -> None:
    found = turns(CHATML)
    (one,) = found.learned(TWO_TURNS, None)
    whole = found.tokenizer.apply_chat_template(TWO_TURNS, tokenize=True, return_dict=False)
    assert one.ids.tolist() == whole[:-1]  # less the new line after the end-of-turn token


def test_a_template_that_tags_what_is_generated_is_followed() -> None:
    ((_, runs),) = learned(TAGGED, TWO_TURNS)
    assert runs == ["hello<|end|>", " 2\n é<|end|>"]


def test_tags_also_tell_where_a_turn_begins_that_the_generation_prompt_does_not() -> None:
    forced = TAGGED.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")
    ((_, runs),) = learned(forced, TWO_TURNS)
    assert runs == ["hello<|end|>", " 2\n é<|end|>"]


def test_a_turn_that_the_template_rewrites_later_has_a_sequence_of_its_own() -> None:
    first, second = learned(THINKING, TWO_TURNS)
    assert first[0].endswith("<|user|>\nhi<|end|>\n<|assistant|>\n<think>\ngreet\n</think>\n\nhello<|end|>")
    assert first[1] == ["<think>\ngreet\n</think>\n\nhello<|end|>"]
    assert "greet" not in second[0] and "<|assistant|>\nhello<|end|>" in second[0]
    assert second[1] == ["<think>\nsum\n</think>\n\n 2\n é<|end|>"]


def test_turns_that_the_same_template_leaves_alone_share_a_sequence() -> None:
    ((_, runs),) = learned(THINKING, WITH_TOOL)
    assert runs == ["<think>\nask\n</think>\n\ncall<|end|>", "<think>\nsay\n</think>\n\nsunny<|end|>"]


def test_a_last_turn_that_ends_otherwise_is_learned_as_it_ends_when_it_is_generated() -> None:
    first, second = learned(LAST_TURN, TWO_TURNS)
    assert (first[1], second[1]) == (["hello<|user|>"], [" 2\n é<|user|>"])


def test_without_an_end_of_turn_token_the_white_space_after_a_turn_is_its_end() -> None:
    ((_, runs),) = learned(PLAIN, TWO_TURNS[1:3])
    assert runs == ["hello\n"]


def test_a_generation_prompt_that_the_rendered_turn_does_not_begin_with_is_refused() -> None:
    with pytest.raises(TurnError, match="generation prompt ends .*<think>.* add .*generation.* tags"):
        learned(FORCED, TWO_TURNS)


def test_messages_that_the_template_refuses_are_told() -> None:
    with pytest.raises(TurnError, match="the chat template refuses the messages: no tools here"):
        learned("{% for m in messages %}{{ raise_exception('no tools here') }}{% endfor %}", WITH_TOOL)


def test_tools_are_given_to_the_template() -> None:
    found = turns("{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML)
    (one,) = found.learned(TWO_TURNS, [{"name": "search"}])
    assert found.tokenizer.decode(one.ids).startswith("search<|system|>")


@pytest.mark.parametrize("template", [CHATML, TAGGED, THINKING, LAST_TURN, PLAIN])
def test_what_stands_before_a_learned_turn_is_what_a_server_is_asked_with(template: str) -> None:
    """Under every template, the tokens before each learned turn are those of the prompt of that turn."""
    found = turns(template)
    prompts = [
        found.tokenizer.apply_chat_template(messages[:n], add_generation_prompt=True, tokenize=True, return_dict=False)
        for messages in (TWO_TURNS, WITH_TOOL)
        for n, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    begun = []
    for messages in (TWO_TURNS, WITH_TOOL):
        for one in found.learned(messages, None):
            places = [p for p in range(1, len(one.ids)) if one.learned[p] and not one.learned[p - 1]]
            begun += [one.ids[:p].tolist() for p in places]
    assert sorted(begun) == sorted(prompts)
