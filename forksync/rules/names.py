"""Rules that rename one identifier or one command-line flag, wherever their table entry says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from forksync.rules.python import CODE, Place, tokens
from forksync.rules.rule import Edit, Rule, is_python, splice, unspared


class Renaming(NamedTuple):
    """What to look for and what to put there, ``new`` as a template of the match (``\\1``)."""

    old: re.Pattern[str]
    new: str

    def edits(self, text: str, start: int, end: int) -> list[Edit]:
        return [(found.start(), found.end(), found.expand(self.new)) for found in self.old.finditer(text, start, end)]

    def whole(self, text: str, start: int, end: int) -> list[Edit]:
        found = self.old.fullmatch(text, start, end)
        return [(start, end, found.expand(self.new))] if found else []


def renamings(
    path: str, text: str, places: Sequence[str], name: Renaming | None, literal: Renaming | None, word: Renaming
) -> list[Edit]:
    """The edits of a renaming.

    ``name`` is for whole tokens of code, ``literal`` for whole strings, ``word`` within strings, comments and other files.
    """
    if not is_python(path):
        return word.edits(text, 0, len(text)) if "text" in places else []
    edits: list[Edit] = []
    for token in tokens(text):
        kind = "strings" if token.kind == "fields" else token.kind
        if kind in ("strings", "comments"):
            found = word.edits(text, token.start, token.end) if kind in places else []
            if not found and token.kind == "strings" and literal and "literals" in places:
                found = literal.whole(text, token.start, token.end)
            edits += found
        elif kind in places and name:
            edits += name.whole(text, token.start, token.end)
    return edits


class Identifier(Rule):
    """A Python identifier is renamed, in the chosen places."""

    kind: Literal["identifier"]
    old: str = Field(alias="from", pattern=r"^[^\W\d]\w*$")
    new: str = Field(alias="to", pattern=r"^[^\W\d]\w*$")
    places: tuple[Place, ...] = CODE

    @cached_property
    def _renamings(self) -> tuple[Renaming, Renaming, Renaming]:
        name, bounded = re.escape(self.old), rf"(?<!\w){re.escape(self.old)}(?!\w)"
        return (
            Renaming(re.compile(name), self.new),
            Renaming(re.compile(rf"{name}((?:\.\w+)*)"), rf"{self.new}\1"),
            Renaming(re.compile(bounded), self.new),
        )

    def rewrite(self, path: str, text: str) -> tuple[str, int, list[str]]:
        if self.old not in text:
            return text, 0, []
        edits = unspared(text, renamings(path, text, self.places, *self._renamings), self.spare)
        taken = edits and is_python(path) and any(text[t.start : t.end] == self.new for t in tokens(text))
        return (
            splice(text, edits),
            len(edits),
            [f"{self.new} stood here already: two names have become one"] if taken else [],
        )


class Flag(Rule):
    """A command-line flag is renamed in strings, comments and other files; with ``dest`` also the name that argparse makes of it.

    One ``*`` in ``from`` and ``to`` stands for any rest: ``--old-*`` to ``--new-*``.
    """

    kind: Literal["flag"]
    old: str = Field(alias="from", pattern=r"^--?[\w*][\w*-]*$")
    new: str = Field(alias="to", pattern=r"^--?[\w*][\w*-]*$")
    dest: bool = False
    """``args.old_name``, ``f(old_name=1)`` and ``"old_name"`` are renamed too."""
    places: tuple[Literal["strings", "comments", "text"], ...] = ("strings", "comments", "text")

    @model_validator(mode="after")
    def _one_star(self) -> Flag:
        if self.old.count("*") != self.new.count("*") or self.old.count("*") > 1:
            raise ValueError("from and to need the same number of *, at most one")
        return self

    @cached_property
    def _renamings(self) -> tuple[Renaming | None, Renaming | None, Renaming]:
        flag = re.escape(self.old).replace(r"\*", r"(\w[\w-]*)")
        word = Renaming(re.compile(rf"(?<![\w-]){flag}(?![\w-])"), self.new.replace("*", r"\1"))
        if not self.dest:
            return None, None, word
        old, new = (side.lstrip("-").replace("-", "_") for side in (self.old, self.new))
        dest = Renaming(re.compile(re.escape(old).replace(r"\*", r"(\w+)")), new.replace("*", r"\1"))
        return dest, dest, word

    def rewrite(self, path: str, text: str) -> tuple[str, int, list[str]]:
        name, literal, word = self._renamings
        if not word.old.search(text) and not (name and name.old.search(text)):
            return text, 0, []
        places = (*self.places, "attributes", "keywords", "literals") if self.dest else self.places
        edits = unspared(text, renamings(path, text, places, name, literal, word), self.spare)
        return splice(text, edits), len(edits), []
