"""Reward of code: what share of its row's tests the reply's code passes, or whether it passes all.

The code runs in a sandbox (``vime.sandbox``), which what it is compared with never enters. A test with input and output is one
run of the code as a program; outputs are compared here. Tests in Python run in another sandbox and call the code from there
(``vime.sandbox.peer``). Only what that one reports as passed has passed: code that ends early, in whatever way, has not.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from vime.rewards.fenced import last_block
from vime.sample import Task
from vime.sandbox import peer
from vime.sandbox.box import TICK_S, Box, Kind, Limits, check, run

Test = str | tuple[str, str]
"""Python code, or standard input and what is expected of standard output"""
PEER = Path(peer.__file__).read_text()


def code(
    *,
    tests: str = "tests",
    score: Literal["all", "share"] = "all",
    setup: str = "setup",
    entry_point: str = "entry_point",
    test_timeout_s: float = 5.0,
    memory_mb: int = 1024,
    processes: int = 16,
    files_mb: int = 32,
    sandbox: str = "bubblewrap",
    deadline_s: float,
) -> Callable[[Task, str], float]:
    """The reply's last fenced block against the tests in the row's column ``tests``; the columns ``setup`` and
    ``entry_point`` belong to tests in Python. What is not done shortly before ``deadline_s`` has failed."""
    if score not in ("all", "share"):
        raise ValueError(f"score = {score!r}; it is all or share")
    kind = check(sandbox)
    limits = Limits(test_timeout_s, memory_mb, processes, files_mb)

    def reward(task: Task, response: str) -> float:
        column = task.metadata.get(tests)
        if not column:
            raise ValueError(f"the row has no tests in a column {tests!r}; name it in options.tests")
        begin, entry = task.metadata.get(setup) or "", task.metadata.get(entry_point) or ""
        listed = [with_setup(test, begin, entry) for test in tests_of(column)]
        source = last_block(response)
        if source is None:
            return 0.0
        bench = Bench(kind, limits, source, entry, score == "all", time.monotonic() + 0.8 * deadline_s)
        passed = bench.passed(listed)
        return passed / len(listed) if score == "share" else float(passed == len(listed))

    return reward


def tests_of(column: Any) -> list[Test]:
    """A row's tests: a text of Python, a list of such texts or of {"input", "output"}, or {"inputs": [...], "outputs": [...]};
    any of them may be JSON text."""
    if isinstance(column, str):
        with contextlib.suppress(ValueError):
            column = json.loads(column)
    if isinstance(column, dict) and {"inputs", "outputs"} <= set(column):
        column = [{"input": i, "output": o} for i, o in zip(column["inputs"], column["outputs"], strict=True)]
    found: list[Test] = []
    for test in column if isinstance(column, list) else [column]:
        if isinstance(test, str):
            found.append(test)
        elif isinstance(test, dict) and isinstance(test.get("input"), str) and isinstance(test.get("output"), str):
            found.append((test["input"], test["output"]))
        else:
            raise ValueError(
                f'test {len(found)} is neither Python code nor {{"input": text, "output": text}}: {test!r:.100}'
            )
    if not found:
        raise ValueError("the row has no tests")
    return found


def with_setup(test: Test, setup: str, entry_point: str) -> Test:
    """A test in Python with what comes before it; ValueError where it would run nothing, and so pass whatever the code."""
    if not isinstance(test, str):
        return test
    try:
        body = ast.parse(test).body
    except SyntaxError as error:
        raise ValueError(f"a test is no Python: {error}: {test!r:.100}") from None
    called = [one.name for one in body if isinstance(one, ast.FunctionDef)]
    runs = any(not isinstance(one, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)) for one in body)
    if not runs and not any(name.startswith("test_") or (name == "check" and entry_point) for name in called):
        raise ValueError(
            f"a test runs nothing: it has neither a statement, nor a function test_..., nor check(...) with a column "
            f"entry_point: {test!r:.100}"
        )
    return f"{setup}\n{test}"


@dataclass
class Bench:
    """One reply's code under test: to the first failure or all tests, until ``end``, a time of the monotonic clock."""

    kind: Kind
    limits: Limits
    source: str
    entry_point: str
    to_failure: bool
    end: float

    def passed(self, tests: Sequence[Test]) -> int:
        """How many tests pass."""
        count, left = 0, list(tests)
        while left and time.monotonic() < self.end:
            results = self.asserts(left) if isinstance(left[0], str) else [self.output_is(*left[0])]
            count += sum(results)
            if self.to_failure and not all(results):
                break
            left = left[len(results) :]
        return count

    def left_s(self) -> float:
        """Seconds that the next test may take."""
        return max(0.0, min(self.limits.seconds, self.end - time.monotonic()))

    def output_is(self, stdin: str, expected: str) -> bool:
        """One run as a program: it must end well, having written the lines expected, white space at their ends apart."""
        ended = run(self.kind, replace(self.limits, seconds=self.left_s()), {"program.py": self.source, "stdin": stdin})
        return ended.exit_code == 0 and lines(ended.stdout) == lines(expected)

    def asserts(self, tests: Sequence[Test]) -> list[bool]:
        """The tests in Python at the beginning of the list, up to one at which the code ended or was late: at least one."""
        given = list(takewhile(lambda test: isinstance(test, str), tests))
        tested = {"peer.py": PEER, "solution.py": self.source}
        testing = {"peer.py": PEER, "tests.json": json.dumps({"tests": given, "entry_point": self.entry_point})}
        limits = replace(self.limits, seconds=max(1.0, self.end - time.monotonic()))
        ours, theirs = socket.socketpair()
        reports, reporting = os.pipe()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, reports)

            def box(files: dict[str, str], role: str, *descriptors: int) -> Box:
                arguments = [role, *map(str, descriptors)]
                return stack.enter_context(Box(self.kind, limits, "peer.py", files, arguments, descriptors))

            with ours, theirs, os.fdopen(reporting, "wb"):
                boxes = [box(tested, "code", ours.fileno()), box(testing, "tests", theirs.fileno(), reporting)]
            return self.listen(reports, boxes, len(given))

    def listen(self, reports: int, boxes: Sequence[Box], count: int) -> list[bool]:
        """What is reported of each test; no report in time is a failure."""
        results: list[bool] = []
        rest, late = b"", time.monotonic() + self.left_s()
        while len(results) < count and time.monotonic() < late and not any(box.excess() for box in boxes):
            if not select.select([reports], [], [], TICK_S)[0]:
                continue
            data = os.read(reports, 2**16)
            if not data:
                break
            *whole, rest = (rest + data).split(b"\n")
            for report in map(json.loads, whole):
                results.append(report["passed"])
                late = time.monotonic() + self.left_s()
                if report["unusable"]:
                    return [False] * count
                if report["gone"] or (self.to_failure and not report["passed"]):
                    return results
        return results if len(results) == count else [*results, False]


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
