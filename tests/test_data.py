"""Where tasks come from, which comes next, and the account of what became of each."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.data.cursor import CursorError, PromptCursor
from vime.data.journal import Journal, account
from vime.data.sources import DataError, load_tasks, split_held_out
from vime.rewards.load import load_reward
from vime.sample import Task

ROWS = [{"prompt": "1 + 1", "answer": 2, "level": "easy"}, {"prompt": "2 + 2", "answer": "4", "level": "hard"}]


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def refusal(source: str, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load_tasks(source, **options)
    return str(caught.value)


@pytest.fixture
def hf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


# sources


def test_a_line_of_a_jsonl_file_is_a_task_with_its_other_columns_as_metadata(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "t.jsonl", ROWS)
    first, second = load_tasks(source)
    assert first == Task(f"{source}/0", ({"role": "user", "content": "1 + 1"},), "2", {"level": "easy"})
    assert second.id == f"{source}/1" and second.answer == "4"


def test_blank_lines_are_skipped_and_size_cuts(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "a"}\n\n   \n{"prompt": "b"}\n{"prompt": "c"}\n')
    tasks = load_tasks(str(tmp_path / "t.jsonl"), size=2)
    assert [task.messages[0]["content"] for task in tasks] == ["a", "b"]
    assert tasks[0].answer is None


def test_prompt_and_answer_columns_can_be_named_and_ids_are_the_rows_own(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "t.jsonl", [{"q": "x", "a": "y", "id": 17, "prompt": "other"}])
    (task,) = load_tasks(source, prompt_key="q", answer_key="a")
    assert task == Task("17", ({"role": "user", "content": "x"},), "y", {"prompt": "other"})


def test_two_rows_of_one_id_are_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "t.jsonl", [{"prompt": "x", "id": "a"}, {"prompt": "y", "id": "a"}])
    assert refusal(source) == f"{source}: rows 0 and 1 have the same id 'a'; make ids unique"


@pytest.mark.parametrize("line", ["{'prompt': 1}", '{"prompt": "x"', '["a"]', "3"])
def test_a_line_that_is_no_json_object_is_named_by_file_and_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.jsonl").write_text(f'{{"prompt": "a"}}\n\n{line}\n')
    text = refusal(str(tmp_path / "t.jsonl"))
    assert text.startswith(f"{tmp_path}/t.jsonl, line 3: ") and "each line is one JSON object" in text


def test_a_row_whose_id_is_null_is_named_by_its_number(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "t.jsonl", [{"prompt": "x", "id": None}, {"prompt": "y", "id": 0}])
    assert [task.id for task in load_tasks(source)] == [f"{source}/0", "0"]


def test_a_line_that_is_not_utf8_is_named_and_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert "t.jsonl, line 2 is not UTF-8" in refusal(str(tmp_path / "t.jsonl"))
    assert len(load_tasks(str(tmp_path / "t.jsonl"), size=1)) == 1


@pytest.mark.usefixtures("hf_cache")
@pytest.mark.parametrize("text", ['[{"prompt": "a"},\n{"prompt" "b"}]', '{"prompt": "a"}\n{"prompt" "b"}\n'])
def test_a_json_file_with_a_fault_is_named_by_its_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    assert f"{tmp_path}/t.json, line 2" in refusal(str(tmp_path / "t.json"))


@pytest.mark.usefixtures("hf_cache")
def test_metadata_is_json_dates_as_text_and_bytes_refused(tmp_path: Path) -> None:
    from datetime import datetime

    from datasets import Dataset

    Dataset.from_list([{"prompt": "a", "when": datetime(2024, 1, 2), "n": [1]}]).to_parquet(tmp_path / "t.parquet")
    (task,) = load_tasks(str(tmp_path / "t.parquet"))
    assert task.metadata == {"when": "2024-01-02 00:00:00", "n": [1]}
    Dataset.from_list([{"prompt": "a", "raw": b"x"}]).to_parquet(tmp_path / "b.parquet")
    assert "row 0: column 'raw' cannot be metadata, bytes is not JSON" in refusal(str(tmp_path / "b.parquet"))


def test_a_missing_column_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "t.jsonl", [{"prompts": "x", "answer": "y"}])
    assert refusal(source) == f"{source}, row 0: no column 'prompt'; did you mean prompts?"


@pytest.mark.parametrize("prompt", [3, None, [], ["hello"], [{"content": "no role"}]])
def test_a_prompt_that_is_neither_text_nor_messages_is_refused_with_its_row(tmp_path: Path, prompt: Any) -> None:
    source = jsonl(tmp_path / "t.jsonl", [{"prompt": "fine"}, {"prompt": prompt}])
    assert f"{source}, row 1: 'prompt' is neither text nor a list of messages" in refusal(source)


def test_a_template_wraps_the_prompt_and_may_name_any_column(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "t.jsonl", [{"q": "1 + 1 {sic}", "level": "easy"}])
    (task,) = load_tasks(source, prompt_key="q", template="[{level}] {prompt} {{as text}}")
    assert task.messages[0]["content"] == "[easy] 1 + 1 {sic} {as text}"


def test_a_template_that_names_an_unknown_column_is_refused_with_the_nearest(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "t.jsonl", ROWS)
    text = "the template names {levl}, which the rows do not have; did you mean level?"
    assert text in refusal(source, template="{prompt} {levl}")


@pytest.mark.parametrize("template", ["{prompt} {", "{prompt}}", "{prompt.nothing}", "{prompt:d}"])
def test_a_template_that_cannot_be_filled_is_a_data_error(tmp_path: Path, template: str) -> None:
    assert "template" in refusal(jsonl(tmp_path / "t.jsonl", ROWS), template=template)


def test_a_system_message_goes_before_prompts_that_have_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "x"}]
    source = jsonl(tmp_path / "t.jsonl", [{"prompt": "x"}, {"prompt": own}, {"prompt": own[1:]}])
    first, second, third = load_tasks(source, system="yours")
    assert [m["content"] for m in first.messages] == ["yours", "x"]
    assert list(second.messages) == own
    assert [m["content"] for m in third.messages] == ["yours", "x"]


def test_a_template_around_messages_is_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "t.jsonl", [{"prompt": [{"role": "user", "content": "x"}]}])
    assert "remove the template" in refusal(source, template="{prompt}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", "does not exist; a source is reasoning-gym:NAME"),
        ("t.csv", "files end in .jsonl, .json or .parquet, not '.csv'"),
        ("empty.jsonl", "holds no rows"),
    ],
)
def test_a_file_that_cannot_be_a_source_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "t.csv").touch()
    (tmp_path / "empty.jsonl").touch()
    assert message in refusal(f"{tmp_path}/{name}")


@pytest.mark.usefixtures("hf_cache")
def test_parquet_files_saved_data_sets_and_folders_give_the_same_tasks(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = [{**row, "answer": str(row["answer"])} for row in ROWS]
    data = Dataset.from_list(rows)
    data.to_parquet(tmp_path / "t.parquet")
    data.save_to_disk(tmp_path / "saved")
    DatasetDict({"train": data.select([0]), "test": data}).save_to_disk(tmp_path / "splits")
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path / "folder" / "train.jsonl", rows)
    wanted = [(task.messages, task.answer, task.metadata) for task in load_tasks(jsonl(tmp_path / "t.jsonl", rows))]
    for name, options in (("t.parquet", {}), ("saved", {}), ("splits", {"split": "test"}), ("folder", {})):
        tasks = load_tasks(str(tmp_path / name), options=options)
        assert [(task.messages, task.answer, task.metadata) for task in tasks] == wanted, name
    assert len(load_tasks(str(tmp_path / "splits"))) == 1
    assert "(split 'nope')" in refusal(str(tmp_path / "splits"), options={"split": "nope"})
    (tmp_path / "bad.parquet").write_text("no parquet")
    assert "bad.parquet cannot be loaded by datasets" in refusal(str(tmp_path / "bad.parquet"))


def test_an_option_that_a_file_does_not_take_is_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "t.jsonl", ROWS)
    assert f"{source} takes no option 'split'" in refusal(source, options={"split": "test"})


def test_a_generated_source_is_the_same_for_the_same_seed_and_other_for_another() -> None:
    make = {"size": 3, "options": {"max_terms": 3}}
    tasks = load_tasks("reasoning-gym:chain_sum", seed=1, **make)
    assert tasks == load_tasks("reasoning-gym:chain_sum", seed=1, **make)
    assert tasks != load_tasks("reasoning-gym:chain_sum", seed=2, **make)
    assert len(tasks) == 3 and tasks[0].metadata["reasoning_gym"] == "chain_sum"
    assert json.loads(json.dumps(tasks[0].metadata)) == tasks[0].metadata


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("chain_summ", {}, "reasoning-gym has no data set 'chain_summ'; did you mean chain_sum?"),
        ("chain_sum", {"size": None}, "is generated and needs a size; set data.size"),
        ("chain_sum", {"options": {"max_term": 3}}, "has no option 'max_term'; did you mean max_terms?"),
        ("chain_sum", {"options": {"max_terms": 0}}, "refuses its options {'max_terms': 0}"),
    ],
)
def test_a_generated_source_that_cannot_be_made_says_why(source: str, options: dict[str, Any], message: str) -> None:
    assert message in refusal(f"reasoning-gym:{source}", **{"size": 2, **options})


def task(name: str, text: str = "") -> Task:
    return Task(name, ({"role": "user", "content": text or name},))


def test_a_training_prompt_that_is_an_evaluation_prompt_is_left_out() -> None:
    train = [task("a", "1 + 1"), task("b", "2 + 2"), task("c", "3 + 3")]
    assert [t.id for t in split_held_out(train, [task("other id", "2 + 2")])] == ["a", "c"]
    assert split_held_out(train, []) == train
    with pytest.raises(DataError, match="all 3 training prompts are evaluation prompts too"):
        split_held_out(train, train)


# cursor


def tasks(count: int) -> list[Task]:
    return [task(f"t{n}") for n in range(count)]


ACTIONS = st.lists(st.sampled_from(["take", "take", "finish", "give_back", "save_and_load", "go_back"]), max_size=60)


@given(st.integers(1, 5), ACTIONS, st.randoms(use_true_random=False))
def test_whatever_happens_no_prompt_is_lost_and_none_is_used_twice(
    count: int, actions: list[str], chance: random.Random
) -> None:
    cursor = PromptCursor(tasks(count), seed=3)
    given_out: dict[int, str] = {}  # group id -> task, over the whole history
    open_: set[int] = set()
    finished: list[int] = []
    saved = (json.dumps(cursor.state()), [])
    for action in [*actions, "save_and_load"]:
        if action == "take":
            group_id, taken = cursor.take()
            assert group_id not in open_ and group_id not in finished
            assert given_out.setdefault(group_id, taken.id) == taken.id
            open_.add(group_id)
        elif action in ("finish", "give_back") and open_:
            group_id = chance.choice(sorted(open_))
            open_.remove(group_id)
            getattr(cursor, action)(group_id)
            finished += [group_id] if action == "finish" else []
        elif action == "save_and_load":  # a stop: what was open comes again
            saved = (json.dumps(cursor.state()), list(finished))
        if action in ("save_and_load", "go_back"):  # a crash: what was done since the last save did not happen
            cursor = PromptCursor(tasks(count), seed=3)
            cursor.load(json.loads(saved[0]))
            open_, finished = set(), list(saved[1])
            given_out = {group: given_out[group] for group in range(cursor.drawn)}
        assert cursor.open.keys() == open_
    total = max(2 * count, -(-cursor.drawn // count) * count)
    for _ in range(total - len(finished)):  # all that is left, to the end of an epoch
        group_id, taken = cursor.take()
        assert given_out.setdefault(group_id, taken.id) == taken.id
        cursor.finish(group_id)
        finished.append(group_id)
    assert sorted(finished) == list(range(total)) and cursor.drawn == total
    for start in range(0, cursor.drawn, count):
        epoch = Counter(given_out[group] for group in range(start, start + count))
        assert epoch == Counter(t.id for t in tasks(count))


def order(cursor: PromptCursor, count: int) -> list[str]:
    taken = [cursor.take() for _ in range(count)]
    for group_id, _ in taken:
        cursor.finish(group_id)
    return [t.id for _, t in taken]


def test_the_order_is_of_the_seed_and_other_in_each_epoch() -> None:
    straight = order(PromptCursor(tasks(30), 0), 60)
    assert straight == order(PromptCursor(tasks(30), 0), 60)
    assert straight[:30] != straight[30:]
    assert straight[:30] != [t.id for t in tasks(30)]
    assert straight != order(PromptCursor(tasks(30), 1), 60)


def test_a_prompt_given_back_comes_again_before_any_new_one_under_its_id() -> None:
    cursor = PromptCursor(tasks(9), 0)
    first, second, _ = cursor.take(), cursor.take(), cursor.take()
    cursor.give_back(second[0])
    cursor.give_back(first[0])
    assert [cursor.take(), cursor.take()] == [first, second]
    assert cursor.take()[0] == 3


def test_a_prompt_open_when_the_state_was_saved_comes_again_first() -> None:
    cursor = PromptCursor(tasks(9), 0)
    first, _second = cursor.take(), cursor.take()
    state = cursor.state()
    cursor.finish(first[0])
    assert cursor.open, "saving must not close what is open"
    resumed = PromptCursor(tasks(9), 0)
    resumed.load(state)
    assert resumed.take() == first


def test_a_prompt_that_is_not_out_can_be_neither_finished_nor_given_back() -> None:
    cursor = PromptCursor(tasks(2), 0)
    group_id, _ = cursor.take()
    cursor.finish(group_id)
    for close, group in ((cursor.finish, group_id), (cursor.give_back, group_id), (cursor.finish, 9)):
        with pytest.raises(CursorError, match=f"group {group} is not out"):
            close(group)
    with pytest.raises(CursorError, match="there are no tasks"):
        PromptCursor([], 0)


@pytest.mark.parametrize(
    ("cursor", "what"),
    [
        (PromptCursor(tasks(8), 0), "tasks was 9, is 8"),
        (PromptCursor([*tasks(8), task("other")], 0), "digest was"),
        (PromptCursor(tasks(9), 1), "seed was 0, is 1"),
        (PromptCursor(tasks(9)[::-1], 0), "digest was"),
    ],
)
def test_a_state_of_other_data_or_another_seed_is_refused(cursor: PromptCursor, what: str) -> None:
    with pytest.raises(CursorError, match=f"the checkpoint's prompts are others: {what}"):
        cursor.load(PromptCursor(tasks(9), 0).state())


# journal


def test_the_account_says_what_became_of_every_prompt(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for group in range(6):
        journal.write("taken", group, task=f"t{group}")
    journal.write("failed_sample", 0, reason="no answer")
    journal.write("trained", 0, step=1)
    journal.write("trained", 1, step=1)
    journal.write("filtered", 2, reason="zero_variance")
    journal.write("filtered", 3, reason="failed")
    journal.write("filtered", 4, reason="zero_variance")
    journal.close()
    assert account(tmp_path / "journal.jsonl") == {
        "taken": 6, "trained": 2, "filtered": {"zero_variance": 2, "failed": 1}, "open": [5], "twice": [], "untaken": [],
        "mixed": [],
    }  # fmt: skip


def test_the_account_shows_a_prompt_used_twice(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for event in ("taken", "trained", "taken", "filtered"):
        journal.write(event, 7)
    journal.close()
    found = account(tmp_path / "journal.jsonl")
    assert (found["twice"], found["taken"], found["open"]) == ([7], 1, [])


def test_the_offset_is_the_length_on_disk_and_a_journal_is_only_added_to(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("taken", 1, prompt="Ü")
    assert journal.offset() == path.stat().st_size > 0
    journal.close()
    again = Journal(path)
    assert again.offset() == path.stat().st_size
    again.write("trained", 1)
    again.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["taken", "trained"]


# what a row brings beside its prompt

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_a_tools_column_is_the_tasks_as_a_list_or_as_json_text(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "tools": [TOOL]},
        {"prompt": "b", "tools": json.dumps([TOOL])},
        {"prompt": "c", "tools": None},
    ]
    loaded = load_tasks(jsonl(tmp_path / "t.jsonl", rows))
    assert [task.tools for task in loaded] == [(TOOL,), (TOOL,), ()]
    assert all("tools" not in task.metadata for task in loaded)
    (named, *_) = load_tasks(jsonl(tmp_path / "u.jsonl", [{"prompt": "a", "functions": [TOOL]}]), tools_key="functions")
    assert named.tools == (TOOL,)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("[{", "row 0: 'tools' is no JSON"),
        ({"add": 1}, "row 0: 'tools' is no list of tools"),
        (
            ["add"],
            "tool 0 of 'tools' is not of the form {type: function, function: {name, description, parameters}}: 'add'",
        ),
        ([TOOL, {"type": "function", "function": {}}], "tool 1 of 'tools' is not of the form"),
        (
            [{"type": "function", "function": {"name": "add", "parameters": "x"}}],
            "'add' of 'tools': parameters is no JSON schema",
        ),
    ],
)
def test_a_tool_that_is_no_definition_is_refused_with_its_row(tmp_path: Path, tools: Any, message: str) -> None:
    assert message in refusal(jsonl(tmp_path / "t.jsonl", [{"prompt": "a", "tools": tools}]))


def test_a_column_names_the_rows_reward_and_generate_function_and_the_section_those_of_the_others(
    tmp_path: Path,
) -> None:
    rows = [
        {"prompt": "a", "score": "last_number", "by": "play.py:play"},
        {"prompt": "b", "score": None},
        {"prompt": "c"},
    ]
    source = jsonl(tmp_path / "t.jsonl", rows)
    loaded = load_tasks(source, reward_key="score", generate_key="by", reward="exact")
    assert [(task.reward, task.generate) for task in loaded] == [
        ("last_number", "play.py:play"),
        ("exact", None),
        ("exact", None),
    ]
    assert loaded[0].metadata == {}
    assert "row 0: 'n' is no function's name: 3" in refusal(
        jsonl(tmp_path / "u.jsonl", [{"prompt": "a", "n": 3}]), reward_key="n"
    )


@pytest.mark.usefixtures("hf_cache")
def test_messages_from_arrow_have_the_keys_they_were_written_with(tmp_path: Path) -> None:
    from datasets import Dataset

    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    prompt = [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    Dataset.from_list([{"prompt": prompt}]).to_parquet(tmp_path / "t.parquet")
    (loaded,) = load_tasks(str(tmp_path / "t.parquet"))
    assert list(loaded.messages) == prompt


def test_whatever_of_a_row_matters_makes_it_another_prompt() -> None:
    base = task("a")
    others = [
        replace(base, answer="x"),
        replace(base, metadata={"k": 1}),
        replace(base, tools=(TOOL,)),
        replace(base, reward="exact"),
        replace(base, generate="single_turn"),
    ]
    for other in others:
        with pytest.raises(CursorError, match="digest was"):
            PromptCursor([other], 0).load(PromptCursor([base], 0).state())


PARTS = [{"name": "chain_sum", "weight": 3, "config": {"max_terms": 2}}, {"name": "gcd"}]


def test_the_parts_of_a_composite_come_by_weight_and_each_keeps_its_own_scorer() -> None:
    loaded = load_tasks("reasoning-gym:composite", size=80, seed=1, options={"datasets": PARTS})
    names = Counter(one.metadata["reasoning_gym"] for one in loaded)
    assert set(names) == {"chain_sum", "gcd"} and 45 <= names["chain_sum"] <= 75
    reward = load_reward("reasoning_gym")
    for one in loaded[:20]:
        assert reward(one, f"<answer>{one.answer}</answer>") == 1.0 and reward(one, "<answer>none</answer>") < 1.0
    assert loaded == load_tasks("reasoning-gym:composite", size=80, seed=1, options={"datasets": PARTS})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (None, "composite needs the data sets it is made of; set options.datasets ="),
        ([{"name": "chain_summ"}], "reasoning-gym has no data set 'chain_summ'; did you mean chain_sum?"),
        ([{"name": "gcd", "wait": 2}], "composite: gcd has no 'wait'; did you mean weight?"),
        ([{"name": "gcd", "config": {"max_num": 2}}], "composite, gcd has no option 'max_num'"),
        ([{"name": "gcd"}, {"name": "gcd"}], "refuses its options"),
    ],
)
def test_a_composite_that_cannot_be_made_says_why(parts: Any, message: str) -> None:
    assert message in refusal("reasoning-gym:composite", size=2, options={"datasets": parts} if parts else {})
