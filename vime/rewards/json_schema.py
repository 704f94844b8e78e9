"""Reward of replies that are JSON of a given form."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from vime.rewards.fenced import last_block
from vime.sample import Task


def json_schema(
    *, schema: dict[str, Any] | None = None, column: str = "schema", fenced: bool = True, valid_json: float = 0.0
) -> Callable[[Task, str], float]:
    """1 where the reply is JSON that fits ``schema``, or the one in the row's ``column``; ``valid_json`` where it is JSON only.

    The reply as a whole is read or, with ``fenced``, its last fenced block where there is one.
    """
    import jsonschema_specifications
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    def validator(given: Any) -> Any:
        kind = validator_for(given)
        try:
            kind.check_schema(given)
        except SchemaError as error:
            raise ValueError(f"the schema is none: {error.message}") from None
        return kind(given, registry=jsonschema_specifications.REGISTRY)  # which fetches nothing

    fixed = None if schema is None else validator(schema)

    def reward(task: Task, response: str) -> float:
        wanted = fixed or validator(schema_of(task, column))
        block = last_block(response) if fenced else None
        try:
            value = json.loads(response if block is None else block, parse_constant=refuse)
        except (ValueError, RecursionError):
            return 0.0
        return 1.0 if wanted.is_valid(value) else valid_json

    return reward


def schema_of(task: Task, column: str) -> Any:
    """The row's schema, an object or JSON text."""
    given = task.metadata.get(column)
    if given is None:
        raise ValueError(
            f"the row has no schema in a column {column!r}; name it in options.column, or set options.schema"
        )
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"column {column!r} is no JSON: {error}") from None


def refuse(constant: str) -> None:
    """NaN and Infinity, which Python reads, are no JSON."""
    raise ValueError(constant)
