"""Which of the upstream's releases is the newest."""

from __future__ import annotations

from fnmatch import fnmatchcase

from forksync.errors import ForksyncError
from forksync.project import Project


def newest(project: Project, pattern: str) -> str:
    """The newest tag of that pattern, as versions are ordered: v1.10 comes after v1.9. ForksyncError if there is none."""
    where = "refs/tags" if project.config.upstream.url == "." else "refs/forksync/upstream/tags"
    words = ("for-each-ref", "--sort=-version:refname", f"--format=%(refname:lstrip={where.count('/') + 1})", where)
    found = next((tag for tag in project.repository.text(*words).splitlines() if fnmatchcase(tag, pattern)), None)
    if found is None:
        raise ForksyncError(f"no tag of the upstream matches {pattern!r}")
    return found
