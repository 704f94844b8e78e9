"""The history table: every signed-off divergence with its reason, anchored to what it says, never to a line number.

The file is TOML and a person's: the reasons are edited by hand, the hunks are written by ``forksync sign``. Writing keeps
every line of an entry above its hunks as it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator

from forksync.config import ConfigError, faults, line_of, read_toml
from forksync.divergence import Edit, Hunk
from forksync.rules.rule import glob
from forksync.section import Section

ENTRY, HUNK = "[[entry]]", "[[entry.hunk]]"
HEADER = """\
# The signed-off divergences of this fork, each with its reason. The text of an entry is yours to edit;
# its hunks are written by `forksync sign`.
"""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class Signature(Section):
    """One hunk as it was signed."""

    path: str
    kind: str = "lines"
    fingerprint: str
    slides: int = Field(default=0, ge=0)
    blob: str = ""
    """Of an added file: the content that was signed."""
    diff: str
    """The normalised lines, each after ``-`` or ``+``."""

    @property
    def edit(self) -> Edit:
        lines = self.diff.split("\n")
        removed, added = (tuple(line[1:] for line in lines if line[:1] == sign) for sign in "-+")
        return Edit(self.kind, removed, added, self.slides)


class Entry(Section):
    """Divergences with one reason."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    id: str
    reason: str
    author: str
    date: date
    links: tuple[str, ...] = ()
    conflict: Literal["ask", "fork", "upstream"] = "ask"
    """Where the upstream changes the very same lines: ask, keep the fork's, or take the upstream's and end the divergence."""
    paths: tuple[str, ...] = ()
    """Globs of files that are the fork's own: signed off whatever they say."""
    hunks: tuple[Signature, ...] = Field(default=(), alias="hunk")

    @field_validator("id", "reason", "author")
    @classmethod
    def _said(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("it must say something")
        return value

    def owns(self, path: str) -> bool:
        return any(glob(pattern).fullmatch(path) for pattern in self.paths)


class History(Section):
    entry: tuple[Entry, ...] = ()

    def find(self, identity: str) -> Entry | None:
        return next((entry for entry in self.entry if entry.id == identity), None)

    def put(self, entry: Entry) -> History:
        """With ``entry`` in place of the one of its name, or at the end; gone if it signs nothing."""
        others = [entry if one.id == entry.id else one for one in self.entry]
        if self.find(entry.id) is None:
            others.append(entry)
        return History(entry=tuple(one for one in others if one.hunks or one.paths))


def signature(hunk: Hunk) -> Signature:
    edit = hunk.edit
    diff = "".join(f"{line}\n" for line in edit.diff)
    return Signature(
        path=hunk.path, kind=edit.kind, fingerprint=edit.fingerprint, slides=edit.slides, blob=hunk.blob, diff=diff
    )


def load(path: Path) -> History:
    """The history in a file; an absent file is an empty history. ConfigError names file, line and fault."""
    if not path.exists():
        return History()
    tree, text = read_toml(path)
    return parse(tree, text, str(path))


def parse(tree: dict[str, object], text: str, shown: str) -> History:
    try:
        history = History.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(faults(error, Path(shown), text, Entry)) from error
    seen: set[str] = set()
    for number, entry in enumerate(history.entry):
        place = f"{shown}:{line_of(text, ('entry', number, 'id'))}"
        if entry.id in seen:
            raise ConfigError(f"{place}: id = {entry.id!r} is another entry's too; give it one of its own")
        seen.add(entry.id)
        if not entry.hunks and not entry.paths:
            raise ConfigError(f"{place}: entry {entry.id!r} signs nothing; run forksync sign, or give it paths")
        for hunk in entry.hunks:
            if hunk.edit.fingerprint != hunk.fingerprint:
                raise ConfigError(
                    f"{place}: a hunk of {entry.id!r} in {hunk.path} says {hunk.fingerprint}, its lines give "
                    f"{hunk.edit.fingerprint}: it was edited by hand; remove the hunk and run forksync sign"
                )
    return history


def write(history: History, before: str) -> str:
    """The file's new text. ``before`` is its old text: what people wrote in it stays."""
    lead, old = blocks(before)
    parts = [lead or HEADER]
    for entry in history.entry:
        head = old.get(entry.id) or described(entry)
        parts.append("\n".join([head.rstrip("\n"), *(signed(hunk) for hunk in entry.hunks)]))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def blocks(text: str) -> tuple[str, dict[str, str]]:
    """What stands above the first entry, and of each entry, by id, the text above its hunks with the comments before it."""
    lines = text.split("\n")
    starts = [number for number, line in enumerate(lines) if line.strip() == ENTRY]
    found: dict[str, str] = {}
    lead_end = comments_above(lines, starts[0]) if starts else len(lines)
    for start, following in pairwise([*starts, len(lines)]):
        block = lines[start:following]
        end = next((number for number, line in enumerate(block) if line.strip() == HUNK), len(block))
        if end == len(block) and following < len(lines):
            end = comments_above(lines, following) - start
        named = next((match[1] for line in block[:end] if (match := re.match(r'\s*id\s*=\s*"(.*)"', line))), "")
        found[named] = "\n".join([*lines[comments_above(lines, start) : start], *block[:end]]).strip("\n")
    return "\n".join(lines[:lead_end]), found


def comments_above(lines: Sequence[str], number: int) -> int:
    """The first of the comment lines that stand directly above a line."""
    while number and lines[number - 1].lstrip().startswith("#"):
        number -= 1
    return number


def described(entry: Entry) -> str:
    lines = [ENTRY, f"id = {quoted(entry.id)}", f"reason = {quoted(entry.reason)}", f"author = {quoted(entry.author)}"]
    lines.append(f"date = {entry.date.isoformat()}")
    for name, values in (("links", entry.links), ("paths", entry.paths)):
        if values:
            lines.append(f"{name} = [{', '.join(map(quoted, values))}]")
    if entry.conflict != "ask":
        lines.append(f"conflict = {quoted(entry.conflict)}")
    return "\n".join(lines)


def signed(hunk: Signature) -> str:
    lines = ["", HUNK, f"path = {quoted(hunk.path)}"]
    if hunk.kind != "lines":
        lines.append(f"kind = {quoted(hunk.kind)}")
    lines.append(f"fingerprint = {quoted(hunk.fingerprint)}")
    if hunk.slides:
        lines.append(f"slides = {hunk.slides}")
    if hunk.blob:
        lines.append(f"blob = {quoted(hunk.blob)}")
    if "'''" in hunk.diff or CONTROL.search(hunk.diff):
        inner = "\n".join(quoted(line)[1:-1] for line in hunk.diff.split("\n"))
        return "\n".join([*lines, f'diff = """\n{inner}"""'])
    return "\n".join([*lines, f"diff = '''\n{hunk.diff}'''"])


def quoted(text: str) -> str:
    """A TOML basic string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
