"""Whoever decides what rules cannot: a command with a budget of tries, or a person. Both work in the sync's worktree."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from forksync import state
from forksync.changes import changes, moved_files
from forksync.fork import history_in, sync_folder, verdict_on
from forksync.gate import Verdict
from forksync.git import Repository
from forksync.history import Entry
from forksync.measure import shell
from forksync.merge import Clash, places
from forksync.merge3 import has_markers
from forksync.project import Project
from forksync.resolve import Resolver
from forksync.state import State, Try
from forksync.worktree import Worktree, read_file

BRIEF = "brief.json"


def sync_worktree(repository: Repository) -> Worktree:
    return Worktree(repository, sync_folder(repository))


def ask(project: Project, now: State, verdict: Verdict, lock: int, say: Callable[[str], None]) -> State:
    """One try of the configured command, in a fresh worktree of the merge so far; the state with what it did."""
    repository, fixer = project.repository, project.config.fixer
    worktree = sync_worktree(repository)
    worktree.lay(repository.commit_id(state.REF), now.clashes)
    brief = repository.common_dir() / "forksync" / BRIEF
    brief.write_text(json.dumps(told(project, now, verdict), indent=1, ensure_ascii=True) + "\n")
    env = {"FORKSYNC_BRIEF": str(brief), "FORKSYNC_TRY": str(now.tried + 1)}
    say(f"fixer, try {now.tried + 1} of {fixer.tries}: {fixer.command}")
    start = time.monotonic()
    code, output = shell(fixer.command, worktree.folder, env, fixer.timeout_s, [lock])
    done = gathered(project, now, worktree, "fixer", code, output, time.monotonic() - start)
    worktree.remove()
    return done


def collect(project: Project, now: State) -> State:
    """What a person did in the worktree since the sync stopped."""
    worktree = sync_worktree(project.repository)
    if not worktree.exists():
        return now
    return gathered(project, now, worktree, "person", 0, "", 0.0)


def gathered(
    project: Project, now: State, worktree: Worktree, by: str, code: int | None, output: str, seconds: float
) -> State:
    tree = worktree.harvest()
    unmerged = worktree.unmerged()
    left = tuple(clash for clash in now.clashes if clash.path in unmerged and undecided(worktree, clash))
    changed = tuple(change.path for change in changes(project.repository, now.tree, tree, renames=False))
    closed = tuple(sorted({clash.path for clash in now.clashes} - {clash.path for clash in left}))
    if by == "person" and not changed and not closed:
        return now
    one = Try(by, code, closed, changed, round(seconds, 2), "" if code == 0 else output)
    decided = tuple(clash for clash in now.clashes if clash not in left)
    return now.but(tree=tree, clashes=left, decided=(*now.decided, *decided), tries=(*now.tries, one))


def undecided(worktree: Worktree, clash: Clash) -> bool:
    """Whether nobody has decided a conflict that git still lists: its text has markers, it lies as it was laid, or it is about a
    submodule, which only the index can decide."""
    if (worktree.folder / clash.path).is_dir():
        return True
    read = read_file(worktree.folder / clash.path)
    if read is None:
        return not clash.laid
    return has_markers(read[1]) or blob_id(worktree, read[1]) == clash.laid


def blob_id(worktree: Worktree, data: bytes) -> str:
    return worktree.inside.run("hash-object", "--no-filters", "--stdin", stdin=data).stdout.decode().strip()


def told(project: Project, now: State, verdict: Verdict) -> dict[str, Any]:
    """The brief: all that is left to do, and what there is to know about it."""
    subjects = project.repository.text("log", "--no-walk=unsorted", "--format=%H %s", *[one for one, _ in now.steps])
    reasons = reasons_of(project, now)
    return {
        "target": now.target,
        "upstream": {"from": now.upstream_from, "to": now.upstream_to, "commits": subjects.splitlines()},
        "conflicts": [
            {
                "path": one.path,
                "kind": one.kind,
                "said": one.said,
                "upstream": touched_by(project.repository, now, one.path),
                "signed": [f"{entry.id}: {entry.reason}" for entry in reasons.get(one.path, [])],
            }
            for one in now.clashes
        ],
        "new": [
            {"path": h.path, "line": h.first, "fingerprint": h.edit.fingerprint, "diff": h.diff} for h in verdict.new
        ],
        "changed": [
            {
                "path": one.hunk.path,
                "line": one.hunk.first,
                "entry": one.claim.entry.id,
                "reason": one.claim.entry.reason,
                "signed": one.claim.signed.edit.diff,
                "diff": one.hunk.diff,
            }
            for one in verdict.changed
        ],
        "vanished": [
            {"path": c.signed.path, "entry": c.entry.id, "reason": c.entry.reason, "signed": c.signed.edit.diff}
            for c in verdict.vanished
        ],
        "measurements": [
            {"name": one.name, "findings": one.findings, "output": one.output} for one in now.measured if not one.passed
        ],
        "tries": [{"by": one.by, "code": one.code, "closed": one.closed, "changed": one.changed} for one in now.tries],
    }


def touched_by(repository: Repository, now: State, path: str) -> list[str]:
    """The upstream's commits on the way that changed a file of the mirror, by subject."""
    said = repository.text("log", "--reverse", "--format=%s", f"{now.base}..{now.mirror}", "--", path)
    return [line.removeprefix("Mirror: ") for line in said.splitlines()]


def reasons_of(project: Project, now: State) -> dict[str, list[Entry]]:
    """For each conflict's path, the entries that sign what it touches of the fork."""
    repository = project.repository
    verdict = verdict_on(project, now.base, now.fork, history_in(project, now.fork))
    resolver = Resolver(verdict, moved_files(repository, now.base, now.mirror), ())
    found: dict[str, list[Entry]] = {}
    for clash in now.clashes:
        hunks = [hunk for place in places(repository, clash) for hunk in resolver.hunks_of(clash.path, place)]
        entries = {entry.id: entry for hunk in hunks if (entry := verdict.entry_of(hunk))}
        found[clash.path] = list(entries.values())
    return found


def conflict_lines(project: Project, now: State) -> Iterator[str]:
    """The conflicts that are left, for a person."""
    reasons = reasons_of(project, now)
    for clash in now.clashes:
        yield f"conflict  {clash.path}: {clash.kind}"
        yield from (f"  upstream: {subject}" for subject in touched_by(project.repository, now, clash.path))
        yield from (f"  fork: {entry.reason} ({entry.id})" for entry in reasons.get(clash.path, []))
