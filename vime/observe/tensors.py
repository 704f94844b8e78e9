"""Dumps and checkpoints of two runs, tensor by tensor. Equal files are found by their bytes; only others are opened."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vime.rollout.outcome import GROUPS, Outcome, store_key
from vime.store.shared_memory import FIELDS

INPUTS = (
    "filtered",
    "rows",
    "rewards",
    "finish_reasons",
    "versions",
)  # of a group, that training depends on or that tell it


@dataclass(frozen=True)
class Difference:
    """The first tensor, or part of a group, that differs: ``index`` in it, and the values there."""

    where: str
    index: list[int]
    one: Any
    other: Any
    max_abs_difference: float | None = None

    def __str__(self) -> str:
        return self.where


def steps_below(one: Path, other: Path, last: int) -> list[int]:
    """The steps up to ``last`` that both folders hold."""

    def steps(folder: Path) -> set[int]:
        return {int(path.name[5:]) for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)}

    return sorted(step for step in steps(one) & steps(other) if step <= last)


def same_files(one: Path, other: Path, names: Sequence[str]) -> bool:
    return not any(filecmp.cmpfiles(one, other, names, shallow=False)[1:])


# Dumps


def differing_dump(one: Path, other: Path, step: int, rtol: float) -> Difference | None:
    """The first difference of the batches of a step: of the tokens, then of what is known of the groups."""
    folders = [run / "dumps" / f"step-{step:06d}" for run in (one, other)]
    first, second = (
        {group.group_id: group for group in msgspec.json.decode((f / GROUPS).read_bytes(), type=list[Outcome])}
        for f in folders
    )
    for group_id in sorted(first.keys() | second.keys()):
        if group_id not in first or group_id not in second:
            return Difference(
                f"group {group_id} is in one batch only", [group_id], group_id in first, group_id in second
            )
        mine, theirs = first[group_id], second[group_id]
        if (
            mine.filtered is None
            and theirs.filtered is None
            and (found := differing_payload(folders[0], folders[1], group_id, rtol))
        ):
            return found
        for name in INPUTS:
            if getattr(mine, name) != getattr(theirs, name):
                return differing_list(group_id, name, getattr(mine, name), getattr(theirs, name))
    return None


def differing_list(group_id: int, name: str, one: Any, other: Any) -> Difference:
    text, index = f"{name} of group {group_id} differ first", []
    if isinstance(one, list) and len(one) == len(other):
        at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        index, one, other = [at], one[at], other[at]
        text = f"the {name} of group {group_id} differ first (sample {at}: {one} / {other})"
    return Difference(text, index, msgspec.to_builtins(one), msgspec.to_builtins(other))


def differing_payload(one: Path, other: Path, group_id: int, rtol: float) -> Difference | None:
    from safetensors.numpy import load_file

    name = f"{store_key(group_id)}.safetensors"
    if same_files(one, other, [name]):
        return None
    mine, theirs = load_file(one / name), load_file(other / name)
    fields = list(FIELDS)

    def order(key: str) -> tuple[int, int]:
        row, _, field = key.partition(".")
        return int(row), fields.index(field)

    for key in sorted(mine.keys() | theirs.keys(), key=order):
        row, _, field = key.partition(".")
        what, a, b = f"{field} of sample {row}", mine.get(key), theirs.get(key)
        if a is None or b is None:
            return Difference(f"group {group_id} has {what} in one run only", [int(row)], a is not None, b is not None)
        if (index := first_index(a, b, rtol)) is not None:
            values = [array[index].item() if within(index, array) else None for array in (a, b)]
            told = {"response_ids": "response token", "prompt_ids": "prompt token"}.get(field, field)
            place = f"{told} {', '.join(map(str, index))}: {values[0]} / {values[1]}"
            text = f"the samples of group {group_id} differ first (sample {row}, {place})"
            return Difference(text, [int(row), *index], *values)
    return None


def within(index: tuple[int, ...], array: np.ndarray) -> bool:
    return all(at < size for at, size in zip(index, array.shape, strict=True))


def first_index(one: np.ndarray, other: np.ndarray, rtol: float) -> tuple[int, ...] | None:
    """Where two arrays first differ, NaN being equal to NaN; the end of the shorter where that is all."""
    size = min(len(one), len(other))
    a, b = (array[:size].astype(np.float64) for array in (one, other))  # which holds every token id
    unequal = ~np.isclose(a, b, rtol if one.dtype.kind == "f" else 0.0, 0.0, equal_nan=True)
    if unequal.any():
        return tuple(int(at) for at in np.argwhere(unequal)[0])
    return None if one.shape == other.shape else (size,) + (0,) * (one.ndim - 1)


# Checkpoints


def differing_checkpoint(one: Path, other: Path, step: int, rtol: float) -> tuple[Difference | None, str]:
    """The first tensor of the trainer's states that differs, weights before moments; and what could not be compared."""
    folders = [run / "checkpoints" / f"step-{step:06d}" / "state" for run in (one, other)]
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in folders]
    if names[0] != names[1]:
        return None, f"the checkpoints of step {step} are of other numbers of ranks: not compared"
    if same_files(folders[0], folders[1], names[0]):
        return None, ""
    found: Difference | None = None
    for name, a, b in tensors(folders[0], folders[1], names[0]):
        if difference := differing_tensor(name, a, b, rtol):
            if is_weight(name):
                return difference, ""
            found = found or difference
    return found, ""


def is_weight(name: str) -> bool:
    """Of a state's tensors, ``PART.KIND.NAME``."""
    return name.split(".")[1] == "weight"


def tensors(one: Path, other: Path, names: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """(name, tensor, tensor) of all tensors, one at a time; None where a run has it not."""
    from safetensors import safe_open

    for file in names:
        with safe_open(one / file, framework="pt") as mine, safe_open(other / file, framework="pt") as theirs:
            held = [set(opened.keys()) for opened in (mine, theirs)]
            for name in sorted(held[0] | held[1], key=lambda name: (not is_weight(name), name)):
                yield (
                    name,
                    mine.get_tensor(name) if name in held[0] else None,
                    theirs.get_tensor(name) if name in held[1] else None,
                )


def differing_tensor(name: str, one: Any, other: Any, rtol: float) -> Difference | None:
    if one is None or other is None or one.shape != other.shape:
        shapes = [tensor is not None and [*tensor.shape] for tensor in (one, other)]
        return Difference(f"{name} has another shape in each ({shapes[0]} / {shapes[1]})", [], shapes[0], shapes[1])
    unequal = ~one.double().isclose(other.double(), rtol, 0.0, equal_nan=True)
    if not unequal.any():
        return None
    index = [int(at) for at in unequal.nonzero()[0]]
    most = (one.double() - other.double()).abs().max().item()
    values = [tensor[tuple(index)].item() for tensor in (one, other)]
    place = f"{index}: {values[0]:.9g} / {values[1]:.9g}"
    return Difference(f"{name} differs first ({place}; at most by {most:.3g})", index, values[0], values[1], most)
