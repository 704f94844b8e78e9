"""Functions of the user's, by dotted path, ``package.module:function`` or ``file.py:function``; and what makes built-in ones."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from vime.config.nearest import nearest


class FunctionError(Exception):
    """There is no such function, or it takes other arguments; the message names the path and the fix."""


DEADLINE = "deadline_s"
"""argument of makers of built-ins that end by themselves before a call is late; it is no option"""


def built_in(
    maker: Callable[..., Any], title: str, options: Mapping[str, Any], deadline_s: float
) -> Callable[..., Any]:
    """What the maker makes of its options; FunctionError where it has no such option, or refuses its value."""
    parameters = list(inspect.signature(maker).parameters)
    known = [name for name in parameters if name != DEADLINE]
    for option in options:
        if option not in known:
            raise FunctionError(f"{title} has no option {option!r}{nearest(option, known) if known else ''}")
    try:
        made: Callable[..., Any] = maker(**options, **({DEADLINE: deadline_s} if DEADLINE in parameters else {}))
        return made
    except MemoryError:
        raise
    except Exception as error:
        raise FunctionError(f"{title}: {error}") from None


def user_function(path: str, arguments: int | None, keywords: Collection[str] = ()) -> Callable[..., Any]:
    """The function at ``path``, which can be called with so many positional arguments, or any, and these others by name;
    FunctionError if not."""
    place, _, attribute = path.rpartition(":")
    module = load_module(place, path)
    found = getattr(module, attribute, None)
    if found is None:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise FunctionError(f"{path}: {place} has no {attribute!r}{nearest(attribute, names) if names else ''}")
    if not callable(found):
        raise FunctionError(f"{path} is a {type(found).__name__}, not a function")
    if arguments is None:
        return found
    try:
        signature = inspect.signature(found)
    except ValueError:  # some of C's have none
        return found
    try:
        signature.bind(*[None] * arguments, **dict.fromkeys(keywords))
    except TypeError:
        given = ", ".join(keywords) if keywords else f"{arguments} arguments"
        raise FunctionError(f"{path}{signature} cannot be called with {given}") from None
    return found


def told_to_end() -> bool:
    """Whether the running task was cancelled by who waits for it; else a CancelledError came from what it called."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def cause_of(error: BaseException) -> str:
    """What a function of the user's raised, and where: its kind, its text, the file and the line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"


def load_module(place: str, path: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            if "" not in sys.path:
                sys.path.insert(0, "")
            return importlib.import_module(place)
        if not Path(place).exists():
            files = [str(file) for file in Path(place).parent.glob("*.py")]
            raise FunctionError(f"{path}: the file {place} does not exist{nearest(place, files) if files else ''}")
        spec = importlib.util.spec_from_file_location(f"user file {place}", place)  # the name of no other module
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    except FunctionError:
        raise
    except (Exception, SystemExit) as error:
        hint = module_hint(place) if isinstance(error, ModuleNotFoundError) and error.name == place else ""
        raise FunctionError(f"{path}: {place} cannot be imported: {type(error).__name__}: {error}{hint}") from None


def module_hint(place: str) -> str:
    """``"; did you mean X?"`` for the closest module beside a missing one, "" where none is close."""
    parent, _, name = place.rpartition(".")
    # pkgutil remembers the directory that "" stood for when it was first asked
    folders = sys.modules[parent].__path__ if parent else [folder or os.getcwd() for folder in sys.path]
    hint = nearest(name, [module.name for module in pkgutil.iter_modules(folders)])
    return hint if "did you mean" in hint else ""
