"""A file as lines that formatting does not change: what two versions are compared by.

Python: one line a statement, or one an element where a statement is long; blank lines, spacing, wrapping, the kind of
quotes and trailing commas are gone, and equal lines mean equal programs. Anything else: its lines without line endings
and trailing blanks. The lexer is our own since ``tokenize`` differs between Python's versions, and a fingerprint must not.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTH = 88
"""A Python statement longer than this is cut at its brackets, so that a change to one element of a long table is one line."""
PYTHON = (".py", ".pyi")
SNIFFED = 8000
"""Bytes at the start of a file that are searched for a NUL, which makes it binary; git's own rule."""

TOKEN = re.compile(
    r"""
    (?P<string>(?:[rR][bBfFtT]?|[bBfFtT][rR]?|[uU])?(?:'''(?:[^\\]|\\.)*?'''|\"\"\"(?:[^\\]|\\.)*?\"\"\"
        |'(?:[^\\'\n]|\\.)*'|"(?:[^\\"\n]|\\.)*"))
    |(?P<comment>\#[^\n]*)
    |(?P<joined>\\\n)
    |(?P<newline>\n)
    |(?P<blank>[ \t\f]+)
    |(?P<name>[^\W\d]\w*)
    |(?P<number>(?:\d|\.\d)(?:[eE][+-]|[\w.])*)
    |(?P<operator>\*\*=|//=|>>=|<<=|\.\.\.|->|:=|==|!=|<=|>=|\*\*|//|<<|>>|[-+*/%@&|^]=|[-+*/%@&|^~<>=.,:;()\[\]{}!$?`])
    """,
    re.VERBOSE | re.DOTALL,
)
CLOSES = {"(": ")", "[": "]", "{": "}"}
SOFT = ("match", "case")
"""Names that may be keywords: ``case (a,):`` is no call."""
PLAIN_STRING = re.compile(r"'([^'\"\\\n]*)'")


@dataclass(frozen=True)
class Line:
    """One normalised line: its depth of indentation, its text, and the first and last line (from 1) it stands on."""

    depth: int
    text: str
    first: int
    last: int

    def __str__(self) -> str:
        return "    " * self.depth + self.text


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int

    @property
    def last(self) -> int:
        return self.line + self.text.count("\n")


def is_binary(data: bytes) -> bool:
    return b"\0" in data[:SNIFFED]


def endings(data: bytes) -> str:
    """``CRLF`` where more than half of the lines end so, else ``LF``."""
    return "CRLF" if 2 * data.count(b"\r\n") > data.count(b"\n") else "LF"


def normalise(path: str, data: bytes) -> list[Line]:
    """The normalised lines of a text file; bytes that are no UTF-8 are carried through as surrogates."""
    text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff").replace("\r\n", "\n")
    if path.endswith(PYTHON):
        try:
            return list(python_lines(text))
        except NotPythonError:
            pass
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [Line(0, line.rstrip(), number, number) for number, line in enumerate(lines, 1)]


class NotPythonError(ValueError):
    """The text cannot be cut into Python's statements; it is compared line by line."""


def python_lines(text: str) -> Iterator[Line]:
    """One or more lines a statement; a comment is a line of its own, at depth 0, before the statement that it stands in."""
    indents = [0]
    for column, statement in statements(text):
        code = [token for token in statement if token.kind != "comment"]
        yield from (Line(0, t.text.rstrip(), t.line, t.line) for t in statement if t.kind == "comment")
        if code:
            while column < indents[-1]:
                indents.pop()
            if column > indents[-1]:
                indents.append(column)
            yield from render(code, len(indents) - 1)


def statements(text: str) -> Iterator[tuple[int, list[Token]]]:
    """Logical lines: the column of the first token (a tab goes to the next multiple of 8) and the tokens."""
    at, line, fresh, column = 0, 1, True, 0
    open_brackets: list[str] = []
    found: list[Token] = []
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise NotPythonError(f"line {line}")
        kind, said, at = str(match.lastgroup), match.group(), match.end()
        if kind == "blank" and fresh:
            column = len(said.expandtabs(8))
        elif kind == "newline" and not open_brackets:
            if found:
                yield column, found
            found, fresh, column = [], True, 0
        elif kind not in ("blank", "newline", "joined"):
            fresh = False
            track(open_brackets, said, line)
            found.append(Token(kind, said, line))
        line += said.count("\n")
    if open_brackets:
        raise NotPythonError("unclosed bracket")
    if found:
        yield column, found


def track(open_brackets: list[str], said: str, line: int) -> None:
    if said in CLOSES:
        open_brackets.append(CLOSES[said])
    elif said in CLOSES.values() and (not open_brackets or open_brackets.pop() != said):
        raise NotPythonError(f"line {line}: {said}")


def render(tokens: Sequence[Token], depth: int) -> Iterator[Line]:
    """A statement, or an element of one, as one line if it is short, else cut at its outermost long brackets."""
    flat = join(tokens)
    if len(flat) <= WIDTH and "\n" not in flat:
        yield Line(depth, flat, tokens[0].line, tokens[-1].last)
        return
    start = 0
    for opened, closed in brackets(tokens):
        inner = tokens[opened + 1 : closed]
        if len(join(inner)) <= WIDTH // 2 and not any("\n" in token.text for token in inner):
            continue
        yield from text_lines(tokens[start : opened + 1], depth)
        for element in elements(tokens, opened, closed):
            yield from render(element, depth + 1)
        start = closed
    yield from text_lines(tokens[start:], depth)


def text_lines(tokens: Sequence[Token], depth: int) -> Iterator[Line]:
    """Tokens that are cut no further; a string over several lines, such as a docstring, gives each of its lines."""
    first, last = tokens[0].line, tokens[-1].last
    for offset, text in enumerate(join(tokens).split("\n")):
        line = min(first + offset, last)
        yield Line(0 if offset else depth, text, line, line if "\n" in join(tokens) else last)


def brackets(tokens: Sequence[Token]) -> list[tuple[int, int]]:
    """Positions of the outermost pairs of brackets."""
    ends = [at for at, (token, depth) in enumerate(with_depth(tokens)) if depth == 0 and is_bracket(token)]
    return list(zip(ends[::2], ends[1::2], strict=True))


def is_bracket(token: Token) -> bool:
    return token.text in CLOSES or token.text in CLOSES.values()


def elements(tokens: Sequence[Token], opened: int, closed: int) -> list[list[Token]]:
    """What stands between two brackets, cut at its commas, each element with its comma; a comprehension at its clauses."""
    inner = tokens[opened + 1 : closed]
    outer = [token.text for token, depth in with_depth(inner) if depth == 0]
    comprehension = "for" in outer
    parts: list[list[Token]] = [[]]
    for token, depth in with_depth(inner):
        if comprehension and depth == 0 and token.text in ("for", "async") and parts[-1][-1].text != "async":
            parts.append([])
        parts[-1].append(token)
        if not comprehension and depth == 0 and token.text == ",":
            parts.append([])
    parts = [part for part in parts if part]
    if parts and outer[-1] != "," and not comprehension and (len(parts) > 1 or comma_is_idle(tokens, opened)):
        parts[-1].append(Token("operator", ",", parts[-1][-1].last))
    return parts


def with_depth(tokens: Sequence[Token]) -> Iterator[tuple[Token, int]]:
    """Each token with the number of brackets that it stands in; the brackets themselves count as outside."""
    depth = 0
    for token in tokens:
        depth -= token.text in CLOSES.values()
        yield token, depth
        depth += token.text in CLOSES


def comma_is_idle(tokens: Sequence[Token], opened: int) -> bool:
    """Whether a comma after the only element means nothing: not so in ``(a,)`` and ``x[a,]``, which are tuples."""
    before = tokens[opened - 1] if opened else None
    called = before is not None and (is_value(before) or before.text in (")", "]"))
    return tokens[opened].text == "{" or called == (tokens[opened].text == "(")


def is_value(token: Token) -> bool:
    if token.kind == "name":
        return not keyword.iskeyword(token.text) and token.text not in SOFT
    return token.kind in ("string", "number")


def join(tokens: Sequence[Token]) -> str:
    """Tokens as text with one fixed spacing, without idle trailing commas."""
    out: list[str] = []
    commas: list[tuple[int, int]] = []
    for at, token in enumerate(tokens):
        before = tokens[at - 1] if at else None
        if token.text in CLOSES:
            commas.append((at, 0))
        elif token.text == "," and commas:
            commas[-1] = (commas[-1][0], commas[-1][1] + 1)
        elif token.text in CLOSES.values() and commas:
            opened, count = commas.pop()
            if before and before.text == "," and (count > 1 or comma_is_idle(tokens, opened)):
                out.pop()
        if before and out and spaced(tokens[at - 2] if at > 1 else None, before, token):
            out.append(" ")
        out.append(quoted(token))
    return "".join(out)


def quoted(token: Token) -> str:
    plain = PLAIN_STRING.fullmatch(token.text) if token.kind == "string" else None
    return f'"{plain[1]}"' if plain else token.text


def spaced(two_before: Token | None, before: Token, token: Token) -> bool:
    if token.text == ".":
        return before.kind == "number" or not (is_value(before) or before.text in ")]}.([{")
    if before.text == ".":
        return token.text == "import"
    if before.text in "([{" or token.text in ")]},:;":
        return False
    if token.text in "([" and (is_value(before) or before.text in ")]}"):
        return False
    unary = before.text in ("-", "+", "~", "*", "**", "@")
    return not unary or (two_before is not None and (is_value(two_before) or two_before.text in ")]}"))
