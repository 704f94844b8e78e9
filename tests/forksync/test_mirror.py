"""The mirror is a pure function of the upstream's commit, the table and the parent."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forksync import mirror as module
from forksync.errors import ForksyncError
from forksync.mirror import MirrorError, mirror, provenance, publish
from tests.forksync.repos import commit, files, new, rule, table

RULES = (
    rule("package", old="slim", new="vim"),
    rule("identifier", old="alpha", new="beta", places=["names", "attributes", "text"]),
    rule("drop", paths=["ci/"]),
    rule("call", old="slim.run(x)", new="vim.start(x)"),
)
TREE = {
    "slim/__init__.py": "from .core import alpha\n",
    "slim/core.py": "import os\nalpha = 1\r\n",
    "slim/logo.png": b"\x89PNG\0slim alpha",
    "ci/build.sh": "alpha\n",
    "docs/latin.txt": b"slim alpha \xe9\xff\r\n",
    "README.md": "slim alpha\n",
    "run": "#!/bin/sh\npython -m slim\n",
}


def test_files_are_translated_moved_dropped_and_keep_modes_and_bytes(tmp_path: Path) -> None:
    repository = new(tmp_path / "r")
    commit(repository, TREE, modes={"run": "100755"})
    made = mirror(repository, "main", table(*RULES))
    assert files(repository, made.commit) == {
        "vim/__init__.py": b"from .core import alpha\n",
        "vim/core.py": b"import os\nbeta = 1\r\n",
        "vim/logo.png": b"\x89PNG\0slim alpha",
        "docs/latin.txt": b"vim beta \xe9\xff\r\n",
        "README.md": b"vim beta\n",
        "run": b"#!/bin/sh\npython -m vim\n",
    }
    assert {e.path for e in repository.entries(made.commit) if e.mode == "100755"} == {"run"}
    assert made.sources["vim/core.py"] == "slim/core.py"


def test_links_follow_their_targets_and_submodules_stay(tmp_path: Path) -> None:
    repository = new(tmp_path / "r")
    start = commit(repository, {"a": "x"})
    tree = {
        "slim/a.py": "",
        "docs/to-file": "../slim/a.py",
        "docs/to-folder": "../slim",
        "slim/near": "a.py",
        "away": "/etc/x",
        "out": "../x",
    }
    links = {path: "120000" for path in tree if path != "slim/a.py"}
    entries = repository.entries(commit(repository, tree, modes=links))
    module_entry = type(entries[0])("160000", start, "slim/vendor")
    made_tree = repository.write_tree([*entries, module_entry])
    repository.set_ref("refs/heads/main", repository.write_commit(made_tree, [], "with a submodule\n", "@1 +0000"))
    made = mirror(repository, "main", table(RULES[0]))
    found = files(repository, made.commit)
    assert found["docs/to-file"] == b"../vim/a.py"
    assert found["docs/to-folder"] == b"../vim"
    assert found["vim/near"] == b"a.py"
    assert (found["away"], found["out"]) == (b"/etc/x", b"../x")
    assert [e for e in repository.entries(made.commit) if e.mode == "160000"] == [
        type(entries[0])("160000", start, "vim/vendor")
    ]


def test_the_same_commit_id_in_another_repository_environment_and_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = new(tmp_path / "one"), new(tmp_path / "two")
    assert commit(one, TREE) == commit(two, TREE)
    first = mirror(one, "main", table(*RULES))
    monkeypatch.setattr(module, "PARALLEL_FROM", 0)
    monkeypatch.setattr(module, "CHUNK", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for name, value in {
        "TZ": "Asia/Tokyo",
        "LC_ALL": "C.UTF-8",
        "GIT_AUTHOR_DATE": "2001-01-01",
        "GIT_DIR": "/nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    two.run("config", "user.name", "another")
    two.run("config", "core.autocrlf", "true")
    second = mirror(two, "main", table(*RULES))
    assert second.commit == first.commit
    assert second.uses == first.uses and second.warnings == first.warnings


names = st.sampled_from(["slim/a.py", "slim/b.py", "docs/a.md", "ci/x", "slim/c/d.py", "bin"])
contents = st.lists(
    st.sampled_from([b"alpha ", b"slim", b".run(x)\n", b"import slim\n", b"\0", b"\xff", b"\r\n"]), max_size=8
).map(b"".join)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(trees=st.lists(st.dictionaries(names, contents, min_size=1), min_size=1, max_size=3))
def test_a_mirror_through_the_cache_is_the_mirror_from_nothing(
    tmp_path_factory: Any, trees: list[dict[str, bytes]]
) -> None:
    warm, rules = new(tmp_path_factory.mktemp("r") / "warm"), table(*RULES)
    for tree in trees:
        commit(warm, tree)
        through = mirror(warm, "main", rules)
    cold = new(tmp_path_factory.mktemp("r") / "cold")
    for tree in trees:
        commit(cold, tree)
    alone = mirror(cold, "main", rules)
    assert (alone.commit, alone.uses, alone.warnings) == (through.commit, through.uses, through.warnings)


def test_only_changed_files_are_translated_again_and_a_damaged_cache_costs_time_only(tmp_path: Path) -> None:
    repository, rules = new(tmp_path / "r"), table(*RULES)
    commit(repository, TREE)
    first = mirror(repository, "main", rules)
    assert first.translated == len(TREE) - 1
    assert mirror(repository, "main", rules).translated == 0
    commit(repository, {**TREE, "slim/core.py": "alpha = 2\n"})
    after = mirror(repository, "main", rules)
    assert after.translated == 1
    (cache,) = (repository.common_dir() / "forksync" / "cache").iterdir()
    cache.write_bytes(cache.read_bytes()[:-20] + b"\n{half")
    assert mirror(repository, "main", rules).commit == after.commit
    cache.unlink()
    assert mirror(repository, "main", rules).commit == after.commit


def test_objects_that_git_has_collected_are_made_again(tmp_path: Path) -> None:
    repository, rules = new(tmp_path / "r"), table(*RULES)
    commit(repository, TREE)
    first = mirror(repository, "main", rules)
    repository.run("gc", "--prune=now", "--quiet")
    assert not repository.has(first.commit)
    assert mirror(repository, "main", rules).commit == first.commit


def test_two_files_at_one_path_or_one_below_another_are_refused_by_name(tmp_path: Path) -> None:
    repository = new(tmp_path / "r")
    commit(repository, {"a/x": "1", "b/x": "2"})
    with pytest.raises(MirrorError, match="a/x and b/x both become b/x"):
        mirror(repository, "main", table(rule("path", old="a", new="b")))
    with pytest.raises(MirrorError, match="lies below the file that b/x becomes"):
        mirror(repository, "main", table(rule("path", old="b/x", new="a")))


def test_the_branch_has_provenance_grows_by_what_is_new_and_is_never_taken_from_another_use(tmp_path: Path) -> None:
    repository, rules = new(tmp_path / "r"), table(*RULES)
    old = commit(repository, TREE)
    first = publish(repository, "forksync/mirror", mirror(repository, "main", rules))
    assert provenance(repository, first) == (old, rules.hash)
    assert publish(repository, "forksync/mirror", mirror(repository, "main", rules)) == first
    commit(repository, {**TREE, "new": "alpha\n"})
    second = publish(repository, "forksync/mirror", mirror(repository, "main", rules))
    assert repository.text("rev-parse", f"{second}^") == first
    assert repository.commit_id("forksync/mirror") == second
    with pytest.raises(MirrorError, match="main is checked out"):
        publish(repository, "main", mirror(repository, "main", rules))
    repository.set_ref("refs/heads/other", old)
    with pytest.raises(MirrorError, match="other ends in .* which is no mirror"):
        publish(repository, "other", mirror(repository, "main", rules))


def test_a_ref_that_names_no_commit_is_one_clear_message(tmp_path: Path) -> None:
    repository = new(tmp_path / "r")
    commit(repository, TREE)
    with pytest.raises(ForksyncError, match="'v9' names no commit"):
        mirror(repository, "v9", table(*RULES))


def test_a_thousand_files_take_seconds(tmp_path: Path) -> None:
    """Of processor time, so that the bound holds on a machine that does other work too."""
    body = "".join(f"def f{n}(alpha, x={n}):\n    return slim.g(alpha, 'text {n}')  # comment\n\n" for n in range(30))
    repository = new(tmp_path / "r")
    commit(repository, {f"slim/m{n}.py": f"import slim\nN = {n}\n{body}" for n in range(1000)})
    started = time.process_time(), os.times().children_user
    made = mirror(repository, "main", table(*RULES))
    assert made.translated == 1000
    assert time.process_time() - started[0] + os.times().children_user - started[1] < 10
