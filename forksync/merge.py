"""The three-way merge of trees: old mirror, new mirror, fork. git finds renames and merges what it can; where it stops, the
file's text is merged by ``merge3``, then by rules, and only what both sides changed differently is asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from forksync.changes import LINK, RENAMES, SUBMODULE
from forksync.git import Entry, Repository, decode
from forksync.merge3 import Conflict, merge3
from forksync.merge3 import Merged as MergedText
from forksync.normal import is_binary

DATE = "1000000000 +0000"
"""Of commits that live only for the time of a merge."""
BASE, FORK, UPSTREAM = 1, 2, 3
"""git's stages of a conflict."""
WHOLE = ("modify/delete", "rename/delete", "binary", "contents", "add/add", "submodule")
"""Conflicts about one path, where one side's file can be taken as it is. git has several words that begin with the last."""


@dataclass(frozen=True)
class Clash:
    """A path that git could not merge: what it says, and the (mode, id) of each stage that there is."""

    path: str
    kind: str
    """git's words: contents, modify/delete, rename/delete, binary, add/add, …"""
    said: str
    stages: dict[int, tuple[str, str]]
    lines: tuple[str, ...] = ()
    """What the places that wait for a decision say in the old mirror and in the new one."""
    laid: str = ""
    """The blob that stands in the tree until somebody decides; empty if none does."""

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Clash:
        stages = {int(number): (mode, identity) for number, (mode, identity) in told["stages"].items()}
        return cls(**{**told, "stages": stages, "lines": tuple(told["lines"])})


@dataclass(frozen=True)
class Settled:
    """A conflict, or one place of it, that a rule decided."""

    path: str
    by: str
    """Which rule: lines, entry ID, resolve PATTERN."""
    took: str
    """fork, upstream or both."""
    because: str
    lines: tuple[str, ...] = ()
    """What the place says in the old mirror and in the new one; empty for a whole file."""


@dataclass(frozen=True)
class Merged:
    tree: str
    """Conflicts that are left stand in it between markers."""
    clashes: tuple[Clash, ...]
    settled: tuple[Settled, ...]


Choice = tuple[str, str, str]
"""(fork, upstream or both; by which rule; because)."""
Rules = Callable[[str, Conflict | None], Choice | None]
"""Decides a place in a file's text, or (None) a conflict of whole files; None: it must be asked."""


def merge_trees(repository: Repository, base: str, fork: str, upstream: str, rules: Rules) -> Merged:
    """Merges two trees that come from ``base``."""
    tree, clashes = git_merge(repository, base, fork, upstream)
    if not clashes:
        return Merged(tree, (), ())
    leaves = {entry.path: entry for entry in repository.entries(tree)}
    left: list[Clash] = []
    settled: list[Settled] = []
    for clash in clashes:
        open_clash, decided = settle(repository, clash, leaves, rules)
        left += [open_clash] if open_clash else []
        settled += decided
    return Merged(repository.write_tree(leaves.values()), tuple(left), tuple(settled))


def git_merge(repository: Repository, base: str, fork: str, upstream: str) -> tuple[str, list[Clash]]:
    root = repository.write_commit(base, [], "base", DATE)
    sides = [
        repository.write_commit(tree, [root], name, DATE) for tree, name in ((fork, "fork"), (upstream, "upstream"))
    ]
    options = (
        *RENAMES,
        "-c",
        "merge.conflictStyle=diff3",
        "-c",
        "merge.directoryRenames=true",
        "-c",
        "merge.renames=true",
    )
    words = ("merge-tree", "--write-tree", "-z", "--messages", *sides)
    output = decode(repository.run(*options, *words, ok=(0, 1)).stdout)
    return parse(output)


def parse(output: str) -> tuple[str, list[Clash]]:
    """What ``merge-tree -z`` prints: the tree; stages, up to an empty field; then messages with the paths they are about."""
    tree, *fields = output.split("\0")
    stages: dict[str, dict[int, tuple[str, str]]] = {}
    at = 0
    while at < len(fields) and fields[at]:
        told, _, path = fields[at].partition("\t")
        mode, identity, stage = told.split(" ")
        stages.setdefault(path, {})[int(stage)] = (mode, identity)
        at += 1
    at += 1
    said: dict[str, tuple[list[str], list[str]]] = {path: ([], []) for path in stages}
    while at < len(fields) and fields[at].isdigit():
        count = int(fields[at])
        paths, kind, text = fields[at + 1 : at + 1 + count], fields[at + 1 + count], fields[at + 2 + count]
        at += 3 + count
        if kind.startswith("CONFLICT"):
            short = kind.removeprefix("CONFLICT (").rstrip(")")
            for path in paths:
                kinds, texts = said.setdefault(path, ([], []))
                kinds.append(short)
                texts.append(text.strip())
    return tree, [
        Clash(path, " + ".join(said[path][0]), " ".join(said[path][1]), those) for path, those in stages.items()
    ]


def settle(
    repository: Repository, clash: Clash, leaves: dict[str, Entry], rules: Rules
) -> tuple[Clash | None, list[Settled]]:
    """Decides what can be decided of a clash, changing ``leaves``; what is left of it, and what was decided."""
    if not mergeable(repository, clash):
        return settle_whole(clash, leaves, rules)
    merged = merge_texts(repository, clash)
    found = (
        []
        if merged.conflicts
        else [Settled(clash.path, "lines", "both", "the sides changed different lines, or only the layout")]
    )
    parts: list[tuple[str, ...] | Conflict] = []
    for part in merged.parts:
        choice = rules(clash.path, part) if isinstance(part, Conflict) else None
        if choice and isinstance(part, Conflict):
            took, by, because = choice
            found.append(Settled(clash.path, by, took, because, (*part.base, *part.upstream)))
            parts.append({"fork": part.fork, "upstream": part.upstream, "both": part.fork + part.upstream}[took])
        else:
            parts.append(part)
    merged = replace(merged, parts=parts)
    blob = repository.write_blobs([merged.data()])[0]
    mode = leaves[clash.path].mode if clash.path in leaves else clash.stages[FORK][0]
    leaves[clash.path] = Entry(mode, blob, clash.path)
    lines = tuple(dict.fromkeys(line for one in merged.conflicts for line in (*one.base, *one.upstream)))
    return (replace(clash, lines=lines, laid=blob) if merged.conflicts else None), found


def merge_texts(repository: Repository, clash: Clash) -> MergedText:
    blobs = repository.blobs([identity for _, identity in clash.stages.values()])
    base, fork, upstream = (blobs[clash.stages[n][1]] if n in clash.stages else b"" for n in (BASE, FORK, UPSTREAM))
    return merge3(clash.path, base, fork, upstream)


def places(repository: Repository, clash: Clash) -> list[Conflict | None]:
    """The places in a text that both sides changed; [None] for a conflict of whole files."""
    return [*merge_texts(repository, clash).conflicts] if mergeable(repository, clash) else [None]


def settle_whole(clash: Clash, leaves: dict[str, Entry], rules: Rules) -> tuple[Clash | None, list[Settled]]:
    """Takes one side's file, or its absence, where a rule says so and the conflict is about this one path."""
    one_path = all(kind.startswith(WHOLE) for kind in clash.kind.split(" + "))
    choice = rules(clash.path, None) if one_path else None
    if choice is None or choice[0] == "both":
        return replace(clash, laid=leaves[clash.path].id if clash.path in leaves else ""), []
    took, by, because = choice
    leaves.pop(clash.path, None)
    if stage := clash.stages.get(FORK if took == "fork" else UPSTREAM):
        leaves[clash.path] = Entry(*stage, clash.path)
    return None, [Settled(clash.path, by, took, because)]


def mergeable(repository: Repository, clash: Clash) -> bool:
    """Whether both sides have a text file there, and nothing but its lines is at odds."""
    sides = [clash.stages[n] for n in (FORK, UPSTREAM) if n in clash.stages]
    files = len(sides) == 2 and all(mode not in (LINK, SUBMODULE) for mode, _ in clash.stages.values())
    if not files or clash.kind not in ("contents", "add/add"):
        return False
    blobs = repository.blobs([identity for _, identity in clash.stages.values()])
    return not any(is_binary(data) for data in blobs.values())
