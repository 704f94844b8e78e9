"""What was renamed within files that belong together, read off their differences. Pure."""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from forksync.rules.python import tokens
from forksync.rules.rule import is_python

PIECE = re.compile(r"--?[^\W\d][\w-]*|[^\W\d]\w*")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
"""One word of a ``snake_case`` or ``CamelCase`` name."""
FROM_NAMES = 3
"""A word that changed within at least so many names is taken to have changed in all."""


class Renamed(NamedTuple):
    old: str
    new: str


class Word(NamedTuple):
    text: str
    place: str
    line: int


def words(path: str, text: str) -> list[Word]:
    """The words of a file, in order, each with the place where it stands; see ``forksync.rules.python.Place``."""
    starts = [0, *(found.end() for found in re.finditer("\n", text))]
    found: list[Word] = []
    line = 0
    spans = [("text", 0, len(text))] if not is_python(path) else [(t.kind, t.start, t.end) for t in tokens(text)]
    for kind, start, end in spans:
        place = "strings" if kind == "fields" else kind
        whole = kind == "strings" and re.fullmatch(r"[^\W\d]\w*(\.\w+)*", text[start:end]) is not None
        for piece in PIECE.finditer(text, start, end):
            while line + 1 < len(starts) and starts[line + 1] <= piece.start():
                line += 1
            found.append(Word(piece[0], "literals" if whole else place, line))
    return found


def compare(path: str, before: str, after: str) -> Counter[tuple[Renamed, str]]:
    """How often each word of one text stands as another in the same place of the other text, by place."""
    votes: Counter[tuple[Renamed, str]] = Counter()
    if before == after:
        return votes
    theirs, ours = lines_of_words(path, before), lines_of_words(path, after)
    lines = difflib.SequenceMatcher(None, before.split("\n"), after.split("\n"), autojunk=False)
    for tag, i1, i2, j1, j2 in lines.get_opcodes():
        if tag != "replace":
            continue
        old = [word for line in range(i1, i2) for word in theirs[line]]
        new = [word for line in range(j1, j2) for word in ours[line]]
        inner = difflib.SequenceMatcher(
            None, [(w.text, w.place) for w in old], [(w.text, w.place) for w in new], autojunk=False
        )
        for change, a1, a2, b1, b2 in inner.get_opcodes():
            if change == "replace" and a2 - a1 == b2 - b1:
                for left, right in zip(old[a1:a2], new[b1:b2], strict=True):
                    if left.place == right.place and left.text != right.text:
                        votes[Renamed(left.text, right.text), left.place] += 1
    return votes


def lines_of_words(path: str, text: str) -> dict[int, list[Word]]:
    found: dict[int, list[Word]] = defaultdict(list)
    for word in words(path, text):
        found[word.line].append(word)
    return found


def within_names(renamed: Iterable[Renamed]) -> list[Renamed]:
    """Words that changed within several names, one for each case: ``SlimArgs`` → ``VimArgs`` tells ``Slim`` → ``Vim``."""
    votes: dict[Renamed, set[str]] = defaultdict(set)
    for one in renamed:
        before, after = PART.findall(one.old), PART.findall(one.new)
        changed = [Renamed(a, b) for a, b in zip(before, after, strict=False) if a != b]
        if len(before) == len(after) and len(before) > 1 and len(changed) == 1:
            votes[changed[0]].add(one.old)
    enough = [one for one, names in votes.items() if len(names) >= FROM_NAMES]
    return sorted(enough, key=lambda one: (-len(votes[one]), one))
