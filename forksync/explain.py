"""Why a line of the fork differs from the upstream's: who signed it and for what reason, or which translation made it so."""

from __future__ import annotations

from collections.abc import Sequence

from forksync import history as histories
from forksync.changes import Range, line_ranges
from forksync.divergence import Hunk
from forksync.errors import ForksyncError
from forksync.findings import place
from forksync.fork import Base, base_of, own_files, snapshot, verdict_on
from forksync.gate import Verdict
from forksync.git import decode
from forksync.history import Entry as Signed
from forksync.project import Project
from forksync.words import counted


def explain(project: Project, path: str, line: int | None) -> list[str]:
    """What there is to say of a line of the working tree; of the whole file without one."""
    repository = project.repository
    commit, tree = snapshot(project)
    base = base_of(project, commit)
    files = {entry.path: entry for entry in repository.entries(tree)}
    verdict = verdict_on(project, base.commit, tree, histories.load(project.config.history))
    if own_files(project)(path):
        return [f"{path} is forksync's own file"]
    if path not in files and not any(hunk.path == path for hunk, _ in verdict.signed):
        raise ForksyncError(f"{path} is not in the fork")
    text = decode(repository.blobs([files[path].id])[files[path].id]).split("\n") if path in files else []
    if line is not None and not 1 <= line <= max(1, len(text)):
        raise ForksyncError(f"{path} has {len(text)} lines, not {line}")
    lines = [f"{path}:{line}: {text[line - 1]}"] if line is not None and text else [path]
    found = [part for part in hunks(verdict, path, line)]
    return [*lines, *found] if found else [*lines, *translation(project, base, path, line, text)]


def hunks(verdict: Verdict, path: str, line: int | None) -> list[str]:
    """The hunks that hold the line."""
    found: list[str] = []
    everything: list[tuple[Hunk, Signed | None]] = [*verdict.signed, *verdict.owned]
    everything += [(hunk, None) for hunk in [*verdict.new, *(one.hunk for one in verdict.changed)]]
    for hunk, entry in everything:
        if hunk.path == path and (line is None or hunk.first <= line <= max(hunk.last, hunk.first)):
            found += described(hunk, entry, verdict)
    return found


def described(hunk: Hunk, entry: Signed | None, verdict: Verdict) -> list[str]:
    head = f"{hunk.edit.fingerprint}  {place(hunk)}"
    was = next((one.claim.entry for one in verdict.changed if one.hunk is hunk), None)
    if entry is None and was is None:
        return [f"{head}: nobody has signed it off; forksync sign {hunk.edit.fingerprint} --reason '...'", *hunk.diff]
    told = entry or was
    assert told is not None
    lines = [f"{head}: {told.reason}", f"  entry {told.id}, by {told.author}, {told.date}"]
    lines += [f"  see {link}" for link in told.links]
    lines += [] if entry else ["  but it has changed since it was signed"]
    return [*lines, *hunk.diff]


def translation(project: Project, base: Base, path: str, line: int | None, text: list[str]) -> list[str]:
    """Where an unsigned line comes from in the upstream, and what it was called there."""
    repository, table = project.repository, project.table
    mirrored = next((entry for entry in repository.entries(base.commit) if entry.path == path), None)
    known = repository.entries(base.upstream) if repository.has(base.upstream) else []
    source = next((entry for entry in known if table.place(entry.path)[0] == path), None)
    if mirrored is None or source is None or not source.is_file:
        return ["nothing is known of where it comes from"]
    at = f"{source.path} of upstream {base.upstream[:12]}"
    if line is None:
        return [f"it is {at}" + ("" if source.id == mirrored.id else ", translated")]
    blobs = repository.blobs([source.id, mirrored.id])
    old, new = (decode(blobs[i]).split("\n") for i in (source.id, mirrored.id))
    from_mirror, from_upstream = line_ranges([(new, text), (old, new)])
    if any(c <= line - 1 < d for _, _, c, d in from_mirror):
        return [f"it differs from {at} in its layout only, which is not compared"]
    number = back(from_mirror, line - 1)
    for a, b, c, d in from_upstream:
        if c <= number < d:
            uses = table.translate(source.path, blobs[source.id]).uses
            rules = ", ".join(f"{name} ({counted(count, 'use')})" for name, count in sorted(uses.items()))
            return [
                f"it is {at}, line {a + 1}, translated; rules of this file: {rules}",
                *(f"-{was}" for was in old[a:b]),
            ]
    return [f"it is as in {at}, line {back(from_upstream, number) + 1}"]


def back(ranges: Sequence[Range], line: int) -> int:
    """The line, from 0, that an unchanged line had before."""
    return line + sum((b - a) - (d - c) for a, b, c, d in ranges if d <= line)
