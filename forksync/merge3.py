"""Three versions of one text: what only one side changed is taken; what both changed differently is a conflict. Pure.

Changes to neighbouring lines are not changes of the same thing, and a side that only reformatted has not changed anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forksync.changes import Range, line_ranges
from forksync.git import decode, encode
from forksync.normal import endings, normalise

MARKERS = (b"<<<<<<< ", b"||||||| ", b"=======", b">>>>>>> ")
FORK, BASE, UPSTREAM = "fork", "mirror before", "upstream"


@dataclass(frozen=True)
class Region:
    """A stretch of the three texts. ``base``, ``fork``, ``upstream``: (first, end) lines from 0 in each."""

    base: tuple[int, int]
    fork: tuple[int, int]
    upstream: tuple[int, int]


@dataclass(frozen=True)
class Text:
    """A file's lines without their endings, and what the endings are."""

    lines: list[str]
    endings: str
    closed: bool
    """Whether the last line ends."""

    @classmethod
    def of(cls, data: bytes) -> Text:
        whole = decode(data)
        crlf = endings(data)
        lines = whole.split("\n")
        closed = lines[-1] == ""
        if closed:
            lines.pop()
        if crlf == "CRLF":
            lines = [line.removesuffix("\r") for line in lines]
        return cls(lines, crlf, closed)


@dataclass(frozen=True)
class Conflict:
    """Lines that both sides changed, differently."""

    region: Region
    base: tuple[str, ...]
    fork: tuple[str, ...]
    upstream: tuple[str, ...]

    def marked(self) -> list[str]:
        return [
            f"<<<<<<< {FORK}",
            *self.fork,
            f"||||||| {BASE}",
            *self.base,
            "=======",
            *self.upstream,
            f">>>>>>> {UPSTREAM}",
        ]


@dataclass(frozen=True)
class Merged:
    """The parts in order: lines that are settled, and conflicts."""

    parts: list[tuple[str, ...] | Conflict]
    endings: str
    closed: bool

    @property
    def conflicts(self) -> list[Conflict]:
        return [part for part in self.parts if isinstance(part, Conflict)]

    def data(self) -> bytes:
        """The file, conflicts between markers."""
        lines = [line for part in self.parts for line in (part.marked() if isinstance(part, Conflict) else part)]
        end = "\r\n" if self.endings == "CRLF" else "\n"
        return encode(end.join(lines) + (end if lines and self.closed else ""))


def merge3(path: str, base: bytes, fork: bytes, upstream: bytes) -> Merged:
    """The merge of two versions of the text ``base``."""
    texts = [Text.of(data) for data in (base, fork, upstream)]
    lines = [text.lines for text in texts]
    ours, theirs = line_ranges([(lines[0], lines[1]), (lines[0], lines[2])])
    parts: list[tuple[str, ...] | Conflict] = []
    at = 0
    for region, sides in regions(ours, theirs):
        parts.append(tuple(lines[0][at : region.base[0]]))
        parts += settled(path, lines, region, sides)
        at = region.base[1]
    parts.append(tuple(lines[0][at:]))
    changed = [
        texts[1] if getattr(texts[1], name) != getattr(texts[0], name) else texts[2] for name in ("endings", "closed")
    ]
    return Merged([part for part in parts if part], changed[0].endings, changed[1].closed)


def regions(ours: Sequence[Range], theirs: Sequence[Range]) -> Iterator[tuple[Region, str]]:
    """Changes of both sides in the order of the base, those that overlap joined. The second part: which sides changed it."""
    left = sorted([(r, "fork") for r in ours] + [(r, "upstream") for r in theirs], key=lambda one: (one[0][:2], one[1]))
    shift = {"fork": 0, "upstream": 0}
    while left:
        (first, side), *left = left
        group = [(first, side)]
        start, end = first[0], first[1]
        while left and overlaps(group, left[0]):
            group.append(left.pop(0))
            end = max(end, group[-1][0][1])
        spans = {}
        for name in ("fork", "upstream"):
            grown = sum((r[3] - r[2]) - (r[1] - r[0]) for r, who in group if who == name)
            spans[name] = (start + shift[name], end + shift[name] + grown)
            shift[name] += grown
        sides = {who for _, who in group}
        yield Region((start, end), spans["fork"], spans["upstream"]), "both" if len(sides) > 1 else sides.pop()


def overlaps(group: Sequence[tuple[Range, str]], following: tuple[Range, str]) -> bool:
    """Whether a change touches lines that the group's changes touch, or puts lines in at the very place where the other side
    puts some in: their order would be a guess."""
    (start, end, *_), side = following
    reach = max(r[1] for r, _ in group)
    if start < reach:
        return True
    same_point = start == end and any(r[0] == r[1] == start and who != side for r, who in group)
    return same_point


def settled(path: str, lines: Sequence[list[str]], region: Region, sides: str) -> list[tuple[str, ...] | Conflict]:
    """What a region becomes: lines, or a conflict with what both sides have in common at its ends taken off."""
    base = tuple(lines[0][slice(*region.base)])
    fork = tuple(lines[1][slice(*region.fork)])
    upstream = tuple(lines[2][slice(*region.upstream)])
    if sides != "both":
        return [fork if sides == "fork" else upstream]
    plain = [plain_lines(path, text) for text in (base, fork, upstream)]
    if fork == upstream or plain[1] in (plain[0], plain[2]):
        return [upstream]
    if plain[2] == plain[0]:
        return [fork]
    head = common(fork, upstream)
    tail = common(fork[head:][::-1], upstream[head:][::-1])
    inner = Region(region.base, cut(region.fork, head, tail), cut(region.upstream, head, tail))
    ours, theirs = (text[head : len(text) - tail] for text in (fork, upstream))
    return [fork[:head], Conflict(inner, base, ours, theirs), fork[len(fork) - tail :]]


def plain_lines(path: str, lines: Sequence[str]) -> list[str]:
    return [str(line) for line in normalise(path, encode("\n".join(lines)))]


def common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many lines are the same at the start."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def cut(span: tuple[int, int], head: int, tail: int) -> tuple[int, int]:
    return span[0] + head, span[1] - tail


def has_markers(data: bytes) -> bool:
    """Whether a conflict is left in a file: a line that opens one, one that divides and one that closes."""
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    starts = (MARKERS[0], MARKERS[3])
    return all(any(line.startswith(marker) for line in lines) for marker in starts) and MARKERS[2] in lines
