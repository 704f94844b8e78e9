"""Gate two: every measurement, on a clean checkout of the merge and, to compare with, of the mirror or the upstream."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from forksync import ledger
from forksync.errors import ForksyncError
from forksync.findings import ranges
from forksync.gate import Verdict
from forksync.git import Repository, decode
from forksync.measure import Expected, Measure, Measured, Run, judge, missing_lines, run, uncovered
from forksync.merge import DATE
from forksync.project import Project
from forksync.state import State
from forksync.words import counted
from forksync.worktree import Worktree

Say = Callable[[str], None]


def measure_all(project: Project, now: State, verdict: Verdict, lock: int, say: Say) -> tuple[Measured, ...]:
    """All measurements of the merge in ``now.tree``."""
    repository = project.repository
    commit = repository.write_commit(now.tree, [], "measured", DATE)
    work = repository.common_dir() / "forksync" / "work"
    places = {
        "fork": (Worktree(repository, work / "fork"), commit),
        "mirror": (Worktree(repository, work / "mirror"), now.mirror),
        "upstream": (Worktree(repository, work / "upstream"), now.upstream_to),
    }
    before = ledger.passed_tests(project, now.tree)
    found = []
    try:
        for measure in project.config.measure:
            needed = ["fork", *([measure.reference] if measure.compares else [])]
            for side in needed:
                places[side][0].lay(places[side][1])
            expected = Expected(before.get(measure.name, ()), Excuses(repository, now))
            one = measured(project, measure, {side: places[side][0].folder for side in needed}, expected, verdict, lock)
            found.append(one)
            say(f"gate two: {one.name}: {summary(one)}")
            for path, lines in one.uncovered.items():
                say(f"  no test runs {path}:{', '.join(ranges(lines))}")
    finally:
        for worktree, _ in places.values():
            worktree.remove()
    return tuple(found)


def measured(
    project: Project, measure: Measure, folders: dict[str, Path], expected: Expected, verdict: Verdict, lock: int
) -> Measured:
    start = time.monotonic()
    ours = [run(measure, folders["fork"], number, "fork", [lock]) for number in range(measure.runs)]
    theirs: list[Run | bytes] = []
    if measure.compares:
        theirs += [
            run(measure, folders[measure.reference], number, measure.reference, [lock])
            for number in range(measure.runs)
        ]
    elif measure.kind in ("metrics", "curves"):
        file = folders["fork"] / measure.reference
        if not file.is_file():
            raise ForksyncError(f"measure {measure.name}: reference = {measure.reference!r} is no file of the fork")
        theirs.append(file.read_bytes())
    one = judge(measure, ours, theirs, expected, time.monotonic() - start)
    if not measure.coverage:
        return one
    changed: dict[str, set[int]] = {}
    for hunk, _ in verdict.signed:
        if hunk.last >= hunk.first and hunk.edit.kind in ("lines", "added"):
            changed.setdefault(hunk.path, set()).update(range(hunk.first, hunk.last + 1))
    if ours[-1].coverage is None:
        said = f"the command wrote no {measure.coverage} in $FORKSYNC_OUT: which lines are measured is not known"
        return replace(one, passed=False, findings=(*one.findings, said))
    try:
        return replace(one, uncovered=uncovered(missing_lines(ours[-1].coverage), changed))
    except (ValueError, KeyError, TypeError) as fault:
        said = f"{measure.coverage} is neither coverage.py's JSON nor LCOV: {fault!r}"
        return replace(one, passed=False, findings=(*one.findings, said))


class Excuses:
    """Which tests may be missing since the upstream took them away, or made other cases of them."""

    def __init__(self, repository: Repository, now: State) -> None:
        self.repository, self.now = repository, now

    @cached_property
    def files(self) -> tuple[dict[str, str], dict[str, str]]:
        """Path → blob in the old and in the new mirror."""
        old, new = ({e.path: e.id for e in self.repository.entries(m)} for m in (self.now.base, self.now.mirror))
        return old, new

    def __call__(self, test: str, ran: Collection[str]) -> bool:
        """``test`` is ``file.class::name[case]``; ``ran``: all tests that ran."""
        function, _, case = test.partition("[")
        classname, _, name = function.partition("::")
        old, new = self.files
        path = self.path_of(classname)
        if path is None:
            return False
        if path not in new or not self.says(new[path], name):
            return self.says(old[path], name)
        changed = old[path] != new[path] or any(old.get(p) != i for p, i in new.items() if p.endswith("conftest.py"))
        return bool(case) and changed and any(one.startswith(f"{function}[") or one == function for one in ran)

    def path_of(self, classname: str) -> str | None:
        """The old mirror's file that a test of this class lies in."""
        parts = classname.split(".")
        paths = ("/".join(parts[:count]) + ".py" for count in range(len(parts), 0, -1))
        return next((path for path in paths if path in self.files[0]), None)

    def says(self, blob: str, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", decode(self.repository.blobs([blob])[blob])) is not None


def summary(one: Measured) -> str:
    words = ["passed" if one.passed else f"failed, {counted(len(one.findings), 'finding')}"]
    words += [counted(len(one.tests), "test")] if one.tests else []
    words += [f"{parity.metric} {parity.said}" for parity in one.parities]
    missed = sum(map(len, one.uncovered.values()))
    words += [f"{counted(missed, 'divergent line')} that no test runs"] if missed else []
    return ", ".join([*words, f"{one.seconds:.1f} s"])
