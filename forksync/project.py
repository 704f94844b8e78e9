"""What every command works on: the fork's repository with its configuration and table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forksync import config, table
from forksync.config import FILE, Config
from forksync.errors import ForksyncError
from forksync.git import Repository, open_repository
from forksync.table import Table

UPSTREAM_REF = "refs/forksync/upstream"
"""Where the fetched upstream stands; none of the user's branches or remotes is touched."""


@dataclass(frozen=True)
class Project:
    repository: Repository
    config: Config
    table: Table

    def fetch(self) -> str:
        """Fetches the upstream's branch and its tags' commits; the commit it stands at."""
        url, branch = self.config.upstream.url, self.config.upstream.branch
        if url == ".":
            return self.repository.commit_id(branch)
        specs = [f"+refs/heads/{branch}:{UPSTREAM_REF}/heads/{branch}", f"+refs/tags/*:{UPSTREAM_REF}/tags/*"]
        self.repository.run("fetch", "--no-tags", "--no-write-fetch-head", "--quiet", url, *specs)
        return self.repository.commit_id(f"{UPSTREAM_REF}/heads/{branch}")

    def upstream_commit(self, ref: str | None) -> str:
        """The upstream's commit that ``ref`` names: its tag, its branch, or what the repository knows; None: its tip."""
        fetched = [f"{UPSTREAM_REF}/{kind}/{ref or self.config.upstream.branch}" for kind in ("tags", "heads")]
        for candidate in fetched if self.config.upstream.url != "." else []:
            if self.repository.has(f"{candidate}^{{commit}}"):
                return self.repository.commit_id(candidate)
        return self.repository.commit_id(ref or self.config.upstream.branch)


def open_project(folder: Path) -> Project:
    """The project that ``folder`` lies in. ForksyncError says what is missing or wrong."""
    repository = open_repository(folder)
    file = repository.path / FILE
    if not file.exists():
        raise ForksyncError(
            f"{file} does not exist; write one with forksync init, or run forksync in the fork's checkout"
        )
    loaded = config.load(file)
    return Project(repository, loaded, table.load(loaded.table))
