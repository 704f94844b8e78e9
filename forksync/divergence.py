"""In what a fork differs from its mirror: the normalised difference, cut into hunks that are known by what they say.

A hunk's fingerprint depends on the lines that it takes away and puts in, not on where they stand or what stands around
them. So it survives that upstream moves the code, reformats it, or changes what is beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from forksync.changes import LINK, SUBMODULE, Change, Range, changes, contents, line_ranges
from forksync.git import Repository
from forksync.normal import Line, endings, is_binary, normalise

WEAK = ("deleted", "renamed", "mode", "endings")
"""Kinds that say little of themselves: such a hunk is the same one elsewhere only if its old file is gone."""


@dataclass(frozen=True)
class Edit:
    """What a hunk does, wherever it stands.

    ``kind``: lines, added, deleted, renamed, mode, type, link, submodule, binary, endings.
    ``slides``: by how many lines the same edit can be told further down, as an added ``b a`` in ``a b a`` is an added ``a b``.
    """

    kind: str
    removed: tuple[str, ...]
    added: tuple[str, ...]
    slides: int = 0

    @cached_property
    def fingerprint(self) -> str:
        told = json.dumps([self.kind, *relative(self.removed, self.added)])
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    @cached_property
    def fingerprints(self) -> frozenset[str]:
        """Of all the ways to tell this edit."""
        return frozenset(
            Edit(self.kind, turned(self.removed, by), turned(self.added, by)).fingerprint
            for by in range(self.slides + 1)
        )

    def same(self, other: Edit) -> bool:
        return not self.fingerprints.isdisjoint(other.fingerprints)

    @property
    def diff(self) -> list[str]:
        return [*(f"-{line}" for line in self.removed), *(f"+{line}" for line in self.added)]


def turned(lines: tuple[str, ...], by: int) -> tuple[str, ...]:
    by %= len(lines) or 1
    return lines[by:] + lines[:by]


def relative(removed: Sequence[str], added: Sequence[str]) -> list[list[tuple[int, str]]]:
    """Lines with their indentation counted from the first removed line's, so that indenting all of the code around a
    hunk does not change it. Lines that are only added are counted from the margin: nothing else holds them in place."""
    code = [line for line in removed if not line.lstrip().startswith("#")]
    anchor = margin(code[0]) if code else 0
    return [
        [(0 if line.lstrip().startswith("#") else margin(line) - anchor, line.strip()) for line in side]
        for side in (removed, added)
    ]


def margin(line: str) -> int:
    return len(line) - len(line.lstrip())


@dataclass(frozen=True)
class Hunk:
    """One difference between the mirror and the fork, and where it is in both."""

    path: str
    """In the fork; in the mirror for a file that the fork deleted."""
    edit: Edit
    first: int = 1
    """The first line of it in the fork, from 1; where nothing was put in, the line that follows."""
    last: int = 0
    mirror_path: str = ""
    mirror_first: int = 1
    old: tuple[str, ...] = ()
    """The lines in the mirror as they stand there, for people."""
    new: tuple[str, ...] = ()
    blob: str = ""
    """Of a file that the fork added: its content, to compare later versions with."""

    @property
    def diff(self) -> list[str]:
        return [*(f"-{line}" for line in self.old), *(f"+{line}" for line in self.new)] or self.edit.diff


def divergence(
    repository: Repository, mirror: str, fork: str, own: Callable[[str], bool] = lambda path: False
) -> list[Hunk]:
    """All hunks between two trees, by path and line. ``own``: which paths are forksync's own files, to be left out."""
    found = [change for change in changes(repository, mirror, fork) if not own(change.path)]
    hunks: list[Hunk] = []
    texts: list[tuple[Change, bytes, bytes]] = []
    for change, old, new in contents(repository, found):
        hunks += whole_file(change, old, new)
        both_files = change.status in "MR" and {change.old_mode, change.new_mode} <= {"100644", "100755"}
        if both_files and change.old != change.new and not is_binary(old) and not is_binary(new):
            texts.append((change, old, new))
            if endings(old) != endings(new) and b"\n" in old and b"\n" in new:
                hunks.append(simple(change, "endings", endings(old), endings(new)))
    hunks += text_hunks(texts)
    return sorted(hunks, key=lambda hunk: (hunk.path, hunk.first))


def whole_file(change: Change, old: bytes, new: bytes) -> Iterator[Hunk]:
    """What is different about a file as a whole."""
    if change.status == "A":
        yield Hunk(change.path, Edit("added", (), (description(change.new_mode, change.new, change.path, new),)),
                   last=max(1, new.count(b"\n")), blob="" if change.new_mode == SUBMODULE else change.new)  # fmt: skip
        return
    if change.status == "D":
        yield Hunk(change.path, Edit("deleted", (change.path,), ()), mirror_path=change.path)
        return
    if change.status == "R":
        yield simple(change, "renamed", change.old_path, change.path)
    if change.old_mode[:3] != change.new_mode[:3]:
        sides = [description(*side) for side in ((change.old_mode, change.old, change.old_path, old),
                                                 (change.new_mode, change.new, change.path, new))]  # fmt: skip
        yield simple(change, "type", *sides)
        return
    if change.old_mode != change.new_mode:
        yield simple(change, "mode", change.old_mode, change.new_mode)
    if change.old == change.new:
        return
    if change.new_mode == SUBMODULE:
        yield simple(change, "submodule", change.old, change.new)
    elif change.new_mode == LINK:
        yield simple(change, "link", shown(old), shown(new))
    elif is_binary(old) or is_binary(new):
        yield simple(change, "binary", change.old, change.new)


def simple(change: Change, kind: str, old: str, new: str) -> Hunk:
    return Hunk(change.path, Edit(kind, (old,), (new,)), mirror_path=change.old_path)


def description(mode: str, identity: str, path: str, data: bytes) -> str:
    """A whole file in one line: its type, and what stands for its content."""
    if mode == SUBMODULE:
        return f"submodule {identity}"
    if mode == LINK:
        return f"link {shown(data)}"
    program = "program, " if mode == "100755" else ""
    if is_binary(data):
        return f"{program}binary {identity}"
    lines = [str(line) for line in normalise(path, data)]
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return f"{program}{len(lines)} lines {digest}"


def shown(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def text_hunks(texts: Sequence[tuple[Change, bytes, bytes]]) -> Iterator[Hunk]:
    normal = [(normalise(change.old_path, old), normalise(change.path, new)) for change, old, new in texts]
    pairs = [([str(line) for line in old], [str(line) for line in new]) for old, new in normal]
    for (change, *raw), lines, text, ranges in zip(texts, normal, pairs, line_ranges(pairs), strict=True):
        physical = [shown(side).replace("\r\n", "\n").split("\n") for side in raw]
        for index, place in enumerate(ranges):
            before = ranges[index - 1][3] if index else 0
            after = ranges[index + 1][2] if index + 1 < len(ranges) else len(text[1])
            old, new = span(lines[0], place[0], place[1]), span(lines[1], place[2], place[3])
            yield Hunk(
                change.path,
                told(text, place, before, after),
                first=new[0],
                last=new[1],
                mirror_path=change.old_path,
                mirror_first=old[0],
                old=tuple(physical[0][old[0] - 1 : old[1]]),
                new=tuple(physical[1][new[0] - 1 : new[1]]),
            )


def span(lines: Sequence[Line], start: int, end: int) -> tuple[int, int]:
    """First and last line in the file; for none, the line that follows and the one before it."""
    if start < end:
        return lines[start].first, max(line.last for line in lines[start:end])
    following = lines[start].first if start < len(lines) else (lines[-1].last + 1 if lines else 1)
    return following, following - 1


def told(text: tuple[Sequence[str], Sequence[str]], place: Range, before: int, after: int) -> Edit:
    """The edit at a place, told as far up as it can be. ``before`` and ``after`` bound the common lines in the fork."""
    old_start, old_end, start, end = place
    removed, added = (tuple(map(clean, text[0][old_start:old_end])), tuple(map(clean, text[1][start:end])))
    if removed and added:
        return Edit("lines", removed, added)
    lines, (low, high) = (text[1], (start, end)) if added else (text[0], (old_start, old_end))
    room_up, room_down = start - before, after - end
    up = down = 0
    while up < room_up and low - up - 1 >= 0 and lines[low - up - 1] == lines[high - up - 1]:
        up += 1
    while down < room_down and high + down < len(lines) and lines[low + down] == lines[high + down]:
        down += 1
    moved = tuple(map(clean, lines[low - up : high - up]))
    return Edit("lines", () if added else moved, moved if added else (), min(up + down, len(moved) - 1))


def clean(line: str) -> str:
    """A line as text that any file can hold."""
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
