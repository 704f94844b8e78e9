"""``vime contract``: finds what kind of function it is, tries it, prints what was checked."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vime.config.load import ConfigError, read
from vime.config.nearest import nearest
from vime.config.sections import Config
from vime.contract import inputs
from vime.contract.checks import CHECKERS, kinds_of, tried
from vime.functions import FunctionError
from vime.rewards.builtin import BUILTIN
from vime.rollout.generate import GENERATE
from vime.slime.hooks import HOOKS, load_function
from vime.training.advantages import ESTIMATORS
from vime.training.losses import OBJECTIVES

NAMES: dict[str, Collection[str]] = {
    "reward.function": BUILTIN,
    "rollout.generate": GENERATE,
    "algorithm.advantage": ESTIMATORS,
    "algorithm.objective": OBJECTIVES,
}


def kind_named(name: str) -> str:
    """The kind that ``--hook`` names: itself, or its option; ConfigError for none."""
    plain = name.removeprefix("--").removeprefix("slime.").replace("-", "_")
    kinds = [kind for kind, hook in HOOKS.items() if plain in (kind, hook.option)]
    if name in NAMES:
        return name
    if not kinds:
        raise ConfigError(f"no kind of function is called {name!r}{nearest(name, list(CHECKERS))}")
    return kinds[0]


def kind_found(path: str) -> str:
    """The kind of the function, by its parameters; ConfigError where that does not say."""
    if named := [kind for kind, names in NAMES.items() if path in names]:
        return named[0]
    try:
        kinds = kinds_of(load_function(path))
    except FunctionError as error:
        raise ConfigError(str(error)) from None
    if len(kinds) == 1:
        return kinds[0]
    those = f"it may be {' or '.join(kinds)}" if kinds else "its parameters have the names of no kind"
    raise ConfigError(
        f"{path}: {those}; say which with --hook KIND, one of {', '.join(kinds or CHECKERS)}, or the name of its option"
    )


def contract(path: str, hook: str | None, config: Path | None, timeout_s: float) -> int:
    """Prints the table; 1 where a check failed."""
    kind = kind_named(hook) if hook else kind_found(path)
    given = read(config, (), Config) if config else inputs.config()
    checks = asyncio.run(tried(kind, path, given, timeout_s))
    option = f"slime.{HOOKS[kind].option}" if kind in HOOKS else kind
    table = Table("checked", "verdict", "found", title=f"{path} as {option}")
    for check in checks:
        table.add_row(check.what, "[green]ok[/green]" if check.ok else "[red]fails[/red]", check.found)
    Console().print(table)
    return 0 if checks and all(check.ok for check in checks) else 1
