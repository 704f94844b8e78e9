"""Which file of the fork is which file of the upstream. Pure: two dictionaries in, pairs of paths out."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

WORD = re.compile(r"\w+")
RARE = 20
"""A word in more files than this tells nothing about which two belong together."""
ALIKE = 0.4
"""The share of two files' words that must be common to both."""
SAME_NAME = 0.25
"""What an equal file name adds to the share."""


def words(data: bytes) -> frozenset[str]:
    return frozenset(WORD.findall(data.decode("utf-8", "replace")))


def alike(one: frozenset[str], other: frozenset[str]) -> float:
    """The share of words in common, from 0 to 1."""
    either = len(one | other)
    return len(one & other) / either if either else 0.0


def name(path: str) -> str:
    return path.rpartition("/")[2]


def pair(upstream: Mapping[str, bytes], fork: Mapping[str, bytes]) -> dict[str, str]:
    """Upstream path → fork path: those at the same path, those with the same content, then the most alike first."""
    pairs = {path: path for path in upstream if path in fork}
    left = {path: data for path, data in upstream.items() if path not in pairs}
    free = {path: data for path, data in fork.items() if path not in pairs}
    by_content = defaultdict(list)
    for path, data in free.items():
        by_content[data].append(path)
    for path, data in left.items():
        same = [other for other in by_content[data] if data and name(other) == name(path)] or by_content[data]
        if data and len(same) == 1 and same[0] in free:
            pairs[path] = same[0]
            del free[same[0]]
    left = {path: data for path, data in left.items() if path not in pairs}
    theirs = {path: words(data) for path, data in left.items()}
    ours = {path: words(data) for path, data in free.items()}
    taken: set[str] = set()
    for _, path, other in sorted(scores(theirs, ours), key=lambda found: (-found[0], found[1:])):
        if path not in pairs and other not in taken:
            pairs[path] = other
            taken.add(other)
    return pairs


def scores(
    theirs: Mapping[str, frozenset[str]], ours: Mapping[str, frozenset[str]]
) -> Iterable[tuple[float, str, str]]:
    """How alike each two files are that share a rare word or a file name, where it is enough to pair them."""
    holders: dict[str, list[str]] = defaultdict(list)
    for path, found in ours.items():
        for word in (*found, f"/{name(path)}"):
            holders[word].append(path)
    for path, found in theirs.items():
        near = {
            other
            for word in (*found, f"/{name(path)}")
            if len(holders.get(word, ())) <= RARE
            for other in holders.get(word, ())
        }
        for other in near:
            score = alike(found, ours[other]) + (SAME_NAME if name(path) == name(other) else 0.0)
            if score >= ALIKE:
                yield score, path, other


class Move(NamedTuple):
    """A file or folder that lies elsewhere in the fork."""

    old: str
    new: str


def move_of(old: str, new: str) -> Move:
    """What must be renamed to bring one path to the other: the parts between their common beginning and end."""
    before, after = old.split("/"), new.split("/")
    end = 0
    while end < min(len(before), len(after)) and before[-1 - end] == after[-1 - end]:
        end += 1
    keep = len(before) - end, len(after) - end
    if not all(keep):  # one lies in a folder of the other's: move what is below it
        end -= 1
        keep = len(before) - end, len(after) - end
    return Move("/".join(before[: keep[0]]), "/".join(after[: keep[1]]))


def moved(path: str, moves: Iterable[Move]) -> str:
    for old, new in moves:
        if path == old or path.startswith(f"{old}/"):
            path = new + path[len(old) :]
    return path


def moves(pairs: Mapping[str, str]) -> list[Move]:
    """Renames of files and folders that bring the pairs together, the one that helps most first."""
    found: list[Move] = []
    while True:
        now = {path: moved(path, found) for path in pairs}
        votes = Counter(move_of(now[path], pairs[path]) for path in pairs if now[path] != pairs[path])
        best, gain = None, 0
        for move, _ in sorted(votes.items(), key=lambda vote: (-vote[1], vote[0]))[:20]:
            after = {path: moved(at, [move]) for path, at in now.items()}
            better = sum(after[p] == pairs[p] for p in pairs) - sum(now[p] == pairs[p] for p in pairs)
            if better > gain:
                best, gain = move, better
        if best is None:
            return found
        found.append(best)


def together(upstream: Mapping[str, bytes], fork: Mapping[str, bytes]) -> tuple[dict[str, str], list[Move]]:
    """The pairs and the moves between them. A file that says too little, such as an empty one, goes with its folder."""
    pairs = pair(upstream, fork)
    found = moves(pairs)
    for path in upstream:
        target = moved(path, found)
        if path not in pairs and target in fork and target not in pairs.values():
            pairs[path] = target
    return pairs, found


def dropped(upstream: Iterable[str], pairs: Mapping[str, str]) -> list[str]:
    """Globs of the upstream's files that the fork lacks: whole folders where nothing below them was kept."""
    lost = sorted(path for path in upstream if path not in pairs)
    kept_folders = {path[:end] for path in pairs for end, c in enumerate(path) if c == "/"}
    globs: list[str] = []
    for path in lost:
        folders = [path[: end + 1] for end, c in enumerate(path) if c == "/" and path[:end] not in kept_folders]
        glob = folders[0] if folders else path
        if glob not in globs:
            globs.append(glob)
    return globs
