"""Sources of the user's own: a class whose rows are read once, or are asked for for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from vime.data import DataError
from vime.functions import FunctionError, cause_of, user_function

Row = dict[str, Any]


@runtime_checkable
class Endless(Protocol):
    """A source that never ends; what it keeps between two calls goes through ``state`` into checkpoints."""

    def take(self, count: int) -> list[Row]:
        """The next rows, exactly so many."""
        ...

    def state(self) -> Any:
        """JSON from which ``load`` of a new object goes on with the same rows."""
        ...

    def load(self, state: Any) -> None: ...


def own_rows(path: str, options: dict[str, Any]) -> Iterable[Row] | Endless:
    """The rows of ``Class(**options)``, or, where it is endless, the object. DataError where it is neither."""
    try:
        kind = user_function(path, 0, tuple(options))
    except FunctionError as error:
        raise DataError(f"{error}; a source is a class, made with data.options") from None
    with asked(path, "the class"):
        source = kind(**options)
    if callable(getattr(source, "rows", None)):
        with asked(path, "rows()"):
            rows = source.rows()
        return checked(rows, path)
    if missing := [name for name in ("take", "state", "load") if not callable(getattr(source, name, None))]:
        raise DataError(
            f"{path} has no rows() and no {missing[0]}(); a source has rows(), or take(n), state() and load(state)"
        )
    assert isinstance(source, Endless)
    return source


@contextmanager
def asked(path: str, what: str) -> Iterator[None]:
    """Whatever a source raises inside becomes a DataError with its place."""
    try:
        yield
    except Exception as error:
        raise DataError(f"{path}: {what} failed: {cause_of(error)}") from None


def taken(source: Endless, path: str, count: int) -> list[Row]:
    """So many rows of an endless source."""
    with asked(path, "take()"):
        rows = source.take(count)
    if not isinstance(rows, list) or len(rows) != count:
        got = f"{len(rows)} rows" if isinstance(rows, list) else f"a {type(rows).__name__}"
        raise DataError(f"{path}: take({count}) returned {got}; it returns a list of exactly so many rows")
    return list(checked(rows, path))


def checked(rows: Any, path: str) -> Iterable[Row]:
    """The rows, each of which is a dict."""
    if not isinstance(rows, Iterable):
        raise DataError(f"{path}: rows() returned a {type(rows).__name__}; return a list or a generator of dicts")
    found = iter(rows)
    number = 0
    while True:
        with asked(path, "rows()"):
            row = next(found, None)
        if row is None:
            return
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number} is a {type(row).__name__}, not a dict of columns")
        yield row
        number += 1
