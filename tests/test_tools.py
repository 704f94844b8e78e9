"""Tools of generate functions: what they return, and how each can fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vime.config.sections import Rollout, Tool
from vime.inference.gate import Gate
from vime.inference.requests import Requests
from vime.rollout.generate import Context, GenerateError, load_generate
from vime.sample import Task
from vime.tools import ToolError
from vime.tools.calls import Tools, check_tools

FUNCTIONS = """
import os, time
def search(query, limit=3): return {"found": [query] * limit}
async def fetch(url): return url.upper()
def raises(*_): raise LookupError("no such page")
def hangs(): time.sleep(600)
def eats(): return len([bytearray(2**24) for _ in range(1000)])
def ends(): os._exit(1)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture(scope="module")
def context(run: Any, file: Path) -> Iterator[Context]:
    names = ("search", "fetch", "raises", "eats", "ends")
    sections = {name: Tool(function=f"{file}:{name}", workers=1, memory_mb=400) for name in names}
    sections["hangs"] = Tool(function=f"{file}:hangs", workers=1, timeout_s=0.5)
    sections["python"] = Tool(function="python", workers=1, timeout_s=60)
    tools = Tools(sections, file.parent / "logs")
    run(tools.__aenter__())
    requests = Requests(None, Gate(usable=True), Rollout())  # type: ignore[arg-type]
    yield Context(requests, None, None, {}, call_tool=tools.call)  # type: ignore[arg-type]
    assert tools.counts()["tools/search_calls"] >= 3 and tools.counts()["tools/search_calls"] == 0
    run(tools.__aexit__())


def test_a_tool_takes_arguments_by_position_and_by_name(run: Any, context: Context) -> None:
    assert run(context.tool("search", "x")) == {"found": ["x"] * 3}
    assert run(context.tool("search", query="x", limit=1)) == {"found": ["x"]}
    assert run(context.tool("fetch", "a")) == "A"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("raises", [], "tool raises failed: LookupError: no such page"),
        ("hangs", [], "tool hangs took over 0.5 s (tools.hangs.timeout_s)"),
        ("eats", [], "it used all of its worker's memory_mb = 400"),
        ("ends", [], "tool ends failed: its worker ended with exit code 1"),
        ("search", [], "missing 1 required positional argument: 'query'"),
        ("search", [object()], "its arguments are no JSON"),
        ("serch", ["x"], "no tool is called 'serch'; did you mean search?"),
    ],
)
def test_a_tool_that_fails_is_named_with_the_cause(
    run: Any, context: Context, name: str, arguments: Any, said: str
) -> None:
    with pytest.raises(ToolError) as caught:
        run(context.tool(name, *arguments))
    assert said in str(caught.value)


def test_python_runs_in_the_sandbox_and_tells_how_it_ended(run: Any, context: Context) -> None:
    code = "import sys\nprint(int(input()) + 1)\nsys.exit(2)"
    assert run(context.tool("python", code, "41")) == {"stdout": "42\n", "stderr": "", "exit_code": 2, "cause": ""}
    assert "Error" in run(context.tool("python", "open('/etc/passwd')"))["stderr"]
    bomb = run(context.tool("python", "import os\nwhile True: os.fork()"))
    assert bomb["exit_code"] is None and "processes" in bomb["cause"]


def test_an_error_that_a_generate_function_lets_through_fails_its_sample_alone(
    run: Any, context: Context, tmp_path: Path
) -> None:
    path = tmp_path / "agents.py"
    path.write_text("async def f(context, task):\n    return await context.tool('raises')\n")
    generate = load_generate(f"{path}:f", 60)
    with pytest.raises(GenerateError, match="failed on task t1: ToolError: tool raises failed: LookupError"):
        run(generate(context, Task("t1", ())))


def test_without_a_tool_in_the_configuration_the_call_says_so() -> None:
    context = Context(None, None, None, {})  # type: ignore[arg-type]
    with pytest.raises(ToolError, match=r"no tool is called 'x'; there is no \[tools.NAME\] in the configuration"):
        asyncio.run(context.tool("x"))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"function": "pyton"}, "tools.mine: no tool is called 'pyton'; did you mean python?"),
        (
            {"function": "python", "options": {"memory": 1}},
            "tool 'python' has no option 'memory'; did you mean memory_mb?",
        ),
        ({"function": "tools.py:none"}, "tools.mine: tools.py:none: the file tools.py does not exist"),
        ({"function": "math:sqrt", "options": {"a": 1}}, "options are for built-ins"),
    ],
)
def test_a_tool_that_cannot_be_loaded_is_refused_before_the_start(run: Any, section: Any, said: str) -> None:
    with pytest.raises(ToolError) as caught:
        run(check_tools({"mine": Tool(**section)}))
    assert said in str(caught.value)


def test_a_check_names_the_workers_of_a_run(run: Any) -> None:
    lines = run(check_tools({"sqrt": Tool(function="math:sqrt", workers=2)}))
    assert [line.split(":")[0] for line in lines] == ["worker 0 of tool sqrt", "worker 1 of tool sqrt"]
