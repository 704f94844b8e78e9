"""Random upstreams and forks, and syncs of them that are killed at random.

``python -m tests.forksync.synthetic --syncs 300 --folder FOLDER`` runs many.

A world is two repositories. The upstream's history has edits, additions, deletions, renames of files and folders, modes,
binary files, symlinks, submodules, CRLF and bytes that are no UTF-8; the fork translates the package's name and changes
things of its own. Whatever happens, a sync has landed with both gates true, or it has stopped and nothing of the user's
has moved.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forksync import state
from forksync.cli import main
from forksync.fork import checkout_of, sync_folder
from forksync.git import Entry, Repository, decode
from forksync.history import load
from forksync.ledger import CONFLICT, NOT_NEEDED, ledgers
from forksync.project import open_project
from tests.forksync import repos

Files = dict[str, tuple[str, bytes]]
"""Path → (mode, content); of a submodule the content is the id of its commit."""

CONFIG = """\
[upstream]
url = "../upstream"
base = "v0"

[[measure]]
name = "no markers"
command = "! grep -rIlE '^(<<<<<<<|>>>>>>>) ' --exclude-dir=.git . && {check}"
{more}
"""
TABLE = """\
[[rule]]
name = "package"
kind = "package"
from = "lib"
to = "own"
at_least = 0
places = ["names", "imports", "literals", "strings", "comments"]
examples = [{ before = "import lib.a", after = "import own.a" }, { path = "lib/a.py", becomes = "own/a.py" }]

[[rule]]
name = "ci"
kind = "drop"
paths = ["ci/**"]
examples = [{ path = "ci/run.sh", becomes = "" }]
"""
FIXER = """\
import pathlib, subprocess, sys
side = sys.argv[1]
for path in pathlib.Path(".").rglob("*"):
    if ".git" in path.parts or path.is_symlink() or not path.is_file():
        continue
    data = path.read_bytes()
    lines, out, where = data.split(b"\\n"), [], "all"
    for line in lines:
        mark = line.rstrip(b"\\r")
        if mark.startswith(b"<<<<<<< "): where = "fork"
        elif mark.startswith(b"||||||| "): where = "base"
        elif mark == b"=======" and where == "base": where = "upstream"
        elif mark.startswith(b">>>>>>> ") and where == "upstream": where = "all"
        elif where in ("all", side): out.append(line)
    if b"\\n".join(out) != data:
        path.write_bytes(b"\\n".join(out))
unmerged = subprocess.run(["git", "ls-files", "-u", "-z"], capture_output=True).stdout.split(b"\\0")[:-1]
for path, one in {one.partition(b"\\t")[2]: one for one in unmerged}.items():
    if one.startswith(b"160000"):
        info = b"160000," + one.split(b" ")[1] + b"," + path
        subprocess.run(["git", "update-index", "--cacheinfo", info], check=True)
    else:
        subprocess.run(["git", "add", "-A", "--", path], check=True)
"""


@dataclass
class World:
    """One upstream and its fork in a folder, driven by one seed."""

    folder: Path
    seed: int
    random: random.Random = field(init=False)
    files: Files = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.upstream = repos.new(self.folder / "upstream")
        self.fork = repos.new(self.folder / "fork")
        for number in range(self.random.randint(4, 9)):
            self.files[f"lib/m{number}.py"] = ("100644", self.module(number))
        self.files |= {
            "lib/__init__.py": ("100644", b""),
            "lib/sub/deep.py": ("100644", self.module(90)),
            "lib/sub/more.py": ("100644", self.module(91)),
            "ci/run.sh": ("100755", b"#!/bin/sh\ntrue\n"),
            "tools/run.sh": ("100755", b"#!/bin/sh\npython -m lib\n"),
            "docs/notes.txt": ("100644", b"".join(b"note %d\r\n" % n for n in range(12))),
            "docs/latin.txt": ("100644", b"caf\xe9\nna\xefve\n" * 4),
            "data/logo.bin": ("100644", bytes(self.random.randbytes(64)) + b"\0"),
            "docs/link": ("120000", b"notes.txt"),
            "vendor/other": ("160000", b"1" * 40),
            "README": ("100644", b"lib\n\n" + b"".join(b"line %d\n" % n for n in range(10))),
        }
        self.tag()

    def module(self, number: int) -> bytes:
        parts = ["import os", f"import lib.m{number % 4}", ""]
        for at in range(self.random.randint(2, 6)):
            parts += ["", f"def f{at}(a, b):", f'    """Does {number}."""', *self.body(), f"    return a + {at}", ""]
        return "\n".join(parts).encode()

    def body(self) -> list[str]:
        return [
            f"    x{self.random.randint(0, 9)} = a * {self.random.randint(0, 99)}"
            for _ in range(self.random.randint(1, 4))
        ]

    def tag(self) -> None:
        """Commits the upstream's files as version ``count``."""
        identity = commit(self.upstream, self.files, f"version {self.count}")
        self.upstream.set_ref(f"refs/tags/v{self.count}", identity)
        self.count += 1

    def evolve(self, files: Files, changes: int, own: bool = False) -> None:
        """Random changes to files, in place. ``own``: such as a fork makes."""
        for _ in range(changes):
            operation = self.random.choice(
                [edit, edit, edit, edit, add, remove, rename, mode, rare, move_folder, reformat]
            )
            if own and operation in (move_folder, rename) and self.random.random() < 0.8:
                operation = edit
            operation(self, files, "own" if own else "lib")

    def release(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            self.evolve(self.files, self.random.randint(1, 4))
            commit(self.upstream, self.files, f"change {self.random.randint(0, 999)}")
        self.tag()

    # --- the fork

    def derive(self) -> None:
        """The fork's first state: the translation of v0, with signed changes of its own; checked out."""
        texts = {"forksync.toml": CONFIG.format(check="true", more=self.more()), "forksync/table.toml": TABLE}
        fixer = self.folder / "fixer.py"
        fixer.write_text(FIXER)
        files: Files = {path: ("100644", text.encode()) for path, text in texts.items()}
        commit(self.fork, files, "begin")
        self.git("reset", "-q", "--hard")
        open_project(self.fork.path).fetch()
        assert self.run("mirror", "--to", "v0") in (0, 1)
        mirrored = read(self.fork, "forksync/mirror")
        commit(self.fork, files | mirrored, "derive")
        self.git("reset", "-q", "--hard")
        self.diverge(8)

    def more(self) -> str:
        side = self.random.choice(["fork", "upstream", "nobody"])
        sign = f"{sys.executable} -m forksync sign --all --reason decided --author fixer"
        fixer = f"{sys.executable} {self.folder}/fixer.py {side} && {sign} || true"
        fixing = f"[fixer]\ncommand = '{fixer}'\ntries = 2\n" if self.random.random() < 0.5 else ""
        resolve = (
            '[[resolve]]\npaths = ["docs/**"]\ntake = "both"\nreason = "notes"\n' if self.random.random() < 0.3 else ""
        )
        return f"{fixing}\n{resolve}"

    def diverge(self, changes: int) -> None:
        """The fork's own changes, signed and committed."""
        files = {p: v for p, v in read(self.fork, "main").items() if not p.startswith("forksync")}
        kept = {p: v for p, v in read(self.fork, "main").items() if p.startswith("forksync")}
        self.evolve(files, changes, own=True)
        commit(self.fork, files | kept, "diverge")
        self.git("reset", "-q", "--hard")
        if self.run("diff") == 1:
            conflict = self.random.choice(["ask", "ask", "fork", "upstream"])
            words = ("--reason", f"seed {self.seed}", "--author", "Ann", "--conflict", conflict)
            assert self.run("sign", "--all", *words) == 0
            self.git("add", "-A")
            self.git("-c", "user.name=Ann", "-c", "user.email=a@b", "commit", "-qm", "sign")
        assert self.run("diff") == 0

    def git(self, *words: str) -> str:
        return git(self.fork.path, *words)

    def run(self, *words: str) -> int:
        return run("--repo", str(self.fork.path), *words)[0]


def commit(repository: Repository, files: Files, message: str) -> str:
    blobs = repository.write_blobs([data for _, data in files.values()])
    entries = [
        Entry(mode, data.decode() if mode == "160000" else blob, path)
        for (path, (mode, data)), blob in zip(files.items(), blobs, strict=True)
    ]
    parents = [repository.commit_id("refs/heads/main")] if repository.has("refs/heads/main") else []
    made = repository.write_commit(repository.write_tree(entries), parents, f"{message}\n", "1700000000 +0000")
    repository.set_ref("refs/heads/main", made)
    return made


def read(repository: Repository, ref: str) -> Files:
    entries = repository.entries(ref)
    blobs = repository.blobs(entry.id for entry in entries if entry.mode != "160000")
    return {e.path: (e.mode, blobs.get(e.id, e.id.encode())) for e in entries}


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=True, timeout=120)
    return decode(done.stdout)


def run(*words: str) -> tuple[int, str]:
    """A command of forksync in this process; its exit code and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(words)
    return code, printed.getvalue()


# --- what may happen to a file


def texts(files: Files) -> list[str]:
    return [path for path, (mode, data) in files.items() if mode.startswith("100") and b"\0" not in data]


def edit(world: World, files: Files, package: str) -> None:
    """Lines put in, taken away and replaced, with the file's own line endings."""
    path = world.random.choice(texts(files))
    mode_, data = files[path]
    end = b"\r\n" if b"\r\n" in data else b"\n"
    lines = data.split(end)
    for _ in range(world.random.randint(1, 3)):
        at = world.random.randrange(len(lines))
        fresh = [line.encode() for line in world.body()]
        kind = world.random.choice(["in", "out", "for"])
        lines[at : at + (kind != "in") * world.random.randint(1, 3)] = [] if kind == "out" else fresh
        lines = lines or [b""]
    files[path] = (mode_, end.join(lines))


def reformat(world: World, files: Files, package: str) -> None:
    """Blank lines, or line endings."""
    path = world.random.choice(texts(files))
    mode_, data = files[path]
    if world.random.random() < 0.2:
        files[path] = (mode_, data.replace(b"\r\n", b"\n") if b"\r\n" in data else data.replace(b"\n", b"\r\n"))
    else:
        files[path] = (mode_, data.replace(b"\n\n", b"\n\n\n", 1))


def add(world: World, files: Files, package: str) -> None:
    folder = world.random.choice([package, f"{package}/sub", "docs", "new"])
    path = f"{folder}/n{world.random.randint(0, 30)}.{world.random.choice(['py', 'txt'])}"
    if free(files, path):
        files[path] = ("100644", world.module(world.random.randint(0, 99)))


def free(files: Files, path: str) -> bool:
    """Whether nothing lies at, above or below a path."""
    above = {str(parent) for parent in Path(path).parents}
    return path not in files and not any(other in above or other.startswith(f"{path}/") for other in files)


def remove(world: World, files: Files, package: str) -> None:
    if len(files) > 8:
        del files[world.random.choice(sorted(files))]


def rename(world: World, files: Files, package: str) -> None:
    old = world.random.choice(sorted(files))
    new = f"{world.random.choice([package, 'docs', f'{package}/sub'])}/r{world.random.randint(0, 40)}{Path(old).suffix}"
    if free(files, new):
        files[new] = files.pop(old)


def move_folder(world: World, files: Files, package: str) -> None:
    old = world.random.choice(sorted({str(Path(path).parent) for path in files} - {"."}))
    new = f"{package}/moved{world.random.randint(0, 9)}"
    for path in [one for one in files if one.startswith(f"{old}/")]:
        target = f"{new}/{path.removeprefix(f'{old}/')}"
        if free(files, target):
            files[target] = files.pop(path)


def mode(world: World, files: Files, package: str) -> None:
    path = world.random.choice(texts(files))
    old, data = files[path]
    files[path] = ("100755" if old == "100644" else "100644", data)


def rare(world: World, files: Files, package: str) -> None:
    """Binary files, links, submodules, other encodings, changes of type."""
    what = world.random.choice(["binary", "link", "submodule", "latin", "type", "empty"])
    fresh = bytes(world.random.randbytes(8)).hex().encode()
    path = {"binary": "data/logo.bin", "link": "docs/link", "submodule": "vendor/other", "latin": "docs/latin.txt"}.get(
        what
    )
    if path is None:
        path = world.random.choice(texts(files))
        files[path] = ("120000", b"../README") if what == "type" else (files[path][0], b"")
    elif path in files or free(files, path):
        made = {
            "binary": b"\0" + fresh,
            "link": fresh,
            "submodule": hashlib.sha1(fresh).hexdigest().encode(),
            "latin": b"\xff\xfe " + fresh + b"\n" + b"caf\xe9\n" * 6,
        }
        kinds = {"link": "120000", "submodule": "160000"}
        files[path] = (kinds.get(what, "100644"), made[what])


# --- one sync, with kills and a person


def sync(world: World, target: str, kills: bool) -> str:
    """Takes the fork to a version however often it is killed; how it ended. Checks what must hold after every step."""
    person = world.random.choice(["fork", "upstream"])
    before = world.fork.commit_id("refs/heads/main")
    for number in range(12):
        if kills and world.random.random() < 0.6:
            killed(world, target)
            check_intact(world, before)
        code, said = waited("--repo", str(world.fork.path), "sync", "--to", target)
        if code == 0:
            check_landed(world, before, target)
            return "automatic" if number == 0 else "with a person"
        assert code == 1, f"seed {world.seed}, to {target}: {code}: {said}"
        check_intact(world, before)
        if number == 4:
            assert world.run("sync", "--abandon") == 0
            check_intact(world, before)
            assert not state.load(world.fork)
            return "given up"
        decide(world, person)
    raise AssertionError(f"seed {world.seed}, to {target}: no end: {said}")


def decide(world: World, side: str) -> None:
    """A person who takes one side of everything and signs it."""
    folder = sync_folder(world.fork)
    subprocess.run([sys.executable, str(world.folder / "fixer.py"), side], cwd=folder, check=True, timeout=60)
    run("--repo", str(folder), "sign", "--all", "--reason", "decided", "--author", "person")


def waited(*words: str) -> tuple[int, str]:
    """A command; again while one that a killed forksync had started still holds the lock."""
    for _ in range(600):
        code, said = run(*words)
        if "another forksync" not in said:
            break
        time.sleep(0.1)
    return code, said


def killed(world: World, target: str) -> None:
    """A sync in a process group of its own, killed after a random time."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            code = main(["--repo", str(world.fork.path), "sync", "--to", target])
        os._exit(code)
    time.sleep(world.random.expovariate(1 / 0.8))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def check_intact(world: World, before: str) -> None:
    """The fork's branch is where it was, or at the finished merge; its checkout is clean unless that move was cut off."""
    tip = world.fork.commit_id("refs/heads/main")
    now = state.load(world.fork)
    if tip != before:
        assert world.fork.text("log", "-1", "--format=%P", tip).split()[0] == before, f"seed {world.seed}"
        return
    if not (now and now.moving):
        assert not world.git("status", "--porcelain"), f"seed {world.seed}: {world.git('status', '--porcelain')}"


def check_landed(world: World, before: str, target: str) -> None:
    """Both gates are true by forksync's word, and by a plain comparison of trees every difference is in the history."""
    tip = world.fork.commit_id("refs/heads/main")
    assert not state.load(world.fork)
    assert not world.git("status", "--porcelain"), f"seed {world.seed}: {world.git('status', '--porcelain')}"
    assert world.run("diff") == 0
    if tip == before:
        return
    assert world.fork.text("log", "-1", "--format=%P", tip).split()[0] == before
    mirrored = world.fork.text("log", "-1", "--format=%P", tip).split()[1]
    ours, theirs = read(world.fork, tip), read(world.fork, mirrored)
    check_nothing_lost(world, tip, ours, theirs)
    signed = {hunk.path for entry in load(world.fork.path / "forksync/history.toml").entry for hunk in entry.hunks}
    renamed = {line.removeprefix("-") for e in load(world.fork.path / "forksync/history.toml").entry for h in e.hunks
               if h.kind == "renamed" for line in h.diff.splitlines() if line.startswith("-")}  # fmt: skip
    for path in sorted({*ours, *theirs}):
        if path.startswith("forksync") or ours.get(path) == theirs.get(path) or path in signed | renamed:
            continue
        assert path in ours and path in theirs, f"seed {world.seed}: {path} differs and nobody signed it"
        plain = [[line.strip() for line in side[1].splitlines() if line.strip()] for side in (ours[path], theirs[path])]
        assert plain[0] == plain[1], f"seed {world.seed}: {path} differs and nobody signed it"
        assert ours[path][0] == theirs[path][0], f"seed {world.seed}: mode of {path}"
    assert checkout_of(world.fork, "main") is not None
    for path, (mode_, _) in ours.items():
        status = os.lstat(os.fsencode(str(world.fork.path / path)))
        assert mode_ == "160000" or bool(status.st_mode & stat.S_IXUSR) == (mode_ == "100755") or mode_ == "120000"


def check_nothing_lost(world: World, tip: str, ours: Files, theirs: Files) -> None:
    """Every line that the upstream put in is in the fork, or the ledger says why it is not."""
    told = ledgers(open_project(world.fork.path), tip)[-1]
    older = read(world.fork, world.fork.text("rev-parse", f"{tip}^2~{len(told['commits'])}"))
    fates = [fate for one in told["commits"] for fate in one["fates"]]
    excused = {path for fate in fates if fate["fate"] in (NOT_NEEDED, CONFLICT) for path in fate["paths"]}
    lines = {line.strip() for one in told["commits"] for lost in one["not_taken"] for line in lost["lines"]}
    everywhere = sum((words(data) for _, data in ours.values()), Counter[str]())
    before = sum((words(data) for _, data in older.values()), Counter[str]())
    for path, (mode_, data) in theirs.items():
        if not mode_.startswith("100") or b"\0" in data or path in excused:
            continue
        fresh = words(data) - (words(older[path][1]) if path in older else before)
        lost = set(fresh - (words(ours[path][1]) if path in ours else everywhere)) - lines
        assert not lost, f"seed {world.seed}: {path}: the ledger says nothing of {lost}"


def words(data: bytes) -> Counter[str]:
    return Counter(line.strip() for line in decode(data).split("\n") if line.strip())


def run_world(folder: Path, seed: int, syncs: int, kills: bool) -> Counter[str]:
    world = World(folder, seed)
    world.derive()
    ends: Counter[str] = Counter()
    for _ in range(syncs):
        world.release()
        if world.random.random() < 0.5:
            world.release()
        end = sync(world, f"v{world.count - 1}", kills)
        ends[end] += 1
        if world.random.random() < 0.5:
            world.diverge(2)
    return ends


def cli() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--syncs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--no-kills", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    arguments: Any = parser.parse_args()
    total: Counter[str] = Counter()
    seed = arguments.first
    while sum(total.values()) < arguments.syncs:
        total += run_world(arguments.folder / str(seed), seed, 5, not arguments.no_kills)
        print(seed, dict(total), flush=True)
        subprocess.run(["rm", "-rf", str(arguments.folder / str(seed))], check=True, timeout=60)
        seed += 1


if __name__ == "__main__":
    cli()
