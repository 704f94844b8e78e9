"""The state of a fork as one HTML page that needs nothing else: neither a script nor a connection."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from forksync import findings
from forksync.divergence import Hunk
from forksync.fixer import conflict_lines
from forksync.fork import history_in, sync_folder
from forksync.git import Repository
from forksync.history import Entry
from forksync.ledger import CONFLICT, NOT_NEEDED, TAKEN, TRANSLATED
from forksync.project import Project
from forksync.report_style import STYLE
from forksync.status import Status, status
from forksync.words import counted

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The page may load and run nothing: the texts in it are code and commit messages of others."""
FATES = (TAKEN, TRANSLATED, NOT_NEEDED, CONFLICT)
PENDING = 200
"""Commits of the upstream that are listed; of more, the oldest."""


def write(project: Project, target: str | None, out: Path) -> Path:
    """Writes the page, whole or not at all, and returns its path."""
    one = status(project, target)
    title = f"{project.repository.path.resolve().name}, {project.config.fork.branch}"
    sections = (
        headline(title, one),
        syncing(project, one),
        drift(project.repository, one),
        pending(one),
        signed(project, one),
        measured(one),
        syncs(one),
    )
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(sections)}<footer>forksync</footer></main></body></html>"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.tmp")
    partial.write_text(page, encoding="utf-8", errors="backslashreplace")
    os.replace(partial, out)
    return out


def headline(title: str, one: Status) -> str:
    verdict = one.verdict
    found = len(verdict.new) + len(verdict.changed) + len(verdict.vanished)
    entries = len({entry.id for _, entry in [*verdict.signed, *verdict.owned]})
    cards = [
        card(
            "drift",
            str(found) if found else "none",
            "unsigned findings" if found else "exactly what was signed off",
            not found,
        ),
        card(
            "behind",
            str(len(one.commits)),
            "commits" + (f", since {one.since[:10]}" if one.since else ""),
            None if one.commits else True,
        ),
        card("forecast", str(len(one.conflicts)), "conflicts to decide in the next sync", not one.conflicts),
        card("signed off", str(len(verdict.signed)), f"hunks under {entries} reasons", None),
    ]
    facts = [
        ("fork", one.fork[:12]),
        ("merged with upstream", one.names[one.base.upstream]),
        ("upstream stands at", one.names[one.upstream]),
        ("syncs", str(len(one.ledgers))),
    ]
    if one.rewritten:
        facts.append(("upstream", "its past was rewritten"))
    listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<header><h1>{escape(title)}</h1><dl>{listed}</dl><div class="cards">{"".join(cards)}</div></header>'


def card(name: str, value: str, note: str, good: bool | None) -> str:
    tone = {True: "good", False: "bad", None: ""}[good]
    return f'<div class="card"><span>{escape(name)}</span><p class="{tone}">{escape(value)}</p><em>{escape(note)}</em></div>'


def syncing(project: Project, one: Status) -> str:
    """The sync that waits for a person: what is left of it and why."""
    now = one.syncing
    if now is None:
        return ""
    folder = sync_folder(project.repository)
    lines = list(conflict_lines(project, now))
    lines += [line for done in now.measured if not done.passed for line in findings.measured_lines(done)]
    tries = "".join(
        f"<li>{escape(done.by)}: exit {done.code}, decided {counted(len(done.closed), 'conflict')}, "
        f"changed {counted(len(done.changed), 'file')}</li>"
        for done in now.tries
    )
    return (
        f"<h2>Sync to {escape(now.target)} in progress</h2>"
        f'<p class="note">Phase {now.phase}; the merge so far lies in {escape(str(folder.relative_to(folder.parents[3])))}.</p>'
        f"{pre(lines) if lines else ''}<ul>{tries}</ul>"
    )


def drift(repository: Repository, one: Status) -> str:
    if one.verdict.passed:
        return ""
    blocks = "".join(block(part) for part in parts(findings.verdict_lines(repository, one.verdict)))
    return f"<h2>Drift</h2><p class='note'>Sign it off with its reason, or undo it.</p>{blocks}"


def parts(lines: Iterable[str]) -> list[list[str]]:
    """Findings, which a blank line ends."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line:
            found[-1].append(line)
        else:
            found.append([])
    return [part for part in found if part]


def block(lines: Sequence[str]) -> str:
    return f"<article><h4>{escape(lines[0])}</h4>{pre(lines[1:])}</article>"


def pre(lines: Iterable[str]) -> str:
    tones = {"-": "del", "+": "ins"}
    rows = (
        f"<{tones[line[0]]}>{escape(line)}</{tones[line[0]]}>" if line[:1] in tones else f"<span>{escape(line)}</span>"
        for line in lines
    )
    return f"<pre>{''.join(rows)}</pre>"


def pending(one: Status) -> str:
    """The upstream's commits that the fork lacks, and what a sync would ask."""
    if not one.commits:
        return ""
    rows = [(identity[:12], subject) for identity, subject in one.commits[:PENDING]]
    clashes = "".join(f"<li>{escape(clash.path)}: {escape(clash.kind)}</li>" for clash in one.conflicts)
    rules = sum(1 for settled in (one.predicted.settled if one.predicted else ()) if settled.by != "lines")
    asked = f"<p>{counted(len(one.conflicts), 'conflict')} to decide, {rules} decided by rules.</p><ul>{clashes}</ul>"
    more = f'<p class="note">and {len(one.commits) - PENDING} more</p>' if len(one.commits) > PENDING else ""
    return f"<h2>Waiting in the upstream</h2>{asked}{table(('commit', 'subject'), rows)}{more}"


def signed(project: Project, one: Status) -> str:
    """Every entry of the history with its hunks to unfold."""
    hunks: dict[str, list[Hunk]] = {}
    for hunk, entry in [*one.verdict.signed, *one.verdict.owned]:
        hunks.setdefault(entry.id, []).append(hunk)
    entries = history_in(project, one.fork).entry
    gone = {claim.entry.id for claim in one.verdict.vanished}
    shown = "".join(entry_block(project.repository, e, hunks.get(e.id, []), e.id in gone) for e in entries)
    return f"<h2>Signed off</h2>{shown}" if shown else ""


def entry_block(repository: Repository, entry: Entry, hunks: Sequence[Hunk], gone: bool) -> str:
    links = " ".join(link(url) for url in entry.links)
    policy = {"ask": "", "fork": " · keeps the fork's side", "upstream": " · yields to the upstream"}[entry.conflict]
    lines = sum(len(hunk.edit.removed) + len(hunk.edit.added) for hunk in hunks)
    facts = (
        f"{entry.id} · {entry.author} · {entry.date}{policy} · {counted(len(hunks), 'hunk')}, {counted(lines, 'line')}"
    )
    inner = "".join(
        block([findings.place(hunk), *findings.shortened(findings.lines_of(repository, hunk))]) for hunk in hunks
    )
    body = f"<details><summary>hunks</summary>{inner}</details>" if inner else ""
    body += '<p class="bad">some of its code is gone</p>' if gone else ""
    return f'<article><h3>{escape(entry.reason)}</h3><p class="note">{escape(facts)} {links}</p>{body}</article>'


def link(url: str) -> str:
    safe = url.startswith(("https://", "http://"))
    return f'<a href="{escape(url, quote=True)}" rel="noreferrer">{escape(url)}</a>' if safe else escape(url)


def measured(one: Status) -> str:
    """What was measured at the last sync, and what was not: divergent lines that no test runs."""
    if not one.ledgers:
        return ""
    last = one.ledgers[-1]["measured"]
    rows = [
        (
            m["name"],
            "passed",
            str(len(m["tests"]) or ""),
            "; ".join(f"{p['metric']} {p['said']}" for p in m["parities"]),
            f"{m['seconds']:.1f} s",
        )
        for m in last
    ]
    missed = [(path, ", ".join(findings.ranges(lines))) for m in last for path, lines in m["uncovered"].items()]
    uncovered = f"<h3>Divergent lines that no test runs</h3>{table(('file', 'lines'), missed)}" if missed else ""
    return f"<h2>Measured at the last sync</h2>{table(('measurement', '', 'tests', 'parity', 'time'), rows)}{uncovered}"


def syncs(one: Status) -> str:
    """All ledgers, the newest first."""
    if not one.ledgers:
        return ""
    return f"<h2>Syncs</h2>{trend(one.ledgers)}{''.join(sync_block(told) for told in reversed(one.ledgers))}"


def sync_block(told: Mapping[str, Any]) -> str:
    commits = told["commits"]
    counts = {fate: sum(1 for one in commits if one["fate"] == fate) for fate in FATES}
    bar = "".join(
        f'<i class="f{number}" style="flex:{count}" title="{fate}: {count}"></i>'
        for number, (fate, count) in enumerate(counts.items())
        if count
    )
    said = ", ".join(f"{count} {fate}" for fate, count in counts.items() if count)
    rows = [(one["id"][:12], one["fate"], one["subject"], because(one)) for one in reversed(commits)]
    by = [(one["path"], one["by"], one["because"]) for one in told["conflicts"]]
    conflicts = f"<h4>Conflicts</h4>{table(('file', 'decided by', 'because'), by)}" if by else ""
    ended = f"<p>Ended: {escape(', '.join(told['ended']))}</p>" if told["ended"] else ""
    return (
        f"<article><h3>{escape(told['target'])}</h3><p class='note'>{escape(told['upstream']['to'][:12])} · {said} · "
        f"{counted(len(told['conflicts']), 'conflict')} decided</p><div class='bar'>{bar}</div>{ended}"
        f"<details><summary>ledger</summary>{table(('commit', 'fate', 'subject', 'because'), rows)}{conflicts}</details>"
        "</article>"
    )


def because(commit: Mapping[str, Any]) -> str:
    lost = [
        f"{counted(len(one['lines']), 'line')} of {one['path']} not taken: {one['because']}"
        for one in commit["not_taken"]
    ]
    return "; ".join(part for part in [commit["because"], *lost] if part)


def trend(ledgers: Sequence[Mapping[str, Any]]) -> str:
    """Signed hunks after each sync, as bars."""
    if len(ledgers) < 2:
        return ""
    counts = [told["divergence"]["hunks"] for told in ledgers]
    top, width = max([1, *counts]), min(40, 600 / len(counts))
    bars = "".join(
        f'<rect x="{n * width:.1f}" y="{80 - 76 * count / top:.1f}" width="{max(1, width - 3):.1f}" '
        f'height="{76 * count / top + 0.5:.1f}">'
        f"<title>{escape(told['target'])}: {count} hunks</title></rect>"
        for n, (count, told) in enumerate(zip(counts, ledgers, strict=True))
    )
    note = f"Signed hunks after each sync: {counts[0]} after the first, {counts[-1]} after the last."
    drawn = f'<svg viewBox="0 0 600 82" role="img" aria-label="{note}">{bars}</svg>'
    return f"<figure><figcaption>{note}</figcaption>{drawn}</figure>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
