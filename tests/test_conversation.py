"""Many turns as one sample: every token is the one that was sent or came, and only replies are trained."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.tiny import make_tokenizer
from vime.config.sections import Rollout
from vime.data.turns import TurnError
from vime.inference.client import Completion
from vime.inference.gate import Gate
from vime.inference.requests import Requests
from vime.rollout.conversation import Conversation, following
from vime.rollout.generate import Context
from vime.sample import Sample, Task, VersionSpan

TASK = Task("t", ({"role": "user", "content": "Guess."},), "7")


class Script:
    """A server that gives scripted replies: their tokens and how they end. ``asked`` are the prompts it got."""

    version = 0

    def __init__(self, *replies: tuple[list[int], str]) -> None:
        self.replies, self.asked, self.limits = list(replies), list[list[int]](), list[int]()

    async def generate(self, prompt: list[int], sampling: Any, *_: Any) -> Completion:
        self.asked.append(prompt)
        self.limits.append(sampling["max_tokens"])
        ids, reason = self.replies.pop(0)
        number = len(self.asked)
        return Completion(ids, [-float(number)] * len(ids), (VersionSpan(number, 0, len(ids)),), reason)


def talk(server: Script, tokenizer: Any, max_tokens: int = 100, task: Task = TASK) -> Conversation:
    requests = Requests(server, Gate(usable=True), Rollout())  # type: ignore[arg-type]
    return Conversation(Context(requests, tokenizer, None, {"max_tokens": max_tokens}), task)  # type: ignore[arg-type]


def smollm2() -> Any:
    return AutoTokenizer.from_pretrained("models/smollm2")


def test_a_conversation_is_what_the_chat_template_makes_of_it() -> None:
    """Replies that are tokenised as a text is give the very tokens of the whole conversation, rendered at once."""
    tokenizer = smollm2()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    replies = ["5", "Perhaps 8?", "It is 7."]
    server = Script(*(([*tokenizer.encode(text), end], "stop") for text in replies))
    game = talk(server, tokenizer)

    async def play() -> Sample:
        assert await game.respond() == "5"
        game.append({"role": "user", "content": "Higher."})
        assert await game.respond() == "Perhaps 8?"
        game.append({"role": "user", "content": "Lower."})
        await game.respond()
        return game.sample(guesses=3)

    sample = asyncio.run(play())
    whole = [*TASK.messages]
    for text, told in zip(replies, ("Higher.", "Lower.", ""), strict=True):
        whole += [{"role": "assistant", "content": text}, {"role": "user", "content": told}]
    rendered = tokenizer.apply_chat_template(whole[:-1], tokenize=True, return_dict=False)
    assert sample.prompt_ids + sample.response_ids == rendered[: len(sample.prompt_ids + sample.response_ids)]
    assert server.asked[2] == rendered[: len(server.asked[2])]
    trained = [token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]
    assert trained == [token for text in replies for token in [*tokenizer.encode(text), end]]
    assert all(math.isnan(v) != bool(m) for v, m in zip(sample.logprobs, sample.loss_mask, strict=True))
    for span in sample.versions:  # each span is one reply: its tokens have that request's log-probabilities
        assert sample.loss_mask[span.start : span.end] == [1] * (span.end - span.start)
        assert set(sample.logprobs[span.start : span.end]) == {-float(span.version)}
    assert sample.text == "It is 7." and sample.metadata["guesses"] == 3 and sample.finish_reason == "stop"
    assert [m["content"] for m in sample.metadata["messages"]] == ["5", "Higher.", "Perhaps 8?", "Lower.", "It is 7."]


def test_a_reply_that_was_cut_gets_the_end_of_its_turn_untrained() -> None:
    tokenizer = smollm2()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    game = talk(Script(([5, 6], "length"), ([7, end], "stop")), tokenizer)

    async def play() -> Sample:
        await game.respond(max_tokens=2)
        assert not game.truncated
        game.append({"role": "user", "content": "Go on."})
        await game.respond()
        return game.sample()

    sample = asyncio.run(play())
    assert sample.response_ids[:3] == [5, 6, end] and sample.loss_mask[:3] == [1, 1, 0]
    assert sample.response_ids[-2:] == [7, end] and sample.loss_mask[-2:] == [1, 1]


@pytest.mark.parametrize("room", [9, 10])
def test_all_turns_share_the_tokens_there_are_and_what_no_reply_follows_is_left_out(room: int) -> None:
    server = Script(([5] * 8, "length"), ([6], "length"))
    game = talk(server, make_tokenizer(), max_tokens=room)

    async def play() -> Sample:
        await game.respond(max_tokens=8)
        game.append({"role": "user", "content": "a long message that does not fit"})
        assert await game.respond() == "" and game.truncated
        return game.sample()

    sample = asyncio.run(play())
    assert sample.response_ids == [5] * 8 and sample.finish_reason == "length" and server.limits == [8]


def test_a_reply_that_takes_all_the_room_is_truncated() -> None:
    game = talk(Script(([5] * 8, "length")), make_tokenizer(), max_tokens=8)
    asyncio.run(game.respond())
    assert game.truncated and game.sample().truncated


def test_tools_are_in_the_prompt() -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ tools }}" + tokenizer.chat_template
    task = Task("u", TASK.messages, tools=(tool,))
    assert "look_up" in tokenizer.decode(talk(Script(), tokenizer, task=task).prompt_ids)


def test_mistakes_in_the_order_are_named() -> None:
    game = talk(Script(([5], "stop")), make_tokenizer())
    with pytest.raises(ValueError, match="has not replied to task t"):
        game.sample()
    with pytest.raises(ValueError, match="messages follow a reply"):
        game.append({"role": "user", "content": "hello"})
    asyncio.run(game.respond())
    with pytest.raises(ValueError, match="append a message before its next reply"):
        asyncio.run(game.respond())


def test_messages_that_the_template_refuses_are_an_error_of_this_sample() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
    with pytest.raises(TurnError, match="no tools here"):
        following(tokenizer, [{"role": "tool", "content": "1"}], None)


def test_a_template_that_takes_thinking_out_of_earlier_turns_changes_no_token(tmp_path: Path) -> None:
    """As Qwen3's: the reply is never rendered, so what it would be rendered as does not matter."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and loop.last %}(thought){% endif %}"
        "{{ m.content }}.{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    ids = following(tokenizer, [{"role": "user", "content": "b"}], None)
    assert tokenizer.decode(ids) == ".[user]b.[assistant]"


def test_a_real_server_sampled_every_trained_token_in_its_place(run: Any, fleets: Any) -> None:
    """What it says of its own response, scored as one whole, is what it said when each turn was sampled."""
    fleet = fleets("tied")
    tokenizer = make_tokenizer()
    requests = Requests(fleet.front, fleet.gate, Rollout())
    context = Context(requests, tokenizer, None, {"max_tokens": 120, "temperature": 1.0, "ignore_eos": True})  # type: ignore

    async def play() -> tuple[Sample, list[float]]:
        game = Conversation(context, TASK)
        for told in ("ab", "c"):
            await game.respond(max_tokens=7)
            game.append({"role": "user", "content": told})
        await game.respond(max_tokens=7)
        sample = game.sample()
        return sample, await requests.score(fleet.front, sample.prompt_ids, sample.response_ids)

    sample, scored = run(play())
    assert sum(sample.loss_mask) == 21 and len(sample.response_ids) > 21
    for value, expected, mask in zip(sample.logprobs, scored, sample.loss_mask, strict=True):
        assert mask == 0 or value == pytest.approx(expected, abs=1e-4)
