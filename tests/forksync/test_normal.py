"""A file's normal form: layout is gone, and equal lines mean equal programs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from forksync.normal import WIDTH, NotPythonError, endings, normalise, python_lines

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "forksync").rglob("*.py")) + sorted((ROOT / "vime").rglob("*.py"))[::8]

ARGUMENTS = [f"argument{n}" for n in range(20)]


def shown(text: str, path: str = "a.py") -> list[str]:
    return [str(line) for line in normalise(path, text.encode("utf-8", "surrogateescape"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_normal_form_of_python_is_the_same_program_and_its_own_normal_form(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    normal = "\n".join(map(str, python_lines(source)))
    assert ast.dump(ast.parse(normal)) == ast.dump(ast.parse(source))
    assert "\n".join(map(str, python_lines(normal))) == normal


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("f(a,b)\n", "f(\n    a,\n    b,\n)\n"),
        ("x = 'a'\n", 'x = "a"\n'),
        ("if x:\n  y = 1\n", "if x:\n\n        y  =  1\n"),
        ("if x:\n\ty = 1\n", "if x:\n    y = 1\n"),
        ("x = a + \\\n    b\n", "x = a + b\n"),
        ("def f(a): pass\n", "def f(\n    a,\n): pass\n"),
        ("x = [1, 2]\r\n", "x = [\n    1,\n    2,\n]\n"),
        ("x = {'a': 1}", 'x = {\n    "a": 1,\n}\n'),
        (f"f({', '.join(ARGUMENTS)})\n", "f(\n" + "".join(f"    {name},\n" for name in ARGUMENTS) + ")\n"),
    ],
)  # fmt: skip
def test_layout_does_not_count(one: str, other: str) -> None:
    assert shown(one) == shown(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = (a,)\n", "x = (a)\n"),
        ("x[a,]\n", "x[a]\n"),
        ("if x:\n    y\n    z\n", "if x:\n    y\nz\n"),
        ("x = 'a b'\n", "x = 'a  b'\n"),
        ('"""a\n  b"""\n', '"""a\n   b"""\n'),
        ("x = 1 # a\n", "x = 1 # b\n"),
        ("x = 'it\\'s'\n", "x = 'its'\n"),
        ("x = a - -b\n", "x = a - b\n"),
        ("return\nx\n", "return x\n"),
        ("case (a,): pass\n", "case (a): pass\n"),
    ],
)
def test_what_counts_stays(one: str, other: str) -> None:
    assert shown(one) != shown(other)


def test_a_long_statement_is_cut_at_its_elements_so_that_a_change_of_one_is_one_line() -> None:
    rows = [f'    "name{n}": {n},\n' for n in range(30)]
    before = shown("table = {\n" + "".join(rows) + "}\n")
    rows[7] = '    "name7": 70,\n'
    after = shown("table = {" + "".join(row.strip() for row in rows) + "}")
    assert [(a, b) for a, b in zip(before, after, strict=True) if a != b] == [('    "name7": 7,', '    "name7": 70,')]
    assert max(map(len, before)) < WIDTH


def test_each_line_knows_where_it_stands() -> None:
    lines = normalise("a.py", b"x = 1\n\n\ny = f(\n    a,\n)  # why\n")
    assert [(line.first, line.last, line.text) for line in lines] == [
        (1, 1, "x = 1"),
        (6, 6, "# why"),
        (4, 6, "y = f(a)"),
    ]


def test_what_is_no_python_is_compared_line_by_line() -> None:
    assert shown("x = (\ny  =  1  \n") == ["x = (", "y  =  1"]
    with pytest.raises(NotPythonError):
        list(python_lines("x = (\n"))


def test_other_text_loses_its_endings_and_trailing_blanks_only() -> None:
    assert shown("a  b \r\n\r\n  c", "notes.md") == ["a  b", "", "  c"]
    assert shown("caf\udce9\n", "notes.txt") == ["caf\udce9"]
    assert endings(b"a\r\nb\r\n") == "CRLF"
    assert endings(b"a\nb\r\nc\n") == "LF"
