"""The configured tools, each in worker processes of its own, each call with a deadline."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from vime.config.nearest import nearest
from vime.config.sections import Tool
from vime.tools import ToolError
from vime.workers.pool import Pool
from vime.workers.worker import COMMAND, CallError, CallLate, Function, WorkerError


class Tools:
    """``async with`` starts the workers, whose output is in files of ``logs``; ToolError where a tool cannot be loaded."""

    def __init__(self, sections: Mapping[str, Tool], logs: Path) -> None:
        self.sections = sections
        self.pools = {
            name: Pool(f"tool-{name}", {name: function_of(tool)}, tool.workers, tool.memory_mb, logs)
            for name, tool in sections.items()
        }
        self._stack = contextlib.AsyncExitStack()
        self._calls, self._failed = dict.fromkeys(sections, 0), dict.fromkeys(sections, 0)  # since the last ``counts``

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            for name, pool in self.pools.items():
                try:
                    await stack.enter_async_context(pool)
                except WorkerError as error:
                    raise ToolError(f"tools.{name}: {error}") from None
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def call(self, name: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        """The tool's result. ToolError where there is no such tool, or it raises, is late or ends its worker."""
        if name not in self.sections:
            missing = (
                nearest(name, list(self.sections))
                if self.sections
                else "; there is no [tools.NAME] in the configuration"
            )
            raise ToolError(f"no tool is called {name!r}{missing}")
        tool = self.sections[name]
        self._calls[name] += 1
        try:
            return await self.pools[name].call(name, [arguments, named], tool.timeout_s, tool.retries)
        except CallError as error:
            self._failed[name] += 1
            late = f"took over {tool.timeout_s:g} s (tools.{name}.timeout_s)"
            raise ToolError(f"tool {name} {late if isinstance(error, CallLate) else f'failed: {error}'}") from None

    def counts(self) -> dict[str, float]:
        """What has been counted since the last call."""
        counted: dict[str, float] = {f"tools/{name}_calls": count for name, count in self._calls.items()}
        counted |= {f"tools/{name}_failed": count for name, count in self._failed.items()}
        counted |= {f"tools/{name}_worker_restarts": pool.restarts for name, pool in self.pools.items()}
        self._calls, self._failed = dict.fromkeys(self.sections, 0), dict.fromkeys(self.sections, 0)
        for pool in self.pools.values():
            pool.restarts = 0
        return counted


def function_of(tool: Tool) -> Function:
    wanted = {"function": tool.function, "options": tool.options, "deadline_s": tool.timeout_s}
    return Function("vime.tools.load:caller", wanted)


async def check_tools(sections: Mapping[str, Tool]) -> list[str]:
    """Loads the tools in workers as a run would. Returns a line for each of the run's workers; ToolError where it cannot."""
    one_each = {name: tool.model_copy(update={"workers": 1}) for name, tool in sections.items()}
    with tempfile.TemporaryDirectory() as logs:
        async with Tools(one_each, Path(logs)):
            pass
    return [
        f"worker {index} of tool {name}: {' '.join(COMMAND)}"
        for name, tool in sections.items()
        for index in range(tool.workers)
    ]
