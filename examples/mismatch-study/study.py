"""Compares runs by the mismatch between server and trainer: a table, and a page with the curves.

python examples/mismatch-study/study.py RUN [RUN ...] [--page FILE.html]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from vime.observe.metrics import ObserveError, Run, read_run
from vime.observe.report import POLICY, STYLE, draw
from vime.observe.summary import Line, series

MEASURED = {
    "train/logprob_abs_diff_mean": "log-probability, server against trainer: mean difference",
    "train/logprob_abs_diff_max": "log-probability, server against trainer: largest difference",
    "train/mismatch_kl": "KL of server and trainer (k3)",
    "train/effective_sample_size": "share of the tokens that the importance ratios leave effective",
    "reward/mean": "reward",
}
ON_LOG_SCALE = 3  # the first so many: they differ by powers of ten


def values(run: Run, name: str) -> list[float]:
    """What was measured and finite, step by step."""
    return [value for _, value in series(run.steps, name) if math.isfinite(value)]


def correction(run: Run) -> str:
    return ", ".join(run.config["algorithm"]["corrections"]) or "none"


def row(run: Run) -> list[str]:
    """One line of the table; "-" where nothing was measured."""
    difference, most, kl, effective, reward = (values(run, name) for name in MEASURED)

    def told(found: list[float], value: float, form: str) -> str:
        return format(value, form) if found else "-"

    return [
        run.folder.name,
        run.config["model"]["dtype"],
        correction(run),
        str(len(run.steps)),
        told(difference, fmean(difference or [0]), ".2e"),
        told(most, max(most, default=0), ".2e"),
        told(kl, fmean(kl or [0]), ".2e"),
        told(effective, fmean(effective or [0]), ".4f"),
        told(reward, reward[0] if reward else 0, ".3f") + " → " + told(reward, reward[-1] if reward else 0, ".3f"),
    ]


def page(runs: list[Run]) -> str:
    """The curves of all runs, a chart a metric; it loads nothing from elsewhere."""
    charts = "".join(
        draw(title, [Line(run.folder.name, name, series(run.steps, name)) for run in runs], place < ON_LOG_SCALE)
        for place, (name, title) in enumerate(MEASURED.items())
    )
    return (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>Mismatch study</title><style>{STYLE}</style><main><h1>Mismatch study</h1>{charts}</main>\n"
    )


def opened(folder: Path) -> Run:
    if not (folder / "metrics.jsonl").exists():
        raise ObserveError(f"{folder} holds no metrics.jsonl; name the folder of a run (run.dir)")
    return read_run(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the curves there, as HTML")
    given = parser.parse_args()
    try:
        runs = [opened(folder) for folder in given.runs]
    except ObserveError as error:
        parser.error(str(error))
    table = Table("run", "dtype", "correction", "steps", "diff mean", "diff max", "KL", "effective", "reward")
    for run in runs:
        table.add_row(*row(run))
    Console().print(table)
    if given.page:
        given.page.write_text(page(runs))
        print(f"curves  {given.page}")


if __name__ == "__main__":
    main()
