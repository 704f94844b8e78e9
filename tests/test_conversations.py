"""Rows of given conversations: what is prompt, what is reply, what is too long, and which rows are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import make_tokenizer
from vime.config.supervised import Batches, Conversations
from vime.data.conversations import load_conversations
from vime.data.examples import make_examples
from vime.data.sources import DataError
from vime.data.turns import Turns
from vime.sample import Task
from vime.store.shared_memory import SharedMemoryStore

USER, YES, NO = ({"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "yes"), ("assistant", "no")))
SYSTEM = {"role": "system", "content": "s"}


def load(folder: Path, row: dict[str, Any], pairs: bool = False, **options: Any) -> Task:
    (folder / "rows.jsonl").write_text(json.dumps(row))
    (task,) = load_conversations(Conversations(source=str(folder / "rows.jsonl"), **options), pairs)
    return task


def refusal(folder: Path, row: dict[str, Any], pairs: bool = False, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(folder, row, pairs, **options)
    return str(caught.value).replace(f"{folder}/", "")


def test_a_conversation_is_a_prompt_and_the_rest_up_to_the_assistants_last_turn(tmp_path: Path) -> None:
    task = load(tmp_path, {"messages": [SYSTEM, USER, YES, USER, NO, USER]})
    assert task.messages == (SYSTEM, USER) and task.metadata == {"replies": [[YES, USER, NO]], "tools": None}


@pytest.mark.parametrize("response", ["yes", [YES]])
def test_a_prompt_and_a_response_are_a_conversation(response: Any, tmp_path: Path) -> None:
    task = load(tmp_path, {"q": "q", "a": response}, prompt_key="q", response_key="a", system="s", template="{prompt}")
    assert task.messages == (SYSTEM, USER) and task.metadata["replies"] == [[YES]]


def test_worked_answers_of_reasoning_gym_are_conversations() -> None:
    section = Conversations(source="reasoning-gym:chain_sum", size=3, response_key="answer")
    assert all(
        isinstance(task.metadata["replies"][0][0]["content"], str) for task in load_conversations(section, False)
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": "q", "chosen": [USER, YES], "rejected": [USER, NO]},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
    ],
)
def test_a_pair_is_two_replies_to_one_prompt_however_it_is_written(row: dict[str, Any], tmp_path: Path) -> None:
    for options, prompt in (({}, (USER,)), ({"system": "s"}, (SYSTEM, USER))):
        task = load(tmp_path, row, True, **options)
        assert task.messages == prompt and task.metadata["replies"] == [[YES], [NO]]


def test_nulls_that_arrow_puts_into_messages_are_taken_out_and_tools_may_be_json_text(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    arrow = {**YES, "tool_calls": None}
    for written in (tools, json.dumps(tools)):
        task = load(tmp_path, {"messages": [USER, arrow], "tools": written})
        assert task.metadata == {"replies": [[YES]], "tools": tools}


REFUSED = [
    ({"mesages": [USER]}, False, "neither a column 'messages' (data.messages_key) nor 'prompt'; did you mean mesages?"),
    ({"prompt": "q", "respnse": "a"}, False, "nor 'response'; did you mean respnse?"),
    ({"messages": [USER]}, False, "no message of 'messages' is the assistant's: nothing is to be learned"),
    ({"messages": [YES, USER]}, False, "'messages' starts with the assistant"),
    ({"messages": "text"}, False, "'messages' is no list of messages"),
    ({"prompt": "q", "response": 5}, False, "'response' is neither text nor a list of messages: 5"),
    ({"prompt": "q", "response": [USER]}, False, "'response' does not end with a message of the assistant"),
    ({"messages": [USER, YES], "tools": "["}, False, "'tools' is no JSON"),
    ({"messages": [USER, YES], "tools": {"a": 1}}, False, "'tools' is no list of tools"),
    ({"prompt": "q", "chosen": "a"}, True, "no column 'rejected'"),
    ({"chosen": [USER, YES], "rejected": [SYSTEM, YES]}, True, "no first message in common"),
]


@pytest.mark.parametrize(("row", "pairs", "why"), REFUSED)
def test_a_row_that_cannot_be_learned_from_is_refused_by_its_place(
    row: dict[str, Any], pairs: bool, why: str, tmp_path: Path
) -> None:
    error = refusal(tmp_path, row, pairs)
    assert error.startswith("rows.jsonl, row 0: ") and why in error


def task(name: str, text: str) -> Task:
    return Task(name, (USER,), metadata={"replies": [[{"role": "assistant", "content": text}]], "tools": None})


def test_sequences_over_the_length_are_dropped_and_counted_or_refused_and_never_cut() -> None:
    turns = Turns(make_tokenizer())
    tasks = [task("short", "a" * 5), task("exact", "a" * 10), task("long", "a" * 11)]
    limit = 1 + 1 + 1 + 1 + 10 + 1  # <|user|> q <|end|> <|assistant|> a... <|end|>
    kept, dropped = make_examples(tasks, turns, False, Batches(max_length=limit))
    assert [one.id for one in kept] == ["short", "exact"] and dropped == 1 and kept[1].length == limit
    with pytest.raises(DataError, match=f"long has {limit + 1} tokens, over batch.max_length = {limit}"):
        make_examples(tasks, turns, False, Batches(max_length=limit, too_long="refuse"))
    with pytest.raises(DataError, match="all 3 sequences are over batch.max_length = 3"):
        make_examples(tasks, turns, False, Batches(max_length=3))


def test_a_pair_shares_its_first_tokens_and_is_scored_after_its_last(tmp_path: Path) -> None:
    turns, store = Turns(make_tokenizer()), SharedMemoryStore(tmp_path / "store")
    pair = Task("p", (USER,), metadata={"replies": [[YES], [NO]], "tools": None})
    ((example,), _) = make_examples([pair], turns, True, Batches(max_length=8))
    rows = example.put(store, "k")
    assert [(row.index, row.reward, row.trained_tokens) for row in rows] == [(0, 1.0, 1), (1, 0.0, 1)]
    for row, reply in zip(rows, (YES, NO), strict=True):
        payload = store.get("k", row.index)
        whole = turns.tokenizer.apply_chat_template([USER, reply], tokenize=True, return_dict=False)
        assert [*payload.prompt_ids, *payload.response_ids[:-1]] == whole
        assert np.flatnonzero(payload.loss_mask).tolist() == [len(payload.response_ids) - 1]
    assert len(example.prompt_ids) == 4  # <|user|> q <|end|> <|assistant|>
