"""How fork and upstream stand: how far behind, what a sync would ask, what has drifted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from forksync import ledger, state
from forksync.changes import moved_files
from forksync.fork import Base, base_of, fork_tip, history_in, own_files, tree_of, verdict_on, without
from forksync.gate import Verdict
from forksync.git import Repository
from forksync.merge import Clash, Merged, merge_trees
from forksync.mirror import mirror
from forksync.project import Project
from forksync.resolve import Resolver
from forksync.state import State
from forksync.words import counted


@dataclass(frozen=True)
class Status:
    fork: str
    base: Base
    upstream: str
    """Where the upstream stands."""
    names: dict[str, str]
    """Commit → a name for people."""
    commits: list[tuple[str, str]]
    """(id, subject) of the upstream's commits that the fork lacks, oldest first."""
    since: str
    """The date of the first of them."""
    tags: list[str]
    """Of the upstream, among them."""
    rewritten: bool
    verdict: Verdict
    predicted: Merged | None
    """What a sync would merge now; None if there is nothing to merge or the fork is not aligned."""
    syncing: State | None
    ledgers: list[dict[str, Any]]

    @property
    def behind(self) -> bool:
        return bool(self.commits) or self.rewritten

    @property
    def conflicts(self) -> tuple[Clash, ...]:
        return self.predicted.clashes if self.predicted else ()


def status(project: Project, target: str | None = None) -> Status:
    """Of the fork's branch against the upstream's commit; fetches nothing, changes no branch."""
    repository = project.repository
    tip = fork_tip(project)
    base, upstream = base_of(project, tip), project.upstream_commit(target)
    known = repository.has(base.upstream)
    missing = repository.text(
        "log", "--reverse", "--format=%H %cI %s", upstream, *([f"^{base.upstream}"] if known else [])
    )
    commits = [line.split(" ", 2) for line in missing.splitlines()]
    verdict = verdict_on(project, base.commit, tip, history_in(project, tip))
    return Status(
        tip,
        base,
        upstream,
        {commit: name(repository, commit) for commit in (base.upstream, upstream)},
        [(commit, subject) for commit, _, subject in commits],
        commits[0][1] if commits else "",
        [tag for commit, _, _ in commits for tag in tags(repository, commit)],
        not known or not repository.is_ancestor(base.upstream, upstream),
        verdict,
        predict(project, base, upstream, tip, verdict) if commits or base.table != project.table.hash else None,
        state.load(repository),
        ledger.ledgers(project, tree_of(repository, tip)),
    )


def predict(project: Project, base: Base, upstream: str, tip: str, verdict: Verdict) -> Merged:
    """The merge that a sync would make, thrown away."""
    repository, own = project.repository, own_files(project)
    new = mirror(repository, upstream, project.table, base.commit).commit
    moves = moved_files(repository, base.commit, new)
    old, fork, mirrored = (
        without(repository, tree_of(repository, commit), own)[0] for commit in (base.commit, tip, new)
    )
    return merge_trees(repository, old, fork, mirrored, Resolver(verdict, moves, project.config.resolve))


def tags(repository: Repository, commit: str) -> list[str]:
    """Tags that stand at a commit, fetched from the upstream or the repository's own."""
    words = (
        "for-each-ref",
        "--format=%(refname:lstrip=2)",
        f"--points-at={commit}",
        "refs/tags",
        "refs/forksync/upstream/tags",
    )
    return sorted({line.removeprefix("upstream/tags/") for line in repository.text(*words).splitlines()})


def name(repository: Repository, commit: str) -> str:
    found = tags(repository, commit) if repository.has(commit) else []
    return f"{found[0]} ({commit[:12]})" if found else commit[:12]


def text(one: Status) -> list[str]:
    """The status as lines for a terminal."""
    verdict = one.verdict
    lines = [f"fork      {one.fork[:12]}, merged with upstream {one.names[one.base.upstream]}"]
    if one.rewritten:
        lines.append(
            f"upstream  {one.names[one.upstream]}: REWRITTEN, {one.names[one.base.upstream]} is not in its past"
        )
    elif one.commits:
        days = (datetime.now(UTC) - datetime.fromisoformat(one.since)).days
        ahead = f"{counted(len(one.commits), 'commit')} ahead, the first {counted(days, 'day')} old"
        lines.append(f"upstream  {one.names[one.upstream]}: {ahead}")
        lines += [f"          releases: {', '.join(one.tags[-8:])}"] if one.tags else []
    else:
        lines.append(f"upstream  {one.names[one.upstream]}: nothing new")
    signed = sum(len(h.edit.removed) + len(h.edit.added) for h, _ in verdict.signed)
    entries = len({entry.id for _, entry in verdict.signed})
    lines.append(
        f"signed    {counted(len(verdict.signed), 'hunk')}, {counted(signed, 'line')}, {counted(entries, 'entry')}; "
        f"{len(verdict.owned)} in own files"
    )
    if verdict.passed:
        lines.append("drift     none")
    else:
        counts = f"{len(verdict.new)} new, {len(verdict.changed)} changed, {len(verdict.vanished)} vanished"
        lines.append(f"drift     {counts}: forksync diff")
    if one.ledgers:
        trend = [str(told["divergence"]["hunks"]) for told in one.ledgers[-10:]]
        lines.append(f"trend     signed hunks over the last syncs: {' '.join(trend)}")
    if one.predicted is not None:
        rules = sum(1 for settled in one.predicted.settled if settled.by != "lines")
        lines.append(f"forecast  {counted(len(one.conflicts), 'conflict')} to decide, {rules} decided by rules")
        lines += [f"          {clash.path}: {clash.kind}" for clash in one.conflicts]
    if one.syncing:
        lines.append(
            f"sync      to {one.syncing.target} in progress ({one.syncing.phase}): forksync sync goes on with it"
        )
    return lines
