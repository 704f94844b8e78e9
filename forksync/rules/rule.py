"""What every rule has: a name, a scope, examples; and the three things that a rule may do to a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

Edit = tuple[int, int, str]
"""Where in a text, from and to, and what is to stand there."""


class Example(BaseModel):
    """A rule's test: by this rule alone ``before`` becomes ``after``, and the file at ``path`` comes to lie at ``becomes``.

    Equal texts, or equal paths, say what the rule must leave alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    before: str | None = None
    after: str | None = None
    path: str = "example.py"
    """Where the text is taken to lie: kinds and scopes of rules depend on it."""
    becomes: str | None = None
    """Where it goes; empty: nowhere, it is dropped."""

    @model_validator(mode="after")
    def _says_something(self) -> Example:
        if (self.before is None) != (self.after is None):
            raise ValueError("before and after go together")
        if self.before is None and self.becomes is None:
            raise ValueError("an example has before and after, or path and becomes")
        return self


@cache
def glob(pattern: str) -> re.Pattern[str]:
    """A glob over whole paths: ``*`` stays within a folder, ``**`` does not, ``dir/`` means all that lies below."""
    pattern = f"{pattern}**" if pattern.endswith("/") else pattern
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    spelled = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(spelled.get(part, re.escape(part)) for part in parts), re.DOTALL)


class Rule(BaseModel):
    """A rule's scope is the upstream's own path of a file, whatever rules before it made of that path."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    kind: str
    name: str = Field(min_length=1)
    """Unique in the table: counts, warnings and the ledger speak of the rule by it."""
    paths: tuple[str, ...] = ("**",)
    """Globs of the files it applies to."""
    not_paths: tuple[str, ...] = ()
    """Globs of the files it leaves alone."""
    examples: tuple[Example, ...] = Field(min_length=1)
    at_least: int = Field(default=1, ge=0)
    """Fewer uses than this in a mirror are warned of; 0 for a rule that may lie idle."""
    at_most: int | None = Field(default=None, ge=0)
    """More uses than this are warned of."""
    never: tuple[str, ...] = ()
    """Regular expressions. A line that the rule changes and one of them matches is warned of."""
    spare: tuple[str, ...] = ()
    """Regular expressions. What they match the rule leaves as it is, such as a link to the upstream's own page."""
    moves: ClassVar[bool] = False
    """Whether the kind can change paths."""

    @model_validator(mode="after")
    def _patterns_compile(self) -> Rule:
        for pattern in (*self.never, *self.spare):
            compiled(pattern)
        return self

    def covers(self, path: str) -> bool:
        return any(glob(p).fullmatch(path) for p in self.paths) and not any(
            glob(p).fullmatch(path) for p in self.not_paths
        )

    def keeps(self, path: str) -> bool | None:
        """Whether the file is part of the mirror; None: no opinion."""
        return None

    def move(self, path: str) -> str:
        """Where the file that now lies at ``path`` goes."""
        return path

    def rewrite(self, path: str, text: str) -> tuple[str, int, list[str]]:
        """The text of the file at ``path`` after the rule, how often it applied, and what it could not do and why."""
        return text, 0, []


def unspared(text: str, edits: list[Edit], spare: Sequence[str]) -> list[Edit]:
    """The edits that touch nothing which a rule spares."""
    spans = [found.span() for pattern in spare for found in compiled(pattern).finditer(text)] if edits else []
    return [edit for edit in edits if not any(edit[0] < end and start < edit[1] for start, end in spans)]


def splice(text: str, edits: list[Edit]) -> str:
    """The text with each ``(start, end, new)`` in place. Edits may come in any order and must not overlap."""
    parts, at = [], 0
    for start, end, new in sorted(edits):
        parts += [text[at:start], new]
        at = end
    return "".join([*parts, text[at:]])


def compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.MULTILINE)
    except re.error as fault:
        raise ValueError(f"not a regular expression: {fault}") from fault


def is_python(path: str) -> bool:
    return path.endswith((".py", ".pyi"))
