"""The rule for everything that has no rule of its own: a regular expression over the text of any file."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Literal

from pydantic import Field, field_validator, model_validator

from forksync.rules.rule import Rule, compiled, splice, unspared


class Regex(Rule):
    """Python's ``re``, with ``^`` and ``$`` at each line; ``to`` is a template with ``\\1`` or ``\\g<name>``."""

    kind: Literal["regex"]
    old: str = Field(alias="from", min_length=1)
    new: str = Field(alias="to")

    @field_validator("old")
    @classmethod
    def _matches_something(cls, pattern: str) -> str:
        if compiled(pattern).match("") is not None:
            raise ValueError("it matches the empty text, so it would apply between all characters")
        return pattern

    @model_validator(mode="after")
    def _template_fits(self) -> Regex:
        try:
            re.compile(f"{self.old}|()", re.MULTILINE).sub(self.new, "")
        except (re.error, IndexError) as fault:
            raise ValueError(f"to = {self.new!r} does not fit the groups of from: {fault}") from fault
        return self

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return compiled(self.old)

    def rewrite(self, path: str, text: str) -> tuple[str, int, list[str]]:
        edits = [(*found.span(), found.expand(self.new)) for found in self._pattern.finditer(text)]
        edits = unspared(text, edits, self.spare)
        return splice(text, edits), len(edits), []
