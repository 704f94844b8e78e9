"""A fork of a real upstream is made and follows it for 23 releases; the same releases are merged by plain git beside it.

The upstream is Starlette 0.44.0, its releases from the package index as one commit each. The fork is Nebula (the folder beside
this file): another name of package and class, threads and files by another backend, 32 divergences that are signed off. Writes
``summary.json``. Run by ``make forksync-proof``; a second run takes the releases that are there already.

    python examples/forksync/proof.py runs/forksync
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from forksync import table
from forksync.git import Entry, Repository
from forksync.mirror import mirror

HERE = Path(__file__).parent / "nebula"
PROJECT, BASE = "starlette", "0.44.0"
RELEASES = (HERE / "releases.txt").read_text().split()
DATE = "@1700000000 +0000"
AUTHOR = "Nebula's authors <nebula@localhost>"
DEADLINE_S = 900


def download(folder: Path) -> None:
    """The releases' source archives, those that are not there yet, by pip and whatever index it is set up with."""
    folder.mkdir(parents=True, exist_ok=True)
    for release in (BASE, *RELEASES):
        if not (folder / f"{PROJECT}-{release}.tar.gz").exists():
            words = ["download", "-q", "--no-deps", "--no-binary", PROJECT, "-d", str(folder), f"{PROJECT}=={release}"]
            subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=DEADLINE_S)


def python_of_nebula(folder: Path) -> str:
    """An interpreter with what the upstream's tests need."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=DEADLINE_S)
    words = ["install", "-q", "--no-compile", "-r", str(HERE / "requirements.txt")]
    subprocess.run([str(python), "-m", "pip", *words], check=True, timeout=DEADLINE_S)
    return str(python.absolute())


def new_repository(folder: Path) -> Repository:
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "init", "-q", "-b", "main", str(folder)], check=True, timeout=60)
    repository = Repository(folder)
    for key, value in (("user.name", "Nebula's authors"), ("user.email", "nebula@localhost")):
        repository.run("config", key, value)
    return repository


def commit(repository: Repository, tree: str, parents: list[str], message: str, branch: str = "main") -> str:
    made = repository.write_commit(tree, parents, message + "\n", DATE)
    repository.set_ref(f"refs/heads/{branch}", made)
    return made


def make_upstream(folder: Path, archives: Path) -> Repository:
    """One commit and one tag for each release."""
    repository, before = new_repository(folder), list[str]()
    for release in (BASE, *RELEASES):
        with tarfile.open(archives / f"{PROJECT}-{release}.tar.gz") as archive:
            members = [member for member in archive.getmembers() if member.isfile()]
            contents = [file.read() for member in members if (file := archive.extractfile(member))]
        blobs = repository.write_blobs(contents)
        modes = ["100755" if member.mode & 0o100 else "100644" for member in members]
        paths = [member.name.partition("/")[2] for member in members]
        tree = repository.write_tree(Entry(*leaf) for leaf in zip(modes, blobs, paths, strict=True))
        before = [commit(repository, tree, before, f"{PROJECT} {release}")]
        repository.set_ref(f"refs/tags/{release}", before[0])
    return repository


def forksync(fork: Path, *words: str, python: str = "") -> tuple[int, str]:
    """One command on the fork; its exit code and what it printed."""
    env = {**os.environ, "NEBULA_PYTHON": python}
    command = [sys.executable, "-m", "forksync", "--repo", str(fork), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout + done.stderr


def edited(fork: Path, edit: dict[str, str]) -> None:
    """Applies one edit of ``divergences.toml`` to the fork's files."""
    path = fork / edit["path"]
    if "new" not in edit:
        path.unlink()
        return
    new = (HERE / edit["new"][1:]).read_text() if edit["new"].startswith("@") else edit["new"]
    text = path.read_text() if path.exists() else ""
    if "old" in edit and edit["old"] not in text:
        raise SystemExit(f"{edit['path']} has no {edit['old']!r}")
    path.write_text(text.replace(edit["old"], new) if "old" in edit else new)


def make_fork(folder: Path, upstream: Repository) -> int:
    """Nebula as it was when it was forked: the translated base, and each divergence committed and signed. How many there are."""
    repository = new_repository(folder)
    repository.run("fetch", "-q", str(upstream.path.absolute()), "refs/tags/*:refs/forksync/upstream/tags/*")
    translated = mirror(repository, f"refs/forksync/upstream/tags/{BASE}", table.load(HERE / "table.toml"))
    commit(repository, translated.tree, [], f"{PROJECT} {BASE} as Nebula")
    repository.run("reset", "-q", "--hard")
    (folder / "forksync").mkdir()
    shutil.copy(HERE / "table.toml", folder / "forksync" / "table.toml")
    shutil.copy(HERE / "forksync.toml", folder)
    divergences = tomllib.loads((HERE / "divergences.toml").read_text())["divergence"]
    for one in divergences:
        for edit in one["edit"]:
            edited(folder, edit)
        sign(folder, one)
        repository.run("add", "--all")
        repository.run(
            "commit",
            "-q",
            "-m",
            f"{one['id']}: {one['reason']}",
            env={"GIT_AUTHOR_DATE": DATE, "GIT_COMMITTER_DATE": DATE},
        )
    return len(divergences)


def sign(fork: Path, one: dict[str, Any]) -> None:
    """Signs a divergence off: whole files as the fork's own by an entry in the history, all else by ``forksync sign``."""
    if owned := one.get("owns"):
        history = fork / "forksync" / "history.toml"
        entry = {
            "id": one["id"],
            "reason": one["reason"],
            "author": AUTHOR,
            "date": "2026-01-01",
            "conflict": "fork",
            "paths": owned,
        }
        lines = [f"{key} = {value if key == 'date' else json.dumps(value)}" for key, value in entry.items()]
        with history.open("a") as file:
            file.write("\n".join(["[[entry]]", *lines]) + "\n\n")
        return
    words = ["sign", "--all", "--entry", one["id"], "--reason", one["reason"], "--author", AUTHOR]
    code, said = forksync(fork, *words, "--conflict", one.get("conflict", "ask"))
    if code:
        raise SystemExit(f"{one['id']} cannot be signed: {said}")


CONFLICT = re.compile(
    r"<<<<<<< fork\n(?P<fork>.*?)\|{7} [^\n]*\n.*?=======\n(?P<upstream>.*?)>>>>>>> upstream\n", re.DOTALL
)


def follow(fork: Path, python: str) -> list[dict[str, Any]]:
    """Syncs the fork to one release after the other; what each took. A stop is resolved as ``resolutions.toml`` has it."""
    resolutions = tomllib.loads((HERE / "resolutions.toml").read_text())
    found = []
    for release in RELEASES:
        started, false_alarms = time.monotonic(), 0
        code, said = forksync(fork, "sync", "--no-fetch", "--to", release, python=python)
        if code:
            if release not in resolutions:
                raise SystemExit(f"{said}\n{release}: no resolution is known")
            false_alarms = resolve(fork, release, resolutions[release], python)
        seconds = time.monotonic() - started
        decided = [conflict["by"] for conflict in ledger(fork, release)["conflicts"]]
        step = {
            "release": release,
            "automatic": code == 0,
            "conflicts": decided.count("person"),
            "decided_by_rule": len(decided) - decided.count("person"),
            "false_alarms": false_alarms,
            "seconds": round(seconds, 1),
            **({"said": said.splitlines()} if code else {}),
        }
        print(f"{release:8} {'stopped' if code else 'automatic':9} {seconds:6.1f} s", flush=True)
        found.append(step)
    return found


def ledger(fork: Path, release: str) -> dict[str, Any]:
    """What the sync to a release wrote down."""
    told = [json.loads(path.read_text()) for path in (fork / "forksync" / "ledger").glob("*.json")]
    return next(one for one in told if one["target"] == release)


def resolve(fork: Path, release: str, resolution: dict[str, Any], python: str) -> int:
    """Does what a person decided. A false alarm, 1, is a stop where nothing was to be done but to sign."""
    folder = fork / ".git" / "forksync" / "work" / "sync"
    for path, side in resolution.get("take", {}).items():
        text = (folder / path).read_text()
        (folder / path).write_text(CONFLICT.sub(rf"\g<{side}>", text))
    for edit in resolution.get("edit", []):
        edited(folder, edit)
    for words in resolution.get("sign", []):
        code, said = forksync(folder, "sign", "--author", AUTHOR, *words)
        if code:
            raise SystemExit(f"{release}: {said}")
    code, said = forksync(fork, "sync", "--no-fetch", python=python)
    if code:
        raise SystemExit(f"{said}\n{release}: stopped again")
    return 0 if {"take", "edit"} & resolution.keys() else 1


OWN = ("forksync.toml", "forksync/")
"""What plain git has no use for."""


def by_hand(folder: Path, upstream: Repository, fork: Repository) -> dict[str, int]:
    """The same releases by ``git merge``, each from a state in which the merge before it was resolved to perfection.

    Counts conflicts (each pair of markers, and each file that git leaves without them); lines that git merged without a word
    into something else than the fork needs, such as the upstream's names; and releases with neither, what the fork dropped aside.
    """
    repository = new_repository(folder)
    for other, refs in ((upstream, "refs/tags/*:refs/tags/*"), (fork, "refs/heads/main:refs/heads/fork")):
        repository.run("fetch", "-q", "--no-tags", str(other.path.absolute()), refs)
    merges = repository.text("log", "--first-parent", "--reverse", "--merges", "--format=%H", "fork").split()
    states = [repository.commit_id(f"{merges[0]}^1"), *merges]
    at = commit(repository, without_own(repository, states[0]), [repository.commit_id(BASE)], "by hand")
    total = Counter[str]()
    for release, state in zip(RELEASES, states[1:], strict=True):
        repository.run("checkout", "-q", "--force", "--detach", at)
        repository.run("-c", "merge.renameLimit=10000", "merge", "-q", "--no-commit", "--no-ff", release, ok=(0, 1))
        right = without_own(repository, state)
        total.update(judged(repository, right))
        repository.run("reset", "-q", "--hard")
        at = commit(repository, right, [at, repository.commit_id(release)], f"by hand {release}")
    return dict(total)


def without_own(repository: Repository, state: str) -> str:
    return repository.write_tree(entry for entry in repository.entries(state) if not entry.path.startswith(OWN))


def judged(repository: Repository, right: str) -> dict[str, int]:
    """What a merge in the worktree left to do, and what it got wrong without saying so."""
    rules = table.load(HERE / "table.toml")
    unmerged = repository.text("diff", "--name-only", "--diff-filter=U").splitlines()
    conflicts, dropped = 0, 0
    for path in unmerged:
        file = repository.path / path
        count = max(1, file.read_bytes().count(b"\n<<<<<<< ") if file.is_file() else 0)
        conflicts += count
        dropped += count if rules.place(path)[0] is None else 0
    wrong = 0
    for line in repository.text("diff", "--cached", "--numstat", "--no-renames", right).splitlines():
        added, removed, path = line.split("\t")
        if path not in unmerged and rules.place(path)[0] is not None and added.isdigit():
            wrong += int(added) + int(removed)
    return {
        "conflicts_plain_merge": conflicts,
        "of_them_in_files_the_fork_dropped": dropped,
        "silently_wrong_lines_plain_merge": wrong,
        "right_plain_merge": int(conflicts == dropped and not wrong),
    }


def main(out: Path) -> None:
    out = out.absolute()
    download(out / "archives")
    python = python_of_nebula(out / "venv")
    upstream = make_upstream(out / "upstream", out / "archives")
    fork = out / "fork"
    divergences = make_fork(fork, upstream)
    print(f"{divergences} divergences of {PROJECT} {BASE} signed off", flush=True)
    steps = follow(fork, python)
    rules = mirror(upstream, RELEASES[-1], table.load(HERE / "table.toml"))
    summary = {
        "releases": len(steps),
        "automatic": sum(step["automatic"] for step in steps),
        "conflicts": sum(step["conflicts"] for step in steps),
        **by_hand(out / "by-hand", upstream, Repository(fork)),
        "false_alarms": sum(step["false_alarms"] for step in steps),
        "seconds": round(sum(step["seconds"] for step in steps), 1),
        "decided_by_rule": sum(step["decided_by_rule"] for step in steps),
        "divergences": divergences,
        "rules": dict(rules.uses),
        "steps": steps,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps({key: value for key, value in summary.items() if key != "steps"}, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
