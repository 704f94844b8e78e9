"""What a person reads and what CI gets back from the commands beside sync."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forksync.pair import CORE, TEXT, Pair
from tests.forksync.synthetic import run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.make(tmp_path_factory.mktemp("pair") / "made")


@pytest.fixture
def pair(made: Pair, tmp_path: Path) -> Pair:
    return made.copy(tmp_path / "pair")


STRIPPED = TEXT.replace("text.upper()", "text.strip().upper()")


def test_status_tells_distance_drift_and_the_conflicts_ahead(pair: Pair) -> None:
    assert pair.run("status", "--check")[0] == 0
    pair.release("v2", {"lib/core.py": CORE + "\n\nx = 1\n"})
    code, said = pair.run("status", "--check")
    assert code == 3, "only behind"
    assert "1 commit ahead" in said
    assert "releases: v2" in said
    assert "drift     none" in said
    assert "forecast  0 conflicts" in said
    pair.release("v3", {"lib/text.py": STRIPPED})
    code, said = pair.run("status", "--check")
    assert code == 1, "a conflict is ahead"
    assert "forecast  1 conflict to decide, 0 decided by rules\n          own/text.py: contents" in said
    assert pair.run("status", "--to", "v2", "--check")[0] == 3
    pair.commit(pair.fork, {"own/core.py": "x = 1\n"}, "unsigned")
    assert "drift     1 new" in pair.run("status")[1]
    assert pair.run("status")[0] == 0
    assert pair.run("status", "--check", "--to", "v2")[0] == 1


def test_diff_shows_new_changed_and_vanished_hunks_of_the_working_tree(pair: Pair) -> None:
    pair.put(pair.fork, {"own/text.py": TEXT.replace('"!"', '"!!!!"'), "own/fresh.py": "x = 1\ny = 2\n"})
    code, said = pair.run("diff")
    assert code == 1
    assert "own/fresh.py (added)\n+x = 1\n+y = 2\n" in said
    assert '+    return text.upper() + "!!!"\n' in said or '-+    return text.upper() + "!!!"' in said
    assert "signed in louder: louder" in said
    assert "1 new, 1 changed, 0 vanished" in said
    pair.put(pair.fork, {"own/text.py": TEXT, "own/fresh.py": None})
    assert "vanished" in pair.run("diff")[1]
    pair.git(pair.fork, "checkout", "-q", ".")
    assert pair.run("diff")[0] == 0
    assert "louder: louder\n-" in pair.run("diff", "--signed")[1]


def test_a_changed_added_file_is_shown_as_a_difference_of_its_versions(pair: Pair) -> None:
    pair.diverge({"own/fresh.py": "x = 1\ny = 2\n"}, "fresh")
    pair.put(pair.fork, {"own/fresh.py": "x = 1\ny = 3\n"})
    said = pair.run("diff")[1]
    assert "-y = 2\n+y = 3\n" in said
    assert "0 new, 1 changed" in said


def test_sign_takes_findings_by_fingerprint_or_path_and_wants_a_reason_for_new_ones(pair: Pair) -> None:
    pair.put(pair.fork, {"own/a.py": "a = 1\n", "own/b.py": "b = 1\n"})
    assert pair.run("sign", "--all", "--author", "A")[0] == 2
    assert pair.run("sign", "own/zzz.py", "--reason", "r", "--author", "A")[0] == 2
    assert pair.run("sign")[0] == 2
    words = ("--reason", "Needed for A & B", "--author", "Ann", "--link", "https://example.org/1", "--conflict", "fork")
    assert pair.run("sign", "own/a.py", *words)[0] == 0
    text = pair.read("forksync/history.toml")
    assert 'id = "needed-for-a-b"' in text
    assert 'links = ["https://example.org/1"]\nconflict = "fork"' in text
    said = pair.run("diff")[1]
    fingerprint = next(line.split()[1] for line in said.splitlines() if line.startswith("new"))
    assert pair.run("sign", fingerprint[:6], "--entry", "needed-for-a-b", "--author", "A")[0] == 0
    assert pair.run("diff")[0] == 0
    assert pair.run("sign", "--all", "--reason", "r", "--author", "A")[0] == 2, "nothing is left to sign"
    pair.put(pair.fork, {"own/a.py": None, "own/b.py": "b = 2\n"})
    assert pair.run("sign", "--all", "--author", "A")[0] == 0
    assert pair.run("diff")[0] == 0
    assert pair.read("forksync/history.toml").count("[[entry.hunk]]") == 2


def test_a_new_hunk_can_take_the_place_of_an_entrys_last_one(pair: Pair) -> None:
    pair.diverge({"own/a.py": "a = 1\n"}, "ours", "--link", "https://example.org/1")
    pair.put(pair.fork, {"own/a.py": None, "own/core.py": pair.read("own/core.py").replace("w * h", "h * w")})
    assert pair.run("sign", "--all", "--entry", "ours", "--author", "B")[0] == 0
    assert pair.run("diff")[0] == 0
    text = pair.read("forksync/history.toml")
    assert 'reason = "ours"\nauthor = "Ann"' in text
    assert "https://example.org/1" in text


def test_explain_tells_who_signed_a_line_or_where_it_comes_from(pair: Pair) -> None:
    pair.put(
        pair.fork,
        {"own/core.py": pair.read("own/core.py").replace("w * h", "h * w").replace("import os\n", "import os\n\n")},
    )
    code, said = pair.run("explain", "own/text.py:2")
    assert code == 0
    assert "louder\n  entry louder, by Ann, " in said
    assert "is lib/core.py of upstream" in pair.run("explain", "own/core.py:4")[1]
    assert "translated; rules of this file: package" in pair.run("explain", "own/core.py:4")[1]
    assert "-from lib.text import shout" in pair.run("explain", "own/core.py:4")[1]
    assert "is as in lib/core.py of upstream" in pair.run("explain", "own/core.py:1")[1]
    assert "line 1\n" in pair.run("explain", "own/core.py:1")[1]
    assert "layout only" in pair.run("explain", "own/core.py:3")[1]
    assert "nobody has signed it off" in pair.run("explain", "own/core.py:13")[1]
    assert "forksync's own file" in pair.run("explain", "forksync.toml:1")[1]
    assert pair.run("explain", "nothing.py:1")[0] == 2
    assert "has 3 lines, not 99" in pair.run("explain", "own/text.py:99")[1]


def test_a_removed_line_is_explained_where_it_was(pair: Pair) -> None:
    pair.diverge({"own/core.py": pair.read("own/core.py").replace('    """Greets."""\n', "")}, "no docstring")
    assert "no docstring" in pair.run("explain", "own/core.py:7")[1]


def test_the_report_is_one_page_that_loads_nothing_and_escapes_what_others_wrote(pair: Pair) -> None:
    pair.diverge({"own/evil.py": "x = '<script>alert(1)</script>'\n"}, "<b>why</b>", "--link", "javascript:alert(1)")
    pair.release("v2", {"lib/core.py": CORE + "x = 1\n"}, "<i>more</i>")
    assert pair.run("sync", "--to", "v2")[0] == 0
    pair.release("v3", {"lib/text.py": STRIPPED}, "strip")
    assert pair.run("sync", "--to", "v3")[0] == 1
    pair.commit(pair.fork, {"own/more.py": "z = 1\n"}, "unsigned")
    code, said = pair.run("report")
    assert code == 0
    page = Path(said.strip()).read_text()
    assert pair.git(pair.fork, "status", "--porcelain") == ""
    assert "<script" not in page
    assert "<b>why" not in page
    assert 'href="javascript' not in page
    assert "default-src 'none'" in page
    for text in (
        "Drift",
        "own/more.py",
        "Waiting in the upstream",
        "&lt;b&gt;why&lt;/b&gt;",
        "&lt;i&gt;more&lt;/i&gt;",
        "Sync to v3 in progress",
    ):
        assert text in page
    assert page.count("<article>") == page.count("</article>")


def test_watch_follows_the_newest_release_and_exits_as_sync_does(pair: Pair) -> None:
    pair.release("v2", {"lib/core.py": CORE + "x = 1\n"})
    pair.release("v10", {"lib/core.py": CORE + "x = 10\n"})
    pair.commit(pair.upstream, {"lib/core.py": CORE + "x = 11\n"}, "unreleased")
    out = pair.folder / "report.html"
    code, said = pair.run("watch", "--tags", "v*", "--report", str(out))
    assert code == 0, said
    assert "x = 10\n" in pair.read("own/core.py")
    assert out.exists()
    pair.release("v11", {"lib/text.py": STRIPPED})
    assert pair.run("watch", "--tags", "w*")[0] == 2
    assert pair.run("watch", "--tags", "v*")[0] == 1
    pair.release("v12", {"lib/core.py": CORE})
    assert "going on with the sync to v11" in pair.run("watch", "--tags", "v*")[1]


def test_the_commands_say_where_there_is_nothing_to_work_on(tmp_path: Path) -> None:
    for words in (("diff",), ("status",), ("sync",), ("explain", "a:1"), ("report",), ("watch",)):
        code, said = run("--repo", str(tmp_path), *words)
        assert code == 2
        assert "no Git repository" in said


def test_a_ledger_is_json_in_the_fork(pair: Pair) -> None:
    pair.release("v2", {"lib/core.py": CORE + "x = 1\n"})
    assert pair.run("sync")[0] == 0
    [path] = (pair.fork / "forksync/ledger").iterdir()
    assert json.loads(path.read_text())["divergence"] == {"hunks": 1, "lines": 2, "owned": 0}
