"""All looks of ``vime doctor``, printed as they are made."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from vime.doctor import Finding, machine, settings

COLORS = {"ok": "green", "warning": "yellow", "fault": "red"}
INDENT = 27


def examine(config: Path | None, overrides: Sequence[str], as_json: bool) -> int:
    """Exit code 1 where there is a fault, else 0."""
    looks: dict[str, Iterator[Finding]] = {"this machine": machine.look()}
    if config:
        looks[str(config)] = settings.look(config, overrides)
    console, found = Console(quiet=as_json, highlight=False), list[Finding]()
    for name, look in looks.items():
        console.print(f"[bold]{escape(name)}[/bold]")
        for one in look:
            found.append(one)
            show(console, one)
    faults, warned = (sum(one.verdict == verdict for one in found) for verdict in ("fault", "warning"))
    console.print(f"{faults} faults, {warned} warnings")
    if as_json:
        print(json.dumps({"faults": faults, "warnings": warned, "findings": [asdict(one) for one in found]}, indent=2))
    return 1 if faults else 0


def show(console: Console, one: Finding) -> None:
    color, room = COLORS[one.verdict], max(40, console.width - INDENT)
    for index, line in enumerate(wrapped(console, one.found, room)):
        lead = f"  [{color}]{one.verdict:<8}[/{color}]{one.part:<17}" if index == 0 else " " * INDENT
        console.print(lead + escape(line), soft_wrap=True)
    for line in wrapped(console, one.fix, room) if one.fix and one.verdict != "ok" else ():
        console.print(f"{'':<{INDENT}}[dim]{escape(line)}[/dim]", soft_wrap=True)


def wrapped(console: Console, text: str, room: int) -> list[str]:
    """As wide as the terminal; whole where the output is no terminal, to be searched."""
    if not console.is_terminal:
        return text.splitlines()
    lines = (textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())
    return [line for part in lines for line in part]
