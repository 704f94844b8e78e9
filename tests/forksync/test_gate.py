"""Gate one: the divergence is what was signed off, whatever the upstream moved or reformatted around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forksync.divergence import Hunk, divergence
from forksync.gate import Verdict, compare, renewed
from forksync.git import Entry as Leaf
from forksync.git import Repository
from forksync.history import Entry, History, signature
from forksync.resolve import ended
from tests.forksync import repos

Files = Mapping[str, str | bytes]


def tree(repository: Repository, files: Files, modes: Mapping[str, str] | None = None) -> str:
    data = [text.encode() if isinstance(text, str) else text for text in files.values()]
    blobs = repository.write_blobs(data)
    kinds = modes or {}
    return repository.write_tree(
        Leaf(kinds.get(p, "100644"), text if kinds.get(p) == "160000" else blob, p)  # type: ignore[arg-type]
        for (p, text), blob in zip(files.items(), blobs, strict=True)
    )


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return repos.new(tmp_path_factory.mktemp("gate") / "repository")


def hunks(repository: Repository, before: Files, after: Files, **modes: Any) -> list[Hunk]:
    trees = [tree(repository, files, modes.get(side)) for files, side in ((before, "mirror"), (after, "fork"))]
    return divergence(repository, *trees)


def history(found: list[Hunk], **options: Any) -> History:
    entry = {"id": "one", "reason": "why", "author": "Ann", "date": "2026-01-02", **options}
    return History(entry=(Entry.model_validate({**entry, "hunks": tuple(map(signature, found))}),))


def verdict(repository: Repository, signed: tuple[Files, Files], now: tuple[Files, Files], **options: Any) -> Verdict:
    """What was signed for one pair of mirror and fork, held against another pair."""
    return compare(hunks(repository, *now), history(hunks(repository, *signed), **options), set(now[1]))


FUNCTIONS = [f"def f{n}(a, b):\n    x{n} = a * {n}\n    y = x{n} + b\n    return y - {n}\n" for n in range(6)]


def module(functions: list[str], gap: str = "\n\n") -> str:
    return "import os\n\n\n" + gap.join(functions)


OWN = [*FUNCTIONS]
OWN[2] = OWN[2].replace("a * 2", "a * 200").replace("return", "b = 1\n    return")
OWN[4] = OWN[4].replace("    y = x4 + b\n", "")
SIGNED = ({"a.py": module(FUNCTIONS)}, {"a.py": module(OWN)})


def test_what_was_signed_passes(repository: Repository) -> None:
    assert verdict(repository, SIGNED, SIGNED).passed


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(6)),
    gap=st.sampled_from(["\n", "\n\n", "\n\n\n\n# a remark\n"]),
    path=st.sampled_from(["a.py", "b/c.py"]),
    wrapped=st.booleans(),
    edited=st.sampled_from([0, 1, 3, 5]),
)
def test_moves_and_reformatting_of_other_code_change_nothing(
    repository: Repository, order: list[int], gap: str, path: str, wrapped: bool, edited: int
) -> None:
    """The upstream moves functions and the file, reformats, and changes code beside the divergence; the fork follows."""

    def follow(functions: list[str]) -> Files:
        changed = [
            text.replace(f"* {n}\n", "* 77\n").replace("(a, b)", "(a, c, b)") if n == edited else text
            for n, text in enumerate(functions)
        ]
        spelled = [text.replace("(a, b)", "(\n    a,\n    b,\n)") if wrapped else text for text in changed]
        return {path: module([spelled[n] for n in order], gap)}

    found = verdict(repository, SIGNED, (follow(FUNCTIONS), follow(OWN)))
    assert found.passed, (found.new, found.changed, found.vanished)
    assert len(found.signed) == 3


def test_reformatting_by_one_side_alone_is_no_divergence(repository: Repository) -> None:
    wide = module(OWN, "\n\n\n").replace("(a, b)", "(\n        a,\n        b,\n)").replace("a * 200", "a*200")
    assert verdict(repository, SIGNED, (SIGNED[0], {"a.py": wide})).passed


def test_new_vanished_and_changed_hunks_are_three_findings(repository: Repository) -> None:
    fork = [*OWN]
    fork[2] = fork[2].replace("a * 200", "a * 201")
    fork[4] = FUNCTIONS[4]
    fork[0] = fork[0].replace("return", "print(a)\n    return")
    found = verdict(repository, SIGNED, (SIGNED[0], {"a.py": module(fork)}))
    assert [hunk.edit.added for hunk in found.new] == [("    print(a)",)]
    assert [claim.signed.edit.removed for claim in found.vanished] == [("    y = x4 + b",)]
    assert [one.hunk.edit.added for one in found.changed] == [("    x2 = a * 201",)]
    assert not found.passed


def test_each_signature_signs_one_hunk_only(repository: Repository) -> None:
    mirror, fork = {"a.txt": "a\nb\nc\nd\n"}, {"a.txt": "a\nx\nb\nc\nd\n"}
    twice = {"a.txt": "a\nx\nb\nc\nx\nd\n"}
    found = verdict(repository, (mirror, fork), (mirror, twice))
    assert len(found.signed) == 1
    assert len(found.new) == 1


def test_an_edit_that_can_be_told_in_two_ways_is_one_edit(repository: Repository) -> None:
    """``a b`` put in between ``a b`` and ``c`` may be told as starting at either ``a``, and what decides is around it."""
    before = ({"n.txt": "s\na\nb\nt\n"}, {"n.txt": "s\na\nb\na\nb\nt\n"})
    after = ({"n.txt": "s\nb\nt\n"}, {"n.txt": "s\nb\na\nb\nt\n"})
    assert verdict(repository, before, after).passed


def test_swapped_lines_are_a_change(repository: Repository) -> None:
    mirror = {"n.txt": "s\nt\n"}
    found = verdict(repository, (mirror, {"n.txt": "s\na\nb\nt\n"}), (mirror, {"n.txt": "s\nb\na\nt\n"}))
    assert len(found.changed) == 1


def test_hunks_that_the_upstream_brings_together_or_apart_stay_signed(repository: Repository) -> None:
    apart = ({"n.txt": "1\n2\nmid\n3\n4\n"}, {"n.txt": "one\ntwo\nmid\nthree\nfour\n"})
    together = ({"n.txt": "1\n2\n3\n4\n"}, {"n.txt": "one\ntwo\nthree\nfour\n"})
    assert verdict(repository, apart, together).passed
    assert verdict(repository, together, apart).passed


def test_a_signature_that_equals_one_of_a_joined_hunk_is_still_another(repository: Repository) -> None:
    signed = ({"n": "1\nmid\n2\nx\ny\n1\n"}, {"n": "one\nmid\ntwo\nx\ny\none\n"})
    found = verdict(repository, signed, ({"n": "1\n2\nx\ny\n1\n"}, {"n": "one\ntwo\nx\ny\n1\n"}))
    assert len(found.signed) == 1
    assert len(found.vanished) == 1


def test_code_that_is_indented_with_what_is_around_it_stays_signed(repository: Repository) -> None:
    def deeper(functions: list[str]) -> Files:
        inner = "".join(f"    {line}\n" for line in module(functions, "\n").split("\n")[3:] if line)
        return {"a.py": f"import os\n\n\nclass A:\n{inner}"}

    mirror = {"a.py": module(FUNCTIONS)}
    fork = {"a.py": module(FUNCTIONS).replace("a * 2\n", "a * 200\n")}
    now = (deeper(FUNCTIONS), {"a.py": str(deeper(FUNCTIONS)["a.py"]).replace("a * 2\n", "a * 200\n")})
    assert verdict(repository, (mirror, fork), now).passed


def test_an_added_line_at_another_depth_is_a_change(repository: Repository) -> None:
    mirror = {"a.py": "if x:\n    y()\n"}
    found = verdict(
        repository, (mirror, {"a.py": "if x:\n    y()\n    z()\n"}), (mirror, {"a.py": "if x:\n    y()\nz()\n"})
    )
    assert len(found.changed) == 1


@pytest.mark.parametrize(
    ("mirror", "fork", "modes", "kind"),
    [
        ({"a": "x"}, {"a": "x", "b": "y"}, {}, "added"),
        ({"a": "x", "b": "y"}, {"a": "x"}, {}, "deleted"),
        ({"a": "x\n" * 9}, {"b": "x\n" * 9}, {}, "renamed"),
        ({"a": "x"}, {"a": "x"}, {"fork": {"a": "100755"}}, "mode"),
        ({"a": "x\ny\n"}, {"a": "x\r\ny\r\n"}, {}, "endings"),
        ({"a": b"\0x"}, {"a": b"\0y"}, {}, "binary"),
        ({"a": "b"}, {"a": "c"}, {"mirror": {"a": "120000"}, "fork": {"a": "120000"}}, "link"),
        ({"a": "1" * 40}, {"a": "2" * 40}, {"mirror": {"a": "160000"}, "fork": {"a": "160000"}}, "submodule"),
        ({"a": "b"}, {"a": "b"}, {"fork": {"a": "120000"}}, "type"),
        ({"a": b"caf\xe9\n"}, {"a": b"caf\xe8\n"}, {}, "lines"),
    ],
)
def test_every_kind_of_difference_is_found_and_can_be_signed(
    repository: Repository, mirror: Files, fork: Files, modes: dict[str, Any], kind: str
) -> None:
    found = hunks(repository, mirror, fork, **modes)
    assert [hunk.edit.kind for hunk in found] == [kind]
    assert compare(found, history(found), set(fork)).passed
    assert not compare(found, History(), set(fork)).passed
    assert compare([], history(found), set(fork)).vanished


def test_a_mode_follows_its_file_but_is_not_the_same_elsewhere(repository: Repository) -> None:
    def changed(path: str, other: str) -> list[Hunk]:
        both = {path: "x\n" * 9, other: "y\n"}
        return hunks(repository, both, both, fork={path: "100755"})

    signed = history(changed("a", "b"))
    assert compare(changed("c", "b"), signed, {"c", "b"}).passed
    assert not compare(changed("b", "a"), signed, {"a", "b"}).passed


def test_own_files_are_signed_whatever_they_say(repository: Repository) -> None:
    owner = History(entry=(Entry(id="ci", reason="our CI", author="Ann", date="2026-01-02", paths=("ci/**",)),))  # type: ignore[arg-type]
    found = hunks(repository, {"a": "x"}, {"a": "x", "ci/run": "y", "cin": "z"})
    assert [hunk.path for hunk in compare(found, owner, {"a", "ci/run", "cin"}).new] == ["cin"]


def test_an_entry_that_keeps_the_forks_side_holds_whatever_the_upstream_has_there(repository: Repository) -> None:
    signed = ({"v": "a\nversion 1\nb\n"}, {"v": "a\nversion own\nb\n"})
    now = ({"v": "a\nversion 2\nb\n"}, signed[1])
    assert verdict(repository, signed, now).changed
    assert verdict(repository, signed, now, conflict="fork").passed


def test_of_equal_signatures_as_many_stay_as_there_are_hunks(repository: Repository) -> None:
    mirror = {"n": "a\nx\nb\nx\nc\n"}
    before = history(hunks(repository, mirror, {"n": "a\nb\nc\n"}), conflict="upstream")
    found = ended(compare(hunks(repository, mirror, {"n": "a\nb\nx\nc\n"}), before, {"n"}), [])
    assert found.passed
    assert [len(entry.hunks) for entry in renewed(before, found).entry] == [1]


def test_signatures_are_renewed_after_a_move(repository: Repository) -> None:
    now = ({"b.py": module(FUNCTIONS)}, {"b.py": module(OWN)})
    before = history(hunks(repository, *SIGNED))
    found = compare(hunks(repository, *now), before, set(now[1]))
    after = renewed(before, found)
    assert {hunk.path for entry in after.entry for hunk in entry.hunks} == {"b.py"}
    assert renewed(after, compare(hunks(repository, *now), after, set(now[1]))) == after
