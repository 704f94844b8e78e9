"""One forksync at a time in a repository. The system lets go of the lock when its holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from forksync.errors import ForksyncError
from forksync.git import Repository
from forksync.worktree import drop_half_made


@contextmanager
def locked(repository: Repository) -> Iterator[int]:
    """The lock's file descriptor. Commands that are handed it hold the lock too, so that one which outlives a killed forksync
    is not worked against. ForksyncError if another forksync is at work."""
    folder = repository.common_dir() / "forksync"
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            raise ForksyncError(
                f"another forksync, or a command that it started, is at work in {repository.path}"
            ) from held
        drop_own_locks(repository)
        drop_half_made(repository, folder / "work")
        yield lock
    finally:
        os.close(lock)


def drop_own_locks(repository: Repository) -> None:
    """Locks of forksync's own refs that a git killed with it left behind: nobody else moves these refs."""
    for left in (repository.common_dir() / "refs" / "forksync").rglob("*.lock"):
        left.unlink(missing_ok=True)
