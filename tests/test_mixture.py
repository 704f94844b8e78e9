"""Prompts of several sources by weight, curricula, endless sources: what comes next, and that a resume changes nothing."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import make_config
from vime.config.data import impossible_data, weight_at
from vime.config.sections import Config
from vime.data import DataError
from vime.data.cursor import CursorError, PromptCursor
from vime.data.load import load_data, load_held_out, make_cursor
from vime.data.orders import Band, Epochs
from vime.rollout.outcome import Outcome, source_metrics
from vime.sample import Task


def tasks(count: int, name: str = "t") -> list[Task]:
    return [Task(f"{name}{n}", ({"role": "user", "content": f"{name}{n}"},)) for n in range(count)]


def mixed(sizes: dict[str, int], weights: dict[str, Any], seed: int = 3) -> PromptCursor[Task]:
    sources = {name: Epochs(tasks(size, name), f"{seed}:{name}") for name, size in sizes.items()}
    return PromptCursor(sources, seed, lambda name, step: weight_at(weights[name], step))


# weights

SIZES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5), min_size=1)


@given(SIZES, st.data())
def test_every_source_has_its_share_at_any_time_and_goes_through_its_epochs(sizes: dict[str, int], data: Any) -> None:
    weights = {name: data.draw(st.floats(0.05, 10)) for name in sizes}
    cursor, total, taken = mixed(sizes, weights), sum(weights.values()), Counter[str]()
    order: dict[str, list[str]] = {name: [] for name in sizes}
    for count in range(1, 80):
        group_id, task = cursor.take()
        cursor.finish(group_id)
        taken[task.id[0]] += 1
        order[task.id[0]].append(task.id)
        for name, weight in weights.items():
            assert abs(taken[name] - count * weight / total) < len(sizes)
    for name, size in sizes.items():
        for start in range(0, len(order[name]) - size + 1, size):
            assert sorted(order[name][start : start + size]) == [f"{name}{n}" for n in range(size)]


@given(SIZES, st.lists(st.sampled_from(["take", "take", "finish", "give_back"]), max_size=40), st.randoms())
def test_a_resumed_mixture_draws_what_it_would_have_drawn(
    sizes: dict[str, int], actions: list[str], chance: random.Random
) -> None:
    weights = {name: [(0, 1.0), (5 + place, place + 0.5)] for place, name in enumerate(sizes)}
    cursor, open_, step = mixed(sizes, weights), set[int](), 0
    for action in actions:
        if action == "take":
            open_.add(cursor.take(step)[0])
            step += 1
        elif open_:
            group_id = chance.choice(sorted(open_))
            open_.remove(group_id)
            getattr(cursor, action)(group_id)
    resumed = mixed(sizes, weights)
    resumed.load(json.loads(json.dumps(cursor.state())))
    for group_id in sorted(open_):
        cursor.give_back(group_id)
    assert [cursor.take(step) for _ in range(30)] == [resumed.take(step) for _ in range(30)]


def test_weights_follow_their_lines_and_a_source_of_weight_0_rests() -> None:
    line = [(2, 1.0), (6, 0.0)]
    assert [weight_at(line, step) for step in (0, 2, 3, 5, 6, 99)] == [1.0, 1.0, 0.75, 0.25, 0.0, 0.0]
    cursor = mixed({"a": 3, "b": 3}, {"a": [(0, 1.0), (1, 0.0)], "b": [(0, 0.0), (1, 1.0)]})
    assert [cursor.take(step)[1].id[0] for step in (0, 0, 1, 1, 0)] == ["a", "a", "b", "b", "a"]


def test_a_state_of_another_mixture_is_refused_with_both() -> None:
    state = mixed({"a": 3, "b": 3}, {"a": 1.0, "b": 1.0}).state()
    with pytest.raises(CursorError, match="data.mixture is another: it was of a, b, is of a, c"):
        mixed({"a": 3, "c": 3}, {"a": 1.0, "c": 1.0}).load(state)
    with pytest.raises(CursorError, match="it was of a, b, is of one source"):
        PromptCursor(tasks(3), 3).load(state)
    with pytest.raises(CursorError, match="data.mixture.b: tasks was 3, is 2"):
        mixed({"a": 3, "b": 2}, {"a": 1.0, "b": 1.0}).load(state)
    mixed({"a": 3, "b": 3}, {"a": 1.0, "b": 0.0}).load(state)  # another weight is no other data


# curriculum


@given(st.integers(1, 8), st.integers(1, 4), st.lists(st.sampled_from([None, 0.0, 0.1, 0.5, 0.9, 1.0]), max_size=80))
def test_prompts_in_the_band_come_once_an_epoch_and_others_in_every_so_manieth(
    count: int, rest: int, rates: list[float | None]
) -> None:
    band = Band(0.2, 0.8, rest) if rest > 1 else None
    order, came, last = Epochs(tasks(count), 1, band), {}, dict[int, float | None]()
    drawn_in: dict[int, list[int]] = {}
    for rate in rates:
        index = order.draw()
        assert order.epoch not in drawn_in.get(index, []), "none comes twice in an epoch"
        if index in came:
            outside = band is not None and last[index] is not None and not 0.2 <= (last[index] or 0.0) <= 0.8
            assert order.epoch - came[index] == (rest if outside else 1)
        came[index], last[index] = order.epoch, rate
        drawn_in.setdefault(index, []).append(order.epoch)
        order.done(index, rate)
        again = Epochs(tasks(count), 1, band)
        again.load(json.loads(json.dumps(order.state())))
        order = again


def test_a_curriculum_draws_what_is_neither_too_easy_nor_too_hard_more_often() -> None:
    order, drawn = Epochs(tasks(30), 0, Band(0.2, 0.8, 4)), Counter[int]()
    for _ in range(300):
        index = order.draw()
        drawn[index] += 1
        order.done(index, (0.0, 0.5, 1.0)[index % 3])
    middle = [drawn[index] for index in range(1, 30, 3)]
    others = [drawn[index] for index in range(30) if index % 3 != 1]
    assert min(middle) >= 3 * max(others) and min(others) >= 4


# from the configuration


def config_of(tmp_path: Path, data: dict[str, Any], **sections: Any) -> Config:
    return make_config(tmp_path, **sections).model_copy(
        update={"data": Config.model_validate({"model": {"path": "m"}, "data": data}).data}
    )


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_mixture_is_loaded_by_sections_and_its_tasks_know_their_source(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "r.jsonl", [{"prompt": f"p{n}", "answer": n, "id": n} for n in range(4)])
    config = config_of(
        tmp_path,
        {
            "mixture": {
                "words": {"source": rows, "template": "Say {prompt}", "reward": "exact", "weight": 3},
                "plain": {"source": rows, "generate": "single_turn"},
            }
        },
        eval={"sets": {"t": {"source": rows, "size": 1, "reward": "last_number"}}},
    )
    prompts, held_out = load_data(config)
    assert [task.id for task in prompts["words"]] == [f"words/{n}" for n in range(4)]  # type: ignore[union-attr]
    assert [task.id for task in prompts["plain"]] == ["plain/1", "plain/2", "plain/3"], "without the evaluation prompt"
    assert held_out["t"][0].reward == "last_number"
    cursor = make_cursor(config, prompts)
    taken = [cursor.take()[1] for _ in range(40)]
    assert Counter(task.source for task in taken) == {"words": 30, "plain": 10}
    assert {(task.source, task.reward, task.generate) for task in taken} == {
        ("words", "exact", None),
        ("plain", None, "single_turn"),
    }
    assert {task.source for task in cursor.first(2)} == {"words", "plain"}


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ({"source": "a.jsonl", "mixture": {"a": {"source": "a"}}}, "data.source is set beside data.mixture; set it in"),
        ({"mixture": {"a": {"source": "a", "weight": 0}}}, "data.mixture: at step 0 all weights are 0"),
        ({"mixture": {"a": {"source": "a", "weight": [[0, 1.0], [0, 2.0]]}}}, "the steps of its points must rise"),
        ({"mixture": {"a/b": {"source": "a"}}}, "leave out the '/'"),
        (
            {"source": "verifiers:x", "generate": "single_turn"},
            "brings its own reward and generate function; remove it",
        ),
        ({"source": "a", "curriculum": {"low": 0.9}}, "data.curriculum.low = 0.9 is over high = 0.8"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(tmp_path: Path, data: dict[str, Any], fault: str) -> None:
    (found,) = impossible_data(config_of(tmp_path, data))
    assert fault in found


def test_the_batch_is_measured_by_source() -> None:
    def outcome(source: str, rewards: list[float], passed: float) -> Outcome:
        return Outcome(0, None, [], rewards, 1, [1], ["stop"], [], [], source, passed)

    batch = [outcome("a", [1.0, 0.0], 0.5), outcome("b", [1.0, 1.0], 1.0), outcome("a", [0.0, 0.0], 0.0)]
    assert source_metrics(batch) == {
        "source/a/groups": 2,
        "source/a/reward_mean": 0.25,
        "source/a/passed": 0.25,
        "source/b/groups": 1,
        "source/b/reward_mean": 1.0,
        "source/b/passed": 1.0,
    }
    assert source_metrics([outcome("", [1.0], 1.0)]) == {}


# sources of one's own

OWN = """
class Numbers:
    def __init__(self, start=0):
        self.next = start

    def take(self, count):
        first, self.next = self.next, self.next + count
        return [{"prompt": f"number {n}", "answer": n} for n in range(first, self.next)]

    def state(self):
        return {"next": self.next}

    def load(self, state):
        self.next = state["next"]


class Squares:
    def rows(self):
        return ({"prompt": f"{n} x {n}", "answer": n * n} for n in range(5))


class Halves(Numbers):
    def take(self, count):
        return super().take(count // 2)


class Odd(Numbers):
    def state(self):
        return {1, 2}


class Forgetful:
    def take(self, count): ...

    def state(self): ...


class Wrong:
    def rows(self):
        return ["a"]
"""


def own(tmp_path: Path, name: str, **data: Any) -> Config:
    (tmp_path / "own.py").write_text(OWN)
    return config_of(tmp_path, {"source": f"{tmp_path}/own.py:{name}", **data})


def test_a_class_with_rows_is_a_source_as_a_file_is(tmp_path: Path) -> None:
    prompts, _ = load_data(own(tmp_path, "Squares", size=3, template="What is {prompt}?"))
    assert [(task.messages[0]["content"], task.answer) for task in prompts[""]] == [  # type: ignore[union-attr]
        ("What is 0 x 0?", "0"),
        ("What is 1 x 1?", "1"),
        ("What is 2 x 2?", "4"),
    ]


@given(st.lists(st.sampled_from(["take", "take", "finish", "give_back"]), max_size=50))
def test_an_endless_source_goes_on_after_a_resume_with_the_same_rows(actions: list[str]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        config = own(Path(folder), "Numbers", options={"start": 100})
        cursor, open_ = make_cursor(config, load_data(config)[0]), list[int]()
        for action in actions:
            if action == "take":
                open_.append(cursor.take()[0])
            elif open_:
                getattr(cursor, action)(open_.pop(0))
        resumed = make_cursor(config, load_data(config)[0])
        resumed.load(json.loads(json.dumps(cursor.state())))
    for group_id in open_:
        cursor.give_back(group_id)
    straight = [cursor.take() for _ in range(60)]
    assert [resumed.take() for _ in range(60)] == straight
    assert all(task.messages[0]["content"] == f"number {100 + group_id}" for group_id, task in straight)


def test_an_endless_source_gives_no_evaluation_prompt_and_a_size_makes_it_a_set(tmp_path: Path) -> None:
    config = own(tmp_path, "Numbers")
    sets = {"t": {"source": config.data.source, "size": 2}}
    both = config.model_copy(update={"eval": make_config(tmp_path, eval={"sets": sets}).eval})
    cursor = make_cursor(both, load_data(both)[0])
    assert [cursor.take()[1].messages[0]["content"] for _ in range(3)] == ["number 2", "number 3", "number 4"]
    assert len(load_data(own(tmp_path, "Numbers", size=7))[0][""]) == 7  # type: ignore[arg-type]
    endless = {"t": {"source": config.data.source}}
    with pytest.raises(DataError, match="is endless and needs a size here"):
        load_held_out(make_config(tmp_path, eval={"sets": endless}))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Number", {}, "has no 'Number'; did you mean Numbers?"),
        ("Numbers", {"begin": 3}, "cannot be called with begin; a source is a class, made with data.options"),
        ("Numbers", {"start": "x"}, r"take\(\) failed: TypeError: can only concatenate str .*own.py, line 7"),
        ("Halves", {}, r"take\(16\) returned 8 rows; it returns a list of exactly so many rows"),
        ("Odd", {}, r"state\(\) is no JSON"),
        ("Forgetful", {}, r"has no rows\(\) and no load\(\); a source has rows\(\), or take"),
        ("Wrong", {}, "row 0 is a str, not a dict of columns"),
    ],
)
def test_a_source_of_ones_own_that_breaks_its_contract_is_refused_before_the_start(
    tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_data(own(tmp_path, name, options=options))


def test_a_state_of_another_form_is_refused_in_words() -> None:
    cursor = PromptCursor({"": Epochs([Task("a", ())], 0)}, 0)
    with pytest.raises(CursorError, match="of an earlier vime"):
        cursor.load({"tasks": 1, "digest": "0", "seed": 0, "drawn": 0, "buffer": [], "held": []})
