"""The live view of a run: a panel that refreshes in place on a terminal, one plain line per event everywhere else."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vime.observe.metrics import Metrics
from vime.observe.summary import (
    Change,
    changes,
    duration,
    names,
    number,
    phase_table,
    series,
    show,
    thin,
)

REFRESHES_PER_SECOND = 4
CELL_WIDTH = 38
"""Columns of one metric's cell: two cells fit into a panel on an 80-column terminal."""
LABEL_WIDTH = 13
SPARK_WIDTH = 7
BLOCKS = "▁▂▃▄▅▆▇█"
PHASE_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_black")
UNNAMED = 6
"""Metrics beyond the known ones that the panel shows; the files have all."""

Row = tuple[str, str, tuple[str, ...]]
ROWS: tuple[Row, ...] = (
    ("length", "{} ≤{}", ("rollout/response_tokens_mean", "rollout/response_tokens_max")),
    ("truncated", "{}", ("rollout/truncated_fraction",)),
    ("entropy", "{}", ("train/entropy",)),
    ("KL", "{}", ("train/kl",)),
    ("clip fraction", "{}", ("train/clip_fraction",)),
    ("grad norm", "{}", ("train/grad_norm",)),
    ("logprob diff", "{} ≤{}", ("train/logprob_abs_diff_mean", "train/logprob_abs_diff_max")),
    ("probe diff", "{} ≤{}", ("weights/probe_abs_diff_mean", "weights/probe_abs_diff_max")),
    ("rollout", "{} tok/s", ("rollout/tokens_per_s",)),
    ("train", "{} tok/s", ("train/tokens_per_s",)),
    ("loss", "{}", ("train/loss",)),
    ("accuracy", "{}", ("train/accuracy",)),
    ("margin", "{}", ("train/margin",)),
    ("memory", "{} GiB", ("train/memory_peak_gib",)),
    ("lr", "{}", ("train/lr",)),
    ("staleness", "{} ≤{}", ("rollout/staleness_mean", "rollout/staleness_max")),
    ("version", "{}", ("weights/version",)),
    ("zero variance", "{}", ("reward/zero_variance_fraction",)),
    ("filtered", "{}", ("rollout/filtered",)),
    ("prompt", "{} tokens", ("rollout/prompt_tokens_mean",)),
    ("in flight", "{} ≤{}", ("servers/running", "servers/cap")),
    ("servers idle", "{}", ("servers/idle_fraction",)),
    ("driver lag", "{} ms", ("driver/lag_max_ms",)),
)
"""What is shown of a step: label, form, metrics. A row appears once its first metric does; "3 ≤7" is mean, maximum."""
PLAIN_ROWS = 10
"""A plain line has the first rows only: what one looks at to see whether a run is healthy."""
UNREWARDED = ("loss", "accuracy", "margin")
"""And these where there is no reward."""
KNOWN = {name for _, _, row in ROWS for name in row} | {"reward/mean", "reward/std"}


class Pace:
    """Estimates the time that is left from the moments at which the last steps ended."""

    WINDOW = 20
    """Steps looked back on: enough to smooth one eval or checkpoint, few enough to follow growing responses."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque(maxlen=self.WINDOW + 1)

    def step_ended(self, now: float, step: int, seconds: float | None) -> None:
        """``now`` in seconds of any clock; ``seconds`` the step took, which stands in until a second step has ended."""
        if not self._ends and seconds is not None:
            self._ends.append((now - seconds, step - 1))
        self._ends.append((now, step))

    def seconds_left(self, total_steps: int, now: float) -> float | None:
        """None while nothing is known. Counts down between two steps."""
        if len(self._ends) < 2:
            return None
        (begin, first), (end, last) = self._ends[0], self._ends[-1]
        if last <= first:
            return None
        return max(0.0, (end - begin) / (last - first) * (total_steps - last) - (now - end))


class LiveView:
    """Shows a run while it goes. A context manager: nothing is shown outside of ``with``.

    A console that isn't an interactive terminal, or a set ``CI`` variable, gets plain lines without control codes: one
    per step, eval and message, and one for each phase name when it first appears. So start-up is told and the cycle of
    a step doesn't fill the log.
    """

    def __init__(self, title: str, total_steps: int, console: Console | None = None) -> None:
        self._title, self._total = title, total_steps
        self._console = console or Console()
        self._steps: list[tuple[int, Metrics]] = []
        self._evals: list[tuple[int, Metrics]] = []
        self._body = _Body([], [])
        self._phase = ("starting", "")
        self._phases_told: set[str] = set()
        self._began = self._phase_began = time.monotonic()
        self._pace = Pace()
        self._lock = threading.Lock()
        interactive = self._console.is_interactive and not os.environ.get("CI")
        self._live = self._make_live() if interactive else None

    def _make_live(self) -> Live:
        return Live(console=self._console, get_renderable=self._panel, refresh_per_second=REFRESHES_PER_SECOND)

    def __enter__(self) -> Self:
        self._began = self._phase_began = time.monotonic()
        if self._live:
            self._live.start()
        else:
            self._line(f"{self._title}: {self._total} steps")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def phase(self, name: str, detail: str = "") -> None:
        """Says what goes on now. ``detail`` is what moves within it, such as "37/128"."""
        with self._lock:
            if name != self._phase[0]:
                self._phase_began = time.monotonic()
            self._phase = (name, detail)
        if not self._live and name not in self._phases_told:
            self._phases_told.add(name)
            self._line(f"{name} {detail}".rstrip() + " …")

    def update(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a "step" or an "eval", as ``Recorder.log`` does."""
        now = time.monotonic()
        with self._lock:
            if kind == "eval":
                self._evals.append((step, dict(metrics)))
            else:
                self._steps.append((step, dict(metrics)))
                self._pace.step_ended(now, step, metrics.get("time/step"))
            self._body = _Body(list(self._steps), list(self._evals))
        if not self._live:
            self._line(eval_line(step, metrics) if kind == "eval" else self._step_line(step, metrics, now))

    def message(self, text: str) -> None:
        """Prints a line that stays, above the panel."""
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _step_line(self, step: int, metrics: Metrics, now: float) -> str:
        parts = [f"step {step}/{self._total}"]
        if "reward/mean" in metrics:
            parts.append(f"reward {_reward(metrics)}")
        wanted = [label for label, _, _ in ROWS[:PLAIN_ROWS]]
        wanted += UNREWARDED if "reward/mean" not in metrics else ()
        parts += [f"{label} {text}" for label, text, _ in cells([(step, metrics)]) if label in wanted]
        left = self._pace.seconds_left(self._total, now) if step < self._total else None
        times = (("took", metrics.get("time/step")), ("left", left))
        return "  ".join(parts + [f"{label} {duration(value)}" for label, value in times if value is not None])

    def _panel(self) -> RenderableType:
        with self._lock:
            inside = Group(self._status(time.monotonic()), self._body)
        return Panel(inside, title=Text(self._title, style="bold"), border_style="bright_black", padding=(0, 1))

    def _status(self, now: float) -> Text:
        """Two lines: how far the run is, and what goes on."""
        step = self._steps[-1][0] if self._steps else 0
        done = min(1.0, step / self._total) if self._total else 1.0
        bar = round(20 * done)
        text = Text.assemble(("━" * bar, "cyan"), ("━" * (20 - bar), "bright_black"))
        text.append(f"  step {step}/{self._total}", style="bold")
        left = self._pace.seconds_left(self._total, now) if done < 1 else None
        text.append(f"  {100 * done:.0f}%  elapsed {duration(now - self._began)}")
        text.append(f"  left {duration(left)}" if left is not None else "")
        name, detail = self._phase
        text.append(f"\n▸ {name}", style="cyan")
        text.append(f" {detail}".rstrip() + f"  {duration(now - self._phase_began)}", style="bright_black")
        return text


class _Body:
    """The inside of the panel for one state of the run, laid out for the width that it is given.

    The panel is refreshed several times a second and a run has thousands of steps: a layout is made once per width.
    """

    def __init__(self, steps: list[tuple[int, Metrics]], evals: list[tuple[int, Metrics]]) -> None:
        self._steps, self._evals = steps, evals
        self._layouts: dict[int, list[RenderableType]] = {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = options.max_width
        if width not in self._layouts:
            self._layouts = {width: list(self._layout(width))}
        yield from self._layouts[width]

    def _layout(self, width: int) -> Iterator[RenderableType]:
        if reward := series(self._steps, "reward/mean"):
            shown = _reward(self._steps[-1][1])
            yield Text()
            yield Text.assemble(
                ("reward".ljust(LABEL_WIDTH + 1), "bright_black"), (f"{shown:<14}", "bold green"),
                (spark([value for _, value in reward], max(1, width - LABEL_WIDTH - 16)), "green"),
            )  # fmt: skip
        if self._evals:
            yield _eval_table(changes(self._evals))
        if self._steps:
            yield Text()
            yield _grid(self._steps, max(1, width // CELL_WIDTH))
            yield _times(self._steps, width)


def _grid(steps: Sequence[tuple[int, Metrics]], columns: int) -> Table:
    """Metrics in ``columns`` columns of label, value and sparkline."""
    grid = Table.grid(padding=(0, 1))
    for _ in range(columns):
        grid.add_column(style="bright_black", width=LABEL_WIDTH, no_wrap=True)
        grid.add_column(width=CELL_WIDTH - LABEL_WIDTH - SPARK_WIDTH - 3, no_wrap=True)
        grid.add_column(style="cyan", width=SPARK_WIDTH, no_wrap=True)
    shown = cells(steps)
    known = {label for label, _, _ in ROWS}
    shown = [cell for cell in shown if cell[0] in known] + [cell for cell in shown if cell[0] not in known][:UNNAMED]
    height = -(-len(shown) // columns)
    for top in range(height):
        row: list[str] = []
        for label, text, values in shown[top::height]:
            row += [label, text, spark(values, SPARK_WIDTH)]
        grid.add_row(*row)
    return grid


def cells(steps: Sequence[tuple[int, Metrics]]) -> list[tuple[str, str, list[float]]]:
    """(label, latest value, history) of all metrics of ``steps`` but reward and time; unknown ones last."""
    latest: dict[str, float | None] = {name: value for _, metrics in steps for name, value in metrics.items()}
    found = []
    for label, form, row in ROWS:
        if row[0] in latest:
            present = [show(name, latest[name]) for name in row if name in latest]
            text = form.format(*present) if len(present) == len(row) else present[0]
            found.append((label, text, [value for _, value in series(steps, row[0])]))
    for name in names(steps):
        if name not in KNOWN and not name.startswith("time/"):
            found.append((name, show(name, latest[name]), [value for _, value in series(steps, name)]))
    return found


def _reward(metrics: Metrics) -> str:
    spread = metrics.get("reward/std")
    return show("", metrics["reward/mean"]) + (f" ±{show('', spread)}" if spread is not None else "")


def _eval_table(found: Sequence[Change]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", pad_edge=False)
    table.add_column("eval", style="bright_black", overflow="ellipsis", no_wrap=True)
    for header in ("before", "latest", "change", "best"):
        table.add_column(header, justify="right", no_wrap=True)
    passes = [change for change in found if change.metric.startswith("pass@")]
    for change in passes or found:
        if change.best is not None:
            best = f"{show(change.metric, change.best[1])} @{number(change.best[0])}"
            after = Text(show(change.metric, change.after), style="bold")
            name = f"{change.eval_set} {change.metric}"
            table.add_row(name, show(change.metric, change.before), after, _difference(change), best)
    return table


def _times(steps: Sequence[tuple[int, Metrics]], width: int) -> RenderableType:
    """Where the time of the last steps went, as one bar and its legend."""
    found = phase_table(steps[-Pace.WINDOW :])
    bar, legend = Text(), []
    for index, phase in enumerate(found):
        color = PHASE_COLORS[index % len(PHASE_COLORS)]
        bar.append("█" * round(phase.share * width), style=color)
        entry = (f"{phase.name} {duration(phase.mean)} {100 * phase.share:.0f}%", "bright_black")
        legend.append(Text.assemble(("■ ", color), entry))
    bar.truncate(width)
    return Group(Text(), bar, Columns(legend, padding=(0, 3))) if found else Text()


def spark(values: Sequence[float], width: int) -> str:
    """``values`` as at most ``width`` blocks from their minimum to their maximum; one that isn't finite is a blank."""
    points = [value for _, value in thin(list(enumerate(values)), width)]
    finite = [value for value in points if math.isfinite(value)]
    if len(values) < 2 or not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in points)


def eval_line(step: int, metrics: Metrics) -> str:
    """One plain line of an eval, by set: "eval at step 20  gsm8k: pass@1 41.2%, …"."""
    parts = []
    found = changes([(step, metrics)])
    for eval_set in dict.fromkeys(change.eval_set for change in found):
        values = [f"{c.metric} {show(c.metric, c.before)}" for c in found if c.eval_set == eval_set]
        parts.append(f"{eval_set}: {', '.join(values)}")
    return f"eval at step {step}  {'  '.join(parts)}"


def before_after_table(evals: list[tuple[int, dict[str, float]]]) -> Table:
    """What a run has changed: one row per eval set and metric, first against last eval; fractions change in points."""
    table = Table(header_style="bold", title="evaluation, before and after", title_justify="left")
    table.add_column("eval set")
    table.add_column("metric")
    for header in ("before", "after", "change", "prompts"):
        table.add_column(header, justify="right", no_wrap=True)
    for change in changes(evals):
        prompts = "-" if change.prompts is None else str(change.prompts)
        before, after = show(change.metric, change.before), show(change.metric, change.after)
        table.add_row(change.eval_set, change.metric, before, after, _difference(change), prompts)
    return table


def _difference(change: Change) -> Text:
    """The change, green or red where more is better."""
    return Text(change.difference, style={True: "green", False: "red", None: ""}[change.better])
