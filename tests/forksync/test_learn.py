"""A first table is learned from two trees, and ``forksync init`` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forksync import table as tables
from forksync.cli import main
from forksync.learn.match import Move, dropped, moved, moves, pair
from forksync.learn.propose import learn
from forksync.learn.renames import Renamed, compare, within_names
from forksync.rules.rule import Rule
from forksync.table import Table, table_of
from tests.forksync.repos import commit, new, rule, table

CORE = """\
import os
from slim.engine import SlimEngine, load_slim

# The engine of slim.
class SlimArgs:
    rollout = None

def run(engine: SlimEngine, use_slim=True):
    rollout = engine.rollout
    parser.add_argument("--slim-rollout-size", type=int)
    return load_slim(rollout, path=os.path.join("slim", "data"), rollout=rollout)
"""
ENGINE = """\
class SlimEngine:
    def start(self, rollout):
        self.rollout = rollout

class SlimLoss:
    pass

def load_slim(x):
    return x
"""
UPSTREAM = {
    "slim/__init__.py": "",
    "slim/core.py": CORE,
    "slim/engine.py": ENGINE,
    "slim/old_name.py": "import slim\n\ndef only_here(alpha, beta):\n    return alpha + beta\n",
    "docs/guide.md": "slim is fast. Use --slim-rollout-size 3.\n",
    "ci/one.sh": "make lint\n",
    "ci/two.sh": "make tests\n",
    "README.md": "# slim\n\nA library called slim.\n",
}


def tree(files: dict[str, str]) -> dict[str, bytes]:
    return {path: text.encode() for path, text in files.items()}


def translated(by: Table, files: dict[str, bytes]) -> dict[str, bytes]:
    return {at: by.translate(path, data).data for path, data in files.items() if (at := by.place(path)[0])}


DERIVED = table(
    rule("package", old="slim", new="vim"),
    rule("module", old="vim.old_name", new="vim.new_name"),
    rule("identifier", old="rollout", new="sample", places=["names", "attributes", "keywords"]),
    rule("regex", old="Slim(?![a-z])", new="Vim"),
    rule("regex", old="(?<![A-Za-z])slim(?![a-z])", new="vim"),
    rule("drop", paths=["ci/"]),
)


def test_the_rules_that_made_a_fork_are_found_from_its_tree() -> None:
    upstream = tree(UPSTREAM)
    fork = translated(DERIVED, upstream)
    learned = learn(upstream, {**fork, "vim/own.py": b"print('own')\n"})
    assert translated(table_of(tuple(learned.rules)), upstream) == fork
    assert learned.lines_after == 0 < learned.lines_before


def test_each_proposed_rule_passes_its_own_examples_and_says_what_it_is_worth() -> None:
    upstream = tree(UPSTREAM)
    learned = learn(upstream, translated(DERIVED, upstream))
    assert learned.rules
    for one in learned.rules:
        assert not tables.failing_examples(one)
        assert any(example.after or example.becomes is not None for example in one.examples)
    assert all(gain >= 2 for name, gain in learned.gains.items() if name.startswith(("identifier", "part")))


def test_equal_trees_need_no_rule() -> None:
    assert learn(tree(UPSTREAM), tree(UPSTREAM)).rules == []


def test_what_a_fork_wrote_itself_is_not_taken_for_a_rename() -> None:
    upstream = tree(UPSTREAM)
    fork = {**upstream, "README.md": b"# other\n\nA fork with a text of its own.\n"}
    assert learn(upstream, fork).rules == []


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    names=st.lists(
        st.sampled_from(["rollout", "engine", "load_slim", "SlimArgs", "SlimEngine", "parser"]), unique=True, max_size=3
    ),
    package=st.booleans(),
)
def test_a_learned_table_never_brings_the_trees_further_apart(names: list[str], package: bool) -> None:
    rules = [rule("identifier", old=name, new=f"new_{n}") for n, name in enumerate(names)]
    by = table(*rules, *([rule("package", old="slim", new="vim")] if package else []))
    learned = learn(tree(UPSTREAM), translated(by, tree(UPSTREAM)))
    assert learned.lines_after <= learned.lines_before


def test_files_are_paired_by_path_content_and_likeness() -> None:
    common = "def long_function(argument_one, argument_two):\n    return argument_one\n"
    theirs = {
        "a/same.py": "x",
        "a/moved.bin": "unique bytes",
        "a/changed.py": f"{common}old_name = 1\n",
        "a/gone.py": "other words\n",
    }
    ours = {
        "a/same.py": "y",
        "b/moved.bin": "unique bytes",
        "b/renamed.py": f"{common}new_name = 1\n",
        "b/own.py": "nothing alike\n",
    }
    assert pair(tree(theirs), tree(ours)) == {
        "a/same.py": "a/same.py",
        "a/moved.bin": "b/moved.bin",
        "a/changed.py": "b/renamed.py",
    }


def test_moves_are_told_by_the_folder_that_explains_most() -> None:
    pairs = {"src/a/x.py": "src/b/x.py", "src/a/c/y.py": "src/b/c/y.py", "src/a/z.py": "src/b/w.py", "t": "t"}
    found = moves(pairs)
    assert found == [Move("src/a", "src/b"), Move("src/b/z.py", "src/b/w.py")]
    assert {path: moved(path, found) for path in pairs} == pairs


def test_a_folder_that_is_gone_as_a_whole_is_dropped_as_one() -> None:
    assert dropped(["a/b/x", "a/b/y", "a/c", "d/e"], {"a/c": "a/c"}) == ["a/b/", "d/"]


def test_renames_are_read_off_with_the_place_they_stand_in() -> None:
    before = "import old\nold.f(x=1)  # old\ny = 'old'\n"
    after = "import new\nnew.f(x=1)  # new\ny = 'new'\n"
    votes = compare("a.py", before, after)
    assert set(votes) == {(Renamed("old", "new"), place) for place in ("imports", "names", "comments", "literals")}


def test_a_word_that_changed_within_several_names_is_one_rename_for_each_case() -> None:
    seen = [Renamed(f"Slim{name}", f"Vim{name}") for name in ("Args", "Engine", "Loss")]
    assert within_names([*seen, Renamed("load_slim", "load_vim")]) == [Renamed("Slim", "Vim")]


def repositories(folder: Path) -> tuple[Path, Path]:
    upstream, fork = new(folder / "up"), new(folder / "fork")
    commit(upstream, UPSTREAM)
    commit(fork, translated(DERIVED, tree(UPSTREAM)))
    fork.run("reset", "--hard", "--quiet")
    return upstream.path, fork.path


def test_init_writes_a_configuration_and_a_table_that_mirror_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream, fork = repositories(tmp_path)
    assert main(["--repo", str(fork), "init", "--upstream", str(upstream)]) == 0
    assert "0 after" in capsys.readouterr().out
    rules: tuple[Rule, ...] = tables.load(fork / "forksync" / "table.toml").rules
    assert {one.kind for one in rules} >= {"package", "drop"}
    assert main(["--repo", str(fork), "mirror"]) == 0
    shown = capsys.readouterr().out
    assert "forksync/mirror" in shown and "package slim" in shown


def test_init_over_a_configuration_or_without_an_upstream_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream, fork = repositories(tmp_path)
    assert main(["--repo", str(fork), "init", "--upstream", str(tmp_path / "nowhere")]) == 2
    assert main(["--repo", str(fork), "init", "--upstream", str(upstream), "--base", "v9"]) == 2
    assert "'v9' names no commit" in capsys.readouterr().err
    assert not (fork / "forksync.toml").exists()
    (fork / "forksync.toml").write_text("[fork]\n")
    assert main(["--repo", str(fork), "init", "--upstream", str(upstream)]) == 2
    assert "forksync.toml exists" in capsys.readouterr().err
    assert (fork / "forksync.toml").read_text() == "[fork]\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mirror", "--to", "v9"], "'v9' names no commit"),
        (["mirror"], "table.toml:3: rule.kind = \"pakage\""),
        (["mirror"], "forksync.toml:2: upstream.brunch is not an option; did you mean branch?"),
        (["mirror"], "forksync init writes one"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_message_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    upstream, fork = repositories(tmp_path)
    main(["--repo", str(fork), "init", "--upstream", str(upstream)])
    rules = fork / "forksync" / "table.toml"
    if "pakage" in said:
        rules.write_text('\n[[rule]]\nkind = "pakage"\n')
    if "brunch" in said:
        (fork / "forksync.toml").write_text('[upstream]\nbrunch = "main"\n')
    if "init" in said:
        rules.unlink()
    refs = new(fork).text("for-each-ref")
    capsys.readouterr()
    assert main(["--repo", str(fork), *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.startswith("forksync: ") and not shown.out
    assert new(fork).text("for-each-ref") == refs


def test_a_folder_that_is_no_repository_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--repo", str(tmp_path), "mirror"]) == 2
    assert "is in no Git repository" in capsys.readouterr().err
