"""What a response is worth: the built-in rewards, a user's own, and how each can fail."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stand_in_runs import QuickJob, Server, configuration, whole_run
from vime.config.sections import RewardSection
from vime.rewards import RewardError
from vime.rewards.builtin import answer_of, last_number_of
from vime.rewards.load import load_reward, numbers_of
from vime.rewards.scoring import Rewards, check_rewards, weighted_sum
from vime.sample import Task


def task(answer: str | None = None, **metadata: Any) -> Task:
    return Task("t1", ({"role": "user", "content": "?"},), answer, metadata)


def value(reward: Any, response: str, answer: str | None = None, **metadata: Any) -> Any:
    """What a loaded reward gives, called here."""
    return reward(task(answer, **metadata), response)


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(RewardError) as caught:
        load_reward(name, options)
    return str(caught.value)


# built-ins


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("28.", "28"),
        ("the answer is -7", "-7"),
        ("1,234", "1234"),
        ("1,234.50 dollars", "1234.50"),
        ("13 - 5", "5"),
        ("13-5", "5"),
        ("x-5", "5"),
        ("2 + -5", "-5"),
        ("(-5)", "-5"),
        ("= -5", "-5"),
        ("=-5", "-5"),
        ("$12", "12"),
        ("3, 4, 5", "5"),
        ("5,", "5"),
        ("12%", "12"),
        ("**42**", "42"),
        ("0.50", "0.5"),
        ("first 3 then nothing", "3"),
        ("13 -5", "5"),
        ("13 - 5 = 8", "8"),
        ("so -5", "-5"),
        ("x = −7", "-7"),
        ("1,2,3", "3"),
        ("10,20", "20"),
        ("1,234,567.", "1234567"),
        ("is .5", "0.5"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str) -> None:
    found = last_number_of(text)
    assert found is not None and found == type(found)(number)


@pytest.mark.parametrize("text", ["", "none", "-", "...", ","])
def test_a_text_without_digits_has_no_number(text: str) -> None:
    assert last_number_of(text) is None


def test_last_number_compares_numbers_not_texts() -> None:
    reward = load_reward("last_number")
    assert value(reward, "so 12 + 30 = 42.0", "42") == 1
    assert value(reward, "1,000", "1000") == 1
    assert value(reward, "42 it is, not 43", "42") == 0
    assert value(reward, "no idea", "42") == 0
    assert value(reward, "-42", "42") == 0


def test_last_number_needs_an_answer_with_a_number() -> None:
    with pytest.raises(ValueError, match="the answer 'y' holds no number"):
        value(load_reward("last_number"), "x", "y")


def test_exact_ignores_white_space_around_and_case_on_demand() -> None:
    assert value(load_reward("exact"), " Paris\n", "Paris ") == 1
    assert value(load_reward("exact"), "paris", "Paris") == 0
    assert value(load_reward("exact", {"ignore_case": True}), "paris", "Paris") == 1
    assert value(load_reward("exact"), "Paris!", "Paris") == 0


@pytest.mark.parametrize(("name", "options"), [("exact", {}), ("regex", {"pattern": ".*"}), ("math_verify", {})])
def test_without_an_answer_an_empty_reply_is_not_right_but_an_error(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the task has no answer"):
        value(load_reward(name, options), "")


def test_regex_takes_the_last_match_and_its_first_group() -> None:
    boxed = load_reward("regex", {"pattern": r"\\boxed\{(.*?)\}"})
    assert value(boxed, r"\boxed{3} no, \boxed{ 4 }", "4") == 1
    assert value(boxed, r"\boxed{4} no, \boxed{3}", "4") == 0
    assert value(boxed, "4", "4") == 0
    assert value(boxed, "\\boxed{a\nb}", "a\nb") == 1
    assert value(load_reward("regex", {"pattern": r"\d+"}), "3 then 4", "4") == 1


def test_math_verify_finds_equal_what_is_written_otherwise() -> None:
    reward = load_reward("math_verify")
    assert value(reward, r"so $\frac{1}{2}$", "$0.5$") == 1
    assert value(reward, r"\boxed{2x + 2}", "$2(x+1)$") == 1
    assert value(reward, "$3$", "$4$") == 0
    assert value(reward, "no idea", "$4$") == 0


def test_math_verify_reads_a_bare_latex_answer_and_refuses_an_empty_one() -> None:
    reward = load_reward("math_verify")
    assert value(reward, r"so $\sqrt{2}$", r"\sqrt{2}") == 1
    assert value(reward, "$2x + 2$", "2(x+1)") == 1
    with pytest.raises(ValueError, match="cannot read the answer ''"):
        value(reward, "$4$", "")


@pytest.mark.parametrize("name", ["arc_agi", "rearc"])
def test_reasoning_gym_gives_full_marks_for_the_right_grid(name: str) -> None:
    from vime.data.sources import load_tasks

    (one,) = load_tasks(f"reasoning-gym:{name}", size=1)
    assert load_reward("reasoning_gym")(one, str(one.answer)) == 1


def test_reasoning_gym_asks_the_data_sets_own_scorer() -> None:
    from vime.data.sources import load_tasks

    (one,) = load_tasks("reasoning-gym:chain_sum", size=1, options={"max_terms": 2})

    def asked(response: str, **options: Any) -> Any:
        return load_reward("reasoning_gym", options)(one, response)

    assert asked(f"hm <answer>1</answer> <answer> {one.answer} </answer>") == 1
    assert asked("<answer>nothing</answer>") < 1
    assert asked(f"it is {one.answer}.", extract="last_number") == 1
    assert asked(str(one.answer), extract="whole") == 1


def test_reasoning_gym_refuses_a_task_that_is_not_its_own() -> None:
    with pytest.raises(ValueError, match="task t1 is not from reasoning-gym"):
        value(load_reward("reasoning_gym"), "x")


@pytest.mark.parametrize(
    ("response", "extract", "answer"),
    [
        ("<answer>1</answer> x <answer>\n2 </answer>", "answer_tag", "2"),
        (" no tag ", "answer_tag", "no tag"),
        ("is 1,200.", "last_number", "1200"),
        ("none", "last_number", ""),
        ("0.0000001", "last_number", "0.0000001"),
        (" <answer>1</answer> ", "whole", "<answer>1</answer>"),
    ],
)
def test_the_part_of_a_reply_that_is_scored(response: str, extract: str, answer: str) -> None:
    assert answer_of(response, extract) == answer


CITY = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    ("reply", "worth"),
    [
        ('{"city": "Paris"}', 1),
        (' {"city": "Paris", "more": 1}\n', 1),
        ('First\n```\n{}\n```\nthen\n```json\n{"city": "Paris"}\n```\nDone.', 1),
        ('{"city": 3}', 0.25),
        ("[]", 0.25),
        ("Paris", 0),
        ('It is {"city": "Paris"}', 0),
        ('{"city": "Paris", "x": NaN}', 0),
        ("[" * 100000, 0),
        ("", 0),
    ],
)
def test_json_schema_tells_json_that_fits_from_json_and_from_other_replies(reply: str, worth: float) -> None:
    assert value(load_reward("json_schema", {"schema": CITY, "valid_json": 0.25}), reply) == worth


def test_json_schema_takes_the_schema_of_a_row_as_object_or_text_and_whole_replies_on_demand() -> None:
    reward = load_reward("json_schema", {"column": "form", "fenced": False})
    assert value(reward, "3", form={"type": "integer"}) == 1
    assert value(reward, "3.5", form='{"type": "integer"}') == 0
    assert value(reward, "```\n3\n```", form={"type": "integer"}) == 0
    for form, said in (
        (None, "the row has no schema in a column 'form'"),
        ("{", "is no JSON"),
        ({"type": "x"}, "the schema is none"),
    ):
        with pytest.raises(ValueError, match=said):
            value(reward, "3", **({} if form is None else {"form": form}))


def test_a_schema_in_the_options_is_checked_and_no_reference_is_fetched() -> None:
    assert "the schema is none: 'strin' is not valid" in refusal("json_schema", schema={"type": "strin"})
    remote = load_reward("json_schema", {"schema": {"$ref": "http://127.0.0.1:9/schema"}})
    with pytest.raises(Exception, match="127.0.0.1:9/schema"):
        value(remote, "3")


# a user's own function


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Kept:\n    text: str\n"
        "def length(task, response):\n    return len(Kept(response).text)\n"
        "def optional(task, response, scale=2):\n    return scale\n"
        "def one(task):\n    return 1\n"
        "def three(task, response, more):\n    return 1\n"
        "constant = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    return path


def test_a_function_of_a_file_is_a_reward(user_file: Path) -> None:
    assert value(load_reward(f"{user_file}:length"), "four") == 4
    assert value(load_reward("my_rewards.py:optional"), "") == 2


def test_a_function_of_a_module_on_the_path_or_in_the_working_folder_is_a_reward(user_file: Path) -> None:
    assert user_file.exists()
    assert value(load_reward("my_rewards:length"), "four") == 4
    assert load_reward("builtins:max"), "a function whose signature cannot be read is taken as it is"


def test_a_file_named_like_a_module_of_the_library_does_not_replace_it(tmp_path: Path) -> None:
    import json

    (tmp_path / "json.py").write_text("def reward(task, response):\n    return 5\n")
    assert value(load_reward(f"{tmp_path}/json.py:reward"), "") == 5
    assert __import__("json") is json


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exat", "no reward is called 'exat'; did you mean exact?"),
        ("my_rewards.py:lenght", "has no 'lenght'; did you mean length?"),
        ("my_rewards.py:one", "(task) cannot be called with 2 arguments; a reward is f(task, response)"),
        ("my_rewards.py:three", "(task, response, more) cannot be called with 2 arguments"),
        ("my_rewards.py:constant", "is a int, not a function; a reward is f(task, response)"),
        ("none.py:f", "the file none.py does not exist"),
        ("no_such_module_here:f", "no_such_module_here cannot be imported: ModuleNotFoundError"),
        ("broken.py:f", "broken.py cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_reward_that_cannot_be_loaded_says_why(user_file: Path, name: str, message: str) -> None:
    (user_file.parent / "broken.py").write_text("1 / 0\n")
    assert message in refusal(name)


def test_options_are_checked_and_are_for_built_ins(user_file: Path) -> None:
    assert "has no option 'ignorecase'; did you mean ignore_case?" in refusal("exact", ignorecase=True)
    assert "reward 'last_number' has no option 'x'" in refusal("last_number", x=1)
    assert "reward 'regex'" in refusal("regex", pattern="(")
    assert "reward 'regex'" in refusal("regex")
    assert "it is answer_tag, last_number or whole" in refusal("reasoning_gym", extract="tag")
    assert "reward.options are for built-ins" in refusal(f"{user_file}:length", x=1)


def test_a_missing_file_or_module_is_named_with_the_nearest(user_file: Path) -> None:
    assert user_file.exists()
    assert "my_reward.py does not exist; did you mean my_rewards.py?" in refusal("my_reward.py:length")
    assert "did you mean my_rewards?" in refusal("my_rewardz:length")
    assert "did you mean config?" in refusal("vime.confg:length")


def test_the_nearest_module_is_sought_where_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"my_{name}_rewards.py").touch()
        monkeypatch.chdir(tmp_path / name)
        assert f"did you mean my_{name}_rewards?" in refusal(f"my_{name}_rewardz:length")


# what a reward returns


@pytest.mark.parametrize(
    ("result", "numbers"),
    [
        (2, {"reward": 2.0}),
        (np.float32(0.5), {"reward": 0.5}),
        (None, None),
        ({"reward": 1, "format": True, "length": 3}, {"reward": 1.0, "format": 1.0, "length": 3.0}),
    ],
)
def test_a_number_or_a_dict_with_one_is_a_reward_and_none_says_that_there_is_none(result: Any, numbers: Any) -> None:
    assert numbers_of(result) == numbers


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("3", "reward is the text '3', not a number"),
        ({}, "its dict has no 'reward', only \\[\\]"),
        ({"format": 1.0}, "its dict has no 'reward', only \\['format'\\]"),
        ({"reward": None}, "NoneType"),
        ([1.0], "list"),
    ],
)
def test_a_result_that_is_no_reward_says_what_it_is(result: Any, message: str) -> None:
    with pytest.raises((TypeError, KeyError), match=message):
        numbers_of(result)


# scoring, in workers

REWARDS = """
import asyncio, time
from vime.sample import Task

def seen(task, response):
    assert task == Task("t1", ({"role": "user", "content": "?"},), "y", {"kind": ["a", 1]})
    return {"reward": len(response), "answered": task.answer == "y", "messages": len(task.messages)}
async def later(task, response):
    await asyncio.sleep(0.01)
    return {"reward": len(response), "answered": task.answer == "y"}
def gives_a_coroutine(task, response): return later(task, response)
class Judge:
    async def __call__(self, task, response): return await later(task, response)
judge = Judge()
def picky(task, response): raise KeyError("level")
def timed_out(task, response): raise TimeoutError("the judge was slow")
def stops(task, response): raise StopIteration("no more")
async def cancels(task, response): raise asyncio.CancelledError
def text(task, response): return "high"
def unlike(task, response): return None
def endless(task, response): return float("inf")
def part(task, response): return {"reward": 1.0, "format": float("nan")}
def hangs(task, response): time.sleep(300)
def once(task, response):
    with open(response, "a") as file: file.write("x")
    time.sleep(300 if len(open(response).read()) == 1 else 0)
    return 1
async def slow(task, response):
    open(response, "w").close()
    try: await asyncio.sleep(300)
    finally: open(response, "a").write("ended")
def bad(task, response):
    while not __import__("os").path.exists(response): time.sleep(0.01)
    return "no"
"""
FUNCTIONS = [line.split("(")[0].split()[-1] for line in REWARDS.splitlines() if line.startswith(("def ", "async def "))]
Y = Task("t1", ({"role": "user", "content": "?"},), "y", {"kind": ["a", 1]})


@pytest.fixture(scope="module")
def rewards(run: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rewards]:
    """Functions of a file as parts, asked by name; "single" is a built-in."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "functions.py").write_text(REWARDS)
    parts: dict[str, Any] = {name: {"function": f"{folder}/functions.py:{name}"} for name in [*FUNCTIONS, "judge"]}
    parts["hangs"]["timeout_s"] = parts["once"]["timeout_s"] = 0.5
    parts["single"] = {"function": "exact", "options": {"ignore_case": True}}
    made = Rewards(RewardSection.model_validate({"parts": parts}), folder / "logs")
    run(made.__aenter__())
    yield made
    run(made.__aexit__())


@pytest.fixture
def ask(run: Any, rewards: Rewards) -> Callable[..., Any]:
    return lambda name, text="abc", given=Y: run(rewards.ask(rewards.run[name], given, text))


def test_a_function_gets_the_task_and_the_response(ask: Any) -> None:
    assert ask("seen") == {"reward": 3.0, "answered": 1.0, "messages": 1.0}
    assert ask("single", "Y ") == {"reward": 1.0}


@pytest.mark.parametrize("name", ["later", "gives_a_coroutine", "judge"])
def test_an_async_reward_is_awaited(ask: Any, name: str) -> None:
    assert ask(name) == {"reward": 3.0, "answered": 1.0}


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("picky", "failed on task t1: KeyError: 'level'"),
        ("timed_out", "failed on task t1: TimeoutError: the judge was slow"),
        ("stops", "failed on task t1: StopIteration: no more"),
        ("cancels", "failed on task t1: it cancelled itself"),
        ("text", "failed on task t1: TypeError: reward is the text 'high', not a number"),
        ("endless", "gave inf for task t1; rewards are finite numbers"),
        ("part", "gave format = nan for task t1; rewards are finite numbers"),
        ("hangs", "took over 0.5 s on task t1 (reward.parts.hangs.timeout_s)"),
    ],
)
def test_a_reward_that_fails_is_named_with_task_and_cause(ask: Any, name: str, cause: str) -> None:
    with pytest.raises(RewardError) as caught:
        ask(name)
    assert str(caught.value) == f"reward parts.{name} {cause}"


def test_a_late_reward_is_asked_again_and_one_that_raises_is_not(ask: Any, tmp_path: Path) -> None:
    assert ask("once", str(tmp_path / "calls")) == {"reward": 1.0}
    assert (tmp_path / "calls").read_text() == "xx"


def test_a_reply_that_stops_math_verify_fails_alone(run: Any, tmp_path: Path) -> None:
    section = RewardSection(function="math_verify", timeout_s=2, retries=0, workers=1)

    async def scored() -> list[Any]:
        async with Rewards(section, tmp_path) as rewards:
            scores = [rewards.score(Task("t1", (), "4"), text) for text in ("$9^{9^{9}}$", "$4$", "$2 + 2$")]
            return await asyncio.gather(*scores, return_exceptions=True)

    endless, *others = run(scored())
    assert str(endless) == "reward math_verify took over 2 s on task t1 (reward.timeout_s)"
    assert others == [(1.0, {})] * 2


# the sum


NUMBERS = st.floats(-100, 100)


@given(st.lists(st.tuples(st.none() | NUMBERS, NUMBERS), min_size=1, max_size=5))
def test_the_reward_is_the_weighted_sum_of_the_parts_that_apply(parts: list[tuple[float | None, float]]) -> None:
    values = np.array([np.nan if v is None else v for v, _ in parts])
    found = {f"p{i}": {"reward": v} for i, (v, _) in enumerate(parts) if v is not None}
    total, logged = weighted_sum({f"p{i}": w for i, (_, w) in enumerate(parts)}, found)
    assert total == pytest.approx(np.nansum(values * np.array([w for _, w in parts])), abs=1e-9)
    assert logged == {f"p{i}": v for i, v in enumerate(values.tolist()) if not np.isnan(v)}


def test_a_part_that_gives_a_dict_adds_its_reward_and_its_own_parts_under_its_name() -> None:
    judge = {"reward": 0.5, "clear": 1.0, "polite": 0.0}
    logged = {"right": 1.0, "judge": 0.5, "judge/clear": 1.0, "judge/polite": 0.0}
    assert weighted_sum({"right": 1.0, "judge": 2.0}, {"right": {"reward": 1.0}, "judge": judge}) == (2.0, logged)


def test_a_part_of_weight_0_is_logged_only() -> None:
    found = {"right": {"reward": 1.0}, "length": {"reward": 37.0}}
    assert weighted_sum({"right": 1.0, "length": 0.0}, found) == (1.0, {"right": 1.0, "length": 37.0})


def scored(run: Any, section: dict[str, Any], folder: Path, text: str = "x", given: Task = Y) -> Any:
    """A response's score by rewards of this section; the error's text where there is one."""

    async def score() -> Any:
        async with Rewards(RewardSection.model_validate({"workers": 1, **section}), folder / "logs") as rewards:
            return await rewards.score(given, text)

    try:
        return run(score())
    except RewardError as error:
        return str(error)


@pytest.fixture
def parts(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    (tmp_path / "functions.py").write_text(REWARDS)
    return lambda *names: {"parts": {name: {"function": f"{tmp_path}/functions.py:{name}"} for name in names}}


def test_without_parts_the_function_is_the_reward_and_exact_by_default(run: Any, tmp_path: Path) -> None:
    assert scored(run, {}, tmp_path, "y ") == (1.0, {})
    regex = {"function": "regex", "options": {"pattern": "."}}
    assert scored(run, regex, tmp_path, "so y") == (1.0, {})


def test_a_single_function_is_named_without_its_file(run: Any, tmp_path: Path, parts: Any) -> None:
    path = parts("picky")["parts"]["picky"]["function"]
    assert scored(run, {"function": path}, tmp_path) == "reward picky failed on task t1: KeyError: 'level'"
    text = scored(run, {"function": path.replace("picky", "hangs"), "timeout_s": 0.3, "retries": 0}, tmp_path)
    assert text == "reward hangs took over 0.3 s on task t1 (reward.timeout_s)"


def test_a_single_reward_that_does_not_apply_is_an_error(run: Any, tmp_path: Path, parts: Any) -> None:
    text = scored(run, {"function": parts("unlike")["parts"]["unlike"]["function"]}, tmp_path)
    assert text.startswith("reward unlike failed on task t1: it returned None, which says that it does not apply")


def test_a_task_to_which_no_part_applies_is_an_error_that_names_them(run: Any, tmp_path: Path, parts: Any) -> None:
    section = parts("unlike")
    section["parts"]["code"] = section["parts"]["unlike"]
    message = "failed on task t1: none of its parts applies, unlike, code returned None; add one of [reward.parts]"
    assert message in scored(run, section, tmp_path)


def test_parts_are_loaded_with_their_options_and_weights_and_left_out_where_they_do_not_apply(
    run: Any, tmp_path: Path, parts: Any
) -> None:
    section = parts("later", "unlike")
    section["parts"]["later"]["weight"] = -0.01
    section["parts"]["right"] = {"function": "exact", "options": {"ignore_case": True}}
    total, logged = scored(run, section, tmp_path, "Y")
    assert total == pytest.approx(0.99) and logged == {"later": 1.0, "later/answered": 1.0, "right": 1.0}


def test_a_part_that_fails_fails_the_sample_and_ends_those_that_still_run(run: Any, tmp_path: Path, parts: Any) -> None:
    async def score() -> str:
        async with Rewards(RewardSection.model_validate(parts("slow", "bad")), tmp_path / "logs") as rewards:
            with pytest.raises(RewardError) as caught:
                await rewards.score(Y, str(tmp_path / "slow"))
            async with asyncio.timeout(20):
                while (tmp_path / "slow").read_text() != "ended":
                    await asyncio.sleep(0.01)
        return str(caught.value)

    assert run(score()) == "reward parts.bad failed on task t1: TypeError: reward is the text 'no', not a number"


def test_rewards_that_cannot_be_loaded_are_refused_with_the_loaders_words(run: Any, tmp_path: Path) -> None:
    section = RewardSection.model_validate({"parts": {"right": {"function": "exat"}}})
    with pytest.raises(
        RewardError, match=r"^no reward is called 'exat'; did you mean exact\?; your own is module:function$"
    ):
        run(check_rewards(section))


def test_a_check_of_rewards_names_the_workers_of_a_run(run: Any, parts: Any) -> None:
    section = RewardSection.model_validate({"workers": 2, **parts("later", "picky")})
    assert [line.split(":")[0] for line in run(check_rewards(section))] == [
        "worker of concurrent rewards 0",
        "worker of concurrent rewards 1",
        "worker of plain rewards 0",
        "worker of plain rewards 1",
    ]


def test_failed_samples_are_told_with_the_last_cause(models: Any, tmp_path: Path) -> None:
    config = configuration(tmp_path, models("tied"), run={"steps": 2})
    (tmp_path / "lower.py").write_text(
        "calls = []\n"
        "def share(task, response):\n"
        "    calls.append(1)\n"
        "    if len(calls) % 5 == 0:\n"
        "        raise ValueError('no such answer')\n"
        "    return len(calls) % 3\n"
    )
    _, said = asyncio.run(whole_run(config, Server(), QuickJob))
    assert re.search(r"note: \d+ samples failed; the last: .*no such answer", said)
