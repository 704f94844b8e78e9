"""What a response is worth: the built-in rewards, a user's own, and how each can fail."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.config.sections import RewardSection
from vime.rewards import Part, RewardError, load_reward, load_rewards, score
from vime.rewards.builtin import answer_of, last_number_of
from vime.sample import Task


def task(answer: str | None = None, **metadata: Any) -> Task:
    return Task("t1", ({"role": "user", "content": "?"},), answer, metadata)


def value(reward: Any, response: str, answer: str | None = None, deadline_s: float = 20, **metadata: Any) -> float:
    return asyncio.run(score(reward, task(answer, **metadata), response, deadline_s))[0]


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(RewardError) as caught:
        load_reward(name, **options)
    return str(caught.value)


def failure(reward: Any, deadline_s: float = 20) -> str:
    with pytest.raises(RewardError) as caught:
        value(reward, "x", "y", deadline_s)
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
    assert "the answer 'y' holds no number" in failure(load_reward("last_number"))


def test_exact_ignores_white_space_around_and_case_on_demand() -> None:
    assert value(load_reward("exact"), " Paris\n", "Paris ") == 1
    assert value(load_reward("exact"), "paris", "Paris") == 0
    assert value(load_reward("exact", ignore_case=True), "paris", "Paris") == 1
    assert value(load_reward("exact"), "Paris!", "Paris") == 0


@pytest.mark.parametrize(("name", "options"), [("exact", {}), ("regex", {"pattern": ".*"}), ("math_verify", {})])
def test_without_an_answer_an_empty_reply_is_not_right_but_an_error(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=f"reward {name} failed on task t1: .*the task has no answer"):
        value(load_reward(name, **options), "")


def test_regex_takes_the_last_match_and_its_first_group() -> None:
    boxed = load_reward("regex", pattern=r"\\boxed\{(.*?)\}")
    assert value(boxed, r"\boxed{3} no, \boxed{ 4 }", "4") == 1
    assert value(boxed, r"\boxed{4} no, \boxed{3}", "4") == 0
    assert value(boxed, "4", "4") == 0
    assert value(boxed, "\\boxed{a\nb}", "a\nb") == 1
    assert value(load_reward("regex", pattern=r"\d+"), "3 then 4", "4") == 1


def test_math_verify_finds_equal_what_is_written_otherwise_off_the_main_thread() -> None:
    reward = load_reward("math_verify")
    assert value(reward, r"so $\frac{1}{2}$", "$0.5$") == 1
    assert value(reward, r"\boxed{2x + 2}", "$2(x+1)$") == 1
    assert value(reward, "$3$", "$4$") == 0
    assert value(reward, "no idea", "$4$") == 0


def test_math_verify_reads_a_bare_latex_answer_and_refuses_an_empty_one() -> None:
    reward = load_reward("math_verify", processes=1)
    assert value(reward, r"so $\sqrt{2}$", r"\sqrt{2}") == 1
    assert value(reward, "$2x + 2$", "2(x+1)") == 1
    with pytest.raises(RewardError, match="math_verify failed on task t1: ValueError: .*cannot read the answer ''"):
        value(reward, "$4$", "")


def test_a_reply_that_stops_math_verify_fails_alone_and_leaves_the_event_loop_free() -> None:
    reward = load_reward("math_verify", timeout_s=1, processes=1)

    async def scored() -> tuple[str, int, float]:
        endless = asyncio.create_task(score(reward, task("4"), "$9^{9^{9}}$", 60))
        turns = 0
        while not endless.done():
            turns += 1
            await asyncio.sleep(0.01)
        return str(endless.exception()), turns, (await score(reward, task("4"), "$4$", 60))[0]

    error, turns, after = asyncio.run(scored())
    assert "math-verify took over 1 s (option timeout_s)" in error
    assert turns > 20 and after == 1


@pytest.mark.parametrize("name", ["arc_agi", "rearc"])
def test_reasoning_gym_gives_full_marks_for_the_right_grid(name: str) -> None:
    from vime.data.sources import load_tasks

    (one,) = load_tasks(f"reasoning-gym:{name}", size=1)
    assert asyncio.run(score(load_reward("reasoning_gym"), one, str(one.answer), 20)) == (1.0, {})


def test_reasoning_gym_asks_the_data_sets_own_scorer() -> None:
    from vime.data.sources import load_tasks

    (one,) = load_tasks("reasoning-gym:chain_sum", size=1, options={"max_terms": 2})

    def asked(response: str, **options: Any) -> float:
        return asyncio.run(score(load_reward("reasoning_gym", **options), one, response, 20))[0]

    assert asked(f"hm <answer>1</answer> <answer> {one.answer} </answer>") == 1
    assert asked("<answer>nothing</answer>") < 1
    assert asked(f"it is {one.answer}.", extract="last_number") == 1
    assert asked(str(one.answer), extract="whole") == 1


def test_reasoning_gym_refuses_a_task_that_is_not_its_own() -> None:
    assert "task t1 is not from reasoning-gym" in failure(load_reward("reasoning_gym"))


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


# scoring


def test_a_reward_runs_off_the_event_loop() -> None:
    def reward(_task: Task, _text: str) -> float:
        return float(threading.current_thread() is threading.main_thread())

    assert value(reward, "") == 0


def test_a_dict_is_the_reward_and_its_named_parts() -> None:
    result = {"reward": 1, "format": True, "length": 3}
    assert asyncio.run(score(lambda *_: result, task(), "", 5)) == (1.0, {"format": 1.0, "length": 3.0})
    assert result == {"reward": 1, "format": True, "length": 3}


def test_an_async_reward_is_awaited() -> None:
    async def reward(given: Task, text: str) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"reward": len(text), "answered": given.answer == "y"}

    assert asyncio.run(score(reward, task("y"), "abc", 5)) == (3.0, {"answered": 1.0})


def test_a_reward_that_raises_is_named_with_task_and_cause() -> None:
    def picky(_task: Task, _text: str) -> float:
        raise KeyError("level")

    text = failure(picky)
    assert "picky failed on task t1: KeyError: 'level'" in text


@pytest.mark.parametrize("result", ["high", {}, {"format": 1.0}, {"reward": None}, [1.0]])
def test_a_result_that_is_no_reward_is_refused(result: Any) -> None:
    assert "failed on task t1" in failure(lambda *_: result)


@pytest.mark.parametrize("result", [float("nan"), float("inf"), {"reward": float("-inf")}])
def test_a_reward_that_is_not_finite_is_refused(result: Any) -> None:
    assert "for task t1; rewards are finite numbers" in failure(lambda *_: result)


def test_a_reward_that_hangs_is_given_up_at_the_deadline() -> None:
    let_go = threading.Event()

    def hangs(_task: Task, _text: str) -> float:
        let_go.wait(20)
        return 1.0

    async def scored() -> str:
        try:
            await score(hangs, task(), "", 0.05)
        except RewardError as error:
            assert not let_go.is_set()
            return str(error)
        finally:
            let_go.set()
        return "was not given up"

    assert "hangs took over 0.05 s on task t1 (reward.timeout_s)" in asyncio.run(scored())


def test_an_async_reward_that_hangs_is_given_up_at_the_deadline() -> None:
    async def hangs(_task: Task, _text: str) -> float:
        await asyncio.sleep(60)
        return 1.0

    assert "took over 0.05 s on task t1" in failure(hangs, 0.05)


def test_a_slow_reward_does_not_hold_up_the_others() -> None:
    let_go = threading.Event()

    async def both() -> list[float]:
        slow = asyncio.create_task(score(lambda *_: float(let_go.wait(20)), task(), "", 30))
        fast, _ = await score(lambda *_: 2.0, task(), "", 30)
        let_go.set()
        return [fast, (await slow)[0]]

    assert asyncio.run(both()) == [2.0, 1.0]


def test_rewards_that_hang_hold_up_neither_the_others_nor_the_end_of_the_run() -> None:
    let_go = threading.Event()

    async def all_of_them() -> float:
        hung = [asyncio.create_task(score(lambda *_: float(let_go.wait(30)), task(), "", 0.05)) for _ in range(40)]
        await asyncio.gather(*hung, return_exceptions=True)
        return (await score(lambda *_: 2.0, task(), "", 5))[0]

    assert asyncio.run(all_of_them()) == 2
    assert not let_go.is_set(), "the loop closed while they hung"
    let_go.set()


def test_an_async_reward_that_will_not_be_cancelled_is_given_up_all_the_same() -> None:
    async def stubborn(_task: Task, _text: str) -> float:
        for _ in range(20):
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        return 1.0

    async def scored() -> float:
        begin = asyncio.get_running_loop().time()
        with pytest.raises(RewardError, match=r"stubborn took over 0\.05 s"):
            await score(stubborn, task(), "", 0.05)
        return asyncio.get_running_loop().time() - begin

    assert asyncio.run(scored()) < 0.5


def test_an_object_with_an_async_call_is_a_reward() -> None:
    class Judge:
        async def __call__(self, _task: Task, text: str) -> float:
            await asyncio.sleep(0)
            return float(len(text))

    assert value(Judge(), "abc") == 3


@pytest.mark.parametrize("error", [TimeoutError("the judge was slow"), SystemExit(3), StopIteration("no more")])
def test_an_error_of_the_rewards_own_is_not_taken_for_the_deadline_or_the_end_of_the_run(error: BaseException) -> None:
    def broken(_task: Task, _text: str) -> float:
        raise error

    text = failure(broken)
    assert "broken failed on task t1" in text and "took over" not in text


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("3", "reward is the text '3', not a number"),
        ({"format": 1.0}, "its dict has no 'reward', only ['format']"),
        ({"reward": 1.0, "format": float("nan")}, "gave format = nan for task t1; rewards are finite numbers"),
    ],
)
def test_a_result_that_is_no_reward_says_what_it_is(result: Any, message: str) -> None:
    assert message in failure(lambda *_: result)


def test_a_missing_file_or_module_is_named_with_the_nearest(user_file: Path) -> None:
    assert user_file.exists()
    assert "my_reward.py does not exist; did you mean my_rewards.py?" in refusal("my_reward.py:length")
    assert "did you mean my_rewards?" in refusal("my_rewardz:length")
    assert "did you mean config?" in refusal("vime.confg:length")


# several rewards


def both(rewards: Any, response: str = "x", answer: str | None = None, deadline_s: float = 20) -> tuple[float, Any]:
    return asyncio.run(score(rewards, task(answer), response, deadline_s))


def gives(result: Any, weight: float = 1.0) -> Part:
    return Part(lambda *_: result, weight)


NUMBERS = st.floats(-100, 100)


@given(
    st.lists(st.tuples(st.none() | NUMBERS, NUMBERS), min_size=1, max_size=5).filter(
        lambda p: any(v is not None for v, _ in p)
    )
)
def test_the_reward_is_the_weighted_sum_of_the_parts_that_apply(parts: list[tuple[float | None, float]]) -> None:
    values = np.array([np.nan if v is None else v for v, _ in parts])
    total, logged = both({f"p{i}": gives(v, w) for i, (v, w) in enumerate(parts)})
    assert total == pytest.approx(np.nansum(values * np.array([w for _, w in parts])), abs=1e-9)
    assert logged == {f"p{i}": v for i, v in enumerate(values.tolist()) if not np.isnan(v)}


def test_the_weights_of_parts_that_do_not_apply_are_not_given_to_the_others() -> None:
    assert both({"math": gives(None, 0.8), "style": gives(1.0, 0.2)}) == (0.2, {"style": 1.0})


def test_a_part_of_weight_0_is_logged_only() -> None:
    assert both({"right": gives(1), "length": gives(37, 0)}) == (1.0, {"right": 1.0, "length": 37.0})


def test_a_part_that_gives_a_dict_adds_its_reward_and_its_own_parts_under_its_name() -> None:
    judge = gives({"reward": 0.5, "clear": 1, "polite": 0}, 2.0)
    logged = {"right": 1.0, "judge": 0.5, "judge/clear": 1.0, "judge/polite": 0.0}
    assert both({"right": gives(1), "judge": judge}) == (2.0, logged)


def test_a_part_of_the_value_0_applies() -> None:
    assert both({"right": gives(0.0)}) == (0.0, {"right": 0.0})


def test_a_single_reward_that_does_not_apply_is_an_error() -> None:
    assert "failed on task t1: it returned None, which says that it does not apply" in failure(lambda *_: None)


def test_a_task_to_which_no_part_applies_is_an_error_that_names_them() -> None:
    message = "failed on task t1: none of its parts applies, math, code returned None; add one of [reward.parts]"
    assert message in failure({"math": gives(None), "code": gives(None)})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("3", "reward parts.bad failed on task t1: TypeError: reward is the text '3'"),
        ({"clear": 1}, "reward parts.bad failed on task t1: KeyError"),
        (float("nan"), "reward parts.bad gave nan for task t1"),
    ],
)
def test_a_part_that_fails_fails_the_sample_and_is_named(result: Any, message: str) -> None:
    assert message in failure({"good": gives(1), "bad": gives(result, 0)})


def test_a_part_that_hangs_is_named_at_the_deadline() -> None:
    let_go = threading.Event()
    late = Part(lambda *_: let_go.wait(20))
    assert "parts.judge took over 0.05 s on task t1" in failure({"right": gives(1), "judge": late}, 0.05)
    let_go.set()


def test_a_part_that_fails_ends_those_that_still_run() -> None:
    ended = []

    async def slow(_task: Task, _text: str) -> float:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        return 1.0

    async def scored() -> None:
        with pytest.raises(RewardError, match="parts.bad"):
            await score({"slow": Part(slow), "bad": gives("no")}, task(), "", 30)
        await asyncio.sleep(0.05)
        assert ended, "it ran on"

    asyncio.run(scored())


def test_parts_are_asked_at_the_same_time() -> None:
    meet = threading.Barrier(2, timeout=10)
    parts = {name: Part(lambda *_: float(meet.wait() >= 0)) for name in ("a", "b")}
    assert both(parts)[0] == 2


def test_without_parts_the_function_is_the_reward_and_exact_by_default() -> None:
    assert both(load_rewards(RewardSection()), "yes ", "yes") == (1.0, {})
    section = RewardSection(function="regex", options={"pattern": r"\d+"})
    assert both(load_rewards(section), "so 4", "4") == (1.0, {})


def test_parts_are_loaded_with_their_options_and_weights(user_file: Path) -> None:
    section = RewardSection.model_validate(
        {
            "parts": {
                "right": {"function": "exact", "options": {"ignore_case": True}},
                "length": {"function": f"{user_file}:length", "weight": -0.01},
            }
        }
    )
    total, logged = both(load_rewards(section), "PARIS", "Paris")
    assert total == pytest.approx(0.95) and logged == {"right": 1.0, "length": 5.0}


def test_a_part_that_cannot_be_loaded_says_why() -> None:
    section = RewardSection.model_validate({"parts": {"right": {"function": "exat"}}})
    with pytest.raises(RewardError, match="no reward is called 'exat'; did you mean exact?"):
        load_rewards(section)
