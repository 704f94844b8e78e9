"""Checkouts for fixers, people and measurements: a tree laid out byte by byte, and read back so.

No filter of git's runs either way: what lies there is what the commits hold, whatever ``.gitattributes`` or the user's
configuration would make of line endings.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from forksync.changes import LINK, SUBMODULE
from forksync.git import Entry, Repository, decode, encode
from forksync.merge import Clash

DROPPINGS = ("__pycache__/", "*.pyc", ".pytest_cache/", ".mypy_cache/", ".ruff_cache/", ".coverage")
"""What running code leaves behind; never taken for a new file."""


@dataclass(frozen=True)
class Worktree:
    """A linked worktree of a repository, detached at a commit."""

    repository: Repository
    folder: Path

    @property
    def inside(self) -> Repository:
        return Repository(self.folder)

    def exists(self) -> bool:
        return (self.folder / ".git").is_file()

    def lay(self, commit: str, clashes: Sequence[Clash] = ()) -> None:
        """Makes the folder hold exactly this commit. Conflicts stand in the index as after ``git merge``."""
        self.remove()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        words = ("worktree", "add", "--quiet", "--force", "--force", "--no-checkout", "--detach")
        self.repository.run(*words, str(self.folder), commit)
        entries = self.repository.entries(commit)
        blobs = self.repository.blobs(entry.id for entry in entries if entry.mode != SUBMODULE)
        for entry in entries:
            write(self.folder / entry.path, entry, blobs.get(entry.id, b""))
        self.inside.run("read-tree", "HEAD")
        lines = [b"0 %b\t%b\0" % (b"0" * 40, encode(clash.path)) for clash in clashes]
        lines += [
            b"%b %b %d\t%b\0" % (mode.encode(), identity.encode(), number, encode(clash.path))
            for clash in clashes
            for number, (mode, identity) in sorted(clash.stages.items())
        ]
        self.inside.run("update-index", "-z", "--index-info", stdin=b"".join(lines))
        self.inside.run("update-index", "-q", "--refresh", ok=(0, 1))

    def remove(self) -> None:
        """Takes the folder away and what git keeps of it, which ``git worktree prune`` would not of one that is half made."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        for kept, folder in kept_by_git(self.repository):
            if folder == self.folder:
                shutil.rmtree(kept)

    def harvest(self) -> str:
        """The tree that lies in the folder: its tracked files, and new ones that are not ignored. Submodules are as the index has
        them, since their folders are empty."""
        head = {entry.path: entry for entry in self.repository.entries(self.inside.commit_id("HEAD"))}
        excluded = [word for pattern in DROPPINGS for word in ("-x", pattern)]
        words = ("ls-files", "-z", "--others", "--exclude-standard", *excluded)
        staged = [line.partition("\t") for line in self.listed("ls-files", "-z", "--stage")]
        submodules = {path: told.split(" ")[1] for told, _, path in staged if told.startswith(SUBMODULE)}
        submodules |= {path: head[path].id for path in self.unmerged() if path in head and head[path].mode == SUBMODULE}
        paths = sorted({*head, *(path for _, _, path in staged), *self.listed(*words)})
        found: list[Entry] = []
        files: list[tuple[str, str, bytes]] = []
        for path in paths:
            if path.endswith("/"):
                continue  # a repository of its own that somebody made in here
            if path in submodules and (self.folder / path).is_dir():
                found.append(Entry(SUBMODULE, submodules[path], path))
            elif (read := read_file(self.folder / path)) is not None:
                files.append((read[0], path, read[1]))
        links = {path for mode, path, _ in files if mode == LINK}
        files = [one for one in files if links.isdisjoint(map(str, PurePosixPath(one[1]).parents))]
        identities = self.repository.write_blobs([data for _, _, data in files])
        found += [Entry(mode, identity, path) for (mode, path, _), identity in zip(files, identities, strict=True)]
        return self.repository.write_tree(found)

    def listed(self, *words: str) -> set[str]:
        return set(decode(self.inside.run(*words).stdout).split("\0")) - {""}

    def unmerged(self) -> set[str]:
        """Paths that stand in the index as conflicts: nobody has said ``git add`` or ``git rm``."""
        return {line.partition("\t")[2] for line in self.listed("ls-files", "-z", "--unmerged")}


def kept_by_git(repository: Repository) -> list[tuple[Path, Path]]:
    """What git keeps of each linked worktree, and the worktree's folder."""
    found = (repository.common_dir() / "worktrees").glob("*/gitdir")
    return [(file.parent, Path(decode(file.read_bytes()).strip()).parent) for file in sorted(found)]


def drop_half_made(repository: Repository, work: Path) -> None:
    """Takes away worktrees in ``work`` that a killed git had not finished: their HEAD is no commit, and a fetch fails on it."""
    for kept, folder in kept_by_git(repository):
        head = kept / "HEAD"
        if folder.parent == work and not (head.exists() and head.read_text().strip().strip("0")):
            Worktree(repository, folder).remove()


def write(path: Path, entry: Entry, data: bytes) -> None:
    target = os.fsencode(encode(str(path)))
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if entry.mode == SUBMODULE:
        os.makedirs(target, exist_ok=True)
    elif entry.mode == LINK:
        os.symlink(data, target)
    else:
        with open(target, "wb") as out:
            out.write(data)
        os.chmod(target, 0o755 if entry.mode == "100755" else 0o644)


def read_file(path: Path) -> tuple[str, bytes] | None:
    """(mode, content) of a file or link; None if there is none."""
    target = os.fsencode(encode(str(path)))
    try:
        status = os.lstat(target)
        if stat.S_ISLNK(status.st_mode):
            return LINK, os.fsencode(os.readlink(target))
        if stat.S_ISREG(status.st_mode):
            with open(target, "rb") as source:
                return "100755" if status.st_mode & stat.S_IXUSR else "100644", source.read()
    except (FileNotFoundError, NotADirectoryError):
        pass
    return None
