"""Rows of reasoning-gym: one data set, or a composite of several by weight, each scored by its own scorer."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

from vime.config.nearest import nearest
from vime.data import DataError

COMPOSITE = "composite"


def rows(name: str, size: int | None, seed: int, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """``entry`` is kept for the data set's own scorer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package it imports, when that is first compiled
        import reasoning_gym

    what = f"reasoning-gym:{name}"
    check(name, options, what)
    if size is None:
        raise DataError(f"{what} is generated and needs a size; set data.size (or the evaluation set's)")
    try:
        dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **made(name, options))
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"{what} refuses its options {options}: {error}") from None
    for entry in dataset:
        kept = json.loads(json.dumps({"answer": entry["answer"], "metadata": entry["metadata"]}, default=str))
        own = entry["metadata"]["source_dataset"] if name == COMPOSITE else name
        yield {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": own, "entry": kept}


def check(name: str, options: dict[str, Any], what: str) -> None:
    """Refuses a data set or an option that is not there, also of the parts of a composite."""
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise DataError(f"reasoning-gym has no data set {name!r}{close(name, list(DATASETS))}")
    known = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("size", "seed")]
    for option in options:
        if option not in known:
            raise DataError(f"{what} has no option {option!r}{nearest(option, known)}")
    if name == COMPOSITE:
        parts = options.get("datasets")
        if (
            not isinstance(parts, list)
            or not all(isinstance(part, dict) and "name" in part for part in parts)
            or not parts
        ):
            raise DataError(
                f"{what} needs the data sets it is made of; set options.datasets = "
                '[{ name = "chain_sum", weight = 2, config = { max_terms = 3 } }, { name = "gcd" }]'
            )
        for part in parts:
            for key in part:
                if key not in ("name", "weight", "config"):
                    raise DataError(
                        f"{what}: {part['name']} has no {key!r}{nearest(key, ['name', 'weight', 'config'])}"
                    )
            check(part["name"], part.get("config", {}), f"{what}, {part['name']}")


def made(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options as reasoning-gym takes them."""
    if name != COMPOSITE:
        return options
    from reasoning_gym.composite import DatasetSpec

    parts = [DatasetSpec(part["name"], part.get("weight", 1.0), part.get("config", {})) for part in options["datasets"]]
    return {**options, "datasets": parts}


def close(name: str, known: list[str]) -> str:
    hint = nearest(name, known)
    return (
        hint
        if "did you mean" in hint
        else f"; it has {len(known)}, see `python -c 'from reasoning_gym.factory import DATASETS; print(*DATASETS)'`"
    )
