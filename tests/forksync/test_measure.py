"""Gate two: what is not measured does not pass."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from forksync.measure import Expected, Measure, Measured, Run, judge, missing_lines, run, shell, uncovered


def measure(kind: str = "tests", **options: Any) -> Measure:
    file = {"tests": "junit.xml", "metrics": "m.json", "curves": "m.json"}.get(kind, "")
    return Measure.model_validate({"name": "m", "command": "true", "kind": kind, "file": file, **options})


def junit(**tests: str) -> bytes:
    inner = {"passed": "", "failed": "<failure/>", "error": "<error/>", "skipped": "<skipped/>"}
    cases = "".join(f'<testcase classname="t.a" name="{name}">{inner[how]}</testcase>' for name, how in tests.items())
    return f"<testsuites><testsuite>{cases}</testsuite></testsuites>".encode()


def done(file: bytes | None = None, code: int | None = 0) -> Run:
    return Run(code, "said", file, None)


def judged(file: bytes | None, expected: list[str] | None = None, code: int = 0, **options: Any) -> Measured:
    return judge(measure("tests", **options), [done(file, code)], [], Expected(expected or []), 0.0)


def test_tests_that_ran_and_passed_pass() -> None:
    one = judged(junit(a="passed", b="passed"), ["t.a::a"])
    assert one.passed
    assert one.tests == ("t.a::a", "t.a::b")


@pytest.mark.parametrize(
    ("file", "expected", "finding"),
    [
        (junit(a="failed"), [], "t.a::a: failed"),
        (junit(a="error"), [], "t.a::a: failed"),
        (junit(a="passed", b="skipped"), [], "t.a::b: skipped"),
        (junit(a="passed"), ["t.a::gone"], "t.a::gone: missing"),
        (junit(), [], "no test ran"),
        (None, [], "wrote no junit.xml"),
        (b"<a", [], "is no JUnit XML"),
    ],
)
def test_a_failed_skipped_or_missing_test_fails(file: bytes | None, expected: list[str], finding: str) -> None:
    one = judged(file, expected)
    assert not one.passed
    assert finding in " ".join(one.findings)


def test_what_may_be_skipped_or_missing_is_said_by_name() -> None:
    file = junit(a="passed", gpu_b="skipped")
    assert judged(file, ["t.a::old"], allow_skipped=["t.a::gpu_*"], allow_missing=["*::old"]).passed


def test_the_exit_code_counts_always() -> None:
    one = judged(junit(a="passed"), code=1)
    assert not one.passed
    assert one.output == "said"


def compared(kind: str, fork: Any, reference: Any, **options: Any) -> Measured:
    files = [json.dumps(side).encode() if side is not None else None for side in (fork, reference)]
    configured = measure(kind, tolerance={"loss": {"absolute": 0.1, **options}})
    return judge(configured, [done(files[0])], [done(files[1])], Expected(), 0.0)


def test_metrics_are_compared_with_the_references() -> None:
    assert compared("metrics", {"loss": 1.0, "other": 7}, {"loss": 1.05}).passed
    assert not compared("metrics", {"loss": 1.0}, {"loss": 1.2}).passed
    assert compared("metrics", {"loss": [1.0, 1.01, 0.99]}, {"loss": [1.0, 1.02, 0.98]}).passed


@pytest.mark.parametrize(
    ("fork", "reference", "finding"),
    [
        ({}, {"loss": 1}, "not measured in every run"),
        ({"loss": 1}, {}, "not measured in every run"),
        (None, {"loss": 1}, "wrote no m.json in $FORKSYNC_OUT on the fork"),
        ([1], {"loss": 1}, "must be an object"),
        ({"loss": "low"}, {"loss": 1}, "could not convert"),
    ],
)
def test_a_metric_that_was_not_measured_fails(fork: Any, reference: Any, finding: str) -> None:
    one = compared("metrics", fork, reference)
    assert not one.passed
    assert finding in " ".join(one.findings)


def test_a_reference_that_fails_leaves_nothing_to_compare_with() -> None:
    configured = measure("metrics", tolerance={"loss": {}})
    one = judge(configured, [done(b'{"loss": 1}')], [done(None, 1)], Expected(), 0.0)
    assert "nothing to compare with" in one.findings[0]


def test_curves_may_be_values_or_pairs_of_step_and_value() -> None:
    assert compared("curves", {"loss": [3, 2, 1]}, {"loss": [[0, 3], [1, 2], [2, 1]]}).passed
    assert not compared("curves", {"loss": [3, 3, 3]}, {"loss": [3, 2, 1]}).passed


def test_a_command_has_a_deadline_and_leaves_no_process(tmp_path: Path) -> None:
    start = time.monotonic()
    code, output = shell("echo begun; sleep 60 & sleep 60", tmp_path, {}, 0.5)
    assert code is None
    assert output == "begun\n"
    assert time.monotonic() - start < 30


def test_a_command_is_told_where_to_write_and_which_run_it_is(tmp_path: Path) -> None:
    command = 'printf "<a>$FORKSYNC_SIDE $FORKSYNC_RUN</a>" > $FORKSYNC_OUT/junit.xml; exit 3'
    one = run(measure("tests", command=command), tmp_path, 2, "mirror")
    assert (one.code, one.file) == (3, b"<a>mirror 2</a>")


COVERAGE = json.dumps({"files": {"a.py": {"missing_lines": [2, 3]}, "b.py": {"missing_lines": []}}}).encode()
LCOV = b"SF:a.py\nDA:1,4\nDA:2,0\nDA:3,0\nend_of_record\nSF:b.py\nDA:1,1\nend_of_record\n"


@pytest.mark.parametrize("report", [COVERAGE, LCOV], ids=["coverage.py", "lcov"])
def test_divergent_lines_that_no_test_runs_are_found(report: bytes) -> None:
    changed = {"a.py": {1, 2}, "b.py": {1}, "unknown.py": {5}, "notes.md": {1}}
    assert uncovered(missing_lines(report), changed) == {"a.py": [2], "unknown.py": [5]}


def test_what_was_measured_survives_being_written_down() -> None:
    one = compared("metrics", {"loss": 1.0}, {"loss": 1.2})
    assert Measured.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize("kind", ["tests", "metrics"])
def test_a_measurement_says_what_it_reads(kind: str) -> None:
    with pytest.raises(ValidationError, match="needs"):
        Measure.model_validate({"name": "m", "command": "true", "kind": kind})
