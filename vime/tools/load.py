"""A tool in a worker process: a built-in by name, or the user's by path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vime.config.nearest import nearest
from vime.functions import FunctionError, built_in, user_function
from vime.tools import ToolError
from vime.tools.builtin import BUILTIN
from vime.workers.child import is_coroutine_function


def load_tool(function: str, options: dict[str, Any], deadline_s: float) -> Callable[..., Any]:
    """The function; ToolError where it cannot be loaded."""
    if function not in BUILTIN and ":" not in function:
        raise ToolError(
            f"no tool is called {function!r}{nearest(function, list(BUILTIN))}; your own is module:function"
        )
    if function not in BUILTIN and options:
        raise ToolError(f"options are for built-ins; {function} takes the arguments of its calls only")
    try:
        if function in BUILTIN:
            return built_in(BUILTIN[function], f"tool {function!r}", options, deadline_s)
        return user_function(function, None)
    except FunctionError as error:
        raise ToolError(str(error)) from None


def caller(function: str, options: dict[str, Any], deadline_s: float) -> Callable[[list[Any], dict[str, Any]], Any]:
    """The tool as a function in a worker: of its arguments by position and by name."""
    tool = load_tool(function, options, deadline_s)

    def plain(arguments: list[Any], named: dict[str, Any]) -> Any:
        return tool(*arguments, **named)

    async def coroutine(arguments: list[Any], named: dict[str, Any]) -> Any:
        return await tool(*arguments, **named)

    return coroutine if is_coroutine_function(tool) else plain
