"""What became of every commit of the upstream: taken, translated, not needed because, conflict decided by.

A sync's ledger is a JSON file in the fork, committed with the merge, and in short its message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from forksync.changes import Change, changes, contents, line_ranges
from forksync.divergence import Hunk
from forksync.fork import relative
from forksync.gate import Verdict
from forksync.git import Repository, decode
from forksync.history import Entry
from forksync.merge import Clash
from forksync.normal import is_binary
from forksync.project import Project
from forksync.state import State, Try
from forksync.words import counted

FORMAT = 1
TAKEN, TRANSLATED, NOT_NEEDED, CONFLICT = "taken", "translated", "not needed", "conflict"
ORDER = (CONFLICT, TRANSLATED, TAKEN, NOT_NEEDED)
"""Of a commit with several fates, the one that it is listed by."""


@dataclass
class Fate:
    """What became of some of a commit's files."""

    fate: str
    because: str
    paths: list[str]
    """In the mirror; in the upstream for files that the table drops."""


@dataclass
class NotTaken:
    """Lines of the upstream that the fork does not have, and the entry that says why."""

    path: str
    lines: list[str]
    entry: str
    because: str


@dataclass
class Commit:
    id: str
    subject: str
    author: str
    date: str
    fates: list[Fate] = field(default_factory=list)
    not_taken: list[NotTaken] = field(default_factory=list)

    @property
    def fate(self) -> str:
        known = {one.fate for one in self.fates}
        return next((name for name in ORDER if name in known), NOT_NEEDED)

    @property
    def because(self) -> str:
        said = [one.because for one in self.fates if one.because and one.fate == self.fate]
        if self.fate != NOT_NEEDED:
            said += [f"in part not needed: {one.because}" for one in self.fates if one.fate == NOT_NEEDED]
        return "; ".join(dict.fromkeys(said))


def build(project: Project, now: State, verdict: Verdict) -> dict[str, Any]:
    """The ledger of a sync whose gates are green. ``verdict`` is gate one's on the merge."""
    commits = [described(project.repository, upstream) for upstream, _ in now.steps]
    upstream = [now.upstream_from, *(one for one, _ in now.steps)]
    mirrors = [now.base, *(one for _, one in now.steps)]
    verdicts = decisions(now)
    entries = {hunk.path: entry for hunk, entry in verdict.signed if hunk.edit.kind == "deleted"}
    for commit, (old, new), (before, after) in zip(commits, pairwise(upstream), pairwise(mirrors), strict=True):
        fates = Fates(project, before, after, verdicts, entries)
        known = project.repository.has(old)
        touched = changes(project.repository, old, new, renames=False) if known else []
        commit.fates = fates.of(touched)
        if fates.mirrored:
            commit.fates.append(Fate(TRANSLATED, "the table has changed", sorted(fates.mirrored)))
    not_taken(project.repository, now, verdict, dict(zip(mirrors[1:], commits, strict=True)))
    return {
        "format": FORMAT,
        "number": len(ledgers(project, now.tree)) + 1,
        "target": now.target,
        "upstream": {"from": now.upstream_from, "to": now.upstream_to},
        "mirror": now.mirror,
        "table": project.table.hash,
        "commits": [{"fate": one.fate, "because": one.because, **asdict(one)} for one in commits],
        "conflicts": [{"path": one.path, "by": one.by, "because": one.because} for one in verdicts],
        "ended": sorted({claim.entry.id for claim in verdict.ended}),
        "tries": [asdict(one) for one in now.tries],
        "measured": [{key: value for key, value in asdict(one).items() if key != "output"} for one in now.measured],
        "divergence": size(verdict),
    }


def described(repository: Repository, commit: str) -> Commit:
    identity, subject, author, date = repository.text("log", "-1", "--format=%H%x00%s%x00%an%x00%aI", commit).split(
        "\0"
    )
    return Commit(identity, subject, author, date)


@dataclass(frozen=True)
class Decision:
    """A conflict, who decided it and how."""

    path: str
    by: str
    because: str
    lines: tuple[str, ...]
    """What it was about; none: the whole file."""
    not_needed: bool
    """Whether an entry of the history said that the upstream's side is not wanted."""


def decisions(now: State) -> list[Decision]:
    """All conflicts of a sync."""
    found = [
        Decision(
            one.path, f"rule: {one.by}", one.because, one.lines, one.took == "fork" and one.by.startswith("entry ")
        )
        for one in now.settled
        if one.by != "lines"
    ]
    return found + [Decision(one.path, decided_by(now.tries, one), "", one.lines, False) for one in now.decided]


def decided_by(tries: tuple[Try, ...], clash: Clash) -> str:
    for number, one in enumerate(tries, 1):
        if clash.path in one.closed:
            return f"{one.by}, try {number}" if one.by == "fixer" else one.by
    return "the fork's later commits"


class Fates:
    """The fates of one commit's files."""

    def __init__(
        self, project: Project, before: str, after: str, verdicts: list[Decision], deleted: Mapping[str, Entry]
    ) -> None:
        self.project, self.verdicts, self.deleted = project, verdicts, deleted
        self.mirrored = {one.path: one for one in changes(project.repository, before, after, renames=False)}
        """Changes of the mirror that no file of the upstream has claimed yet."""

    def of(self, touched: list[Change]) -> list[Fate]:
        found: dict[tuple[str, str], Fate] = {}
        for change in touched:
            target = self.project.table.place(change.path)[0]
            fate, because = self.one(change, target)
            found.setdefault((fate, because), Fate(fate, because, [])).paths.append(target or change.path)
        return list(found.values())

    def one(self, change: Change, target: str | None) -> tuple[str, str]:
        if target is None:
            return NOT_NEEDED, "the table drops these files"
        mirrored = self.mirrored.pop(target, None)
        if mirrored is None:
            return NOT_NEEDED, "translated, these files are as they were"
        for told in self.verdicts:
            if told.path == target and (not told.lines or self.changes_any(mirrored, told.lines)):
                if told.not_needed:
                    return NOT_NEEDED, told.because
                return CONFLICT, f"decided by {told.by}" + (f": {told.because}" if told.because else "")
        if target in self.deleted:
            return NOT_NEEDED, self.deleted[target].reason
        same = mirrored.new == change.new and target == change.path
        return (TAKEN if same else TRANSLATED), ""

    def changes_any(self, mirrored: Change, lines: tuple[str, ...]) -> bool:
        """Whether the commit put in or took away one of these lines."""
        [(_, old, new)] = contents(self.project.repository, [mirrored])
        if is_binary(old) or is_binary(new):
            return True
        sides = [[line.removesuffix("\r") for line in decode(side).split("\n")] for side in (old, new)]
        [ranges] = line_ranges([(sides[0], sides[1])])
        moved = {line for a, b, c, d in ranges for line in (*sides[0][a:b], *sides[1][c:d])}
        return not moved.isdisjoint(lines)


def not_taken(repository: Repository, now: State, verdict: Verdict, by_mirror: Mapping[str, Commit]) -> None:
    """Gives each commit its lines that the fork does not have. git's blame of the mirror knows whose they are."""
    changed = {change.path for change in changes(repository, now.base, now.mirror, renames=False)}
    blames: dict[str, list[str]] = {}
    for hunk, entry in [*verdict.signed, *verdict.owned]:
        if hunk.edit.kind != "lines" or not hunk.old or hunk.mirror_path not in changed:
            continue
        if hunk.mirror_path not in blames:
            blames[hunk.mirror_path] = blame(repository, now, hunk.mirror_path)
        for mirror, lines in owners(hunk, blames[hunk.mirror_path]):
            if mirror in by_mirror:
                by_mirror[mirror].not_taken.append(NotTaken(hunk.mirror_path, lines, entry.id, entry.reason))


def blame(repository: Repository, now: State, path: str) -> list[str]:
    """The mirror commit that each line of a file comes from; the old mirror's id for what was there before."""
    output = decode(repository.run("blame", "-s", "-l", "--root", f"{now.base}..{now.mirror}", "--", path).stdout)
    return [line.split(" ", 1)[0] for line in output.split("\n")[:-1]]


def owners(hunk: Hunk, blamed: list[str]) -> Iterator[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for number, line in enumerate(hunk.old, hunk.mirror_first):
        if number <= len(blamed):
            found.setdefault(blamed[number - 1], []).append(line)
    yield from found.items()


def size(verdict: Verdict) -> dict[str, int]:
    signed = [hunk for hunk, _ in verdict.signed]
    return {
        "hunks": len(signed),
        "lines": sum(len(h.edit.removed) + len(h.edit.added) for h in signed),
        "owned": len(verdict.owned),
    }


def message(told: Mapping[str, Any]) -> str:
    """The merge commit's message: the ledger in short."""
    commits = told["commits"]
    lines = [
        f"Merge upstream {told['target']}: {counted(len(commits), 'commit')}, {counted(len(told['conflicts']), 'conflict')}",
        "",
    ]
    for one in commits:
        because = f" ({one['because']})" if one["because"] else ""
        lost = sum(len(part["lines"]) for part in one["not_taken"])
        lines.append(
            f"{one['id'][:12]} {one['fate']}: {one['subject']}{because}"
            + (f" [{counted(lost, 'line')} not taken]" if lost else "")
        )
    lines += ["", *(f"measured: {one['name']}: passed in {one['seconds']:.1f} s" for one in told["measured"])]
    lines += [f"ended: {identity}" for identity in told["ended"]]
    return "\n".join(lines).rstrip() + "\n"


def file_name(now: State) -> str:
    return f"{now.upstream_to[:12]}-{now.mirror[:8]}.json"


def ledgers(project: Project, tree: str) -> list[dict[str, Any]]:
    """All ledgers that a tree of the fork holds, the oldest sync first."""
    folder = relative(project, project.config.ledger) + "/"
    found = [
        entry
        for entry in project.repository.entries(tree)
        if entry.path.startswith(folder) and entry.path.endswith(".json")
    ]
    blobs = project.repository.blobs(entry.id for entry in found)
    told = [json.loads(blobs[entry.id]) for entry in found]
    return sorted((one for one in told if one.get("format") == FORMAT), key=lambda one: one["number"])


def passed_tests(project: Project, tree: str) -> dict[str, list[str]]:
    """Measurement → the tests that passed at the last sync."""
    told = ledgers(project, tree)
    return {one["name"]: one["tests"] for one in told[-1]["measured"]} if told else {}
