"""The loop: it lands with both gates true, or it stops and nothing of the user's has moved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forksync import landing, state
from forksync.gate_two import Excuses
from forksync.git import Repository
from forksync.merge3 import has_markers
from tests.forksync import repos
from tests.forksync.pair import CONFIG, CORE, TABLE, TEXT, Pair


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.make(tmp_path_factory.mktemp("pair") / "made")


@pytest.fixture
def pair(made: Pair, tmp_path: Path) -> Pair:
    return made.copy(tmp_path / "pair")


ROOT = Path(__file__).parents[2]
POSITIVE = CORE.replace("return w * h", "return abs(w * h)")
STRIPPED = TEXT.replace("text.upper()", "text.strip().upper()")


def ledger(pair: Pair) -> dict[str, Any]:
    told = [json.loads(path.read_text()) for path in (pair.fork / "forksync/ledger").iterdir()]
    return max(told, key=lambda one: one["number"])


def untouched(pair: Pair, before: str) -> None:
    assert pair.tip(pair.fork, "main") == before
    assert pair.git(pair.fork, "status", "--porcelain") == ""


def test_a_new_upstream_lands_as_one_merge_of_the_fork_and_the_mirror(pair: Pair) -> None:
    before = pair.tip(pair.fork)
    pair.release("v2", {"lib/core.py": POSITIVE})
    code, said = pair.run("sync", "--to", "v2")
    assert code == 0, said
    parents = pair.git(pair.fork, "log", "-1", "--format=%P", "main").split()
    assert parents == [before, pair.tip(pair.fork, "forksync/mirror")]
    assert "abs(w * h)" in pair.read("own/core.py")
    assert "!!!" in pair.read("own/text.py")
    untouched(pair, pair.tip(pair.fork))
    assert pair.run("diff")[0] == 0
    assert not pair.work.exists()
    assert pair.run("sync", "--to", "v2") == (0, "nothing to do: the fork has this upstream already, by this table\n")


def test_the_ledger_says_of_every_commit_what_became_of_it(pair: Pair) -> None:
    pair.diverge({"README": None, "own/core.py": pair.read("own/core.py").replace("w * h", "float(w * h)")}, "own way")
    pair.diverge({"own/extra.py": "x = 1\n"}, "ours", "--conflict", "fork")
    pair.commit(pair.upstream, {"notes.txt": "n\n"}, "notes")
    pair.commit(pair.upstream, {"lib/new.py": "import lib.core\n"}, "module")
    pair.commit(pair.upstream, {"README": "tool\n\nfor everybody\n"}, "readme")
    pair.commit(pair.upstream, {"ci/run.sh": "true\n"}, "ci")
    pair.release("v2", {"lib/core.py": POSITIVE}, "positive")
    fixer = f"{sys.executable} -m forksync sign --all --author f"
    pair.configure(f"[fixer]\ncommand = '''sed -i '/^<<<<<<</d;/^|||||||/,/^>>>>>>>/d' own/core.py; {fixer}'''\n")
    code, said = pair.run("sync", "--to", "v2")
    assert code == 0, said
    told = ledger(pair)
    assert [(one["subject"], one["fate"], one["because"]) for one in told["commits"]] == [
        ("notes", "taken", ""),
        ("module", "translated", ""),
        ("readme", "not needed", "own way"),
        ("ci", "not needed", "the table drops these files"),
        ("positive", "conflict", "decided by fixer, try 1"),
    ]
    assert [one["lines"] for one in told["commits"][-1]["not_taken"]] == [["    return abs(w * h)"]]
    message = pair.git(pair.fork, "log", "-1", "--format=%B")
    assert "not needed: readme (own way)" in message
    assert "measured: works: passed" in message


def test_a_conflict_stops_the_sync_for_a_person_who_decides_and_goes_on(pair: Pair) -> None:
    before = pair.tip(pair.fork)
    pair.diverge({"own/text.py": pair.read("own/text.py") + "\n\nx = 1\n"}, "elsewhere in the file")
    before = pair.tip(pair.fork)
    pair.release("v2", {"lib/text.py": STRIPPED}, "strip it")
    code, said = pair.run("sync", "--to", "v2")
    assert code == 1
    assert "conflict  own/text.py: contents\n  upstream: strip it\n  fork: louder (louder)\nstopped" in said
    untouched(pair, before)
    assert has_markers((pair.work / "own/text.py").read_bytes())
    assert pair.git(pair.work, "status", "--porcelain").startswith("UU own/text.py")

    assert "conflict  own/text.py: decide between its markers first" in pair.there("diff")[1]
    assert pair.there("diff")[0] == 1
    assert "decide between the conflict's markers first" in pair.there("sign", "--all", "--reason", "r")[1]

    there = os.stat(pair.work).st_ino
    assert pair.run("sync")[0] == 1, "nothing was decided"
    assert os.stat(pair.work).st_ino == there, "a person may be at work in it"
    (pair.work / "own/text.py").write_text(STRIPPED.replace('"!"', '"!!!"'))
    code, said = pair.run("sync")
    assert code == 1
    assert "changed" in said, "the divergence is another one now"
    untouched(pair, before)

    assert pair.there("sign", "--all")[0] == 0
    assert pair.run("sync")[0] == 0
    assert pair.read("own/text.py") == STRIPPED.replace('"!"', '"!!!"')
    assert [one["by"] for one in ledger(pair)["conflicts"]] == ["person"]
    assert pair.run("diff")[0] == 0


def test_a_fixer_has_a_budget_of_tries_and_is_told_what_is_left(pair: Pair) -> None:
    before = pair.tip(pair.fork)
    pair.release("v2", {"lib/text.py": STRIPPED}, "strip it")
    pair.configure(
        f"[fixer]\ncommand = 'cp $FORKSYNC_BRIEF {pair.folder}/brief$FORKSYNC_TRY.json; exit 1'\ntries = 2\n"
    )
    before = pair.tip(pair.fork)
    code, said = pair.run("sync", "--to", "v2")
    assert code == 1
    assert "fixer, try 2 of 2" in said
    assert "try 3" not in said
    untouched(pair, before)
    brief = json.loads((pair.folder / "brief2.json").read_text())
    assert brief["conflicts"] == [
        {
            "path": "own/text.py",
            "kind": "contents",
            "said": "CONFLICT (content): Merge conflict in own/text.py",
            "upstream": ["strip it"],
            "signed": ["louder: louder"],
        }
    ]
    assert [one["code"] for one in brief["tries"]] == [1]


@pytest.mark.parametrize(
    ("conflict", "kept", "fate"), [("fork", "!!!", "not needed"), ("upstream", "strip", "conflict")]
)
def test_an_entry_may_decide_its_conflicts(pair: Pair, conflict: str, kept: str, fate: str) -> None:
    history = pair.read("forksync/history.toml").replace(
        "\n\n[[entry.hunk]]", f'\nconflict = "{conflict}"\n\n[[entry.hunk]]'
    )
    pair.commit(pair.fork, {"forksync/history.toml": history}, "policy")
    pair.release("v2", {"lib/text.py": STRIPPED})
    code, said = pair.run("sync", "--to", "v2")
    assert code == 0, said
    assert kept in pair.read("own/text.py")
    assert [one["fate"] for one in ledger(pair)["commits"]] == [fate]
    assert pair.run("diff")[0] == 0
    ended = conflict == "upstream"
    assert ledger(pair)["ended"] == (["louder"] if ended else [])
    assert ("louder" not in pair.read("forksync/history.toml")) is ended


def test_a_changed_table_is_merged_like_a_new_upstream(pair: Pair) -> None:
    table = (
        TABLE
        + """
[[rule]]
name = "surface"
kind = "identifier"
from = "area"
to = "surface"
examples = [{ before = "area(1, 2)", after = "surface(1, 2)" }]
"""
    )
    pair.release("v2", {"README": "more\n"})
    assert pair.run("sync")[0] == 0
    pair.commit(pair.fork, {"forksync/table.toml": table}, "another name")
    assert pair.run("diff")[0] == 0, "the fork is held against what it was merged with"
    pair.commit(pair.fork, {"forksync.toml": CONFIG.replace("area", "surface")}, "measure it by that")
    code, said = pair.run("sync")
    assert code == 0, said
    assert "def surface(w, h)" in pair.read("own/core.py")
    assert [(one["fate"], one["because"]) for one in ledger(pair)["commits"]] == [
        ("translated", "the table has changed")
    ]


def test_a_divergence_that_the_upstream_adopts_ends(pair: Pair) -> None:
    pair.diverge({"README": None, "own/core.py": pair.read("own/core.py").replace("w * h", "h * w")}, "ours")
    pair.release("v2", {"README": None, "lib/core.py": CORE.replace("w * h", "h * w")})
    code, said = pair.run("sync", "--to", "v2")
    assert code == 0, said
    assert ledger(pair)["ended"] == ["ours"]
    assert '"ours"' not in pair.read("forksync/history.toml")
    assert pair.run("diff")[0] == 0


def test_a_rule_for_paths_decides_conflicts(pair: Pair) -> None:
    pair.diverge({"README": "fork\n\nfor all\n"}, "name")
    pair.configure('[[resolve]]\npaths = ["README"]\ntake = "upstream"\nreason = "texts are theirs"\n')
    pair.release("v2", {"README": "TOOL\n\nfor all\n"})
    code, said = pair.run("sync", "--to", "v2")
    assert code == 1, "the divergence is gone, and that is to be signed"
    assert "vanished" in said
    assert pair.there("sign", "--all")[0] == 0
    assert pair.run("sync")[0] == 0
    assert pair.read("README") == "TOOL\n\nfor all\n"
    assert ledger(pair)["conflicts"] == [
        {"path": "README", "by": "rule: resolve README", "because": "texts are theirs"}
    ]


def test_what_upstream_renames_stays_signed_and_the_history_follows(pair: Pair) -> None:
    pair.release(
        "v2", {"lib/text.py": None, "lib/words.py": TEXT, "lib/core.py": CORE.replace("lib.text", "lib.words")}
    )
    code, said = pair.run("sync", "--to", "v2")
    assert code == 0, said
    assert "!!!" in pair.read("own/words.py")
    assert 'path = "own/words.py"' in pair.read("forksync/history.toml")


def test_red_measurements_keep_the_merge_from_landing(pair: Pair) -> None:
    before = pair.tip(pair.fork)
    pair.release("v2", {"lib/core.py": CORE.replace("w * h", "w + h")})
    code, said = pair.run("sync", "--to", "v2")
    assert code == 1
    assert "works: FAILED" in said
    assert "AssertionError" in said
    untouched(pair, before)
    (pair.work / "own/core.py").write_text(CORE.replace("lib.", "own."))
    assert pair.there("sign", "--all", "--reason", "theirs is wrong", "--author", "Ann")[0] == 0
    assert pair.run("sync")[0] == 0


def test_without_a_measurement_the_loop_is_open_and_nothing_lands(pair: Pair) -> None:
    pair.commit(pair.fork, {"forksync.toml": CONFIG.split("[[measure]]")[0]}, "no measurement")
    before = pair.tip(pair.fork)
    pair.release("v2", {"lib/core.py": POSITIVE})
    assert "the loop is open" in bad(pair, "sync", "--no-fetch")
    untouched(pair, before)


JUNIT = """
[[measure]]
name = "tests"
kind = "tests"
file = "junit.xml"
command = '''python3 - <<'E'
import os, re, pathlib
names = re.findall(r"def (test_\\w+)", pathlib.Path("test_all.py").read_text())
cases = "".join(f'<testcase classname="test_all" name="{name}"/>' for name in names)
pathlib.Path(os.environ["FORKSYNC_OUT"], "junit.xml").write_text(f"<testsuite>{cases}</testsuite>")
E'''
"""


def test_a_test_that_is_gone_is_missing_unless_the_upstream_took_it_away(pair: Pair) -> None:
    pair.configure(JUNIT)
    pair.diverge({"test_all.py": "def test_own(): pass\n"}, "tests")
    pair.release("v2", {"test_lib.py": "def test_their(): pass\n"})
    assert pair.run("sync", "--to", "v2")[0] == 0
    assert ledger(pair)["measured"][1]["tests"] == ["test_all::test_own"]
    pair.diverge({"test_all.py": "def test_other(): pass\n"}, "tests")
    pair.release("v3", {"lib/core.py": POSITIVE})
    code, said = pair.run("sync", "--to", "v3")
    assert code == 1
    assert "test_all::test_own: missing" in said


@pytest.mark.parametrize(
    ("old", "new", "test", "ran", "excused"),
    [
        ("def test_a(): pass\n", "def test_b(): pass\n", "t.test_x::test_a", [], True),
        ("def test_a(): pass\n", None, "t.test_x.TestC::test_a[1]", [], True),
        ("def test_a(): pass\n", "def test_a(): return\n", "t.test_x::test_a", [], False),
        (
            "[1, 2]\ndef test_a(x): pass\n",
            "[1]\ndef test_a(x): pass\n",
            "t.test_x::test_a[2]",
            ["t.test_x::test_a[1]"],
            True,
        ),
        ("[1, 2]\ndef test_a(x): pass\n", "[1]\ndef test_a(x): pass\n", "t.test_x::test_a[2]", [], False),
        (
            "[1, 2]\ndef test_a(x): pass\n",
            "[1, 2]\ndef test_a(x): pass\n",
            "t.test_x::test_a[2]",
            ["t.test_x::test_a[1]"],
            False,
        ),
        ("def test_a(): pass\n", "def test_b(): pass\n", "t.test_own::test_a", [], False),
    ],
)
def test_what_excuses_a_missing_test(
    tmp_path: Path, old: str, new: str | None, test: str, ran: list[str], excused: bool
) -> None:
    repository = repos.new(tmp_path / "repository")
    before = repos.commit(repository, {"t/test_x.py": old, "other": ""})
    after = repos.commit(repository, {"other": ""} | ({"t/test_x.py": new} if new else {}))
    now = state.State("work", "v2", "", before, after, (), "", "")
    assert Excuses(repository, now)(test, ran) is excused


METRICS = """
[[measure]]
name = "parity"
kind = "metrics"
file = "m.json"
command = '''python3 - <<'E'
import json, os
from own.core import area
json.dump({"a": area(1, 1)}, open(os.environ["FORKSYNC_OUT"] + "/m.json", "w"))
E'''
[measure.tolerance]
a = { absolute = 0.1 }
"""


def test_metrics_are_compared_with_the_mirrors(pair: Pair) -> None:
    pair.configure(METRICS)
    pair.release("v2", {"README": "more\n"})
    assert pair.run("sync", "--to", "v2")[0] == 0
    assert ledger(pair)["measured"][1]["parities"][0]["said"] == "1 against 1: +0"
    pair.diverge({"own/core.py": pair.read("own/core.py").replace("w * h", "w * h * (1 + (w == 1))")}, "wrong")
    pair.release("v3", {"README": "even more\n"})
    code, said = pair.run("sync", "--to", "v3")
    assert code == 1
    assert "a: 2 against 1: +1, outside ±0.1" in said


def test_metrics_are_compared_with_the_untranslated_upstream_or_a_file_of_the_fork(pair: Pair) -> None:
    either = "try:\n    from lib.core import area\nexcept ImportError:\n    from own.core import area"
    text = METRICS.replace("from own.core import area", either)
    pair.configure(text.replace('name = "parity"', 'name = "theirs"\nreference = "upstream"'))
    pair.configure(METRICS.replace('name = "parity"', 'name = "recorded"\nreference = "recorded.json"'))
    pair.diverge({"recorded.json": '{"a": 1.05}'}, "recorded")
    pair.release("v2", {"README": "more\n"})
    code, said = pair.run("sync", "--to", "v2")
    assert code == 0, said
    found = {one["name"]: one["parities"] for one in ledger(pair)["measured"]}
    assert [found[name][0]["reference"] for name in ("theirs", "recorded")] == [1.0, 1.05]


COVERAGE = """
[[measure]]
name = "covered"
kind = "tests"
file = "junit.xml"
coverage = "lcov.info"
command = '''printf '<a><testcase classname="t" name="t"/></a>' > $FORKSYNC_OUT/junit.xml
printf 'SF:own/text.py\\nDA:1,1\\nDA:2,0\\n' > $FORKSYNC_OUT/lcov.info'''
"""


def test_divergent_lines_that_no_test_runs_are_shown_and_kept_in_the_ledger(pair: Pair) -> None:
    pair.configure(COVERAGE)
    pair.release("v2", {"README": "more\n"})
    code, said = pair.run("sync", "--to", "v2")
    assert code == 0, said
    assert "1 divergent line that no test runs" in said
    assert "  no test runs own/text.py:2\n" in said
    assert ledger(pair)["measured"][1]["uncovered"] == {"own/text.py": [2]}


# --- what can go on beside it


def test_commits_to_the_fork_during_a_stop_are_merged_in(pair: Pair) -> None:
    pair.release("v2", {"lib/text.py": STRIPPED})
    assert pair.run("sync", "--to", "v2")[0] == 1
    (pair.work / "own/text.py").write_text(STRIPPED.replace('"!"', '"!!!"'))
    assert pair.there("sign", "--all")[0] == 0
    pair.diverge({"own/core.py": pair.read("own/core.py").replace("Greets.", "Says hello.")}, "wording")
    code, said = pair.run("sync")
    assert "its new commits are merged in" in said
    assert code == 0, said
    assert "Says hello." in pair.read("own/core.py")
    assert pair.read("own/text.py") == STRIPPED.replace('"!"', '"!!!"')
    assert pair.run("diff")[0] == 0


def test_commits_to_the_same_lines_during_a_stop_are_refused_and_nothing_is_lost(pair: Pair) -> None:
    pair.release("v2", {"lib/text.py": STRIPPED})
    assert pair.run("sync", "--to", "v2")[0] == 1
    decided = STRIPPED.replace('"!"', '"!!!"')
    (pair.work / "own/text.py").write_text(decided)
    pair.commit(pair.fork, {"own/text.py": TEXT.replace('"!"', '"?"')}, "ask")
    code, said = pair.run("sync")
    assert code == 2
    assert "both changed the same lines of own/text.py" in said
    assert (pair.work / "own/text.py").read_text() == decided


def test_a_sync_can_be_given_up(pair: Pair) -> None:
    before = pair.tip(pair.fork)
    pair.release("v2", {"lib/text.py": STRIPPED})
    assert pair.run("sync", "--to", "v2")[0] == 1
    assert pair.run("sync", "--to", "v1")[0] == 2
    assert pair.run("sync", "--abandon") == (0, "the sync in progress is given up\n")
    untouched(pair, before)
    assert not pair.work.exists()
    assert state.load(Repository(pair.fork)) is None


def test_a_branch_that_is_not_checked_out_is_moved_alone(pair: Pair) -> None:
    pair.git(pair.fork, "switch", "-q", "-c", "topic")
    pair.commit(pair.fork, {"own/topic.py": "x = 1\n"}, "topic")
    before = pair.tip(pair.fork)
    pair.release("v2", {"lib/core.py": POSITIVE})
    assert pair.run("sync", "--to", "v2")[0] == 0
    untouched_topic = pair.tip(pair.fork, "topic")
    assert untouched_topic == before
    assert pair.git(pair.fork, "status", "--porcelain") == ""
    assert "abs" in pair.git(pair.fork, "show", "main:own/core.py")


def test_a_file_in_the_way_of_the_checkout_is_not_overwritten(pair: Pair) -> None:
    pair.release("v2", {"new.txt": "theirs\n"})
    (pair.fork / "new.txt").write_text("mine\n")
    code, said = pair.run("sync", "--to", "v2")
    assert code == 2
    assert "new.txt" in said
    assert (pair.fork / "new.txt").read_text() == "mine\n"
    (pair.fork / "new.txt").unlink()
    assert pair.run("sync")[0] == 0
    assert pair.read("new.txt") == "theirs\n"


def test_a_landing_that_was_cut_off_goes_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while git was writing the checkout: some files are new, one is half written, git's lock lies there."""
    pair.release("v2", {"lib/core.py": POSITIVE, "new/a.txt": "new\n", "README": "a readme of some length\n"})
    monkeypatch.setattr(landing, "LOCK_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(landing, "refuse_dirty", stop_at_second(landing.refuse_dirty))
        with pytest.raises(KeyboardInterrupt):
            landing_interrupted(pair)
    now = state.load(Repository(pair.fork))
    assert now is not None
    assert now.phase == "land"
    state.save(Repository(pair.fork), now.but(moving=True))
    pair.put(pair.fork, {"own/core.py": POSITIVE.replace("lib.", "own."), "new/a.txt": "new\n", "README": "a readme"})
    (pair.fork / ".git/index.lock").touch()
    code, said = pair.run("sync")
    assert code == 0, said
    untouched(pair, now.landing)
    assert pair.read("README") == "a readme of some length\n"


def stop_at_second(real: Any) -> Any:
    def stop(project: Any) -> None:
        raise KeyboardInterrupt

    return stop


def landing_interrupted(pair: Pair) -> None:
    from forksync.lock import locked
    from forksync.project import open_project
    from forksync.sync import sync

    project = open_project(pair.fork)
    project.fetch()
    with locked(project.repository) as lock:
        sync(project, "v2", False, lock, lambda line: None)


def test_what_was_changed_during_a_cut_off_landing_is_not_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.release("v2", {"lib/core.py": POSITIVE})
    with monkeypatch.context() as patch:
        patch.setattr(landing, "refuse_dirty", stop_at_second(landing.refuse_dirty))
        with pytest.raises(KeyboardInterrupt):
            landing_interrupted(pair)
    now = state.load(Repository(pair.fork))
    assert now is not None
    state.save(Repository(pair.fork), now.but(moving=True))
    for path in ("own/core.py", "README"):
        before = pair.read(path)
        pair.put(pair.fork, {path: "mine\n"})
        code, said = pair.run("sync")
        assert code == 2
        assert f"{path} in {pair.fork} changed" in said
        assert pair.read(path) == "mine\n"
        pair.put(pair.fork, {path: before})
    assert pair.run("sync")[0] == 0


def test_a_worktree_that_git_was_killed_over_is_taken_away(pair: Pair) -> None:
    pair.release("v2", {"lib/text.py": STRIPPED})
    assert pair.run("sync", "--to", "v2")[0] == 1
    kept = pair.fork / ".git" / "worktrees" / "sync"
    (kept / "HEAD").write_text("0" * 40 + "\n")
    (kept / "locked").write_text("initializing")
    (kept / "HEAD.lock").touch()
    with pytest.raises(subprocess.CalledProcessError):
        pair.git(pair.fork, "fetch", "-q", "../upstream")
    code, said = pair.run("sync")
    assert code == 1, said
    assert has_markers((pair.work / "own/text.py").read_bytes())
    assert pair.run("sync", "--abandon")[0] == 0
    assert not kept.exists()


def test_two_syncs_do_not_run_at_once_and_a_fixer_that_outlives_its_sync_holds_the_lock(pair: Pair) -> None:
    pair.release("v2", {"lib/text.py": STRIPPED})
    pair.configure("[fixer]\ncommand = 'echo $$ > ../begun.new; mv ../begun.new ../begun; exec sleep 600'\n")
    words = [sys.executable, "-m", "forksync", "--repo", str(pair.fork), "sync", "--to", "v2"]
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)})
    begun = pair.work.parent / "begun"
    deadline = time.monotonic() + 120
    while not begun.exists() and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    first.kill()
    first.wait()
    fixer = int(begun.read_text())
    try:
        assert "another forksync, or a command that it started, is at work" in pair.run("sync")[1]
    finally:
        os.kill(fixer, signal.SIGKILL)


# --- bad input: one clear message, nothing changed


def bad(pair: Pair, *words: str) -> str:
    before = pair.git(pair.fork, "for-each-ref")
    status = pair.git(pair.fork, "status", "--porcelain")
    code, said = pair.run(*words)
    assert code == 2, said
    assert "Traceback" not in said
    assert pair.git(pair.fork, "for-each-ref") == before
    assert pair.git(pair.fork, "status", "--porcelain") == status
    return said


def test_no_such_ref(pair: Pair) -> None:
    assert "'v9' names no commit" in bad(pair, "sync", "--no-fetch", "--to", "v9")


def test_a_dirty_checkout(pair: Pair) -> None:
    pair.release("v2", {"lib/core.py": POSITIVE})
    pair.git(pair.fork, "fetch", "-q", "../upstream", "+refs/tags/*:refs/forksync/upstream/tags/*")
    pair.put(pair.fork, {"README": "changed\n"})
    assert "changes that are not committed (README)" in bad(pair, "sync", "--no-fetch", "--to", "v2")


def test_a_fault_in_the_table_is_told_with_its_line(pair: Pair) -> None:
    pair.commit(pair.fork, {"forksync/table.toml": TABLE.replace("kind", "kynd", 1)}, "fault")
    said = bad(pair, "sync", "--no-fetch")
    assert "table.toml:1: " in said or "table.toml:3: " in said


def test_a_history_entry_without_a_reason_is_told_with_its_line(pair: Pair) -> None:
    history = pair.read("forksync/history.toml").replace('reason = "louder"\n', "")
    pair.commit(pair.fork, {"forksync/history.toml": history}, "fault")
    pair.release("v2", {"lib/core.py": POSITIVE})
    pair.git(pair.fork, "fetch", "-q", "../upstream", "+refs/tags/*:refs/forksync/upstream/tags/*")
    for words in (
        ("diff",),
        ("sync", "--no-fetch", "--to", "v2"),
        ("explain", "README"),
        ("status", "--no-fetch", "--to", "v2"),
    ):
        assert "history.toml:4: " in bad(pair, *words)
        assert "reason is missing" in bad(pair, *words)


def test_a_rewritten_upstream_is_refused_unless_accepted(pair: Pair) -> None:
    pair.git(pair.upstream, "commit", "-q", "--amend", "-m", "another past")
    pair.release("v2", {"lib/core.py": POSITIVE})
    pair.git(pair.fork, "fetch", "-q", "../upstream", "+refs/heads/*:refs/forksync/upstream/heads/*")
    assert "the upstream was rewritten" in bad(pair, "sync", "--no-fetch")
    assert "REWRITTEN" in pair.run("status")[1]
    assert pair.run("sync", "--accept-rewrite")[0] == 0
    assert "abs" in pair.read("own/core.py")


def test_an_older_upstream_is_refused(pair: Pair) -> None:
    pair.release("v2", {"lib/core.py": POSITIVE})
    assert pair.run("sync")[0] == 0
    assert "is older than" in bad(pair, "sync", "--no-fetch", "--to", "v1")


def test_a_fork_that_is_not_aligned_is_told_before_anything_is_done(pair: Pair) -> None:
    pair.commit(pair.fork, {"README": "changed\n"}, "unsigned")
    pair.release("v2", {"lib/core.py": POSITIVE})
    before = pair.tip(pair.fork)
    code, said = pair.run("sync")
    assert code == 1
    assert "stopped before it began" in said
    assert "+changed" in said
    untouched(pair, before)
    assert state.load(Repository(pair.fork)) is None


def test_rules_that_are_not_the_forks_own(pair: Pair) -> None:
    pair.release("v2", {"lib/core.py": POSITIVE})
    pair.git(pair.fork, "fetch", "-q", "../upstream", "+refs/tags/*:refs/forksync/upstream/tags/*")
    pair.git(pair.fork, "switch", "-q", "-c", "topic")
    pair.commit(pair.fork, {"forksync/table.toml": TABLE + "# another\n"}, "table")
    assert "forksync/table.toml is not as main has it" in bad(pair, "sync", "--no-fetch", "--to", "v2")


def test_a_squashed_merge_is_told_and_can_be_mended(pair: Pair) -> None:
    before = pair.tip(pair.fork)
    pair.release("v2", {"lib/core.py": POSITIVE})
    assert pair.run("sync")[0] == 0
    pair.git(pair.fork, "reset", "-q", "--soft", before)
    pair.git(pair.fork, "commit", "-qm", "squashed")
    pair.release("v3", {"lib/core.py": POSITIVE + "x = 1\n"})
    pair.git(pair.fork, "fetch", "-q", "../upstream", "+refs/heads/*:refs/forksync/upstream/heads/*")
    said = bad(pair, "sync", "--no-fetch")
    assert "was its merge squashed" in said
    pair.git(pair.fork, *said.split("With forksync/mirror fetched, git ")[1].split(" puts")[0].split())
    assert pair.run("sync")[0] == 0
    assert pair.run("diff")[0] == 0


def test_a_sync_in_the_syncs_own_worktree(pair: Pair) -> None:
    pair.release("v2", {"lib/text.py": STRIPPED})
    assert pair.run("sync", "--to", "v2")[0] == 1
    code, said = pair.there("sync")
    assert code == 2
    assert f"run forksync sync in the fork's checkout, {pair.fork}" in said


def test_a_fork_without_a_mirror_in_its_past_needs_a_base(pair: Pair) -> None:
    pair.commit(pair.fork, {"forksync.toml": CONFIG.replace('base = "v1"\n', "")}, "no base")
    assert "set upstream.base" in bad(pair, "diff")
