"""The one step that moves the user's branch: a merge commit of the fork and the new mirror, with the ledger in it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from forksync import history as histories
from forksync import ledger, state
from forksync.changes import changes
from forksync.errors import ForksyncError
from forksync.fixer import sync_worktree
from forksync.fork import checkout_of, fork_tip, history_in, refuse_dirty, relative, together
from forksync.gate import Verdict, renewed
from forksync.git import Entry, GitError, Repository, decode
from forksync.mirror import provenance
from forksync.project import Project
from forksync.state import State
from forksync.worktree import read_file

LOCK_S = 3.0
"""How long another git may take to let go of the index before its lock counts as left behind by a killed forksync."""


class LandingError(ForksyncError):
    """The merge is made but could not be put on the fork's branch; the state is kept."""


def land_commit(project: Project, now: State, verdict: Verdict) -> str:
    """The merge commit: the merge, the history with its signatures renewed, the ledger."""
    repository = project.repository
    told = ledger.build(project, now, verdict)
    history = renewed(history_in(project, now.tree), verdict)
    path = relative(project, project.config.history)
    before = next((entry for entry in repository.entries(now.tree) if entry.path == path), None)
    old = decode(repository.blobs([before.id])[before.id]) if before else ""
    texts = {f"{relative(project, project.config.ledger)}/{ledger.file_name(now)}": json.dumps(told, indent=1) + "\n"}
    if history != history_in(project, now.tree):
        texts[path] = histories.write(history, old)
    blobs = repository.write_blobs([text.encode("utf-8", "surrogateescape") for text in texts.values()])
    files = [Entry("100644", blob, name) for name, blob in zip(texts, blobs, strict=True)]
    tree = together(repository, now.tree, files)
    return repository.write_commit(tree, [now.fork, now.mirror], ledger.message(told), f"{int(time.time())} +0000")


def land(project: Project, now: State, say: Callable[[str], None]) -> str:
    """Moves the fork's branch, and its checkout with it, to the merge; ends the sync. The merge's id."""
    repository, branch = project.repository, project.config.fork.branch
    tip = fork_tip(project)
    if tip not in (now.fork, now.landing):
        raise LandingError(f"{branch} has moved to {tip[:12]} since the merge was made; run forksync sync again")
    folder = checkout_of(repository, branch)
    if tip == now.fork and folder is None:
        repository.set_ref(f"refs/heads/{branch}", now.landing, tip)
    elif tip == now.fork and folder is not None:
        move_checkout(project, Repository(folder), now)
    publish(project, now)
    sync_worktree(repository).remove()
    state.forget(repository)
    say(f"{branch} is at {now.landing[:12]}")
    return now.landing


def move_checkout(project: Project, checkout: Repository, now: State) -> None:
    """Fast-forwards the checkout of the fork's branch; goes on where a killed one was."""
    if now.moving:
        drop_locks(checkout, project.config.fork.branch)
        undo_half_move(checkout, now)
    refuse_dirty(project)
    state.save(project.repository, now.but(moving=True))
    try:
        checkout.run("merge", "--ff-only", "--quiet", now.landing)
    except GitError as refused:
        state.save(project.repository, now.but(moving=False))
        raise LandingError(
            f"the merge {now.landing[:12]} is made and green, but git could not check it out: {refused}"
        ) from refused


def drop_locks(checkout: Repository, branch: str) -> None:
    """Takes away the locks that a git killed with forksync left behind, once no other git can be holding them."""
    folder = Path(checkout.path, checkout.text("rev-parse", "--git-dir"))
    locks = [folder / "index.lock", folder / "HEAD.lock", checkout.common_dir() / "refs" / "heads" / f"{branch}.lock"]
    deadline = time.monotonic() + LOCK_S
    while any(lock.exists() for lock in locks) and time.monotonic() < deadline:
        time.sleep(0.05)
    for lock in locks:
        lock.unlink(missing_ok=True)


def undo_half_move(checkout: Repository, now: State) -> None:
    """Puts the checkout back to the fork's commit if all that differs is what the move had written so far; LandingError if
    anything else does."""
    words = ("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--ignore-submodules=all")
    status = [(line[:2], line[3:]) for line in decode(checkout.run(*words).stdout).split("\0")[:-1]]
    moved = {change.path: change for change in changes(checkout, now.fork, now.landing, renames=False)}
    begun = [path for _, path in status if path in moved]
    blobs = checkout.blobs(i for path in begun for i in (moved[path].old, moved[path].new) if is_object(checkout, i))
    theirs = [path for letters, path in status if path not in moved and letters != "??"]
    for path in begun:
        read = read_file(checkout.path / path)
        versions = [blobs.get(moved[path].old, b""), blobs.get(moved[path].new, b"")]
        if read is not None and not any(version.startswith(read[1]) for version in versions):
            theirs.append(path)
    if theirs:
        raise LandingError(
            f"{', '.join(theirs)} in {checkout.path} changed while the merge was being put there; save your version elsewhere, "
            "undo the change, then run forksync sync again"
        )
    for path in begun:
        if moved[path].status == "A":
            (checkout.path / path).unlink(missing_ok=True)
    checkout.run("reset", "--hard", "--quiet", "HEAD")


def is_object(repository: Repository, identity: str) -> bool:
    return bool(repository.present([identity])) and repository.text("cat-file", "-t", identity) == "blob"


def publish(project: Project, now: State) -> None:
    """Brings the mirror's branch to the merged mirror, unless somebody else's commits stand there or it is checked out."""
    repository, branch = project.repository, project.config.fork.mirror
    ref = f"refs/heads/{branch}"
    free = not repository.has(ref) or provenance(repository, repository.commit_id(ref)) is not None
    if free and checkout_of(repository, branch) is None:
        repository.set_ref(ref, now.mirror)
