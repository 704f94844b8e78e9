"""Where a sync stands: one commit under ``refs/forksync/sync``, whose tree is the merge so far and whose message is the rest.

Moving a ref is atomic, so that a sync can be killed anywhere and goes on from the last step that ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from forksync.errors import ForksyncError
from forksync.git import Repository, decode
from forksync.measure import Measured
from forksync.merge import DATE, Clash, Settled

REF = "refs/forksync/sync"
FORMAT = 1


@dataclass(frozen=True)
class Try:
    """One run of the fixer, or one look at what a person did."""

    by: str
    code: int | None
    closed: tuple[str, ...]
    """Paths of conflicts that it decided."""
    changed: tuple[str, ...]
    """Paths that it changed."""
    seconds: float = 0.0
    output: str = ""


@dataclass(frozen=True)
class State:
    phase: Literal["work", "fixing", "person", "land"]
    """work: to be judged; fixing: a fixer has begun; person: stopped; land: green, ``landing`` is to become the fork's tip."""
    target: str
    """What ``--to`` said."""
    fork: str
    base: str
    """The old mirror's commit."""
    mirror: str
    """The new mirror's commit."""
    steps: tuple[tuple[str, str], ...]
    """(upstream commit, its mirror commit), oldest first, without the base."""
    upstream_from: str
    tree: str
    """The merge so far."""
    clashes: tuple[Clash, ...] = ()
    """Conflicts that wait for a decision."""
    decided: tuple[Clash, ...] = ()
    """Conflicts that the fixer or a person has decided; ``tries`` say who."""
    settled: tuple[Settled, ...] = ()
    tries: tuple[Try, ...] = ()
    measured: tuple[Measured, ...] = ()
    measured_tree: str = ""
    landing: str = ""
    moving: bool = False
    """Whether the fork's checkout may be half way to ``landing``."""

    def but(self, **changes: Any) -> State:
        return replace(self, **changes)

    @property
    def tried(self) -> int:
        """How often the fixer has run."""
        return sum(1 for one in self.tries if one.by == "fixer")

    @property
    def upstream_to(self) -> str:
        return self.steps[-1][0] if self.steps else self.upstream_from


def save(repository: Repository, state: State) -> State:
    told = json.dumps({"format": FORMAT, **asdict(state)}, indent=1)
    message = f"forksync: sync to {state.target}, in progress\n\n{told}\n"
    commit = repository.write_commit(state.tree, [state.fork, state.mirror, *landed(state)], message, DATE)
    repository.set_ref(REF, commit)
    return state


def landed(state: State) -> list[str]:
    """Kept from being collected until it has landed."""
    return [state.landing] if state.landing else []


def load(repository: Repository) -> State | None:
    """The sync in progress, if there is one. ForksyncError if another version of forksync has begun it."""
    if not repository.has(REF):
        return None
    message = decode(repository.run("log", "-1", "--format=%B", REF).stdout)
    told = json.loads(message[message.index("{") :])
    if told.pop("format") != FORMAT:
        raise ForksyncError(
            f"{REF} was begun by another version of forksync; finish it with that, or forksync sync --abandon"
        )
    return from_json(told)


def from_json(told: Mapping[str, Any]) -> State:
    lists = {
        "steps": tuple((step[0], step[1]) for step in told["steps"]),
        "clashes": tuple(map(Clash.from_json, told["clashes"])),
        "decided": tuple(map(Clash.from_json, told["decided"])),
        "settled": tuple(Settled(**{**one, "lines": tuple(one["lines"])}) for one in told["settled"]),
        "tries": tuple(
            Try(**{**one, "closed": tuple(one["closed"]), "changed": tuple(one["changed"])}) for one in told["tries"]
        ),
        "measured": tuple(map(Measured.from_json, told["measured"])),
    }
    return State(**{**told, **lists})


def forget(repository: Repository) -> None:
    repository.delete_ref(REF)
