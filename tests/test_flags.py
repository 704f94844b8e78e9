"""Flags of the server programs: asked of the program itself, checked before anything starts."""

import sys
from pathlib import Path

import pytest

from vime.config.load import ConfigError
from vime.inference.flags import check_flags, command_line, installed_version, known_flags

KNOWN = ["max-model-len", "enforce-eager", "max-num-seqs", "port", *(f"other-{n}" for n in range(40))]

PROGRAM = """
import argparse, pathlib, sys
calls = pathlib.Path({calls!r})
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
parser = argparse.ArgumentParser(description="a server; see also rate--limit")
parser.add_argument("--max-model-len", type=int, help="context; not the same as --max-num-seqs")
parser.add_argument("--max-num-seqs", type=int)
parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
parser.parse_args(["--help"])
"""


def fault(given: dict, known: list[str] = KNOWN, ours: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_flags("vllm", given, known, ours or {})
    return str(caught.value)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Path]:
    """A small program whose only deed is its help, and the file that counts its starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls = tmp_path / "calls"
    return [sys.executable, "-I", "-S", "-c", PROGRAM.format(calls=str(calls))], calls


def test_flags_become_words_by_kind() -> None:
    flags = {"max_model_len": 512, "enforce-eager": True, "prefix_caching": False, "origins": ["a", 2], "f": 0.5}
    assert command_line(flags) == [
        "--max-model-len", "512", "--enforce-eager", "--no-prefix-caching", "--origins", "a", "2", "--f", "0.5",
    ]  # fmt: skip


def test_the_numbers_zero_and_one_are_values_not_switches() -> None:
    assert command_line({"a": 0, "b": 1, "c": ""}) == ["--a", "0", "--b", "1", "--c", ""]


def test_known_flags_pass_under_either_spelling_and_negated() -> None:
    check_flags("vllm", {"max-model-len": 1, "max_num_seqs": 2, "no-enforce-eager": True}, KNOWN, {})


def test_an_unknown_flag_is_refused_with_the_nearest() -> None:
    text = "vllm.max_model_length is no flag of this program; did you mean max-model-len?"
    assert fault({"max_model_length": 1}) == text
    assert fault({"max_model_length": 1}, KNOWN[:3]) == text


def test_an_unknown_flag_near_nothing_is_refused_with_the_known_ones_or_the_way_to_see_them() -> None:
    assert fault({"zzz": 1}, KNOWN[:2]).endswith("; known: enforce-eager, max-model-len")
    assert fault({"zzz": 1}).endswith("vllm.zzz is no flag of this program; see its --help")


def test_a_flag_that_vime_sets_is_refused_with_its_own_option() -> None:
    ours = {"served-model-name": "model.path"}
    assert fault({"served_model_name": "x"}, ours=ours) == "vllm.served_model_name is set by vime; use model.path"


def test_all_wrong_flags_are_said_at_once() -> None:
    assert len(fault({"zzz": 1, "prot": 2, "port": 3}, ours={"port": "nothing"}).splitlines()) == 3


def test_the_flags_of_a_program_are_read_from_its_help(program: tuple[list[str], Path]) -> None:
    command, _ = program
    assert known_flags(command, "p==1") == [
        "enforce-eager",
        "help",
        "max-model-len",
        "max-num-seqs",
        "no-enforce-eager",
    ]


def test_a_program_is_asked_once_a_version(program: tuple[list[str], Path], tmp_path: Path) -> None:
    command, calls = program
    first = known_flags(command, "p==1")
    assert known_flags(command, "p==1") == first
    assert calls.read_text() == "x"
    known_flags(command, "p==2")
    assert calls.read_text() == "xx"
    assert len(list((tmp_path / "cache" / "vime").glob("flags-*.json"))) == 2


@pytest.mark.parametrize("source", ["import sys; sys.exit('no such module: vllm')", "print('usage: nothing')"])
def test_a_program_that_does_not_list_its_flags_is_an_error_and_is_not_cached(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="did not list its flags") as caught:
        known_flags([sys.executable, "-I", "-S", "-c", source], "p==1")
    assert "no such module: vllm" in str(caught.value) or "print" in source
    assert list(tmp_path.rglob("*.json")) == []


def test_the_version_is_of_the_first_distribution_installed() -> None:
    assert installed_version("surely-not-installed", "pytest") == f"pytest=={pytest.__version__}"
    with pytest.raises(ConfigError, match="none of surely-not-installed is installed; run `make setup`"):
        installed_version("surely-not-installed")
