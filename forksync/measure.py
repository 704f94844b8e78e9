"""Gate two: what the fork does is measured. A test that is missing or skipped fails: without measurement the loop is open."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from pydantic import Field, model_validator

from forksync import parity
from forksync.parity import Parity, Tolerance
from forksync.section import Section

TAIL = 4000
"""Characters of a failed command's output that are kept."""


class Measure(Section):
    """One measurement. The command runs by ``sh`` in a clean checkout, with ``$FORKSYNC_OUT``, a folder for what it writes."""

    name: str
    command: str
    kind: Literal["command", "tests", "metrics", "curves"] = "command"
    """What is judged: the exit code; JUnit XML; numbers; curves. The exit code counts always."""
    file: str = ""
    """What the command writes in ``$FORKSYNC_OUT``: JUnit XML; or JSON of metric → number or numbers, → [step, value] pairs."""
    timeout_s: float = Field(default=3600.0, gt=0)
    runs: int = Field(default=1, ge=1)
    """How often, on either side; ``$FORKSYNC_RUN`` counts from 0 and may serve as a seed."""
    reference: str = "mirror"
    """What metrics and curves are compared with: ``mirror`` or ``upstream``, where the command runs too; or a JSON file."""
    tolerance: dict[str, Tolerance] = Field(default_factory=dict)
    """By metric. Each must be measured; others are ignored."""
    coverage: str = ""
    """A coverage.py JSON or LCOV file in ``$FORKSYNC_OUT``: which divergent lines no test runs is shown."""
    allow_skipped: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    """Patterns of tests, ``file.class::name``, that may be skipped, or be missing though they were there at the last sync."""

    @model_validator(mode="after")
    def _complete(self) -> Measure:
        if self.kind != "command" and not self.file:
            raise ValueError(f"kind = {self.kind} needs file, what the command writes in $FORKSYNC_OUT")
        if self.kind in ("metrics", "curves") and not self.tolerance:
            raise ValueError(f"kind = {self.kind} needs tolerance, at least one metric")
        return self

    @property
    def compares(self) -> bool:
        return self.kind in ("metrics", "curves") and self.reference in ("mirror", "upstream")


@dataclass(frozen=True)
class Measured:
    """What came out of one measurement."""

    name: str
    passed: bool
    findings: tuple[str, ...] = ()
    """What is wrong, one line each."""
    tests: tuple[str, ...] = ()
    """Tests that ran and passed."""
    parities: tuple[Parity, ...] = ()
    uncovered: dict[str, list[int]] = field(default_factory=dict)
    """Path → divergent lines that no test ran."""
    seconds: float = 0.0
    output: str = ""
    """The end of what a failed command printed."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Measured:
        parities = tuple(Parity(**one) for one in told["parities"])
        return cls(**{**told, "findings": tuple(told["findings"]), "tests": tuple(told["tests"]), "parities": parities})


@dataclass(frozen=True)
class Run:
    """One run of a command: exit code (None past its deadline), the end of its output, and the files asked for."""

    code: int | None
    output: str
    file: bytes | None
    coverage: bytes | None


def run(measure: Measure, folder: Path, number: int, side: str, keep_open: Sequence[int] = ()) -> Run:
    with tempfile.TemporaryDirectory(prefix="forksync-") as out:
        env = {"FORKSYNC_OUT": out, "FORKSYNC_RUN": str(number), "FORKSYNC_SIDE": side}
        code, output = shell(measure.command, folder, env, measure.timeout_s, keep_open)
        files = [Path(out) / name if name else None for name in (measure.file, measure.coverage)]
        return Run(code, output, *(path.read_bytes() if path and path.is_file() else None for path in files))


def shell(
    command: str, folder: Path, env: Mapping[str, str], timeout_s: float, keep_open: Sequence[int] = ()
) -> tuple[int | None, str]:
    """Runs a command line by ``sh``; its exit code, None if it ran past its deadline, and the end of what it printed.

    It has a process group of its own, which is ended with it. ``keep_open``: the lock's file, so that a command which
    outlives a killed forksync still holds the lock.
    """
    outer = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    with tempfile.TemporaryFile() as printed:
        child = subprocess.Popen(
            ["sh", "-c", command],
            cwd=folder,
            env={**outer, **env},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(keep_open),
        )
        try:
            code: int | None = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(child)
        size = printed.tell()
        printed.seek(max(0, size - TAIL))
        return code, printed.read().decode("utf-8", "replace")


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Ends what the command left running; the group's number is its own until it has been waited for."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


@dataclass(frozen=True)
class Expected:
    """Tests that must have run: those of the last sync, less those that ``excused`` (test, all that ran) lets go."""

    tests: Collection[str] = ()
    excused: Callable[[str, Collection[str]], bool] = lambda test, ran: False


def judge(
    measure: Measure, fork: Sequence[Run], reference: Sequence[Run | bytes], expected: Expected, seconds: float
) -> Measured:
    """The verdict on a measurement's runs."""
    failed = [one for one in fork if one.code != 0]
    findings = [describe(measure, one) for one in failed]
    tests: tuple[str, ...] = ()
    parities: tuple[Parity, ...] = ()
    if measure.kind != "command" and not (failed and measure.kind != "tests"):
        try:
            if measure.kind == "tests":
                tests, more = judge_tests(measure, [one.file for one in fork], expected)
                findings += more
            else:
                parities = compare(measure, [one.file for one in fork], reference)
                findings += [f"{one.metric}: {one.said}" for one in parities if not one.passed]
        except ValueError as fault:
            findings.append(str(fault))
    return Measured(
        measure.name,
        not findings,
        tuple(findings),
        tests,
        parities,
        seconds=round(seconds, 2),
        output=failed[0].output if failed else "",
    )


def describe(measure: Measure, run: Run) -> str:
    how = f"ran past {measure.timeout_s:g} s" if run.code is None else f"ended with {run.code}"
    return f"{shlex.quote(measure.command)} {how}"


def judge_tests(
    measure: Measure, files: Sequence[bytes | None], expected: Expected
) -> tuple[tuple[str, ...], list[str]]:
    """Tests that passed in every run, and what is wrong: a failed, skipped or missing test, or no test at all."""
    states: dict[str, set[str]] = {}
    for file in files:
        for test, state in junit(measure, file):
            states.setdefault(test, set()).add(state)
    passed = tuple(sorted(test for test, seen in states.items() if seen == {"passed"}))
    findings = [f"{test}: failed" for test, seen in sorted(states.items()) if "failed" in seen]
    findings += [
        f"{test}: skipped; nothing measures what it tests (allow_skipped if that is meant)"
        for test, seen in sorted(states.items())
        if "skipped" in seen and not matches(test, measure.allow_skipped)
    ]
    findings += [
        f"{test}: missing; it ran at the last sync (allow_missing if that is meant)"
        for test in sorted(set(expected.tests) - set(states))
        if not matches(test, measure.allow_missing) and not expected.excused(test, states)
    ]
    if not states:
        findings.append("no test ran")
    return passed, findings


def junit(measure: Measure, file: bytes | None) -> list[tuple[str, str]]:
    if file is None:
        raise ValueError(f"the command wrote no {measure.file} in $FORKSYNC_OUT")
    try:
        root = ElementTree.fromstring(file)
    except ElementTree.ParseError as fault:
        raise ValueError(f"{measure.file} is no JUnit XML: {fault}") from fault
    found = []
    for case in root.iter("testcase"):
        tags = {child.tag for child in case}
        state = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        found.append((f"{case.get('classname', '')}::{case.get('name', '')}", state))
    return found


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def compare(measure: Measure, fork: Sequence[bytes | None], reference: Sequence[Run | bytes]) -> tuple[Parity, ...]:
    ours = [numbers(measure, file, "the fork") for file in fork]
    theirs = []
    for one in reference:
        if isinstance(one, Run) and one.code != 0:
            raise ValueError(
                f"{describe(measure, one)} on the {measure.reference}: nothing to compare with; {one.output[-300:]}"
            )
        theirs.append(numbers(measure, one.file if isinstance(one, Run) else one, f"the {measure.reference}"))
    found = []
    for metric, allowed in measure.tolerance.items():
        sides = [[one[metric] for one in side if metric in one] for side in (ours, theirs)]
        if len(sides[0]) < len(ours) or len(sides[1]) < len(theirs):
            found.append(Parity(metric, False, float("nan"), float("nan"), "not measured in every run of both sides"))
        elif measure.kind == "curves":
            found.append(parity.curves(metric, [curve(x) for x in sides[0]], [curve(x) for x in sides[1]], allowed))
        else:
            flat = [[float(x) for one in side for x in (one if isinstance(one, list) else [one])] for side in sides]
            found.append(parity.numbers(metric, flat[0], flat[1], allowed))
    return tuple(found)


def curve(told: Any) -> list[tuple[float, float]]:
    """A list of values, or of (step, value)."""
    return [(float(x[0]), float(x[1])) if isinstance(x, list) else (float(at), float(x)) for at, x in enumerate(told)]


def numbers(measure: Measure, file: bytes | None, side: str) -> dict[str, Any]:
    if file is None:
        raise ValueError(f"the command wrote no {measure.file} in $FORKSYNC_OUT on {side}")
    try:
        told = json.loads(file)
    except ValueError as fault:
        raise ValueError(f"{measure.file} of {side} is not JSON: {fault}") from fault
    if not isinstance(told, dict):
        raise ValueError(f"{measure.file} of {side} must be an object: metric → value")
    return told


def uncovered(missing: Mapping[str, set[int]], changed: Mapping[str, set[int]]) -> dict[str, list[int]]:
    """Of the changed lines, those that are missing from a report's executed code; all lines of a file that the report does
    not know though it knows others of its kind."""
    kinds = {Path(path).suffix for path in missing}
    found = {path: lines & missing.get(path, lines) for path, lines in changed.items() if Path(path).suffix in kinds}
    return {path: sorted(lines) for path, lines in sorted(found.items()) if lines}


def missing_lines(file: bytes) -> dict[str, set[int]]:
    """Path → code lines that did not run, of a coverage.py JSON or LCOV report."""
    if file.lstrip().startswith(b"{"):
        return {path: set(one["missing_lines"]) for path, one in json.loads(file)["files"].items()}
    found: dict[str, set[int]] = {}
    path = ""
    for line in file.decode("utf-8", "replace").splitlines():
        if line.startswith("SF:"):
            path = line[3:]
            found[path] = set()
        elif line.startswith("DA:") and line.split(",")[1] == "0":
            found[path].add(int(line[3:].split(",")[0]))
    return found
