"""The loop: merge a new upstream into the fork, and compare, fix, measure, again, until what differs is exactly what was
signed off and the measurements are green. Then one merge; until then no branch is touched.

Each step ends by saving the state. A killed sync goes on from the last saved state, whichever step that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forksync import ledger, state
from forksync.changes import moved_files
from forksync.config import FILE
from forksync.divergence import divergence
from forksync.fixer import ask, collect, sync_worktree
from forksync.fork import (
    AlignmentError,
    Base,
    base_of,
    fork_tip,
    history_in,
    own_files,
    refuse_dirty,
    relative,
    together,
    tree_of,
    verdict_on,
    without,
)
from forksync.gate import Verdict
from forksync.gate_two import measure_all
from forksync.landing import land, land_commit
from forksync.merge import merge_trees
from forksync.mirror import mirror
from forksync.project import Project
from forksync.resolve import Resolver, ended, relocated
from forksync.state import State
from forksync.words import counted

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """How a sync ended: landed, nothing to do, or stopped for a person at ``state`` with what gate one says."""

    state: State | None
    landed: str = ""
    verdict: Verdict | None = None

    @property
    def stopped(self) -> bool:
        return not self.landed and self.state is not None


def sync(project: Project, target: str | None, accept_rewrite: bool, lock: int, say: Say) -> Outcome:
    """Takes the fork to the upstream's ``target``. AlignmentError and the like: bad input, nothing was changed."""
    if not project.config.measure:
        raise AlignmentError(
            "no [[measure]] is configured: without measurement the loop is open; add one, e.g. the command that runs the tests"
        )
    now = resumed(project, target, say) or begin(project, target, accept_rewrite, say)
    if now is None:
        return Outcome(None)
    while True:
        if now.phase == "land":
            return Outcome(now, land(project, now, say))
        verdict, now = judged(project, now, lock, say)
        if not now.clashes and verdict.passed and all(one.passed for one in now.measured):
            now = save(project, now.but(phase="land", landing=land_commit(project, now, verdict)))
        elif project.config.fixer.command and now.tried < project.config.fixer.tries:
            now = ask(project, save(project, now.but(phase="fixing")), verdict, lock, say)
            now = save(project, now.but(phase="work"))
        else:
            lay_for_person(project, now)
            return Outcome(save(project, now.but(phase="person")), verdict=verdict)


def save(project: Project, now: State) -> State:
    return state.save(project.repository, now)


def resumed(project: Project, target: str | None, say: Say) -> State | None:
    """The sync in progress, brought up to what was done since it stopped; None if there is none, or the fork has moved on."""
    now = state.load(project.repository)
    if now is None:
        return None
    if target is not None and project.upstream_commit(target) != now.upstream_to:
        raise AlignmentError(
            f"a sync to {now.target} is in progress: forksync sync goes on with it, forksync sync --abandon gives it up"
        )
    tip = fork_tip(project)
    if now.phase == "land" and tip in (now.fork, now.landing):
        return now
    say(f"going on with the sync to {now.target}")
    if now.phase == "person":
        now = collect(project, now).but(measured_tree="")
    if tip != now.fork:
        now = moved_on(project, now, tip, say)
    return save(project, now.but(phase="work", landing="", moving=False))


def moved_on(project: Project, now: State, tip: str, say: Say) -> State:
    """The sync with what was committed to the fork's branch since it began."""
    repository, branch = project.repository, project.config.fork.branch
    again = "forksync sync --abandon, then sync again"
    if base_of(project, tip).commit != now.base:
        raise AlignmentError(f"{branch} has been merged with another mirror since the sync began: {again}")
    before, after = tree_of(repository, now.fork), tree_of(repository, tip)
    merged = merge_trees(repository, before, after, now.tree, lambda path, conflict: None)
    if merged.clashes:
        paths = ", ".join(clash.path for clash in merged.clashes)
        raise AlignmentError(
            f"{branch} has moved since the sync began, and both changed the same lines of {paths}: {again}"
        )
    say(f"{branch} has moved since the sync began; its new commits are merged in")
    return now.but(fork=tip, tree=merged.tree)


def begin(project: Project, target: str | None, accept_rewrite: bool, say: Say) -> State | None:
    """The first step: mirrors of all the upstream's commits on the way, and the three-way merge. None: nothing to do."""
    repository = project.repository
    refuse_dirty(project)
    tip = fork_tip(project)
    refuse_uncommitted_rules(project, tip)
    refuse_lost_mirror(project, tip)
    base = base_of(project, tip)
    upstream = project.upstream_commit(target)
    if upstream == base.upstream and base.table == project.table.hash:
        return None
    refuse_rewritten(project, base, upstream, accept_rewrite)
    verdict = verdict_on(project, base.commit, tip, history_in(project, tip))
    if not verdict.passed:
        raise UnsignedError(verdict)
    steps = mirrored(project, base, upstream, say)
    now = State(
        "work", target or project.config.upstream.branch, tip, base.commit, steps[-1][1], steps, base.upstream, ""
    )
    own = own_files(project)
    trees = [without(repository, tree_of(repository, commit), own) for commit in (now.base, tip, now.mirror)]
    moves = moved_files(repository, now.base, now.mirror)
    rules = Resolver(verdict, moves, project.config.resolve)
    merged = merge_trees(repository, trees[0][0], trees[1][0], trees[2][0], rules)
    lines = sum(1 for one in merged.settled if one.by == "lines")
    decided = len(merged.settled) - lines
    say(
        f"merged: {counted(len(merged.clashes), 'conflict')} left, {decided} decided by rules, "
        f"{lines} where git alone would have asked"
    )
    tree = together(repository, merged.tree, trees[1][1])
    return save(project, now.but(tree=tree, clashes=merged.clashes, settled=merged.settled))


class UnsignedError(AlignmentError):
    """The fork is not aligned to begin with."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        counts = f"{len(verdict.new)} new, {len(verdict.changed)} changed, {len(verdict.vanished)} vanished"
        super().__init__(
            f"the fork's divergence is not what was signed off ({counts}): see forksync diff, then forksync sign"
        )


def refuse_uncommitted_rules(project: Project, tip: str) -> None:
    """AlignmentError if configuration or table, as they lie here, are not the fork's branch's: a merge by them could not be
    repeated."""
    repository = project.repository
    blobs = {entry.path: entry.id for entry in repository.entries(tip)}
    for path in (repository.path.resolve() / FILE, project.config.table):
        name = relative(project, path)
        if blobs.get(name) != repository.text("hash-object", f"--path={name}", "--", str(path)):
            raise AlignmentError(f"{name} is not as {project.config.fork.branch} has it; commit it there first")


def refuse_lost_mirror(project: Project, tip: str) -> None:
    """AlignmentError if the last sync's mirror is not in the fork's past, as after a squashed merge or in a shallow clone."""
    repository = project.repository
    told = ledger.ledgers(project, tip)
    if not told:
        return
    mirror_commit = told[-1]["mirror"]
    if not repository.has(f"{mirror_commit}^{{commit}}") or not repository.is_ancestor(mirror_commit, tip):
        branch, of = project.config.fork.branch, project.config.fork.mirror
        raise AlignmentError(
            f"the mirror {mirror_commit[:12]} of the last sync is not in the past of {branch}: was its merge squashed, or is "
            f"this a shallow clone? With {of} fetched, git merge -s ours --allow-unrelated-histories {mirror_commit[:12]} puts "
            "it back"
        )


def refuse_rewritten(project: Project, base: Base, upstream: str, accepted: bool) -> None:
    repository = project.repository
    if accepted or (repository.has(base.upstream) and repository.is_ancestor(base.upstream, upstream)):
        return
    if repository.has(base.upstream) and repository.is_ancestor(upstream, base.upstream):
        said = (
            f"{upstream[:12]} is older than {base.upstream[:12]}, which the fork has already; to go back all the same"
        )
    else:
        said = (
            f"the upstream was rewritten: {base.upstream[:12]}, which the fork was last merged with, is not in the past of "
            f"{upstream[:12]}; if that is meant"
        )
    raise AlignmentError(f"{said}, add --accept-rewrite")


def mirrored(project: Project, base: Base, upstream: str, say: Say) -> tuple[tuple[str, str], ...]:
    """A mirror commit for each of the upstream's commits on its first-parent line, each after the one before."""
    repository = project.repository
    words = ("rev-list", "--first-parent", "--reverse", upstream)
    known = [f"^{base.upstream}"] if repository.has(base.upstream) else []
    found = repository.text(*words, *known).split() or [upstream]
    steps: list[tuple[str, str]] = []
    for number, commit in enumerate(found, 1):
        made = mirror(repository, commit, project.table, steps[-1][1] if steps else base.commit)
        steps.append((commit, made.commit))
        if number % 50 == 0:
            say(f"mirrored {number} of {len(found)} commits")
    say(f"mirrored {counted(len(found), 'commit')} of the upstream, up to {found[-1][:12]}")
    return tuple(steps)


def judged(project: Project, now: State, lock: int, say: Say) -> tuple[Verdict, State]:
    """Both gates on the merge so far. Nothing is measured while there are conflicts or findings of gate one."""
    moves = moved_files(project.repository, now.base, now.mirror)
    history = relocated(history_in(project, now.tree), moves)
    verdict = verdict_on(project, now.mirror, now.tree, history)
    upstream = divergence(project.repository, now.base, now.mirror) if verdict.vanished else []
    verdict = ended(verdict, upstream).beside({clash.path for clash in now.clashes})
    if now.clashes or not verdict.passed:
        return verdict, now.but(measured=(), measured_tree="")
    if now.measured_tree != now.tree:
        say(f"gate one: {counted(len(verdict.signed), 'signed hunk')}, nothing else")
        measured = measure_all(project, now, verdict, lock, say)
        now = save(project, now.but(measured=measured, measured_tree=now.tree))
    return verdict, now


def lay_for_person(project: Project, now: State) -> None:
    """Lays the merge so far out, unless it lies there already: a person may be at work in it."""
    worktree, parents = sync_worktree(project.repository), f"{now.fork} {now.mirror}"
    of_this = worktree.exists() and worktree.inside.text("log", "-1", "--format=%P").startswith(parents)
    if of_this and worktree.harvest() == now.tree:
        return
    worktree.lay(project.repository.commit_id(state.REF), now.clashes)


def abandon(project: Project) -> bool:
    """Gives up the sync in progress; whether there was one. The fork's branch is as it was."""
    sync_worktree(project.repository).remove()
    found = state.load(project.repository) is not None
    state.forget(project.repository)
    return found
