"""Repositories for tests, made of dictionaries."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forksync.git import Entry, Repository
from forksync.table import Table, parse

NOTHING = {"before": "", "after": ""}
"""The example of a rule whose test is elsewhere."""
DATE = "@1700000000 +0000"


def new(folder: Path) -> Repository:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "init", "-q", "-b", "main", str(folder)], check=True, timeout=60)
    return Repository(folder)


def commit(
    repository: Repository,
    files: Mapping[str, bytes | str],
    branch: str = "main",
    modes: Mapping[str, str] | None = None,
) -> str:
    """Commits exactly these files on a branch; the commit's id."""
    contents = [data.encode() if isinstance(data, str) else data for data in files.values()]
    modes = modes or {}
    blobs = repository.write_blobs(contents)
    entries = [Entry(modes.get(path, "100644"), blob, path) for path, blob in zip(files, blobs, strict=True)]
    ref = f"refs/heads/{branch}"
    parents = [repository.commit_id(ref)] if repository.has(ref) else []
    made = repository.write_commit(repository.write_tree(entries), parents, f"state {len(files)}\n", DATE)
    repository.set_ref(ref, made)
    return made


def files(repository: Repository, ref: str) -> dict[str, bytes]:
    entries = repository.entries(ref)
    blobs = repository.blobs(entry.id for entry in entries if entry.mode != "160000")
    return {entry.path: blobs.get(entry.id, b"") for entry in entries}


def rule(kind: str, **options: Any) -> dict[str, Any]:
    """A rule as a table has it; ``old`` and ``new`` for ``from`` and ``to``."""
    spelled = {{"old": "from", "new": "to"}.get(key, key): value for key, value in options.items()}
    return {"kind": kind, "name": f"{kind} {spelled.get('from', '')}", "examples": [NOTHING], **spelled}


def table(*rules: dict[str, Any]) -> Table:
    return parse(
        {"rule": [{**one, "name": f"{one['name']} {n}"} for n, one in enumerate(rules)]}, "", Path("table.toml")
    )


def translated(table_: Table, text: str, path: str = "a.py") -> str:
    return table_.translate(path, text.encode()).data.decode()
