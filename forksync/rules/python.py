"""Python source cut into the places where a name can stand: what rename rules choose from.

Own lexer, since it must be fast (every file of an upstream, for every rule that may concern it), must not fail on source
of another Python version, a template or a file with a syntax error, and must give exact positions, so that what no rule
touches keeps every byte.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

Place = Literal["names", "attributes", "keywords", "imports", "literals", "strings", "comments", "text"]
"""``names``: variables, functions, classes, parameters. ``attributes``: after a dot. ``keywords``: ``f(here=1)``.
``imports``: in an import statement. ``literals``: strings that are the name and nothing else, or a dotted path that
begins with it. ``strings``: words anywhere in strings, docstrings too. ``comments``: words in them. ``text``: words in
files that are not Python."""

CODE: tuple[Place, ...] = ("names", "attributes", "keywords", "imports")


class Token(NamedTuple):
    kind: str
    """names, attributes, keywords, imports, comments, strings (what is between the quotes), or fields: the literal parts
    of a formatted string, whose other parts are cut as code."""
    start: int
    end: int
    statement: int = -1
    """For ``imports``: which import statement of the file, from 0."""


START = re.compile(
    r"""(?P<name>[^\W\d]\w*)(?!\w*["'])
    |(?P<string>(?P<prefix>[rRbBuUfFtT]{0,2})(?P<quote>\"{3}|'{3}|"|'))
    |(?P<word>[^\W\d]\w*)
    |(?P<op>\.(?!\d)|[()\[\]{};:]|[\r\n])
    |(?P<comment>\#[^\r\n]*)
    |(?P<other>\.?\d[\w.]*|\\\r?\n|![rsa](?=[:}]))""",
    re.VERBOSE,
)
BODY = {
    quote: re.compile(pattern, re.DOTALL)
    for quote, pattern in {
        '"': r'[^"\\\r\n]*(?:\\(?:\r\n|.)[^"\\\r\n]*)*',
        "'": r"[^'\\\r\n]*(?:\\(?:\r\n|.)[^'\\\r\n]*)*",
        '"""': r'[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*',
        "'''": r"[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*",
    }.items()
}
FORMATTED = {
    quote: re.compile(rf"\{{\{{|\}}\}}|\{{|\\N\{{[^}}]*\}}|\\(?:\r\n|[^{{}}])|{quote}{end}", re.DOTALL)
    for quote, end in {'"': r"|[\r\n]", "'": r"|[\r\n]", '"""': "", "'''": ""}.items()
}
SPECIFICATION = re.compile(r"[{}\r\n]")
ASSIGNED = re.compile(r"\s*=(?!=)")


@dataclass
class State:
    """Where in the grammar the lexer is."""

    begins: bool
    """A statement begins here."""
    calls: list[bool] = field(default_factory=list)
    """For each open bracket, whether ``name=`` in it names an argument of a call."""
    importing: bool = False
    defines: bool = False
    """After ``def``, before its parameters."""
    after_dot: bool = False

    def step(self, op: str) -> None:
        """Past a dot, a bracket or what may end a statement."""
        if op in "([{":
            self.calls.append(op == "(" and not self.defines)
            self.defines = self.defines and op != "("
        elif op in ")]}" and self.calls:
            self.calls.pop()
        elif op in "\r\n;:" and not self.calls:
            self.begins, self.importing = True, self.importing and op == ":"
            return
        self.after_dot = op == "." or (self.after_dot and op in "\r\n")
        self.begins = self.begins and op in "\r\n"


class Lexer:
    """One pass over ``code``; ``tokens`` is what was found, in order."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.tokens: list[Token] = []
        self.statements = 0
        self.lex(0)

    def lex(self, at: int, within: bool = False) -> int:
        """Cuts from ``at`` to the end, or a field of a formatted string to its ``}`` or ``:``; the place of what ended it."""
        state = State(begins=not within)
        while match := START.search(self.code, at):
            kind, start, at = match.lastgroup, match.start(), match.end()
            if kind in ("name", "word"):
                self.name(state, match[0], start, at)
            elif kind == "op":
                if within and not state.calls and match[0] in "}:":
                    return start
                state.step(match[0])
            elif kind == "comment":
                self.tokens.append(Token("comments", start, at))
            elif kind == "other":
                state.begins = state.begins and match[0][0] == "\\"
            else:
                at = self.string(match["prefix"], match["quote"], at)
                state.begins = state.after_dot = False
        return len(self.code)

    def name(self, state: State, word: str, start: int, end: int) -> None:
        if state.begins and word in ("import", "from"):
            state.importing, self.statements = True, self.statements + 1
        if state.importing:
            self.tokens.append(Token("imports", start, end, self.statements - 1))
        elif state.after_dot:
            self.tokens.append(Token("attributes", start, end))
        elif state.calls and state.calls[-1] and ASSIGNED.match(self.code, end):
            self.tokens.append(Token("keywords", start, end))
        else:
            self.tokens.append(Token("names", start, end))
            state.defines = state.defines or word == "def"
        state.begins = state.after_dot = False

    def string(self, prefix: str, quote: str, at: int) -> int:
        """A string whose content begins at ``at``; where the code goes on after it. One that never ends, ends with its line."""
        if "f" in prefix.lower() or "t" in prefix.lower():
            return self.formatted(quote, at)
        body = BODY[quote].match(self.code, at)
        end = body.end() if body else at
        self.tokens.append(Token("strings", at, end))
        return end + len(quote) if self.code.startswith(quote, end) else end

    def formatted(self, quote: str, at: int) -> int:
        piece = at
        while match := FORMATTED[quote].search(self.code, at):
            at = match.end()
            if match[0] == "{":
                self.tokens.append(Token("fields", piece, match.start()))
                at = piece = self.field(at)
            elif match[0] == quote or match[0] in "\r\n":
                self.tokens.append(Token("fields", piece, match.start()))
                return at
        self.tokens.append(Token("fields", piece, len(self.code)))
        return len(self.code)

    def field(self, at: int) -> int:
        """A field ``{value!r:specification}`` whose value begins at ``at``; the place after its ``}``."""
        at = self.lex(at, within=True)
        if not self.code.startswith(":", at):
            return min(at + 1, len(self.code))  # it may never end
        while match := SPECIFICATION.search(self.code, at):
            if match[0] != "{":
                return match.end()
            at = self.field(match.end())
        return len(self.code)


@lru_cache(maxsize=8)
def tokens(code: str) -> tuple[Token, ...]:
    """The tokens of Python source, in order. Never fails: what is no Python is cut as well as it goes."""
    return tuple(Lexer(code).tokens)
