"""The mechanical mirror: the upstream at a commit, translated. A pure function of the commit, the table and the parent."""

from __future__ import annotations

import json
import os
import posixpath
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from forksync.errors import ForksyncError
from forksync.git import Entry, Repository, decode, encode
from forksync.table import Table, Translated, Warning

PARALLEL_FROM = 2_000_000
"""Bytes to translate from which worker processes pay for their start."""

LINK = "120000"

CHUNK = 64
"""Files a worker takes at once."""


class MirrorError(ForksyncError):
    """The table makes no tree of this commit, e.g. two files at one path."""


@dataclass(frozen=True)
class Mirror:
    commit: str
    tree: str
    upstream: str
    """The upstream's commit."""
    table: str
    """The table's hash."""
    sources: dict[str, str]
    """Path in the mirror → path in the upstream."""
    uses: Counter[str]
    """How often each rule applied."""
    warnings: tuple[Warning, ...]
    translated: int
    """Files that were translated now; the others came from the cache."""


@dataclass(frozen=True)
class Result:
    """What the cache keeps of one file: the translated blob and what there is to say about it."""

    blob: str
    uses: dict[str, int]
    warnings: list[tuple[str, str]]


class Cache:
    """Results by upstream blob and path, one file for each table, in the repository's own folder. Losing it costs time only."""

    def __init__(self, repository: Repository, table: str) -> None:
        self.file = repository.common_dir() / "forksync" / "cache" / f"{table}.jsonl"
        self.known: dict[tuple[str, str], Result] = {}
        if self.file.exists():
            for line in self.file.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
                try:
                    source, path, *rest = json.loads(line)
                    self.known[source, path] = Result(*rest)
                except (ValueError, TypeError):
                    continue  # a line cut short by a kill

    def add(self, results: dict[tuple[str, str], Result]) -> None:
        self.known.update(results)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps([*key, r.blob, r.uses, r.warnings]) for key, r in results.items()]
        with self.file.open("a", encoding="utf-8") as out:
            out.write("".join(f"\n{line}" for line in lines))


def mirror(repository: Repository, ref: str, table: Table, parent: str | None = None) -> Mirror:
    """Translates the commit that ``ref`` names and commits the result, on no branch.

    Equal commit, table and parent give the same commit id on every machine. GitError if there is no such commit,
    MirrorError if the table's paths collide.
    """
    upstream = repository.commit_id(ref)
    entries = repository.entries(upstream)
    places, uses = placed(table, entries)
    results, translated = contents(repository, table, [e for e in entries if e.path in places and e.is_file])
    leaves, warnings = [], list[Warning]()
    for entry in entries:
        if entry.path not in places:
            continue
        blob = entry.id
        if entry.mode == LINK:
            blob = relinked(repository, table, places, entry)
        elif result := results.get((entry.id, entry.path)):
            blob = result.blob
            uses.update(result.uses)
            warnings += [Warning(*pair) for pair in result.warnings]
        leaves.append(Entry(entry.mode, blob, places[entry.path]))
    tree = repository.write_tree(leaves)
    commit = repository.write_commit(
        tree, [parent] if parent else [], message(repository, upstream, table), date(repository, upstream)
    )
    sources = {target: source for source, target in places.items()}
    return Mirror(commit, tree, upstream, table.hash, sources, uses, (*warnings, *table.check(uses)), translated)


def placed(table: Table, entries: Iterable[Entry]) -> tuple[dict[str, str], Counter[str]]:
    """Where each mirrored file goes. MirrorError where two go to one path or one goes below another."""
    places: dict[str, str] = {}
    taken: dict[str, str] = {}
    uses = Counter[str]()
    for entry in entries:
        target, used = table.place(entry.path)
        uses.update(used)
        if target is None:
            continue
        if target in taken:
            raise MirrorError(
                f"{taken[target]} and {entry.path} both become {target}; scope one of the rules that move them"
            )
        places[entry.path], taken[target] = target, entry.path
    for target, source in taken.items():
        for above in Path(target).parents:
            if str(above) in taken:
                raise MirrorError(
                    f"{source} becomes {target}, which lies below the file that {taken[str(above)]} becomes"
                )
    return places, uses


def relinked(repository: Repository, table: Table, places: dict[str, str], link: Entry) -> str:
    """The blob of a symbolic link, made to point at where its target in the tree has gone."""
    written = decode(repository.blobs([link.id])[link.id])
    target = posixpath.normpath(posixpath.join(posixpath.dirname(link.path), written))
    if written.startswith("/") or target.startswith("../"):
        return link.id
    moved = places.get(target) or posixpath.dirname(table.place(f"{target}/_")[0] or f"{target}/_")
    below = posixpath.dirname(places[link.path])
    if moved == target and below == posixpath.dirname(link.path):
        return link.id
    return repository.write_blobs([encode(posixpath.relpath(moved, below or "."))])[0]


def contents(repository: Repository, table: Table, files: list[Entry]) -> tuple[dict[tuple[str, str], Result], int]:
    """The translation of every file, from the cache where it has it; and how many were translated."""
    cache = Cache(repository, table.hash)
    have = repository.present(r.blob for f in files if (r := cache.known.get((f.id, f.path))))
    todo = [f for f in files if (r := cache.known.get((f.id, f.path))) is None or r.blob not in have]
    if todo:
        blobs = repository.blobs(f.id for f in todo)
        done = translate_all(table, [(f.path, blobs[f.id]) for f in todo])
        identities = repository.write_blobs([one.data for one in done])
        fresh = {
            (f.id, f.path): Result(identity, dict(one.uses), [(w.rule, w.text) for w in one.warnings])
            for f, one, identity in zip(todo, done, identities, strict=True)
        }
        cache.add(fresh)
    return {(f.id, f.path): cache.known[f.id, f.path] for f in files}, len(todo)


_table: Table
"""A worker process's table, set once when it starts."""


def _start(table: Table) -> None:
    global _table  # noqa: PLW0603 - the one way to hand a worker of a pool something once
    _table = table


def _translate(files: list[tuple[str, bytes]]) -> list[Translated]:
    return [_table.translate(path, data) for path, data in files]


def translate_all(table: Table, files: list[tuple[str, bytes]]) -> list[Translated]:
    """Every file translated, in the order given; over all cores where there is much to do."""
    cores = len(os.sched_getaffinity(0))
    if cores == 1 or sum(len(data) for _, data in files) < PARALLEL_FROM:
        return [table.translate(path, data) for path, data in files]
    chunks = [files[at : at + CHUNK] for at in range(0, len(files), CHUNK)]
    with ProcessPoolExecutor(min(cores, len(chunks)), get_context("fork"), _start, (table,)) as pool:
        return [one for chunk in pool.map(_translate, chunks) for one in chunk]


def date(repository: Repository, commit: str) -> str:
    """When the upstream committed it, as git takes a date."""
    return repository.text("log", "-1", "--format=@%ct +0000", commit)


def message(repository: Repository, upstream: str, table: Table) -> str:
    subject = repository.text("log", "-1", "--format=%s", upstream)
    return f"Mirror: {subject}\n\nForksync-Upstream: {upstream}\nForksync-Table: {table.hash}\n"


def provenance(repository: Repository, commit: str) -> tuple[str, str] | None:
    """(upstream commit, table hash) of a mirror commit; None for any other commit."""
    lines = repository.text("log", "-1", "--format=%(trailers:only,unfold)", commit).splitlines()
    told = dict(line.split(": ", 1) for line in lines if line.startswith("Forksync-"))
    if "Forksync-Upstream" not in told or "Forksync-Table" not in told:
        return None
    return told["Forksync-Upstream"], told["Forksync-Table"]


def publish(repository: Repository, branch: str, made: Mirror) -> str:
    """Puts the mirror on its branch, after what stands there; the branch's new commit. Nothing new: the old one."""
    ref = f"refs/heads/{branch}"
    if f"branch {ref}" in repository.text("worktree", "list", "--porcelain").splitlines():
        raise MirrorError(
            f"{branch} is checked out; check out another branch there, or set fork.mirror to one of its own"
        )
    if not repository.has(ref):
        repository.set_ref(ref, made.commit, "0" * 40)
        return made.commit
    before = repository.commit_id(ref)
    stands = provenance(repository, before)
    if stands is None:
        raise MirrorError(f"{branch} ends in {before[:12]}, which is no mirror; set fork.mirror to a branch of its own")
    if stands == (made.upstream, made.table):
        return before
    text = decode(repository.run("log", "-1", "--format=%B", made.commit).stdout)
    after = repository.write_commit(made.tree, [before], text.rstrip("\n") + "\n", date(repository, made.upstream))
    repository.set_ref(ref, after, before)
    return after
