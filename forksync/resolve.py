"""The rules that decide a conflict before anybody is asked: what a history entry or ``[[resolve]]`` says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forksync.config import Resolve
from forksync.divergence import Edit, Hunk
from forksync.gate import Verdict
from forksync.history import History, Signature
from forksync.merge import Choice
from forksync.merge3 import Conflict
from forksync.rules.rule import glob


@dataclass(frozen=True)
class Resolver:
    """``verdict``: the fork against the old mirror. ``moves``: path in the old mirror → in the new one, of files that moved."""

    verdict: Verdict
    moves: Mapping[str, str]
    resolve: Sequence[Resolve]

    def __call__(self, path: str, conflict: Conflict | None) -> Choice | None:
        return self.by_entry(path, conflict) or self.by_path(path)

    def by_entry(self, path: str, conflict: Conflict | None) -> Choice | None:
        """What the entries say that sign the fork's side, if they agree and sign all of it."""
        hunks = self.hunks_of(path, conflict)
        signers = [self.verdict.entry_of(hunk) for hunk in hunks]
        entries = {entry.id: entry for entry in signers if entry}
        if not entries or None in signers:
            return None
        gone = conflict is None and any(hunk.edit.kind == "deleted" for hunk in hunks)
        wanted = {"fork" if gone and entry.conflict == "ask" else entry.conflict for entry in entries.values()}
        if len(wanted) > 1 or "ask" in wanted:
            return None
        return wanted.pop(), f"entry {', '.join(entries)}", "; ".join(entry.reason for entry in entries.values())

    def hunks_of(self, path: str, conflict: Conflict | None) -> list[Hunk]:
        """The fork's hunks in a file of the new mirror, or those of a place in it."""
        everything = [hunk for hunk, _ in [*self.verdict.signed, *self.verdict.owned]]
        everything += [*self.verdict.new, *(one.hunk for one in self.verdict.changed)]
        here = [hunk for hunk in everything if path in (hunk.path, self.moves.get(hunk.path))]
        return [hunk for hunk in here if conflict is None or touches(hunk, conflict)]

    def by_path(self, path: str) -> Choice | None:
        for rule in self.resolve:
            if any(glob(pattern).fullmatch(path) for pattern in rule.paths):
                return rule.take, f"resolve {rule.paths[0]}", rule.reason
        return None


def touches(hunk: Hunk, conflict: Conflict) -> bool:
    """Whether the hunk's lines in the fork are among the conflict's; a hunk without lines stands before ``hunk.first``."""
    start, end = conflict.region.fork[0] + 1, conflict.region.fork[1]
    return hunk.first <= end + (hunk.last < hunk.first) and hunk.last >= start - (hunk.last < hunk.first)


def relocated(history: History, moves: Mapping[str, str]) -> History:
    """The history with what names a file by its path alone, a deletion, brought after the upstream's renames."""
    return History(
        entry=tuple(
            one.model_copy(update={"hunks": tuple(follow(h, moves) for h in one.hunks)}) for one in history.entry
        )
    )


def follow(hunk: Signature, moves: Mapping[str, str]) -> Signature:
    if hunk.kind != "deleted" or hunk.path not in moves:
        return hunk
    path = moves[hunk.path]
    edit = Edit("deleted", (path,), ())
    return hunk.model_copy(update={"path": path, "fingerprint": edit.fingerprint, "diff": f"-{path}\n"})


def ended(verdict: Verdict, upstream: Sequence[Hunk]) -> Verdict:
    """The verdict of a sync: a divergence has not vanished but ended where its entry yields to the upstream, or where the
    upstream made the very same change. ``upstream``: the new mirror against the old one."""
    left = list(upstream)
    vanished = []
    for claim in verdict.vanished:
        adopted = next((h for h in left if h.path == claim.signed.path and h.edit.same(claim.signed.edit)), None)
        if adopted:
            left.remove(adopted)
        if adopted or claim.entry.conflict == "upstream":
            verdict.ended.append(claim)
        else:
            vanished.append(claim)
    verdict.vanished = vanished
    return verdict
