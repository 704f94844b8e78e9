"""What differs between two trees, file by file, and where two lists of lines differ."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forksync.git import Repository, decode, encode

LINK, SUBMODULE = "120000", "160000"
RENAMES = ("-c", "diff.renameLimit=0", "-c", "merge.renameLimit=0")
"""Every pair of files is looked at: with a limit, one more file would change what the others are taken for."""
RANGE = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
FILE = re.compile(rb"diff --git a/old/(\d+) ")


@dataclass(frozen=True)
class Change:
    """One file that differs. ``status`` is git's letter: A, D, M, R (renamed) or T (of another type)."""

    status: str
    old_mode: str
    new_mode: str
    old: str
    new: str
    old_path: str
    path: str


def changes(repository: Repository, old: str, new: str, renames: bool = True) -> list[Change]:
    """The files that differ between two trees, ordered by path."""
    how = "-M" if renames else "--no-renames"
    raw = repository.run(*RENAMES, "diff-tree", "-r", "-z", "--raw", "--no-abbrev", how, old, new).stdout
    words = iter(decode(raw).split("\0")[:-1])
    found = []
    for word in words:
        old_mode, new_mode, old_id, new_id, status = word.lstrip(":").split(" ")
        first = next(words)
        found.append(
            Change(status[0], old_mode, new_mode, old_id, new_id, first, next(words) if status[0] == "R" else first)
        )
    return sorted(found, key=lambda change: change.path)


def moved_files(repository: Repository, old: str, new: str) -> dict[str, str]:
    """Path in one tree → path in another, of files that were renamed."""
    return {change.old_path: change.path for change in changes(repository, old, new) if change.status == "R"}


Range = tuple[int, int, int, int]
"""First and last-but-one line, from 0, in the old and in the new list."""


def line_ranges(pairs: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[list[Range]]:
    """For each pair of lists of lines, the ranges in which they differ. One run of git for all of them."""
    found: list[list[Range]] = [[] for _ in pairs]
    if not pairs:
        return found
    with tempfile.TemporaryDirectory(prefix="forksync-") as folder:
        for side, name in enumerate(("old", "new")):
            (Path(folder) / name).mkdir()
            for number, pair in enumerate(pairs):
                (Path(folder) / name / str(number)).write_bytes(encode("".join(f"{line}\n" for line in pair[side])))
        words = ("diff", "--no-index", "--no-renames", "--no-color", "--no-ext-diff", "--text", "-U0")
        output = Repository(Path(folder)).run(
            *words,
            "--inter-hunk-context=0",
            "--diff-algorithm=histogram",
            "--indent-heuristic",
            "old",
            "new",
            ok=(0, 1),
        )
    number = -1
    for line in output.stdout.split(b"\n"):
        if name_line := FILE.match(line):
            number = int(name_line[1])
        elif line.startswith(b"@@") and (match := RANGE.match(line)):
            found[number].append(bounds(*match.groups()))
    return found


def bounds(old: bytes, old_size: bytes | None, new: bytes, new_size: bytes | None) -> Range:
    """git counts lines from 1, and names the line before an empty range."""
    sizes = [1 if size is None else int(size) for size in (old_size, new_size)]
    starts = [int(start) - (size > 0) for start, size in zip((old, new), sizes, strict=True)]
    return starts[0], starts[0] + sizes[0], starts[1], starts[1] + sizes[1]


def contents(repository: Repository, found: Sequence[Change]) -> Iterator[tuple[Change, bytes, bytes]]:
    """Each change with the bytes of both sides; empty for a side that is absent or a submodule."""
    sides = [(change.old_mode, change.old) for change in found] + [(change.new_mode, change.new) for change in found]
    wanted = [identity for mode, identity in sides if mode not in (SUBMODULE, "000000")]
    blobs = repository.blobs(wanted)
    for change in found:
        old = b"" if change.old_mode == SUBMODULE else blobs.get(change.old, b"")
        yield change, old, b"" if change.new_mode == SUBMODULE else blobs.get(change.new, b"")
