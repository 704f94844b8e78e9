"""Rules about files as wholes: which are in the mirror, and where they lie."""

from __future__ import annotations

import re
from functools import cached_property
from typing import ClassVar, Literal

from pydantic import Field

from forksync.rules.rule import Rule, splice, unspared


class Drop(Rule):
    """Files in scope are not mirrored. Of several drop and keep rules the last that covers a file decides."""

    kind: Literal["drop"]
    paths: tuple[str, ...]
    moves: ClassVar[bool] = True

    def keeps(self, path: str) -> bool | None:
        return False if self.covers(path) else None


class Keep(Rule):
    """Files in scope are mirrored, against a drop rule before it."""

    kind: Literal["keep"]
    paths: tuple[str, ...]
    moves: ClassVar[bool] = True

    def keeps(self, path: str) -> bool | None:
        return True if self.covers(path) else None


class MovePath(Rule):
    """A file or folder is renamed; with ``mentions`` also where a text names it by that path."""

    kind: Literal["path"]
    old: str = Field(alias="from", min_length=1)
    new: str = Field(alias="to", min_length=1)
    mentions: bool = False
    moves: ClassVar[bool] = True

    @cached_property
    def _mention(self) -> re.Pattern[str]:
        return re.compile(rf"(?<![\w/-]){re.escape(self.old.strip('/'))}(?![\w-])")

    def move(self, path: str) -> str:
        old, new = self.old.strip("/"), self.new.strip("/")
        if path == old:
            return new
        return f"{new}{path[len(old) :]}" if path.startswith(f"{old}/") else path

    def rewrite(self, path: str, text: str) -> tuple[str, int, list[str]]:
        if not self.mentions:
            return text, 0, []
        edits = [(*found.span(), self.new.strip("/")) for found in self._mention.finditer(text)]
        edits = unspared(text, edits, self.spare)
        return splice(text, edits), len(edits), []
