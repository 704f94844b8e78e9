"""Functions of users are tried before a run: what holds of good ones, and what is said of each bad one."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from vime.cli import main
from vime.contract import inputs
from vime.contract.checks import CHECKERS, Check, tried
from vime.contract.command import NAMES, kind_found, kind_named
from vime.slime.hooks import HOOKS

GOOD = {
    "generate": ["two_turns", "split"],
    "sample": ["tag", "shout"],
    "reward": ["rm"],
    "group_reward": ["group_rm"],
    "dynamic_filter": ["not_all_equal"],
    "buffer_filter": ["newest_first"],
    "sample_filter": ["no_truncated"],
    "all_samples": ["count_all"],
    "reward_post_process": ["centred"],
    "convert": ["first_half"],
    "rollout_log": ["log_rollout"],
    "eval_log": ["log_eval"],
    "data_source": ["Counting"],
    "rollout": ["rollout"],
    "eval": ["evaluation"],
    "advantage": ["whole_batch_advantage"],
    "postprocess": ["mask_first"],
    "tis": ["truncated_tis"],
    "reducer": ["constant_length"],
    "loss": ["policy_gradient"],
    "init": ["note_start"],
    "before_log_prob": ["note_model"],
    "before_step": ["note_step"],
}
NEEDY = {  # built-in ones that a bare task does not do for
    *("regex", "reasoning_gym", "json_schema", "code", "http", "judge", "reward_model"),
    *("dpo", "clip_cov", "kl_cov"),
}
BAD = [
    ("generate", "plain_generate", "is a plain function; it is to be async def f(args, sample, sampling_params"),
    ("generate", "generate_of_two", "cannot be called as async f(args, sample, sampling_params"),
    ("generate", "short_mask", "loss_mask has 8 entries for response_length = 9"),
    ("generate", "no_logprobs", "trained tokens need the log-probability"),
    ("reward", "nan_rm", "the reward is nan"),
    ("reward", "rm", "set slime.reward_key to one of them"),
    ("group_reward", "short_group_rm", "it returned 1 rewards for 4 samples"),
    ("reward_post_process", "no_reward_lists", "1 raw rewards and 1 rewards for 8 samples"),
    ("data_source", "Sourceless", "has no method add_samples"),
    ("sample", "not_there", "has no 'not_there'"),
]


def checked(kind: str, path: str, reward_key: str | None = None) -> list[Check]:
    given = inputs.config(args={"scale": 1.0, "longest": 6}, reward_key=reward_key)
    return asyncio.run(tried(kind, path, given, 30))


def test_every_kind_of_function_has_a_contract_and_an_example_here() -> None:
    assert {*GOOD} == {*HOOKS} and {*GOOD, *NAMES} == {*CHECKERS}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in GOOD.items() for name in names])
def test_a_function_that_does_as_it_should_passes(kind: str, name: str) -> None:
    checks = checked(kind, f"tests.slime_hooks.{name}", "score" if kind == "reward" else None)
    assert checks and [check for check in checks if not check.ok] == []


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_the_built_in_ones_pass(kind: str, name: str) -> None:
    if name in NEEDY:
        pytest.skip("needs an option, a service, a pair, or a task of its own")
    assert [check for check in checked(kind, name) if not check.ok] == []


@pytest.mark.parametrize(("kind", "name", "said"), BAD)
def test_what_is_wrong_is_said(kind: str, name: str, said: str) -> None:
    (failed,) = [check for check in checked(kind, f"tests.slime_hooks.{name}") if not check.ok]
    assert said in failed.found


def test_a_function_that_does_not_end_is_late(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef f(args, samples):\n    time.sleep(3)\n")
    given = inputs.config()
    (check,) = asyncio.run(tried("dynamic_filter", f"{tmp_path}/slow.py:f", given, 0.1))
    assert not check.ok and "0.1 s" in check.found


def test_a_kind_is_known_by_the_parameters_of_the_function_or_said() -> None:
    assert kind_found("tests.slime_hooks.two_turns") == "generate"
    assert kind_found("tests.slime_hooks:truncated_tis") == "tis"
    assert kind_found("gspo") == "algorithm.objective"
    for name in ("custom-rm-path", "--custom-rm-path", "slime.custom_rm_path", "reward"):
        assert kind_named(name) == "reward"


@pytest.mark.parametrize(("page", "functions"), [("reward", ["short"]), ("algorithm", ["advantage", "objective"])])
def test_what_the_guide_writes_passes_its_contract(
    page: str, functions: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", Path(f"docs/guide/{page}.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    for function in functions:
        assert main(["contract", f"{tmp_path}/mine.py:{function}"]) == 0, capsys.readouterr()


def test_the_command_prints_a_table_and_tells_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["contract", "tests.slime_hooks.two_turns"]) == 0
    assert "each trained token has its log-probability" in " ".join(capsys.readouterr().out.split())
    assert main(["contract", "tests.slime_hooks.short_mask"]) == 1
    assert main(["contract", "tests.slime_hooks.centred"]) == 2
    assert "say which with --hook" in capsys.readouterr().err
    assert main(["contract", "tests.slime_hooks.centred", "--hook", "dynamic_fliter"]) == 2
    assert "did you mean dynamic_filter?" in capsys.readouterr().err
