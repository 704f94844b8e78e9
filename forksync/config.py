"""``forksync.toml``: where the upstream, the fork, the table and the history are."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError

from forksync.errors import ForksyncError
from forksync.measure import Measure
from forksync.section import Section

FILE = "forksync.toml"


class ConfigError(ForksyncError):
    """The configuration cannot be used; one line a fault, each with its file and line."""


class Upstream(Section):
    url: str = "."
    """Where to fetch it from: anything ``git fetch`` takes. ``.`` is the fork's own repository."""
    branch: str = "main"
    """What ``status`` compares with, and where ``sync`` goes without ``--to``."""
    base: str = ""
    """The upstream's commit or tag that the fork was made from; needed until the first sync puts a mirror in the fork's past."""


class Fork(Section):
    branch: str = "main"
    """The branch that is kept aligned."""
    mirror: str = "forksync/mirror"
    """The branch that the mirror is written to. Nobody else may commit there."""


class Resolve(Section):
    """Conflicts in files of a kind that need no thought: a change log, a lock file."""

    paths: tuple[str, ...] = Field(min_length=1)
    """Globs of paths in the fork: ``*`` stays within a folder, ``**`` does not."""
    take: Literal["fork", "upstream", "both"]
    """Whose lines; ``both``: the fork's, then the upstream's."""
    reason: str = Field(min_length=1)
    """For the ledger."""


class Fixer(Section):
    """Any command that edits a worktree: a script, an agent."""

    command: str = ""
    """Runs by ``sh`` in a worktree of the merge; ``$FORKSYNC_BRIEF`` is a JSON file of what is left. Empty: a person is asked."""
    tries: int = Field(default=3, ge=1)
    """How often it may run in one sync."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Of one try."""


class Config(Section):
    upstream: Upstream = Upstream()
    fork: Fork = Fork()
    table: Path = Field(default=Path("forksync/table.toml"))
    """Translation rules; relative to the configuration's folder, as the next one."""
    history: Path = Field(default=Path("forksync/history.toml"))
    """The signed-off divergences."""
    ledger: Path = Field(default=Path("forksync/ledger"))
    """Folder for what became of the upstream's commits, one file a sync."""
    resolve: tuple[Resolve, ...] = ()
    fixer: Fixer = Fixer()
    measure: tuple[Measure, ...] = ()


HEADER = re.compile(r"(\[\[?)\s*([\w.-]+)\s*\]")
KEY = re.compile(r"([\w-]+)\s*=")


def lines_of(text: str) -> dict[tuple[str | int, ...], int]:
    """Where each table and key of a TOML text stands, from 1: ``("rule", 3, "to")`` is ``to`` of the fourth ``[[rule]]``."""
    found: dict[tuple[str | int, ...], int] = {}
    within: tuple[str | int, ...] = ()
    counts: Counter[str] = Counter()
    for number, line in enumerate(text.split("\n"), 1):
        if header := HEADER.match(line):
            brackets, name = header.groups()
            within = (*name.split("."), counts[name]) if brackets == "[[" else tuple(name.split("."))
            counts[name] += 1
            found.setdefault(within, number)
        elif key := KEY.match(line.lstrip()):
            found.setdefault((*within, key[1]), number)
    return found


def line_of(text: str, location: tuple[str | int, ...]) -> int:
    """The line of what ``location`` names, or of the innermost thing around it that the text has."""
    known = lines_of(text)
    while location and location not in known:
        location = location[:-1]
    return known.get(location, 1)


def keys_at(kind: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    """The options of the section of ``kind`` that ``location`` names."""
    for part in location:
        field = kind.model_fields.get(str(part))
        if field is not None:
            inner = (field.annotation, *get_args(field.annotation))
            kind = next(found for found in inner if isinstance(found, type) and issubclass(found, BaseModel))
    return [field.alias or name for name, field in kind.model_fields.items()]


def faults(
    error: ValidationError, file: Path, text: str, kind: type[BaseModel], within: tuple[str | int, ...] = ()
) -> str:
    """pydantic's findings as lines ``file:line: key = value: what is wrong``."""
    found = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        place = f"{file}:{line_of(text, (*within, *fault['loc']))}"
        if fault["type"] == "extra_forbidden":
            close = difflib.get_close_matches(str(fault["loc"][-1]), keys_at(kind, fault["loc"][:-1]), n=1, cutoff=0.5)
            found.append(f"{place}: {key} is not an option" + (f"; did you mean {close[0]}?" if close else ""))
        elif fault["type"] == "missing":
            found.append(f"{place}: {key} is missing")
        else:
            given = f"{key} = {json.dumps(fault['input'], default=str)}: " if key else ""
            found.append(f"{place}: {given}{fault['msg'].removeprefix('Value error, ')}")
    return "\n".join(dict.fromkeys(found))


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """The tree and the text of a TOML file; ConfigError names the file, the line and the fault."""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), text
    except FileNotFoundError as missing:
        raise ConfigError(f"{path} does not exist; forksync init writes one") from missing
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise ConfigError(f"{path}: not TOML: {fault}") from fault


def load(path: Path) -> Config:
    """The configuration in a file, its paths made absolute."""
    tree, text = read_toml(path)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(faults(error, path, text, Config)) from error
    folder = path.resolve().parent
    return config.model_copy(
        update={"table": folder / config.table, "history": folder / config.history, "ledger": folder / config.ledger}
    )
