"""The HTML report of a run: one page that needs nothing else, neither a library nor a connection. Charts are SVG.

What the page shows is read back from the run folder, so that a report can be made of a run that still goes, that was
resumed, or that died.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from pathlib import Path

from vime import __version__
from vime.observe.metrics import Run, first_and_last_samples, read_run
from vime.observe.summary import (
    CHARTED,
    CHARTS,
    Change,
    Chart,
    Line,
    SampleRow,
    Scale,
    changes,
    curve,
    duration,
    latest,
    names,
    number,
    pairs,
    phase_table,
    phases,
    series,
    setting,
    shareable,
    show,
    thin,
    ticks,
    title,
)

REPORT = "report.html"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The page may load and run nothing: the texts in it are a model's."""
MAX_POINTS = 160
"""Points per curve: about one for every two pixels of a chart."""
MAX_BARS = 80
SAMPLE_PAIRS = 4
"""Cards of the first and of the last step, per split."""
WIDTH, HEIGHT = 440, 210
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 10, 24
FACTS = (
    ("rollout tokens/s", "rollout/tokens_per_s"),
    ("train tokens/s", "train/tokens_per_s"),
    ("weights version", "weights/version"),
)
TONES = {True: "good", False: "bad", None: "none"}
COLORS = 8
"""Series colors that the style sheet defines as --c0 and so on."""


class Axes(Scale):
    """A scale in the coordinates of the SVG, and its grid."""

    def x(self, step: float) -> float:
        return round(LEFT + self.across(step) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """``value`` must be one that the scale holds."""
        return round(HEIGHT - BOTTOM - (self.up(value) or 0.0) * (HEIGHT - TOP - BOTTOM), 1)

    def svg(self, name: str) -> str:
        """Grid lines and tick labels; values read as those of the metric ``name``."""
        levels = self.levels()
        whole = all(abs(100 * level - round(100 * level)) < 1e-6 for level in levels)
        parts = []
        for level in levels:
            y, text = self.y(level), show(name, level)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            text = text.replace(".0%", "%") if whole else text
            parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 3.5:.1f}">{text}</text>')
        steps = ticks(self.first, self.last, 6) if self.last > self.first else [self.first]
        places = [(self.x(step), number(step)) for step in steps if step == int(step)]
        parts += [f'<text class="tick mid" x="{x}" y="{HEIGHT - BOTTOM + 16}">{text}</text>' for x, text in places]
        base = HEIGHT - BOTTOM
        return "".join(parts) + f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'


def chart(spec: Chart, run: Run) -> str:
    spread = dict(curve(run.steps, spec.band, MAX_POINTS))
    lines = [Line(label, name, curve(run.steps, name, MAX_POINTS), spread) for name, label in spec.lines]
    return draw(spec.title, lines, spec.log)


def draw(title: str, lines: Sequence[Line], log: bool = False) -> str:
    """A figure of ``lines``; empty text where none has a finite value. Hovering a step shows its values."""
    lines = [line for line in lines if any(math.isfinite(value) for _, value in line.points)]
    if not lines:
        return ""
    steps = [step for line in lines for step, _ in line.points]
    axes = Axes(steps, [value for line in lines for value in line.reach()], log)
    body = "".join(draw_line(line, axes, index % COLORS) for index, line in enumerate(lines))
    keys = "".join(
        f'<span class="key c{index % COLORS}"><i></i>{escape(line.label)} '
        f"<b>{show(line.name, latest(line.points))}</b></span>"
        for index, line in enumerate(lines)
    )
    return (
        f'<figure><figcaption><strong>{escape(title)}</strong><span class="keys">{keys}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} by step">'
        f"{axes.svg(lines[0].name)}{body}{hover(lines, axes)}</svg></figure>"
    )


def draw_line(line: Line, axes: Axes, color: int) -> str:
    """A path that breaks where a value is missing, its band, and dots where the points are few."""
    parts = []
    for run in axes.unbroken(line.points):
        places = [(axes.x(step), axes.y(value)) for step, value in run]
        if line.spread:
            # A single point's band would have no width: it is drawn as a bar.
            wings = (-4, 4) if len(run) == 1 else (0,)
            edges = [(axes.x(step) + side, value, line.half(step)) for step, value in run for side in wings]
            upper = [(x, axes.y(value + half)) for x, value, half in edges]
            lower = [(x, axes.y(value - half)) for x, value, half in reversed(edges)]
            parts.append(f'<path class="band c{color}" d="M{join(upper + lower)}Z"/>')
        parts.append(f'<path class="line c{color}" d="M{join(places)}"/>')
        if len(line.points) <= 40 or len(run) == 1:
            parts += [f'<circle class="dot c{color}" cx="{x}" cy="{y}" r="2.2"/>' for x, y in places]
    return "".join(parts)


def join(places: Iterable[tuple[float, float]]) -> str:
    return "L".join(f"{x} {y}" for x, y in places)


def hover(lines: Sequence[Line], axes: Axes) -> str:
    """One invisible strip per step, which under the pointer shows a rule and, as a tooltip, all values of the step."""
    texts: dict[float, list[str]] = {}
    for line in lines:
        for step, value in line.points:
            spread = f" ± {show(line.name, line.half(step))}" if line.spread else ""
            texts.setdefault(step, []).append(f"{line.label.partition(' ±')[0]}: {show(line.name, value)}{spread}")
    steps = sorted(texts)
    places = [axes.x(step) for step in steps]
    middles = [LEFT, *[(a + b) / 2 for a, b in pairwise(places)], WIDTH - RIGHT]
    parts = []
    for step, x, (start, end) in zip(steps, places, pairwise(middles), strict=True):
        title = escape("\n".join([f"step {int(step)}", *texts[step]]))
        strip = f'<rect x="{start:.1f}" y="{TOP}" width="{end - start:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
        rule = f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        parts.append(f'<g class="hit"><title>{title}</title>{strip}{rule}</g>')
    return "".join(parts)


def time_bars(run: Run, order: Sequence[str]) -> str:
    """Stacked bars of the seconds per phase, one per step or per neighbouring steps."""
    table = {name: thin(points, MAX_BARS) for name, points in phases(run.steps).items()}
    steps = [step for step, _ in table[order[0]]]
    heights = [sum(table[name][index][1] for name in order) for index in range(len(steps))]
    gap = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else 1.0
    axes = Axes([steps[0] - gap / 2, steps[-1] + gap / 2], [0.0, *heights], log=False)
    width = min(0.8 * (WIDTH - LEFT - RIGHT) / len(steps), 40)
    parts = []
    for index, step in enumerate(steps):
        x, base = axes.x(step) - width / 2, 0.0
        lines = [f"{name}: {duration(table[name][index][1])}" for name in order if table[name][index][1] > 0]
        parts.append(f"<g><title>{escape(chr(10).join([f'step {int(step)}', *lines]))}</title>")
        for color, name in enumerate(order):
            top, bottom = axes.y(base + table[name][index][1]), axes.y(base)
            base += table[name][index][1]
            size = f'width="{width:.1f}" height="{bottom - top:.1f}"'
            parts.append(f'<rect class="bar c{color % COLORS}" x="{x:.1f}" y="{top:.1f}" {size}/>')
        parts.append("</g>")
    label = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="seconds per phase by step">'
    caption = "<figcaption><strong>Time per step</strong></figcaption>"
    return f"<figure>{caption}{label}{axes.svg('time/')}{''.join(parts)}</svg></figure>"


def time_section(run: Run) -> str:
    found = phase_table(run.steps)
    if not found:
        return ""
    rows = [
        (
            phase.name,
            *(duration(value) for value in (phase.mean, phase.median, phase.total)),
            f"{100 * phase.share:.1f}%",
        )
        for phase in found
    ]
    keys = [f'<span class="key c{index % COLORS}"><i></i></span>' for index in range(len(found))]
    listed = table(("phase", "mean", "median", "total", "share"), rows, keys=keys)
    note = '<p class="note">Mean and median are of the steps that had the phase.</p>'
    bars = time_bars(run, [phase.name for phase in found])
    return f'<h2>Where the time went</h2><div class="grid two">{bars}<div class="scroll">{listed}{note}</div></div>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]], css: str = "", keys: Sequence[str] = ()) -> str:
    """An HTML table of escaped cells; ``keys`` is markup before the first cell of each row."""
    top = "".join(f"<th>{name}</th>" for name in head)
    lines = [f'<table class="{css}">', f"<tr>{top}</tr>" if head else ""]
    for index, row in enumerate(rows):
        cells = "</td><td>".join(escape(str(cell)) for cell in row)
        lines.append(f"<tr><td>{keys[index] if keys else ''}{cells}</td></tr>")
    return "".join([*lines, "</table>"])


def curves_section(run: Run, found: Sequence[Change]) -> str:
    passes = [Line(f"{c.eval_set} {c.metric}", c.metric, c.points) for c in found if c.metric.startswith("pass@")]
    figures = [chart(CHARTS[0], run), draw("Evaluation", passes), *[chart(spec, run) for spec in CHARTS[1:]]]
    parts = [f'<h2>Curves</h2><div class="grid">{"".join(figures)}</div>'] if any(figures) else []
    if len(run.steps) > MAX_POINTS:
        size = math.ceil(len(run.steps) / MAX_POINTS)
        text = f"A point stands for {size} steps: their mean, or their maximum for a max or a gradient norm."
        parts.append(f'<p class="note">{text}</p>')
    others: dict[str, list[str]] = {}
    for name in names(run.steps):
        if name not in CHARTED and not name.startswith("time/") and name != "weights/version":
            others.setdefault(name.partition("/")[0], []).append(chart(Chart(name, ((name, "value"),)), run))
    for c in found:
        if not c.metric.startswith("pass@"):
            figure = draw(f"{c.eval_set}: {c.metric}", [Line("value", c.metric, c.points)])
            others.setdefault("eval", []).append(figure)
    inner = "".join(
        f'<h3>{escape(prefix)}</h3><div class="grid">{"".join(figures)}</div>' for prefix, figures in others.items()
    )
    return "".join(parts) + (f"<details><summary>More metrics</summary>{inner}</details>" if inner else "")


def eval_section(found: Sequence[Change]) -> str:
    rows = []
    for c in found:
        best = f"{show(c.metric, c.best[1])} at {int(c.best[0])}" if c.best else "-"
        values = show(c.metric, c.before), show(c.metric, c.after), c.difference
        rows.append((c.eval_set, c.metric, *values, best, c.prompts or "-"))
    head = ("set", "metric", "before", "after", "change", "best, at step", "prompts")
    return f'<h2>Evaluation</h2><div class="scroll">{table(head, rows, "named")}</div>' if rows else ""


def headline(run: Run, found: Sequence[Change]) -> str:
    """Name, model, extent, and what the run has changed in big numbers."""
    wanted = ("pass@", "accuracy", "loss")
    big = [(f"{c.eval_set} {c.metric}", c) for name in wanted for c in found if c.metric.startswith(name)][:4]
    rewards = [point for point in series(run.steps, "reward/mean") if math.isfinite(point[1])]
    if not big and rewards:
        big = [("training reward", Change("", "reward", rewards, None))]
    seconds = sum(value for _, value in series(run.steps, "time/step") if math.isfinite(value))
    facts = [("model", setting(run, "model")), ("steps", str(run.steps[-1][0]) if run.steps else "0")]
    facts.append(("time in steps", duration(seconds or run.ended - run.started)))
    facts += [(label, show(name, latest(points))) for label, name in FACTS if (points := series(run.steps, name))]
    if run.started:
        facts.append(("started", datetime.fromtimestamp(run.started, UTC).strftime("%Y-%m-%d %H:%M UTC")))
    listed = "".join(f"<div><dt>{label}</dt><dd>{escape(value)}</dd></div>" for label, value in facts if value)
    cards = "".join(big_number(title, change) for title, change in big)
    return f'<header><h1>{escape(title(run))}</h1><dl>{listed}</dl><div class="cards">{cards}</div></header>'


def big_number(title: str, c: Change) -> str:
    after = f" <i>→</i> <b>{show(c.metric, c.after)}</b>" if c.after is not None else ""
    change = f'<em class="{TONES[c.better]}">{c.difference}</em>' if after else "<em>one evaluation</em>"
    return f'<div class="card"><span>{escape(title)}</span><p>{show(c.metric, c.before)}{after}</p>{change}</div>'


def samples_section(run: Run) -> str:
    parts = []
    for split, (first, last) in sorted(first_and_last_samples(run.folder).items()):
        rows = pairs(first, last, SAMPLE_PAIRS)
        steps = dict.fromkeys((first.step, last.step))
        heads = "".join(f"<h3>{escape(split)}, step {step}</h3>" for step in steps)
        blank = "<div></div>" if len(steps) > 1 else ""
        cards = "".join(sample_card(row) if row else blank for pair in rows for row in pair)
        parts.append(f'<div class="pairs">{heads}{cards}</div>')
    note = "The first groups of each step as the file has them; a task that both steps had stands side by side."
    return f'<h2>Samples</h2><p class="note">{note}</p>{"".join(parts)}' if parts else ""


def sample_card(row: SampleRow) -> str:
    """One sample; every text of it comes from a model or a data set, and is escaped."""
    reward = row.get("reward")
    tone = TONES[None if reward is None else reward > 0]
    facts = [str(row.get("task", "")), f"{row.get('tokens', '-')} tokens", f"version {row.get('version', '-')}"]
    facts += ["cut at the limit"] if row.get("finish") == "length" else []
    facts += [f"advantage {row['advantage']:+.3g}"] if row.get("advantage") is not None else []
    texts = "".join(
        f"<h4>{title}</h4><pre>{escape(str(row[key]))}</pre>"
        for key, title in (("prompt", "prompt"), ("response", "response"), ("answer", "expected answer"))
        if row.get(key) is not None
    )
    badge = f'<b class="reward {tone}">reward {"-" if reward is None else number(reward)}</b>'
    return f'<article><p class="facts">{badge}{escape(" · ".join(facts))}</p>{texts}</article>'


def setup_section(run: Run) -> str:
    """The config, and what the summary says (versions among it)."""
    plain = {key: value for key, value in run.summary.items() if not isinstance(value, dict | list)}
    found = {"summary": plain, **{key: value for key, value in run.summary.items() if isinstance(value, dict)}}
    tables = "".join(
        f"<h3>{escape(title.capitalize())}</h3>{table((), values.items(), 'plain')}"
        for title, values in found.items()
        if values
    )
    config = f"<div><h3>Config</h3><pre>{escape(shareable(run.config_text))}</pre></div>" if run.config_text else ""
    return f'<h2>Setup</h2><div class="grid two">{config}<div>{tables}</div></div>' if config or tables else ""


STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--panel:#fff;--ink:#1d2126;--soft:#687078;--rule:#e4e6e8;
--good:#147a4b;--bad:#b3362b;--c0:#2f6fb5;--c1:#d9822b;--c2:#2b9a66;--c3:#b0488a;--c4:#7a63c7;--c5:#c2a21a;--c6:#3aa6b9;
--c7:#8a8f98}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--panel:#1b1f23;--ink:#e4e7ea;--soft:#949da6;--rule:#2c3238;
--good:#5cc795;--bad:#ef8378;--c0:#6ea8e6;--c1:#eba45a;--c2:#5cc795;--c3:#db86bb;--c4:#a994f0;--c5:#dcc24f;--c6:#6fcbdb}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1240px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:30px;line-height:1.2;margin:0 0 14px;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:19px;margin:48px 0 14px}h3{font-size:14px;margin:20px 0 8px}.pairs h3{margin:8px 0 -6px}
.pairs h3:only-of-type{grid-column:1/-1}
h4{font-size:12px;font-weight:500;color:var(--soft);margin:10px 0 3px}
dl{display:flex;flex-wrap:wrap;gap:10px 32px;margin:0 0 26px}dt{font-size:12px;color:var(--soft)}
dd{margin:0;font-weight:500;overflow-wrap:anywhere}
.cards,.grid,.pairs{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,250px),1fr))}
.grid{grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr))}
.two{align-items:start;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr))}
.pairs{grid-template-columns:repeat(2,minmax(0,1fr));margin-top:14px}
.card,figure,article,.scroll{background:var(--panel);border:1px solid var(--rule);border-radius:10px;padding:14px 16px;
margin:0;min-width:0}
.card span{color:var(--soft);font-size:13px}.card b{font-weight:600;color:var(--ink)}
.card i{font-style:normal;font-size:22px}
.card p{font-size:30px;line-height:1.25;margin:4px 0 2px;white-space:nowrap;color:var(--soft)}
.card em{font-style:normal;font-size:14px}
figcaption{display:flex;flex-wrap:wrap;gap:2px 14px;justify-content:space-between;font-size:13px;margin-bottom:8px}
.keys{display:flex;flex-wrap:wrap;gap:0 14px}.key{color:var(--soft);white-space:nowrap}
.key b{font-weight:500;color:var(--ink)}
.key i{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:6px;background:var(--c)}
figure{display:flex;flex-direction:column}
svg{display:block;width:100%;height:auto;font-family:inherit;margin-top:auto;
overflow:visible}line.grid{stroke:var(--rule)}
line.axis{stroke:var(--soft);opacity:.5}.tick{font-size:11.5px;fill:var(--soft)}.end{text-anchor:end}.mid{text-anchor:middle}
path.line{fill:none;stroke:var(--c);stroke-width:1.6;stroke-linejoin:round}.band{fill:var(--c);opacity:.14}
.dot,.bar{fill:var(--c)}.hit rect{fill:transparent}.hit line{stroke:var(--soft);opacity:0}.hit:hover line{opacity:.7}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}.scroll{overflow-x:auto}
th,td{text-align:right;padding:6px 0 6px 18px;border-bottom:1px solid var(--rule);white-space:nowrap}
th{font-weight:500;color:var(--soft);font-size:12px}tr:last-child td{border-bottom:0}
td:first-child,th:first-child{text-align:left;padding-left:0}.named :is(td,th):nth-child(2),.plain td{text-align:left}
.plain td{white-space:normal;overflow-wrap:anywhere}.note{color:var(--soft);font-size:13px;margin:10px 0 0}
pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere;
margin:0;max-height:17em;overflow:auto;background:var(--bg);border-radius:6px;padding:8px 10px}
.facts{color:var(--soft);font-size:13px;margin:0}.reward{margin-right:12px;font-weight:600}
.good{color:var(--good)}.bad{color:var(--bad)}.none{color:var(--soft)}
details{margin-top:20px}summary{cursor:pointer;font-weight:500}footer{color:var(--soft);font-size:12px;margin-top:48px}
@media(max-width:640px){main{padding:24px 14px 48px}h2{margin-top:36px}
.card p{font-size:19px}.card i{font-size:15px}
.cards{grid-template-columns:repeat(auto-fit,minmax(155px,1fr))}.card,figure,article,.scroll{padding:12px}
table{font-size:13px}th,td{padding-left:12px}.pairs{gap:10px}}
"""
STYLE += "".join(f".c{index}{{--c:var(--c{index})}}" for index in range(COLORS))


def write_report(run_dir: Path) -> Path:
    """Writes ``report.html`` into the run folder, whole or not at all, and returns its path.

    Absent files leave their part of the page out. Raises FileNotFoundError if there is no such folder.
    """
    run = read_run(run_dir)
    found = changes(run.evals)
    sections = (
        headline(run, found),
        "" if run.steps or run.evals else '<p class="note">No metrics have been recorded yet.</p>',
        eval_section(found),
        curves_section(run, found),
        time_section(run),
        samples_section(run),
        setup_section(run),
    )
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">'
        f"<title>{escape(title(run))}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(sections)}<footer>vime {__version__}</footer></main></body></html>"
    )
    path = run.folder / REPORT
    partial = path.with_suffix(".html.tmp")
    partial.write_text(page, encoding="utf-8", errors="replace")
    os.replace(partial, path)
    return path
