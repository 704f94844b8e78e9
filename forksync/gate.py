"""Gate one: the divergence is exactly what was signed off. New, vanished and changed hunks are three different findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import groupby
from typing import TypeVar

from forksync.divergence import WEAK, Edit, Hunk
from forksync.history import Entry, History, Signature, signature

ALIKE = 0.4
"""Share of common text from which a hunk counts as a changed form of a signed one in the same file."""
ALIKE_ELSEWHERE = 0.7
"""The same where the file was moved: less else holds the two together."""


Item = TypeVar("Item")


@dataclass(frozen=True)
class Claim:
    """One signed hunk and the entry that it belongs to."""

    entry: Entry
    signed: Signature


@dataclass(frozen=True)
class Changed:
    claim: Claim
    hunk: Hunk


@dataclass
class Verdict:
    """How the divergence and the signed-off set compare."""

    signed: list[tuple[Hunk, Entry]] = field(default_factory=list)
    owned: list[tuple[Hunk, Entry]] = field(default_factory=list)
    """In files that are the fork's own by an entry's ``paths``."""
    new: list[Hunk] = field(default_factory=list)
    vanished: list[Claim] = field(default_factory=list)
    changed: list[Changed] = field(default_factory=list)
    ended: list[Claim] = field(default_factory=list)
    """Vanished by a sync: the entry yields to the upstream, or the upstream made the same change."""
    kept: dict[str, list[Hunk]] = field(default_factory=lambda: defaultdict(list))
    """Entry's id → its hunks as they are now: what its signatures are to be renewed with."""
    stale: bool = False
    """Whether a signed hunk is found under another path, or told otherwise, than its signature has it."""

    @property
    def passed(self) -> bool:
        return not (self.new or self.vanished or self.changed)

    def beside(self, paths: Collection[str]) -> Verdict:
        """The verdict without findings in these files: what conflicts make of a file is not yet to be judged."""
        return replace(
            self,
            new=[hunk for hunk in self.new if hunk.path not in paths],
            vanished=[claim for claim in self.vanished if claim.signed.path not in paths],
            changed=[one for one in self.changed if one.hunk.path not in paths],
        )

    def entry_of(self, hunk: Hunk) -> Entry | None:
        return next((entry for one, entry in [*self.signed, *self.owned] if one is hunk), None)


def compare(hunks: Sequence[Hunk], history: History, files: Collection[str]) -> Verdict:
    """The verdict on ``hunks``. ``files`` are the paths of the fork: a file that is gone may have been moved."""
    verdict = Verdict()
    rest: list[Hunk] = []
    for hunk in hunks:
        owner = next((entry for entry in history.entry if entry.owns(hunk.path)), None)
        if owner:
            verdict.owned.append((hunk, owner))
        else:
            rest.append(hunk)
    claims = [Claim(entry, signed) for entry in history.entry for signed in entry.hunks]
    rest, claims = in_place(verdict, rest, claims)
    rest, claims = regrouped(verdict, rest, claims)
    rest, claims = pair(verdict, rest, claims, lambda h, c: moved(h, c, files))
    rest, claims = pair(verdict, rest, claims, follows)
    verdict.new, verdict.vanished = changed(verdict, rest, claims, files)
    return verdict


def in_place(verdict: Verdict, hunks: Sequence[Hunk], claims: Sequence[Claim]) -> tuple[list[Hunk], list[Claim]]:
    """Pairs what is the same in the same file: nearly everything, so file by file."""
    there: dict[str, list[Claim]] = {claim.signed.path: [] for claim in claims}
    for claim in claims:
        there[claim.signed.path].append(claim)
    rest: list[Hunk] = []
    for path, here in groupby(hunks, lambda hunk: hunk.path):
        left, there[path] = pair(
            verdict, list(here), there.get(path, []), lambda hunk, claim: hunk.edit.same(claim.signed.edit)
        )
        rest += left
    return rest, [claim for some in there.values() for claim in some]


def pair(
    verdict: Verdict, hunks: Sequence[Hunk], claims: Sequence[Claim], fits: Callable[[Hunk, Claim], bool]
) -> tuple[list[Hunk], list[Claim]]:
    """Takes every hunk with the first claim that fits it; what is left of both. Each claim signs one hunk only."""
    left = list(claims)
    rest = []
    for hunk in hunks:
        claim = next((claim for claim in left if fits(hunk, claim)), None)
        if claim is None:
            rest.append(hunk)
            continue
        left.remove(claim)
        accept(verdict, [hunk], [claim])
    return rest, left


def accept(verdict: Verdict, hunks: Iterable[Hunk], claims: Sequence[Claim]) -> None:
    hunks = list(hunks)
    entry = claims[0].entry
    verdict.signed += [(hunk, entry) for hunk in hunks]
    verdict.kept[entry.id] += hunks
    told = [(hunk.path, hunk.edit.fingerprint) for hunk in hunks]
    verdict.stale |= told != [(claim.signed.path, claim.signed.fingerprint) for claim in claims]


def moved(hunk: Hunk, claim: Claim, files: Collection[str]) -> bool:
    """The same edit elsewhere. One that says little of itself counts only if its old file is gone."""
    return hunk.edit.same(claim.signed.edit) and (hunk.edit.kind not in WEAK or claim.signed.path not in files)


def follows(hunk: Hunk, claim: Claim) -> bool:
    """An entry that keeps the fork's side holds for what the fork puts there, whatever the upstream has there by now."""
    edit, signed = hunk.edit, claim.signed.edit
    if claim.entry.conflict != "fork" or hunk.path != claim.signed.path or edit.kind != signed.kind:
        return False
    return edit.added == signed.added and (bool(edit.added) or resemblance(edit, signed) >= ALIKE)


def resemblance(one: Edit, other: Edit) -> float:
    return SequenceMatcher(None, "\n".join(one.diff), "\n".join(other.diff), autojunk=False).ratio()


def regrouped(verdict: Verdict, hunks: list[Hunk], claims: list[Claim]) -> tuple[list[Hunk], list[Claim]]:
    """Hunks that are several signed ones in a row, or parts of one: the upstream took away, or put in, what lay between."""
    for path in sorted({hunk.path for hunk in hunks}):
        here = [hunk for hunk in hunks if hunk.path == path]
        there = [claim for claim in claims if claim.signed.path == path]
        for some, signed in runs([hunk.edit for hunk in here], [claim.signed.edit for claim in there]):
            found, used = [here[at] for at in some], [there[at] for at in signed]
            free = len(without(hunks, found)) + len(found) == len(hunks)
            free = free and len(without(claims, used)) + len(used) == len(claims)
            if free and len({claim.entry.id for claim in used}) == 1:
                accept(verdict, found, used)
                hunks, claims = without(hunks, found), without(claims, used)
    return hunks, claims


def without(items: list[Item], taken: Sequence[Item]) -> list[Item]:
    """The items less those taken, told apart by identity: two equal signatures are two."""
    return [item for item in items if all(item is not one for one in taken)]


def runs(edits: Sequence[Edit], signed: Sequence[Edit]) -> Iterable[tuple[range, range]]:
    """(one, several) and (several, one) whose lines are the same in sequence."""
    for at, edit in enumerate(edits):
        for several in stretches(signed):
            if joined(signed, several) == (edit.kind, edit.removed, edit.added):
                yield range(at, at + 1), several
    for at, edit in enumerate(signed):
        for several in stretches(edits):
            if joined(edits, several) == (edit.kind, edit.removed, edit.added):
                yield several, range(at, at + 1)


def stretches(edits: Sequence[Edit]) -> Iterable[range]:
    return [range(a, b) for a in range(len(edits)) for b in range(a + 2, min(len(edits), a + 8) + 1)]


def joined(edits: Sequence[Edit], which: range) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    some = [edits[at] for at in which]
    if {edit.kind for edit in some} != {"lines"}:
        return "", (), ()
    return "lines", tuple(x for e in some for x in e.removed), tuple(x for e in some for x in e.added)


def changed(
    verdict: Verdict, hunks: Sequence[Hunk], claims: Sequence[Claim], files: Collection[str]
) -> tuple[list[Hunk], list[Claim]]:
    """Pairs what is left by likeness, the likest first; returns what is new and what has vanished."""
    rated = [
        (likeness, h, c)
        for h, hunk in enumerate(hunks)
        for c, claim in enumerate(claims)
        if (likeness := alike(hunk, claim, files))
    ]
    taken: tuple[set[int], set[int]] = (set(), set())
    for _, h, c in sorted(rated, key=lambda one: (-one[0], one[1], one[2])):
        if h not in taken[0] and c not in taken[1]:
            taken[0].add(h)
            taken[1].add(c)
            verdict.changed.append(Changed(claims[c], hunks[h]))
    return [x for h, x in enumerate(hunks) if h not in taken[0]], [x for c, x in enumerate(claims) if c not in taken[1]]


def alike(hunk: Hunk, claim: Claim, files: Collection[str]) -> float:
    """How much a hunk is a signed one in another form, 0 if not at all."""
    here = hunk.path == claim.signed.path
    if hunk.edit.kind != claim.signed.kind or not (here or claim.signed.path not in files):
        return 0.0
    if here and hunk.edit.kind != "lines":
        return 1.0
    old, new = claim.signed.edit, hunk.edit
    if here and (old.removed == new.removed != () or old.added == new.added != ()):
        return 1.0
    ratio = resemblance(old, new)
    return ratio if ratio >= (ALIKE if here else ALIKE_ELSEWHERE) else 0.0


def renewed(history: History, verdict: Verdict) -> History:
    """The history with the signatures of all found hunks as they are now: paths after moves, lines after an upstream's change
    that the entry follows. What has vanished or changed stays as it was signed."""
    open_claims = [*verdict.vanished, *(one.claim for one in verdict.changed)]
    for entry in history.entry:
        if not entry.hunks:
            continue
        left = [claim.signed for claim in open_claims if claim.entry.id == entry.id]
        now = [signature(hunk) for hunk in verdict.kept[entry.id]]
        before, after = (sorted((s.path, s.fingerprint) for s in side) for side in (entry.hunks, [*now, *left]))
        if before != after:
            history = history.put(entry.model_copy(update={"hunks": (*now, *left)}))
    return history
