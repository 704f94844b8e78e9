"""The fork as forksync sees it: its tree without forksync's own files, the mirror that it was last merged with, its history."""

from __future__ import annotations

import shutil
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forksync import history as histories
from forksync.config import FILE, ConfigError
from forksync.divergence import divergence
from forksync.errors import ForksyncError
from forksync.gate import Verdict, compare
from forksync.git import Entry, GitError, Repository, decode
from forksync.history import History
from forksync.mirror import mirror, provenance
from forksync.project import Project
from forksync.worktree import Worktree


class AlignmentError(ForksyncError):
    """Fork and upstream do not stand to each other as forksync needs it; nothing was changed."""


@dataclass(frozen=True)
class Base:
    """What the fork was last merged with."""

    commit: str
    """The mirror's commit."""
    upstream: str
    table: str


def relative(project: Project, path: Path) -> str:
    try:
        return path.relative_to(project.repository.path.resolve()).as_posix()
    except ValueError as outside:
        raise ConfigError(f"{path} lies outside of {project.repository.path}; the fork must hold it") from outside


def own_files(project: Project) -> Callable[[str], bool]:
    """Which paths of the fork are forksync's own and no divergence: configuration, table, history, ledger."""
    names = {FILE, *(relative(project, path) for path in (project.config.table, project.config.history))}
    ledger = relative(project, project.config.ledger) + "/"
    return lambda path: path in names or path.startswith(ledger)


def base_of(project: Project, commit: str) -> Base:
    """The newest mirror in the past of a fork's commit; before the first sync, the mirror of ``upstream.base``."""
    repository = project.repository
    words = ("rev-list", "--topo-order", "--max-count=1", "--grep=^Forksync-Upstream: [0-9a-f]*$", commit)
    if (found := repository.text(*words)) and (told := provenance(repository, found)):
        return Base(found, *told)
    first = project.config.upstream.base
    if not first:
        raise AlignmentError(
            f"{project.config.fork.branch} has no mirror in its past: set upstream.base in {FILE} to the upstream's commit or "
            "tag that the fork was made from"
        )
    made = mirror(repository, project.upstream_commit(first), project.table)
    return Base(made.commit, made.upstream, made.table)


def tree_of(repository: Repository, commit: str) -> str:
    return repository.text("rev-parse", f"{commit}^{{tree}}")


def without(repository: Repository, tree: str, own: Callable[[str], bool]) -> tuple[str, list[Entry]]:
    """A tree without forksync's own files, and those files."""
    entries = repository.entries(tree)
    mine = [entry for entry in entries if own(entry.path)]
    return repository.write_tree([e for e in entries if not own(e.path)]) if mine else tree, mine


def together(repository: Repository, tree: str, mine: list[Entry]) -> str:
    """A tree with these files instead of what it has at their paths."""
    paths = {entry.path for entry in mine}
    return repository.write_tree([*(e for e in repository.entries(tree) if e.path not in paths), *mine])


def history_in(project: Project, tree: str) -> History:
    """The history as a tree holds it; ConfigError names line and fault."""
    path = relative(project, project.config.history)
    found = next((entry for entry in project.repository.entries(tree) if entry.path == path), None)
    if found is None:
        return History()
    text = decode(project.repository.blobs([found.id])[found.id])
    try:
        return histories.parse(tomllib.loads(text), text, path)
    except tomllib.TOMLDecodeError as fault:
        raise ConfigError(f"{path}: not TOML: {fault}") from fault


def verdict_on(project: Project, mirror_commit: str, tree: str, history: History) -> Verdict:
    """Gate one for a tree of the fork."""
    own = own_files(project)
    hunks = divergence(project.repository, mirror_commit, tree, own)
    return compare(hunks, history, {entry.path for entry in project.repository.entries(tree)})


def checkout_of(repository: Repository, branch: str) -> Path | None:
    """The worktree that has a branch checked out."""
    folder = None
    for line in repository.text("worktree", "list", "--porcelain").splitlines():
        if line.startswith("worktree "):
            folder = Path(line.removeprefix("worktree "))
        if line == f"branch refs/heads/{branch}":
            return folder
    return None


def fork_tip(project: Project) -> str:
    try:
        return project.repository.commit_id(f"refs/heads/{project.config.fork.branch}")
    except GitError as missing:
        raise AlignmentError(
            f"fork.branch = {project.config.fork.branch!r}: there is no such branch in {project.repository.path}"
        ) from missing


def snapshot(project: Project) -> tuple[str, str]:
    """(commit, tree) that ``diff`` and the like look at: of a checkout, its commit and its files as they are now, new ones too;
    without one, the fork's branch."""
    repository = project.repository
    if repository.text("rev-parse", "--is-bare-repository") == "true":
        tip = fork_tip(project)
        return tip, tree_of(repository, tip)
    head = repository.commit_id("HEAD")
    if repository.path.resolve() == sync_folder(repository):
        return head, Worktree(repository, repository.path).harvest()
    with tempfile.TemporaryDirectory(prefix="forksync-") as folder:
        index = Path(folder) / "index"
        real = repository.path / repository.text("rev-parse", "--git-path", "index")
        if real.exists():
            shutil.copyfile(real, index)
        repository.run("add", "--all", env={"GIT_INDEX_FILE": str(index)})
        return head, repository.text("write-tree", env={"GIT_INDEX_FILE": str(index)})


def sync_folder(repository: Repository) -> Path:
    """Where a sync is laid out for its fixer or a person."""
    return repository.common_dir() / "forksync" / "work" / "sync"


def main_checkout(repository: Repository) -> Path:
    return Path(repository.text("worktree", "list", "--porcelain").splitlines()[0].removeprefix("worktree "))


def refuse_dirty(project: Project) -> None:
    """AlignmentError if the fork's checkout has changes that are not committed."""
    folder = checkout_of(project.repository, project.config.fork.branch)
    if folder is None:
        return
    dirty = Repository(folder).text("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    if dirty:
        names = ", ".join(line[3:] for line in dirty.splitlines()[:5])
        raise AlignmentError(f"{folder} has changes that are not committed ({names}); commit or stash them first")
