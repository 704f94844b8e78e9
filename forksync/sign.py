"""Signing off: a finding of gate one becomes part of the history, with a reason."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from forksync import history as histories
from forksync.errors import ForksyncError
from forksync.findings import marked
from forksync.fork import base_of, snapshot, verdict_on
from forksync.gate import Claim, Verdict
from forksync.git import Repository
from forksync.history import Entry, History, Signature, signature
from forksync.project import Project
from forksync.words import counted


class SignError(ForksyncError):
    """Nothing was signed; the message says what is missing."""


def findings(verdict: Verdict, which: Sequence[str]) -> Verdict:
    """The findings that are meant by fingerprints, their beginnings, or paths; of all of them for none. SignError names a word
    that means none."""

    def meant(fingerprint: str, path: str) -> bool:
        return not which or any(path == word or (len(word) >= 4 and fingerprint.startswith(word)) for word in which)

    for word in which:
        known = [(h.edit.fingerprint, h.path) for h in verdict.new]
        known += [(one.hunk.edit.fingerprint, one.hunk.path) for one in verdict.changed]
        known += [(claim.signed.fingerprint, claim.signed.path) for claim in verdict.vanished]
        if not any(path == word or (len(word) >= 4 and fingerprint.startswith(word)) for fingerprint, path in known):
            raise SignError(f"{word} is neither the fingerprint nor the path of a finding; forksync diff lists them")
    return Verdict(
        new=[h for h in verdict.new if meant(h.edit.fingerprint, h.path)],
        changed=[one for one in verdict.changed if meant(one.hunk.edit.fingerprint, one.hunk.path)],
        vanished=[c for c in verdict.vanished if meant(c.signed.fingerprint, c.signed.path)],
    )


def sign(
    project: Project,
    which: Sequence[str],
    reason: str,
    author: str,
    links: Sequence[str],
    identity: str,
    conflict: str,
) -> tuple[Path, Verdict]:
    """Signs findings of the working tree: a new hunk into an entry with this reason, a changed one again into its own entry; a
    vanished one leaves its entry. Writes the history; which file, and what was signed."""
    path = project.config.history
    history = histories.load(path)
    commit, tree = snapshot(project)
    chosen = findings(verdict_on(project, base_of(project, commit).commit, tree, history), which)
    if conflicts := marked(project.repository, tree, chosen):
        raise SignError(
            f"{', '.join(sorted(conflicts))}: decide between the conflict's markers first; nothing was signed"
        )
    if chosen.passed:
        raise SignError("there is nothing to sign: the divergence is what was signed off")
    known = history.find(identity) if identity else None
    if chosen.new and not reason.strip() and known is None:
        raise SignError(f"{counted(len(chosen.new), 'new hunk')} without a reason: forksync sign --reason '...'")
    for one in chosen.changed:
        history = replaced(history, one.claim, [signature(one.hunk)])
    for claim in chosen.vanished:
        history = replaced(history, claim, [])
    if chosen.new:
        told = {"reason": reason, "author": author, "date": date.today(), "links": tuple(links), "conflict": conflict}
        entry = known or Entry.model_validate({"id": identity or unused(history, reason), **told})
        left = now.hunks if (now := history.find(entry.id)) else ()
        history = history.put(entry.model_copy(update={"hunks": (*left, *map(signature, chosen.new))}))
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(histories.write(history, before), encoding="utf-8")
    os.replace(partial, path)
    return path, chosen


def author_of(repository: Repository) -> str:
    """git's user.name and user.email. SignError if git knows none."""
    said = [
        repository.run("config", "--get", f"user.{part}", ok=(0, 1)).stdout.decode().strip()
        for part in ("name", "email")
    ]
    if not said[0]:
        raise SignError("who signs? git knows no user.name here; set it, or give --author")
    return f"{said[0]} <{said[1]}>" if said[1] else said[0]


def replaced(history: History, claim: Claim, by: Sequence[Signature]) -> History:
    entry = history.find(claim.entry.id)
    if entry is None:
        return history
    at = entry.hunks.index(claim.signed)
    return history.put(entry.model_copy(update={"hunks": (*entry.hunks[:at], *by, *entry.hunks[at + 1 :])}))


def unused(history: History, reason: str) -> str:
    """A name for an entry from the first words of its reason."""
    words = re.findall(r"[a-z0-9]+", reason.lower())[:5]
    stem = "-".join(words) or "entry"
    names = {entry.id for entry in history.entry}
    return next(
        name for number in range(len(names) + 1) if (name := f"{stem}-{number + 1}" if number else stem) not in names
    )
