"""Which options two configurations differ in. Imports no torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

UNSET = "(not set)"
PLACES = ("run.dir", "log.dump_every")  # say nothing of what a run does


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options by dotted name; free tables such as [vllm] by their keys."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def differing(one: str, other: str) -> list[tuple[str, Any, Any]]:
    """(option, its value in one, in the other) of two configurations as TOML, each with every option written out."""
    first, second = flat(tomllib.loads(one)), flat(tomllib.loads(other))
    return [
        (name, first.get(name, UNSET), second.get(name, UNSET))
        for name in dict.fromkeys([*first, *second])
        if name not in PLACES and first.get(name, UNSET) != second.get(name, UNSET)
    ]
