"""What the gates found, as text that a person reads: diffs with the reason that was signed for them."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import unified_diff

from forksync.divergence import Hunk, shown
from forksync.gate import Changed, Claim, Verdict
from forksync.git import Repository
from forksync.history import Entry
from forksync.measure import Measured
from forksync.merge3 import has_markers
from forksync.normal import is_binary

LONG = 60
"""Lines of a hunk that are shown; of a longer one, the first."""


def place(hunk: Hunk) -> str:
    return f"{hunk.path}:{hunk.first}" if hunk.edit.kind == "lines" else f"{hunk.path} ({hunk.edit.kind})"


def shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= LONG else [*lines[:LONG], f"… {len(lines) - LONG} more lines"]


def marked(repository: Repository, tree: str, verdict: Verdict) -> set[str]:
    """Files with findings that still have a conflict's markers in them: what they make of the file is not to be judged yet."""
    paths = {hunk.path for hunk in [*verdict.new, *(one.hunk for one in verdict.changed)]}
    files = {entry.path: entry.id for entry in repository.entries(tree) if entry.path in paths and entry.is_file}
    blobs = repository.blobs(files.values())
    return {path for path, identity in files.items() if has_markers(blobs[identity])}


def lines_of(repository: Repository, hunk: Hunk) -> list[str]:
    """A hunk as a diff; of an added file its text."""
    if not hunk.blob:
        return hunk.diff
    data = repository.blobs([hunk.blob])[hunk.blob]
    return hunk.diff if is_binary(data) else [f"+{line}" for line in shown(data).removesuffix("\n").split("\n")]


def new(repository: Repository, hunk: Hunk) -> Iterator[str]:
    yield f"new       {hunk.edit.fingerprint}  {place(hunk)}"
    yield from shortened(lines_of(repository, hunk))


def vanished(claim: Claim) -> Iterator[str]:
    yield f"vanished  {claim.signed.fingerprint}  {claim.signed.path}, signed in {claim.entry.id}: {claim.entry.reason}"
    yield from shortened([f"  {line}" for line in claim.signed.edit.diff])


def changed(repository: Repository, one: Changed) -> Iterator[str]:
    """The signed hunk against the present one, as a difference of the two differences."""
    entry = one.claim.entry
    yield f"changed   {one.hunk.edit.fingerprint}  {place(one.hunk)}, signed in {entry.id}: {entry.reason}"
    old, new = one.claim.signed.edit.diff, one.hunk.edit.diff
    if one.hunk.blob and repository.present([one.claim.signed.blob]):
        blobs = repository.blobs([one.claim.signed.blob, one.hunk.blob])
        old, new = (shown(blobs[i]).split("\n") for i in (one.claim.signed.blob, one.hunk.blob))
    yield from shortened(list(unified_diff(old, new, "signed", "now", n=3, lineterm=""))[2:])


def signed(repository: Repository, hunk: Hunk, entry: Entry) -> Iterator[str]:
    yield f"signed    {hunk.edit.fingerprint}  {place(hunk)}, {entry.id}: {entry.reason}"
    yield from shortened(lines_of(repository, hunk))


def verdict_lines(repository: Repository, verdict: Verdict, everything: bool = False) -> Iterator[str]:
    """All findings, a blank line after each; ``everything``: what is signed too."""
    parts = [new(repository, hunk) for hunk in verdict.new]
    parts += [changed(repository, one) for one in verdict.changed]
    parts += [vanished(claim) for claim in verdict.vanished]
    if everything:
        parts += [signed(repository, hunk, entry) for hunk, entry in [*verdict.signed, *verdict.owned]]
    for part in parts:
        yield from part
        yield ""


def measured_lines(one: Measured) -> Iterator[str]:
    yield f"measured  {one.name}: {'passed' if one.passed else 'FAILED'} in {one.seconds:.1f} s"
    yield from (f"  {finding}" for finding in one.findings)
    yield from (f"  | {line}" for line in one.output.splitlines()[-20:])
    for path, lines in one.uncovered.items():
        yield f"  no test runs {path}:{', '.join(ranges(lines))}"


def ranges(lines: list[int]) -> Iterator[str]:
    """1, 2, 3, 7 as 1-3, 7."""
    start = None
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        start = line if start is None else start
        if following != line + 1:
            yield str(line) if start == line else f"{start}-{line}"
            start = None
