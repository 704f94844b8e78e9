"""``trace.html``: a run's samples on a timeline, and where their time went. One page that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from vime import __version__
from vime.observe.metrics import read_run
from vime.observe.report import STYLE, table
from vime.observe.summary import duration, number, title
from vime.observe.timeline import (
    AT_SERVER,
    Place,
    Spent,
    StepRow,
    Timeline,
    Traced,
    order,
    places,
    read_timeline,
    spent,
    step_rows,
    trainer_idle,
    window,
)

PAGE = "trace.html"
SCRIPT = (Path(__file__).parent / "trace.js").read_text(encoding="utf-8")
SLOWEST = 50
MOST_STEPS = 200
"""rows of the table of steps: the newest"""
COLORS = {
    "queue": "#c3c8cd",
    "server queue": "#98a1aa",
    "prefill": "#7a63c7",
    "decode": "#2f6fb5",
    "generate": "#2f6fb5",
    "failed": "#b3362b",
    "own": "#d9822b",
    "reward queue": "#bfe0cd",
    "reward": "#2b9a66",
    "score": "#3aa6b9",
    "group": "#d8cfe9",
    "batch": "#eadfb4",
    "training": "#b0488a",
}
OTHER = "#8a6d3b"  # a pool of another name
WAITS = ("queue", "server queue", "reward queue", "group", "batch")
LOOKS = """
html{color-scheme:light}main{max-width:1400px}
.tools{display:flex;flex-wrap:wrap;gap:8px 14px;align-items:center;margin:0 0 8px;font-size:13px}
.tools button,.tools select,.tools input{font:inherit;padding:3px 9px;border:1px solid var(--rule);border-radius:6px;
background:var(--panel);color:var(--ink)}.tools input{width:13em}.tools .note{margin:0 0 0 auto}
canvas{display:block;width:100%;height:640px;touch-action:none;cursor:crosshair}canvas:focus-visible{outline:1px solid var(--c0)}
#tip{position:fixed;z-index:2;max-width:420px;background:var(--ink);color:#fff;border-radius:8px;padding:8px 12px;font-size:12px;
line-height:1.45;pointer-events:none;overflow-wrap:anywhere}#tip span{color:#aeb6be}#tip b{font-weight:600}
button.key{font:inherit;font-size:12px;border:0;background:none;padding:2px 0;cursor:pointer}button.off{opacity:.35}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:8px 0 0}a{color:var(--c0);text-decoration:none}
a:hover{text-decoration:underline}
#detail:empty{display:none}#detail{margin-top:14px}#detail h3{margin-top:0}.tall{max-height:520px;overflow:auto}
.tall th{position:sticky;top:-14px;background:var(--panel)}td.text{text-align:left;white-space:normal;overflow-wrap:anywhere}
:root{--bg:#fbfbfa;--panel:#fff;--ink:#1d2126;--soft:#687078;--rule:#e4e6e8;--c0:#2f6fb5}
"""


def ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def data_of(timeline: Timeline, start: float) -> dict[str, Any]:
    """What ``trace.js`` draws; texts once each, times in milliseconds after ``start``."""
    strings: dict[str, int] = {"": 0}
    titles = order(span.phase for one in timeline.samples for span in one.spans)
    numbers = {name: index for index, name in enumerate(titles)}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings))

    def packed(one: Traced) -> list[Any]:
        spans = ((numbers[s.phase], ms(s.start - start), ms(s.seconds), text(s.where)) for s in one.spans)
        return [
            ms(one.begin - start),
            ms(one.begin + one.seconds - start),
            text(one.group),
            one.number,
            text(one.task),
            one.step,
            one.prompt_tokens,
            one.tokens,
            one.oldest,
            one.newest,
            text(one.finish),
            one.reward,
            text(one.fault),
            text(one.server),
            one.staleness,
            ms(one.over - start),
            *(value for span in spans for value in span),
        ]

    phases = [
        {
            "label": label,
            "color": COLORS.get(name, OTHER),
            "wait": name in WAITS,
            "served": name in AT_SERVER and name != "score",
            "decodes": name in ("generate", "decode"),
        }
        for name, label in titles.items()
    ]
    return {
        "phases": phases,
        "samples": [packed(one) for one in timeline.samples],
        "strings": list(strings),
        "loop": [[p.name, p.step, ms(p.start - start), ms((p.end or timeline.end) - start)] for p in timeline.phases],
        "resumes": [ms(moment - start) for moment in timeline.resumes],
        "end": max(1.0, ms(timeline.end - start)),
    }


class _Page:
    """The parts of the page that are text."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.index = {id(one): index for index, one in enumerate(timeline.samples)}
        self.spent = spent(timeline.samples)
        self.steps = step_rows(timeline)
        self.servers, self.workers = places(timeline, servers=True), places(timeline, servers=False)
        self.titles = order(row.phase for row in self.spent)

    def link(self, one: Traced, text: str) -> str:
        return f'<a href="#sample-{self.index[id(one)]}">{escape(text)}</a>'

    def cards(self) -> str:
        idle = [place.idle for place in self.servers if place.idle is not None]
        loops = [phase for phase in self.timeline.phases if phase.name == "rollout"]
        rollout = sum((phase.end or self.timeline.end) - phase.start for phase in loops)
        tail = sum(row.tail for row in self.steps)
        facts = [
            ("servers idle", share(sum(idle) / len(idle) if idle else None), "of the looks at them, once a second"),
            ("trainer idle", share(trainer_idle(self.timeline)), "of the loop's time, in which nothing was trained"),
            (
                "last 5 % of samples",
                share(tail / rollout if rollout else None),
                "of the rollout's time went by until they had ended",
            ),
        ]
        if self.timeline.samples:
            slowest = max(self.timeline.samples, key=lambda one: one.seconds)
            facts.append(("slowest sample", self.link(slowest, duration(slowest.seconds)), escape(slowest.task)))
        cards = (
            f'<div class="card"><span>{name}</span><p><b>{value}</b></p><em>{text}</em></div>'
            for name, value, text in facts
            if value
        )
        return f'<div class="cards">{"".join(cards)}</div>'

    def legend(self) -> str:
        names = list(self.titles)
        found = {row.phase for row in self.spent}
        keys = (
            f'<button class="key" data-phase="{names.index(name)}" title="show or hide">'
            f'<i style="background:{COLORS.get(name, OTHER)}"></i>{escape(self.titles[name])}</button>'
            for name in names
            if name in found
        )
        return f'<div class="legend">{"".join(keys)}</div>'

    def phases(self) -> str:
        whole = sum(row.total for row in self.spent) or 1.0
        rows = [self._phase(row, whole) for row in self.spent]
        head = ("phase", "samples", "total", "share", "mean", "p50", "p90", "p99", "max")
        note = (
            "Seconds of all samples added up. Mean and quantiles are over the samples that were in the phase; the maximum leads "
            "to its sample. Tools, own code: the time of a generate function beside its requests."
        )
        return section("Where the time went", links(head, rows), note)

    def _phase(self, row: Spent, whole: float) -> list[str]:
        color = f'<span class="key"><i style="background:{COLORS.get(row.phase, OTHER)}"></i></span>'
        times = (duration(value) for value in (row.total / row.samples, row.p50, row.p90, row.p99))
        name = color + escape(self.titles[row.phase])
        longest = self.link(row.slowest, duration(row.longest))
        return [name, str(row.samples), duration(row.total), share(row.total / whole), *times, longest]

    def slowest(self) -> str:
        ranked = sorted(self.timeline.samples, key=lambda one: -one.seconds)[:SLOWEST]
        head = ("sample", "took", "most of it", "task", "step", "tokens", "tokens/s", "server", "finish", "reward")
        note = "From the start of the call to its reward. A sample leads to its place."
        return section("The slowest samples", links(head, map(self._slow, ranked)), note, "tall") if ranked else ""

    def _slow(self, one: Traced) -> list[str]:
        sums: dict[str, float] = {}
        for span in one.spans:
            if span.phase not in ("group", "batch", "training"):
                sums[span.phase] = sums.get(span.phase, 0.0) + span.seconds
        most = max(sums, key=lambda phase: sums[phase], default="")
        seconds = sum(span.seconds for span in one.spans if span.phase in ("generate", "decode"))
        return [
            self.link(one, f"{one.group}/{one.number}"),
            duration(one.seconds),
            f"{escape(self.titles[most])}, {duration(sums[most])}" if most else "-",
            escape(one.task),
            "-" if one.step is None else str(one.step),
            str(one.tokens),
            number(one.tokens / seconds) if seconds else "-",
            escape(one.server or "-"),
            escape(one.fault or one.finish),
            "-" if one.reward is None else number(one.reward),
        ]

    def step_table(self) -> str:
        head = ("step", "samples", "rollout", "last 5 %", "train", "sync", "eval", "staleness", "at most", "slowest")
        note = (
            "Last 5 %: from the end of 95 % of the batch's samples to the end of the last. Staleness in versions, of the oldest "
            "token of each sample."
        )
        cut = f" The newest {MOST_STEPS} of {len(self.steps)} steps." if len(self.steps) > MOST_STEPS else ""
        rows = [self._step(row) for row in self.steps[-MOST_STEPS:]]
        return section("Steps", links(head, rows), note + cut, "tall") if rows else ""

    def _step(self, row: StepRow) -> list[str]:
        times = {
            name: duration(row.seconds[name]) if name in row.seconds else "-" for name in ("train", "sync", "eval")
        }
        rollout = duration(row.seconds["rollout"]) if "rollout" in row.seconds else "-"
        slowest = self.link(row.slowest, duration(row.slowest.seconds))
        behind = number(row.staleness), str(row.stalest)
        return [str(row.step), str(row.samples), rollout, duration(row.tail), *times.values(), *behind, slowest]

    def server_table(self) -> str:
        head = ("server", "requests", "tokens", "p50", "max", "running", "idle", "queue", "prefill", "decode")
        note = (
            "Running: requests, on average over the looks; idle: share of the looks that found neither a running nor a waiting "
            "one. Queue, prefill and decode: seconds of all its requests that ended meanwhile, by the server's own account. A "
            "router stands for servers that do not tell their names."
        )
        return section("Servers", links(head, map(self._server, self.servers)), note) if self.servers else ""

    def _server(self, row: Place) -> list[str]:
        shown = [duration(seconds) for seconds in row.phases] or ["-"] * 3
        running = "-" if row.running is None else number(row.running)
        times = duration(row.p50), duration(row.longest)
        return [escape(row.name), str(row.calls), number(row.tokens), *times, running, share(row.idle) or "-", *shown]

    def worker_table(self) -> str:
        spans = self.timeline.end - min((one.begin for one in self.timeline.samples), default=0.0)
        rows = [
            [
                escape(row.name),
                str(row.calls),
                *map(duration, (row.seconds, row.p50, row.longest)),
                share(row.seconds / spans),
            ]
            for row in self.workers
        ]
        head = ("worker", "calls", "total", "p50", "max", "busy")
        note = "Busy: its calls' time as a share of the whole; over 100 % where calls run side by side."
        return section("Workers of rewards and tools", links(head, rows), note) if rows else ""


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def links(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are markup already."""
    lines = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return table(head, ()).replace("</table>", "".join(f"<tr>{line}</tr>" for line in lines) + "</table>")


def section(name: str, body: str, note: str, css: str = "") -> str:
    return f'<h2>{name}</h2><div class="scroll {css}">{body}<p class="note">{note}</p></div>'


def choice(name: str, label: str, values: Sequence[str]) -> str:
    options = "".join(f'<option value="{value}">{value}</option>' for value in values)
    return f'<label>{label} <select id="{name}">{options}</select></label>'


def canvas(page: _Page) -> str:
    buttons = {"fit": "all", "in": "zoom in", "out": "zoom out", "taller": "fewer rows", "flatter": "more rows"}
    shown = "".join(f'<button id="{name}">{text}</button>' for name, text in buttons.items())
    group = choice("by", "group by", ("step", "server", "group", "none"))
    ordered = choice("sort", "sort by", ("start", "duration", "tokens", "finish"))
    search = '<input id="find" type="search" placeholder="group, task, server, fault" aria-label="show only">'
    help_ = (
        "Wheel: zoom in time; with shift: in rows. Drag: move. Click a sample for its details, a key to hide its phase. Black "
        "lines: new weights; yellow: evaluations; broken red: the run was resumed; a red end: the sample failed."
    )
    return (
        '<h2 id="over">Samples over time</h2>'
        f'<div class="tools">{group}{ordered}{search}{shown}<p class="note" id="rows"></p></div>'
        f'<figure><canvas id="timeline" tabindex="0" role="img" aria-label="samples over time"></canvas>{page.legend()}</figure>'
        f'<p class="note">{help_}</p><div id="tip" hidden></div><article id="detail"></article>'
    )


def head(run_dir: Path, timeline: Timeline, whole: Timeline) -> str:
    steps = timeline.steps()
    began = datetime.fromtimestamp(whole.started, UTC).strftime("%Y-%m-%d %H:%M UTC")
    evals = sum(one.evaluation for one in timeline.samples)
    facts = {
        "samples": f"{len(timeline.samples)}" + (f", {evals} of them of evaluations" if evals else ""),
        "steps": f"{steps[0]} to {steps[-1]}" if steps else "none yet",
        "failed": str(sum(bool(one.fault) for one in timeline.samples)),
        "started": began,
    }
    if len(timeline.samples) < len(whole.samples):
        facts["not shown"] = f"{len(whole.samples) - len(timeline.samples)} samples; choose others by --steps A:B"
    listed = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<header><h1>{escape(title(read_run(run_dir)))}: trace</h1><dl>{listed}</dl></header>"


def write_trace(run_dir: Path, first: int | None = None, last: int | None = None) -> Path:
    """Writes ``trace.html`` into the run folder, whole or not at all, and returns its path; the steps as in ``window``."""
    whole = read_timeline(run_dir)
    timeline = window(whole, first, last)
    page = _Page(timeline)
    starts = [one.begin for one in timeline.samples] + [phase.start for phase in timeline.phases if first is None]
    data = json.dumps(data_of(timeline, min(starts, default=0.0)), separators=(",", ":"), allow_nan=False)
    body = [head(run_dir, timeline, whole), page.cards()]
    if timeline.samples or timeline.phases:
        body += [
            canvas(page),
            page.phases(),
            page.slowest(),
            page.step_table(),
            page.server_table(),
            page.worker_table(),
        ]
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">'
        f"<title>{escape(title(read_run(run_dir)))}: trace</title><style>{STYLE}{LOOKS}</style></head>"
        f"<body><main>{''.join(body)}<footer>vime {__version__}</footer></main>"
        f'<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>'
        f"<script>{SCRIPT}</script></body></html>"
    )
    path = run_dir / PAGE
    draft = path.with_suffix(".html.tmp")
    draft.write_text(text, encoding="utf-8", errors="replace")
    os.replace(draft, path)
    return path
