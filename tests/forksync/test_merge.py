"""The three-way merge asks only where both sides changed the same thing, and loses nothing."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forksync.git import Entry, Repository
from forksync.merge import Choice, Merged, merge_trees
from forksync.merge3 import Conflict, has_markers, merge3
from tests.forksync import repos

BASE = [f"line {n}" for n in range(8)]


@st.composite
def edited(draw: st.DrawFn, side: str) -> list[str]:
    """The base with lines replaced, taken out and put in; each new line is like no other."""
    lines: list[str] = []
    for number, line in enumerate(BASE):
        what = draw(st.sampled_from(["keep", "keep", "keep", "replace", "remove", "insert"]))
        lines += [f"{side} {number}"] if what in ("replace", "insert") else []
        lines += [line] if what in ("keep", "insert") else []
    return lines


def data(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


@settings(max_examples=150, deadline=None)
@given(fork=edited("fork"), upstream=edited("upstream"))
def test_every_line_that_a_side_put_in_is_in_the_merge_or_in_a_conflict(fork: list[str], upstream: list[str]) -> None:
    merged = merge3("a.txt", data(BASE), data(fork), data(upstream))
    settled = Counter(line for part in merged.parts if not isinstance(part, Conflict) for line in part)
    for side, of in ((fork, "fork"), (upstream, "upstream")):
        in_conflict = Counter(line for one in merged.conflicts for line in getattr(one, of))
        assert set(side) - set(BASE) <= set(settled + in_conflict)
    for line in BASE:
        gone = line not in fork or line not in upstream
        assert settled[line] <= 1
        assert gone or settled[line] or any(line in one.fork for one in merged.conflicts)


@settings(max_examples=60, deadline=None)
@given(side=edited("side"))
def test_what_only_one_side_changed_is_taken(side: list[str]) -> None:
    base, changed = data(BASE), data(side)
    assert merge3("a.txt", base, base, changed).data() == changed
    assert merge3("a.txt", base, changed, base).data() == changed
    assert merge3("a.txt", base, changed, changed).data() == changed


@settings(max_examples=60, deadline=None)
@given(fork=edited("fork"), upstream=edited("upstream"))
def test_where_git_merges_so_does_this_and_alike(
    tmp_path_factory: pytest.TempPathFactory, fork: list[str], upstream: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    for name, lines in (("base", BASE), ("fork", fork), ("upstream", upstream)):
        (folder / name).write_bytes(data(lines))
    words = ["git", "merge-file", "-p", "fork", "base", "upstream"]
    git = subprocess.run(words, cwd=folder, capture_output=True, timeout=60, check=False)
    merged = merge3("a.txt", data(BASE), data(fork), data(upstream))
    if git.returncode == 0:
        assert not merged.conflicts
        assert merged.data() == git.stdout


def merged(base: str, fork: str, upstream: str, path: str = "a.py") -> tuple[str, int]:
    one = merge3(path, base.encode(), fork.encode(), upstream.encode())
    return one.data().decode(), len(one.conflicts)


def test_changes_of_neighbouring_lines_are_not_a_conflict() -> None:
    assert merged("a\nb\nc\n", "A\nb\nc\n", "a\nB\nc\n") == ("A\nB\nc\n", 0)
    assert merged("a\nb\n", "a\nx\nb\n", "a\nB\n") == ("a\nx\nB\n", 0)


def test_two_sides_that_put_lines_in_at_one_place_are_a_conflict() -> None:
    assert merged("a\nb\n", "a\nx\nb\n", "a\ny\nb\n")[1] == 1


def test_a_side_that_only_reformatted_gives_way() -> None:
    base = "x = f(a, b)\ny = 1\n"
    assert merged(base, "x = f(a, b, own)\ny = 1\n", "x = f(\n    a,\n    b,\n)\ny = 1\n") == (
        "x = f(a, b, own)\ny = 1\n",
        0,
    )
    assert merged(base, "x = f(\n    a,\n    b,\n)\ny = 1\n", "x = f(a, c)\ny = 1\n") == ("x = f(a, c)\ny = 1\n", 0)


def test_line_endings_of_one_side_are_kept_and_no_conflict() -> None:
    assert merged("a\nb\n", "a\r\nb\r\n", "a\nB\n") == ("a\r\nB\r\n", 0)
    assert merged("a\r\nb\r\n", "a\r\nb2\r\n", "a\nb\n") == ("a\nb2\n", 0)


def test_a_conflict_shows_only_what_is_at_odds() -> None:
    text, count = merged("1\n2\n3\n", "1\nsame\nours\n3\n", "1\nsame\ntheirs\n3\n", "a.txt")
    assert count == 1
    assert text == ("1\nsame\n<<<<<<< fork\nours\n||||||| mirror before\n2\n=======\ntheirs\n>>>>>>> upstream\n3\n")
    assert has_markers(text.encode())
    assert not has_markers(b"Title\n=======\n")


def test_bytes_that_are_no_utf8_come_through() -> None:
    one = merge3("a.txt", b"caf\xe9\nb\nc\n", b"caf\xe9\nB\nc\n", b"\xff\xfe\nb\nc\n")
    assert one.data() == b"\xff\xfe\nB\nc\n"


# --- trees


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return repos.new(tmp_path_factory.mktemp("merge") / "repository")


Files = Mapping[str, str]


def trees(
    repository: Repository, base: Files, fork: Files, upstream: Files, choice: Choice | None = None
) -> tuple[Merged, dict[str, bytes]]:
    made = []
    for files in (base, fork, upstream):
        blobs = repository.write_blobs([text.encode() for text in files.values()])
        made.append(repository.write_tree(Entry("100644", blob, path) for path, blob in zip(files, blobs, strict=True)))
    one = merge_trees(repository, *made, lambda path, conflict: choice)
    return one, repos.files(repository, one.tree)


LONG = "".join(f"{n}\n" for n in range(20))


def test_a_change_follows_a_file_that_the_other_side_moved(repository: Repository) -> None:
    _, files = trees(
        repository, {"a": LONG}, {"a": LONG.replace("7", "seven")}, {"b/c": LONG.replace("3\n", "three\n")}
    )
    assert files == {"b/c": LONG.replace("7", "seven").replace("3\n", "three\n").encode()}


def test_a_file_of_the_forks_own_follows_a_folder_that_the_upstream_moved(repository: Repository) -> None:
    base = {"old/a": LONG, "old/b": LONG * 2}
    one, files = trees(repository, base, {**base, "old/own": "x"}, {"new/a": LONG, "new/b": LONG * 2})
    assert set(files) == {"new/a", "new/b", "new/own"}
    assert not one.clashes


def test_what_git_leaves_as_a_conflict_and_can_be_merged_is(repository: Repository) -> None:
    one, files = trees(repository, {"a": "1\n2\n"}, {"a": "one\n2\n"}, {"a": "1\ntwo\n"})
    assert files == {"a": b"one\ntwo\n"}
    assert [(settled.by, settled.took) for settled in one.settled] == [("lines", "both")]


def test_a_file_that_one_side_changed_and_the_other_removed_is_asked_about(repository: Repository) -> None:
    one, _ = trees(repository, {"a": "1\n", "k": ""}, {"k": ""}, {"a": "2\n", "k": ""})
    assert [(clash.path, clash.kind) for clash in one.clashes] == [("a", "modify/delete")]


@pytest.mark.parametrize(
    ("took", "expected"), [("fork", b"ours\n"), ("upstream", b"theirs\n"), ("both", b"ours\ntheirs\n")]
)
def test_a_rule_decides_a_place_in_a_text(repository: Repository, took: str, expected: bytes) -> None:
    one, files = trees(repository, {"a": "1\n"}, {"a": "ours\n"}, {"a": "theirs\n"}, (took, "a rule", "why"))
    assert files == {"a": expected}
    assert not one.clashes
    assert [(s.path, s.by, s.took, s.because, s.lines) for s in one.settled] == [
        ("a", "a rule", took, "why", ("1", "theirs"))
    ]


@pytest.mark.parametrize(("took", "expected"), [("fork", set[str]()), ("upstream", {"a"})])
def test_a_rule_decides_a_whole_file(repository: Repository, took: str, expected: set[str]) -> None:
    one, files = trees(repository, {"a": "1\n"}, {}, {"a": "2\n"}, (took, "a rule", "why"))
    assert set(files) == expected
    assert not one.clashes


def test_a_conflict_about_two_paths_is_always_asked_about(repository: Repository) -> None:
    one, _ = trees(repository, {"a": LONG}, {"b": LONG}, {"c": LONG}, ("fork", "a rule", "why"))
    assert one.clashes
