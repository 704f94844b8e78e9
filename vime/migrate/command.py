"""``vime migrate``: writes the configuration and prints what became of each flag."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from vime.migrate.convert import MAPPED, MISSING, NOTHING, UNKNOWN, migrate

WIDTH = 200  # of the table in a file
COLOURS = {MAPPED: "green", NOTHING: "dim", MISSING: "yellow", UNKNOWN: "red"}


def run(script: Path, output: Path | None) -> int:
    """Prints the TOML where no file is named; 1 where it is not yet a configuration that could run."""
    made = migrate(script)
    console = Console(stderr=output is None)
    if not console.is_terminal:
        console.width = WIDTH
    table = Table(Column("flag", no_wrap=True), "value", "", "ours", "why", title=str(script))
    for row in made.rows:
        verdict = Text(row.verdict, COLOURS[row.verdict])
        table.add_row(Text(row.flag), Text(row.value), verdict, Text(row.ours), Text(row.note))
    console.print(table)
    for note in made.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    for fault in made.faults:
        console.print(f"to do: {fault}", markup=False, highlight=False)
    if output is None:
        sys.stdout.write(made.toml)
    else:
        output.write_text(made.toml)
        console.print(f"wrote {output}; look at it with: vime train {output} --dry-run", markup=False, highlight=False)
    return 1 if made.faults else 0
