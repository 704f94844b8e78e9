"""Rewards of whole groups, and rewards that rows name."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_config, scored_by
from vime.config.load import dump
from vime.config.rewards import impossible_rewards
from vime.config.sections import Config, EvalSet, RewardSection, Rollout
from vime.data.cursor import PromptCursor
from vime.data.journal import Journal
from vime.inference.client import InferenceError
from vime.inference.gate import Gate
from vime.inference.requests import Requests
from vime.rewards import RewardError
from vime.rewards.load import group_numbers
from vime.rewards.scoring import Rewards, check_rewards
from vime.rollout.evaluate import evaluate_set
from vime.rollout.generate import GENERATE, Context, group_of
from vime.rollout.scheduler import Scheduler
from vime.sample import Sample, Task, VersionSpan
from vime.store.shared_memory import SharedMemoryStore

FUNCTIONS = """
def rank(task, responses):
    return [sorted(responses).index(one) for one in responses]
def told(task, responses):
    return [{"reward": len(responses), "note": found.get("note", 0)} for found in task.metadata["samples"]]
async def waits(task, responses):
    return [0.5] * len(responses)
def short(task, responses): return [1.0]
def bad(task, responses): raise KeyError("no")
def picky(task, response):
    if response == "c": raise KeyError("c")
    return 10.0
def none(task, responses): return None
def row(task, response): return 7.0
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return f"{tmp_path}/functions.py"


def task(reward: str | None = None) -> Task:
    return Task("t1", ({"role": "user", "content": "?"},), "a", {"kind": "x"}, reward=reward)


def sample(text: str, reward: float | None = None, **metadata: Any) -> Sample:
    return Sample([1], [65], [-0.5], (VersionSpan(0, 0, 1),), "stop", text, reward=reward, metadata=metadata)


def scoring(run: Any, folder: Path, section: dict[str, Any], texts: Any, given: Task | None = None) -> Any:
    """What a group of these samples is worth: (reward, parts) or the error's text of each."""
    samples = [one if isinstance(one, Sample) else sample(one) for one in texts]
    given = given or task()

    async def score() -> Any:
        async with Rewards(
            RewardSection.model_validate({"workers": 1, **section}), folder / "logs", [given]
        ) as rewards:
            whole = rewards.group_score(given)
            return await whole(samples) if whole else [await rewards.score(given, one.text) for one in samples]

    return [str(one) if isinstance(one, RewardError) else one for one in run(score())]


def test_a_group_reward_sees_all_responses_and_what_was_noted_with_each(run: Any, tmp_path: Path, path: str) -> None:
    assert scoring(run, tmp_path, {"function": f"{path}:rank", "group": True}, "bca") == [(1, {}), (2, {}), (0, {})]
    samples = [sample("a", note=3), sample("b")]
    told = scoring(run, tmp_path, {"function": f"{path}:told", "group": True}, samples)
    assert told == [(2, {"note": 3}), (2, {"note": 0})]


def test_parts_of_both_kinds_are_summed_and_one_that_fails_for_a_response_fails_that_one(
    run: Any, tmp_path: Path, path: str
) -> None:
    parts = {
        "rank": {"function": f"{path}:rank", "group": True, "weight": 2},
        "waits": {"function": f"{path}:waits", "group": True, "weight": 0},
        "none": {"function": f"{path}:none", "group": True},
        "picky": {"function": f"{path}:picky"},
    }
    one, other, failed = scoring(run, tmp_path, {"parts": parts}, "abc")
    assert one == (10, {"rank": 0, "waits": 0.5, "picky": 10})
    assert other == (12, {"rank": 1, "waits": 0.5, "picky": 10})
    assert failed == "reward parts.picky failed on task t1: KeyError: 'c'"


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("bad", "reward bad failed on task t1: KeyError: 'no'"),
        ("short", "reward short failed on task t1: ValueError: it returned 1 rewards for 2 responses"),
        ("none", "reward none failed on task t1: it returned None"),
    ],
)
def test_a_group_reward_that_fails_fails_every_response(
    run: Any, tmp_path: Path, path: str, name: str, cause: str
) -> None:
    found = scoring(run, tmp_path, {"function": f"{path}:{name}", "group": True}, "ab")
    assert len(found) == 2 and all(one.startswith(cause) for one in found)


def test_what_a_group_reward_returns_is_one_entry_a_response() -> None:
    assert group_numbers([1, {"reward": 2, "x": 3}, None], ["a", "b", "c"]) == [
        {"reward": 1},
        {"reward": 2, "x": 3},
        None,
    ]
    assert group_numbers((0.5 for _ in "ab"), ["a", "b"]) == [{"reward": 0.5}] * 2
    assert group_numbers(None, ["a", "b"]) == [None, None]
    for wrong in ("ab", {"reward": 1}, 3):
        with pytest.raises(TypeError, match="for 2 responses, not a list"):
            group_numbers(wrong, ["a", "b"])


def test_a_group_reward_cannot_be_asked_for_one_response(run: Any, tmp_path: Path, path: str) -> None:
    async def score() -> Any:
        section = RewardSection(function=f"{path}:rank", group=True)
        async with Rewards(section, tmp_path / "logs") as rewards:
            await rewards.score(task(), "a")

    with pytest.raises(RewardError, match="reward rank has group = true: it cannot score a response of task t1 alone"):
        run(score())


def test_a_built_in_is_no_group_reward(run: Any) -> None:
    with pytest.raises(RewardError, match="reward 'exact' scores one response alone; remove group = true"):
        run(check_rewards(RewardSection(function="exact", group=True)))


def test_group_beside_parts_is_refused_and_what_is_written_down_can_be_read_again(tmp_path: Path) -> None:
    parts = {"right": {"function": "exact", "group": True}}
    config = make_config(tmp_path, reward={"parts": parts, "named": {"code": {"function": "code"}}})
    again = Config.model_validate(tomllib.loads(dump(config)))
    assert again == config and not impossible_rewards(again)
    (fault,) = impossible_rewards(make_config(tmp_path, reward={"parts": parts, "group": True}))
    assert fault.startswith("reward.group = True and reward.parts are both set")


# groups as they are made


def group(made: list[Any], score: Callable[[list[Sample]], Any] | None) -> Any:
    """What ``group_of`` gives where the calls made these, with a score of the group."""

    async def generate(context: Context, given: Task) -> Any:
        one = made[context.number]
        if isinstance(one, Exception):
            raise one
        return one

    async def scored(samples: Any) -> Any:
        assert score
        return score(samples)

    requests = Requests(None, Gate(usable=True), Rollout())  # type: ignore[arg-type]
    alone = scored_by(lambda given, text: 5.0)
    context = Context(requests, None, alone, {}, group_score=lambda context, given: scored if score else None)
    return asyncio.run(group_of(context, task(), [generate] * len(made)))


def test_a_group_is_scored_when_it_is_whole_and_samples_with_a_reward_keep_it() -> None:
    seen = []

    def score(samples: list[Sample]) -> Any:
        seen.append([one.text for one in samples])
        return [(float(index), {"part": 1.0}) for index, _ in enumerate(samples)]

    lost = InferenceError("gone")
    found = group([sample("a"), lost, [sample("b", reward=3.0), sample("c")]], score)
    assert seen == [["a", "c"]]
    assert found[0][0].reward == 0 and found[0][0].reward_parts == {"part": 1.0}
    assert found[1] is lost
    assert [one.reward for one in found[2]] == [3.0, 1.0]


def test_a_response_that_the_group_reward_fails_fails_its_call() -> None:
    error = RewardError("no")
    found = group([sample("a"), [sample("b"), sample("c")]], lambda samples: [(1.0, {}), error, (1.0, {})])
    assert found[0][0].reward == 1 and found[1] is error


def test_a_group_of_which_nothing_is_to_be_scored_is_not_asked_about() -> None:
    def never(samples: list[Sample]) -> Any:
        raise AssertionError(samples)

    assert group([sample("a", reward=1.0), InferenceError("x")], never)[0][0].reward == 1


def test_without_group_rewards_each_response_is_scored_as_it_comes() -> None:
    assert [one[0].reward for one in group([sample("a"), sample("b", reward=2.0)], None)] == [5.0, 2.0]


def test_training_and_evaluation_score_groups(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def numbered(context: Context, given: Task) -> Sample:
        if context.number == 1:
            raise InferenceError("lost")
        return sample("abc"[context.number])

    async def ranked(samples: Any) -> Any:
        return [(float(index), {}) for index, _ in enumerate(samples)]

    monkeypatch.setitem(GENERATE, "single_turn", numbered)
    config = make_config(tmp_path, rollout={"groups": 1, "samples_per_group": 3}, run={"steps": 1})
    requests = Requests(type("Front", (), {"version": 0})(), Gate(usable=True), config.rollout)  # type: ignore[arg-type]
    context = Context(requests, None, None, {}, group_score=lambda context, given: ranked)  # type: ignore[arg-type]

    async def both() -> Any:
        store = SharedMemoryStore(tmp_path / "store")
        journal = Journal(tmp_path / "journal.jsonl")
        scheduler = Scheduler(config, context, PromptCursor([task()], seed=0), journal, store)
        (outcome,) = await scheduler.collect()
        section = EvalSet(source="x", samples=3, temperature=1.0)
        metrics, rows = await evaluate_set("held", section, [task(), replace(task(), id="t2")], context, config, 0)
        return outcome, scheduler.failed_samples, metrics, rows

    outcome, failed, metrics, rows = run(both())
    assert outcome.rewards == [0.0, 1.0] and failed == 1
    assert metrics["eval/held/failed"] == 2 and metrics["eval/held/pass@1"] == pytest.approx(1 / 3)
    assert [row["reward"] for row in rows] == [0.0, 1.0] * 2


# rewards that rows name


def test_a_row_is_scored_by_the_reward_it_names_alone(run: Any, tmp_path: Path, path: str) -> None:
    section = {
        "parts": {"right": {"function": "exact"}, "more": {"function": f"{path}:row"}},
        "named": {
            "loose": {"function": "exact", "options": {"ignore_case": True}},
            "ranked": {"function": f"{path}:rank", "group": True},
        },
    }
    assert scoring(run, tmp_path, section, "A") == [(7, {"right": 0, "more": 7})]
    assert scoring(run, tmp_path, section, "A", task("loose")) == [(1, {})]
    assert scoring(run, tmp_path, section, "A", task("exact")) == [(0, {})]
    assert scoring(run, tmp_path, section, "A", task(f"{path}:row")) == [(7, {})]
    assert scoring(run, tmp_path, section, "ba", task("ranked")) == [(1, {}), (0, {})]


def test_a_row_and_the_run_may_name_functions_of_one_name(run: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def exact(task, response):\n    return 9.0\n")
    section = {"function": f"{tmp_path}/own.py:exact"}
    assert scoring(run, tmp_path, section, "a") == [(9, {})]
    assert scoring(run, tmp_path, section, "a", task("exact")) == [(1, {})]


@pytest.mark.parametrize(
    ("name", "named", "said"),
    [
        ("loos", {"loose": {"function": "exact"}}, "a row names the reward 'loos', .* did you mean loose?"),
        ("exat", {}, "a row names the reward 'exat', .* did you mean exact?"),
        ("none.py:f", {}, "the file none.py does not exist"),
        ("regex", {}, "reward 'regex': .*missing 1 required"),
        ("exact", {"exact": {"function": "regex"}}, "reward.named.exact: 'exact' is a built-in reward"),
    ],
)
def test_a_reward_that_a_row_names_is_refused_before_the_start_where_there_is_none(
    run: Any, tmp_path: Path, name: str, named: Any, said: str
) -> None:
    with pytest.raises(RewardError, match=said):
        scoring(run, tmp_path, {"named": named}, "a", task(name))


def test_a_reward_that_no_row_named_at_the_start_fails_the_sample(run: Any, tmp_path: Path) -> None:
    async def score() -> None:
        async with Rewards(RewardSection(), tmp_path / "logs") as rewards:
            await rewards.score(task("regex"), "a")

    with pytest.raises(RewardError, match="task t1 names the reward 'regex', which no row named at the start"):
        run(score())


def test_fewer_async_calls_run_side_by_side_on_demand(run: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import asyncio\nrunning = 0\nasync def f(task, response):\n    global running\n    running += 1\n    most = running\n"
        "    await asyncio.sleep(0.02)\n    most = max(most, running)\n    running -= 1\n    return most\n"
    )
    section = RewardSection(function=f"{tmp_path}/own.py:f", workers=1, concurrency=3)

    async def score() -> Any:
        async with Rewards(section, tmp_path / "logs") as rewards:
            return await asyncio.gather(*(rewards.score(task(), "a") for _ in range(20)))

    assert max(most for most, _ in run(score())) == 3
