"""A small upstream and its fork, in which every test of the loop begins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from forksync.git import decode, environment
from tests.forksync.synthetic import run

CORE = '''\
import os

from lib.text import shout


def greet(name):
    """Greets."""
    return shout("hello " + name)


def area(w, h):
    return w * h


def load(path):
    with open(path) as f:
        return f.read()
'''
TEXT = 'def shout(text):\n    return text.upper() + "!"\n'
CONFIG = """\
[upstream]
url = "../upstream"
base = "v1"

[[measure]]
name = "works"
command = "python3 -c 'from own.core import area; assert area(2, 3) == 6'"
"""
TABLE = """\
[[rule]]
name = "package"
kind = "package"
from = "lib"
to = "own"
examples = [{ before = "import lib.a", after = "import own.a" }, { path = "lib/a.py", becomes = "own/a.py" }]

[[rule]]
name = "ci"
kind = "drop"
paths = ["ci/**"]
at_least = 0
examples = [{ path = "ci/run.sh", becomes = "" }]
"""
WHO = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org")


class Pair:
    """``upstream`` and ``fork`` below a folder; the fork's branch is checked out and has one signed divergence."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.upstream, self.fork = folder, folder / "upstream", folder / "fork"
        self.work = self.fork / ".git" / "forksync" / "work" / "sync"

    @classmethod
    def make(cls, folder: Path) -> Pair:
        self = cls(folder)
        for repository in (self.upstream, self.fork):
            repository.mkdir(parents=True)
            self.git(repository, "init", "-q", "-b", "main")
        self.release(
            "v1", {"lib/__init__.py": "", "lib/core.py": CORE, "lib/text.py": TEXT, "README": "tool\n\nfor all\n"}
        )
        self.put(self.fork, {"forksync.toml": CONFIG, "forksync/table.toml": TABLE})
        files = {"own/__init__.py": "", "own/core.py": CORE.replace("lib.", "own."), "own/text.py": TEXT}
        self.commit(self.fork, {**files, "README": "tool\n\nfor all\n"}, "derive")
        self.git(self.fork, "fetch", "-q", "../upstream", "+refs/tags/*:refs/forksync/upstream/tags/*")
        self.diverge({"own/text.py": TEXT.replace('"!"', '"!!!"')}, "louder")
        return self

    def copy(self, folder: Path) -> Pair:
        shutil.copytree(self.folder, folder, symlinks=True)
        return Pair(folder)

    def git(self, repository: Path, *words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(repository), *WHO, *words], capture_output=True, check=True, timeout=60, env=environment()
        )
        return decode(done.stdout)

    def put(self, repository: Path, files: dict[str, str | None]) -> None:
        for path, text in files.items():
            target = repository / path
            if text is None:
                target.unlink()
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode())

    def commit(self, repository: Path, files: dict[str, str | None], message: str) -> str:
        self.put(repository, files)
        self.git(repository, "add", "-A")
        self.git(repository, "commit", "-qm", message)
        return self.tip(repository)

    def release(self, tag: str, files: dict[str, str | None], message: str = "") -> str:
        commit = self.commit(self.upstream, files, message or f"release {tag}")
        self.git(self.upstream, "tag", tag)
        return commit

    def diverge(self, files: dict[str, str | None], reason: str, *words: str) -> None:
        """Changes of the fork, signed and committed."""
        self.put(self.fork, files)
        assert self.run("sign", "--all", "--reason", reason, "--author", "Ann", *words)[0] == 0
        self.commit(self.fork, {}, reason)

    def tip(self, repository: Path, ref: str = "HEAD") -> str:
        return self.git(repository, "rev-parse", ref).strip()

    def run(self, *words: str) -> tuple[int, str]:
        return run("--repo", str(self.fork), *words)

    def there(self, *words: str) -> tuple[int, str]:
        """A command in the stopped sync's worktree."""
        return run("--repo", str(self.work), *words)

    def read(self, path: str) -> str:
        return (self.fork / path).read_bytes().decode()

    def configure(self, more: str) -> None:
        self.commit(self.fork, {"forksync.toml": self.read("forksync.toml") + more}, "configure")
