"""Where a name can stand in Python source."""

from __future__ import annotations

import io
import sysconfig
import tokenize
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forksync.rules.python import tokens
from forksync.rules.rule import splice

CODE = """\
import numpy.linalg as np; from .x import (y,  # note
    z as w)
def make(size=1, *, kind: int = 3):
    if size: import late
    return call(size=f"ab{np.dot!r:{kind}>3}cd{{no}} {found["key"]}" + rb'\\'quoted', **more).made
a.\\
  joined
(a
  .wrapped)
yield from source
"""


def cut(code: str) -> list[tuple[str, str]]:
    return [(token.kind, code[token.start : token.end]) for token in tokens(code)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "imports",
            ["import", "numpy", "linalg", "as", "np", "from", "x", "import", "y", "z", "as", "w", "import", "late"],
        ),
        ("comments", ["# note"]),
        ("keywords", ["size"]),
        ("attributes", ["dot", "made", "joined", "wrapped"]),
        ("strings", ["key", "\\'quoted"]),
        ("fields", ["ab", "cd{{no}} ", ""]),
    ],
)
def test_each_place_of_a_name_is_told_from_the_others(kind: str, words: list[str]) -> None:
    assert [word for found, word in cut(CODE) if found == kind] == words


def test_a_parameter_is_a_name_and_an_argument_a_keyword() -> None:
    assert cut("def f(a=1): g(a=a)") == [
        ("names", "def"),
        ("names", "f"),
        ("names", "a"),
        ("names", "g"),
        ("keywords", "a"),
        ("names", "a"),
    ]


def test_from_after_yield_or_raise_imports_nothing() -> None:
    assert {kind for kind, _ in cut("yield from a\nraise b from c\nx = (yield)\n")} == {"names"}


def standard_library() -> list[Path]:
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]


def test_names_strings_and_comments_are_those_of_the_tokenizer_on_the_standard_library() -> None:
    for file in standard_library():
        code = file.read_text(encoding="utf-8")
        starts = [0]
        for line in code.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        theirs: dict[str, list[int]] = {"name": [], "comment": [], "string": []}
        within: list[tuple[int, int]] = []
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            at = starts[token.start[0] - 1] + token.start[1]
            if token.type == tokenize.NAME:
                theirs["name"].append(at)
            elif token.type == tokenize.COMMENT:
                theirs["comment"].append(at)
            elif token.type == tokenize.STRING and "f" not in token.string.split(token.string[-1])[0].lower():
                quote = 3 if token.string.endswith(('"""', "'''")) and len(token.string) >= 6 else 1
                theirs["string"].append(at + token.string.index(token.string[-1]) + quote)
            elif token.type == tokenize.STRING:
                within.append((at, at + len(token.string)))
        ours: dict[str, list[int]] = {"name": [], "comment": [], "string": []}
        kinds = {"comments": "comment", "strings": "string"}
        for found in tokens(code):
            if found.kind != "fields" and not any(start < found.start < end for start, end in within):
                ours[kinds.get(found.kind, "name")].append(found.start)
        assert ours == theirs, file


@example("t'{")
@given(st.text(alphabet="ab.=()[]{}'\"#\\\n\r:;f r!1 import from def", max_size=80))
def test_any_text_is_cut_without_failing_into_parts_that_do_not_overlap(code: str) -> None:
    found = tokens(code)
    assert all(token.start <= token.end for token in found)
    assert all(a.end <= b.start for a, b in pairwise(found))
    assert splice(code, [(token.start, token.end, code[token.start : token.end]) for token in found]) == code
