"""``forksync init``: a configuration and a first table for a fork that exists, learned from the two trees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forksync import table
from forksync.config import FILE, Config, Fork, Upstream
from forksync.errors import ForksyncError
from forksync.git import Repository
from forksync.learn.propose import Learned, learn
from forksync.learn.write import table_text, value
from forksync.project import Project
from forksync.table import table_of


@dataclass(frozen=True)
class Started:
    learned: Learned
    base: str
    """The upstream's commit that was learned from."""
    files: tuple[Path, ...]


def files(repository: Repository, ref: str) -> dict[str, bytes]:
    """The regular files of a commit, by path."""
    entries = [entry for entry in repository.entries(repository.commit_id(ref)) if entry.is_file]
    blobs = repository.blobs(entry.id for entry in entries)
    return {entry.path: blobs[entry.id] for entry in entries}


def branch_of(repository: Repository) -> str:
    branch = repository.text("branch", "--show-current")
    if not branch:
        raise ForksyncError("no branch is checked out, so the fork's is not known; check it out, or give --fork BRANCH")
    return branch


def init(repository: Repository, url: str, branch: str, base: str | None, fork: str | None) -> Started:
    """Fetches the upstream, learns a table from its commit ``base`` and the fork's branch, and writes both files.

    ForksyncError if there is a configuration already, or nothing in the two trees belongs together.
    """
    config = Config(upstream=Upstream(url=url, branch=branch), fork=Fork(branch=fork or branch_of(repository)))
    written = (repository.path / FILE, repository.path / config.table)
    for file in written:
        if file.exists():
            raise ForksyncError(f"{file} exists; take it away to begin anew, or go on with forksync mirror")
    project = Project(repository, config, table_of(()))
    tip = project.fetch()
    start = project.upstream_commit(base) if base else tip
    learned = learn(files(repository, start), files(repository, config.fork.branch))
    if not learned.pairs:
        raise ForksyncError(
            f"no file of {start[:12]} is like one of {config.fork.branch}; give another commit with --base"
        )
    settings = (
        f"[upstream]\nurl = {value(url)}\nbranch = {value(branch)}\n"
        f"# What the fork was made from; only the first sync needs it.\nbase = {value(base or start)}\n"
        f"\n[fork]\nbranch = {value(config.fork.branch)}\n"
    )
    for file, text in zip(written, (settings, table_text(learned)), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    table.load(written[1])
    return Started(learned, start, written)
