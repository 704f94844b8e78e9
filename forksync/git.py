"""Git by its command line: objects in, objects out. Nothing here touches a working tree or the user's index.

Every call runs in a fixed environment: what a user's configuration or locale says must not change a result.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forksync.errors import ForksyncError

DEADLINE_S = 600.0
"""Of one git command. The longest are a first fetch and the reading of all blobs of a large tree."""

IDENTITY = {"name": "forksync", "email": "forksync@localhost"}
"""Author and committer of what forksync writes: fixed, so that equal content gives equal commit ids."""

FIXED = (
    "core.autocrlf=false",
    "core.quotePath=false",
    "core.fsmonitor=false",
    "core.useReplaceRefs=false",
    "i18n.commitEncoding=UTF-8",
    "gc.auto=0",
    "advice.detachedHead=false",
)
INHERITED_GIT = ("GIT_SSH", "GIT_SSH_COMMAND", "GIT_ASKPASS", "GIT_EXEC_PATH", "GIT_CEILING_DIRECTORIES")
"""What of the caller's GIT_* variables stays: how to reach a remote. GIT_DIR and the like, which a hook sets, do not."""


class GitError(ForksyncError):
    """git refused; the message has the command and git's own words."""


@dataclass(frozen=True)
class Entry:
    """One leaf of a tree. ``mode`` is 100644, 100755, 120000 (symlink) or 160000 (submodule)."""

    mode: str
    id: str
    path: str

    @property
    def is_file(self) -> bool:
        return self.mode in ("100644", "100755")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k in INHERITED_GIT}
    fixed = {
        "LC_ALL": "C",
        "TZ": "UTC",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
    }
    return {**kept, **fixed, **(extra or {})}


def decode(raw: bytes) -> str:
    """Any bytes as text, and back with ``encode`` to the same bytes."""
    return raw.decode("utf-8", "surrogateescape")


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Repository:
    """A Git repository, bare or not; ``path`` is any folder in it."""

    path: Path

    def run(
        self,
        *words: str,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        ok: Sequence[int] = (0,),
        deadline: float = DEADLINE_S,
    ) -> subprocess.CompletedProcess[bytes]:
        """One git command. Raises GitError for an exit code that is not in ``ok`` and past the deadline (seconds)."""
        command = ["git", *(part for pair in FIXED for part in ("-c", pair)), *words]
        shown = f"git {' '.join(words)}"
        try:
            done = subprocess.run(
                command,
                cwd=self.path,
                env=environment(env),
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                timeout=deadline,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise GitError(f"{shown}: no answer within {deadline:.0f} s") from late
        except FileNotFoundError as missing:
            raise GitError(f"{missing.filename} does not exist: {shown} cannot run") from missing
        if done.returncode not in ok:
            said = decode(done.stderr).strip() or decode(done.stdout).strip()
            raise GitError(f"{shown} in {self.path} failed ({done.returncode}): {said}")
        return done

    def text(self, *words: str, **options: object) -> str:
        """What the command prints, without the last newline."""
        return decode(self.run(*words, **options).stdout).rstrip("\n")  # type: ignore[arg-type]

    # --- names

    def commit_id(self, ref: str) -> str:
        """The full id of the commit that ``ref`` names; GitError if there is none."""
        found = self.run("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}", ok=(0, 1, 128))
        if found.returncode:
            raise GitError(f"{ref!r} names no commit in {self.path}; see git -C {self.path} branch -a and git tag")
        return decode(found.stdout).strip()

    def has(self, name: str) -> bool:
        """Whether the repository has the object that ``name`` (a ref, an id) stands for."""
        return not self.run("cat-file", "-e", name, ok=(0, 1, 128)).returncode

    def common_dir(self) -> Path:
        """Where the repository keeps what all its worktrees share."""
        return (self.path / self.text("rev-parse", "--git-common-dir")).resolve()

    def is_ancestor(self, old: str, new: str) -> bool:
        return not self.run("merge-base", "--is-ancestor", old, new, ok=(0, 1)).returncode

    def set_ref(self, ref: str, commit: str, old: str | None = None) -> None:
        """Moves a ref; with ``old`` only if it still stands there (forty zeros: only if it does not exist)."""
        self.run("update-ref", ref, commit, *([old] if old is not None else []))

    def delete_ref(self, ref: str) -> None:
        self.run("update-ref", "-d", ref)

    # --- reading

    def entries(self, treeish: str) -> list[Entry]:
        """Every leaf of a tree, in git's order of paths."""
        found = []
        for line in self.run("ls-tree", "-r", "-z", "--full-tree", treeish).stdout.split(b"\0")[:-1]:
            fields, _, path = line.partition(b"\t")
            mode, _, identity = fields.decode().split(" ")
            found.append(Entry(mode, identity, decode(path)))
        return found

    def blobs(self, identities: Iterable[str]) -> dict[str, bytes]:
        """The content of every blob, by id. GitError for one that the repository lacks."""
        wanted = list(dict.fromkeys(identities))
        raw = self.run("cat-file", "--batch", stdin="".join(f"{i}\n" for i in wanted).encode()).stdout
        found, at = {}, 0
        for identity in wanted:
            end = raw.index(b"\n", at)
            header = raw[at:end].split(b" ")
            if header[-1] == b"missing":
                raise GitError(f"object {identity} is missing from {self.path}; fetch it, or repair with git fsck")
            size = int(header[2])
            found[identity] = raw[end + 1 : end + 1 + size]
            at = end + 1 + size + 1
        return found

    def present(self, identities: Iterable[str]) -> set[str]:
        """Those of the ids whose objects the repository has."""
        wanted = list(dict.fromkeys(identities))
        said = self.run("cat-file", "--batch-check=%(objectname)", stdin="".join(f"{i}\n" for i in wanted).encode())
        return {line for line in decode(said.stdout).splitlines() if not line.endswith(" missing")}

    # --- writing

    def write_blobs(self, contents: Sequence[bytes]) -> list[str]:
        """Stores blobs, all in one pass; their ids in the same order."""
        if not contents:
            return []
        with tempfile.TemporaryDirectory(prefix="forksync-") as folder:
            marks = Path(folder) / "marks"
            stream = b"".join(
                b"blob\nmark :%d\ndata %d\n%b\n" % (n, len(content), content) for n, content in enumerate(contents, 1)
            )
            self.run("fast-import", "--quiet", f"--export-marks={marks}", stdin=stream)
            by_mark = dict(line.split(" ") for line in marks.read_text().splitlines())
        return [by_mark[f":{n}"] for n in range(1, len(contents) + 1)]

    def write_tree(self, entries: Iterable[Entry]) -> str:
        """The id of the tree with these leaves. No two may lie at one path, none below another."""
        with tempfile.TemporaryDirectory(prefix="forksync-") as folder:
            env = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
            lines = b"".join(b"%b %b\t%b\0" % (e.mode.encode(), e.id.encode(), encode(e.path)) for e in entries)
            self.run("read-tree", "--empty", env=env)
            self.run("update-index", "-z", "--index-info", stdin=lines, env=env)
            return self.text("write-tree", env=env)

    def write_commit(self, tree: str, parents: Sequence[str], message: str, date: str) -> str:
        """The id of a new commit by forksync itself. ``date`` as git takes it, e.g. ``@1700000000 +0000``."""
        who = {
            f"GIT_{role}_{part}": IDENTITY[part.lower()]
            for role in ("AUTHOR", "COMMITTER")
            for part in ("NAME", "EMAIL")
        }
        env = {**who, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        before = [word for parent in parents for word in ("-p", parent)]
        return self.text("commit-tree", tree, *before, stdin=encode(message), env=env)


def open_repository(folder: Path) -> Repository:
    """The repository that ``folder`` lies in, at its top. GitError if it lies in none."""
    if not folder.is_dir():
        raise GitError(f"{folder} is no folder; name one in a Git repository")
    inside = Repository(folder)
    top = inside.run("rev-parse", "--show-toplevel", ok=(0, 128))
    if top.returncode == 0:
        return Repository(Path(decode(top.stdout).rstrip("\n")))
    bare = inside.run("rev-parse", "--git-dir", ok=(0, 128))
    if bare.returncode:
        raise GitError(f"{folder} is in no Git repository; run forksync in the fork's checkout, or give it with --repo")
    return Repository((folder / decode(bare.stdout).rstrip("\n")).resolve())
