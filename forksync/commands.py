"""The loop's commands: sync, status, diff, sign, explain, report, watch. Each prints what was found and gives the exit code."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from forksync.errors import ForksyncError
from forksync.words import counted

if TYPE_CHECKING:
    from forksync.project import Project

GREEN, FOUND, BEHIND = 0, 1, 3
"""Exit codes: all is well; a gate failed or a conflict is left; nothing is wrong but the upstream has gone on."""
STYLES = {"-": "red", "+": "green", "@": "cyan"}


def show(lines: Iterable[str]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for line in lines:
        printable = line.encode("utf-8", "backslashreplace").decode()
        console.print(Text(printable, style=STYLES.get(line[:1], "")))


def say(line: str) -> None:
    show([line])
    sys.stdout.flush()


def sync(arguments: argparse.Namespace) -> int:
    from forksync.fork import main_checkout, sync_folder
    from forksync.lock import locked
    from forksync.project import open_project
    from forksync.sync import abandon

    project = open_project(arguments.repo)
    if project.repository.path.resolve() == sync_folder(project.repository):
        raise ForksyncError(f"run forksync sync in the fork's checkout, {main_checkout(project.repository)}")
    with locked(project.repository) as lock:
        if arguments.abandon:
            say("the sync in progress is given up" if abandon(project) else "no sync is in progress")
            return GREEN
        if arguments.fetch:
            project.fetch()
        return run_sync(project, arguments.to, arguments.accept_rewrite, lock)


def run_sync(project: Project, target: str | None, accept_rewrite: bool, lock: int) -> int:
    from forksync.findings import measured_lines, verdict_lines
    from forksync.fixer import conflict_lines
    from forksync.fork import sync_folder
    from forksync.sync import UnsignedError
    from forksync.sync import sync as run

    try:
        outcome = run(project, target, accept_rewrite, lock, say)
    except UnsignedError as unsigned:
        show(verdict_lines(project.repository, unsigned.verdict))
        say(f"stopped before it began: {unsigned}")
        return FOUND
    if outcome.state is None:
        say("nothing to do: the fork has this upstream already, by this table")
        return GREEN
    if outcome.landed:
        return GREEN
    if outcome.verdict:
        show(verdict_lines(project.repository, outcome.verdict))
    show(line for one in outcome.state.measured if not one.passed for line in measured_lines(one))
    show(conflict_lines(project, outcome.state))
    say(f"stopped for a person; no branch was touched. The merge so far lies in {sync_folder(project.repository)}:")
    say("decide conflicts and sign what is meant there, then run forksync sync again")
    return FOUND


def status(arguments: argparse.Namespace) -> int:
    from forksync.project import open_project
    from forksync.status import status as look
    from forksync.status import text

    project = open_project(arguments.repo)
    if arguments.fetch:
        project.fetch()
    one = look(project, arguments.to)
    show(text(one))
    if not arguments.check:
        return GREEN
    return FOUND if not one.verdict.passed or one.conflicts else BEHIND if one.behind else GREEN


def diff(arguments: argparse.Namespace) -> int:
    from forksync import history
    from forksync.findings import marked, verdict_lines
    from forksync.fork import base_of, snapshot, verdict_on
    from forksync.project import open_project

    project = open_project(arguments.repo)
    commit, tree = snapshot(project)
    verdict = verdict_on(project, base_of(project, commit).commit, tree, history.load(project.config.history))
    conflicts = marked(project.repository, tree, verdict)
    show(f"conflict  {path}: decide between its markers first\n" for path in sorted(conflicts))
    verdict = verdict.beside(conflicts)
    show(verdict_lines(project.repository, verdict, arguments.signed))
    counts = f"{len(verdict.new)} new, {len(verdict.changed)} changed, {len(verdict.vanished)} vanished"
    say(f"{counted(len(verdict.signed), 'hunk')} signed off, {len(verdict.owned)} in own files; {counts}")
    return GREEN if verdict.passed and not conflicts else FOUND


def sign(arguments: argparse.Namespace) -> int:
    from forksync.fork import sync_folder
    from forksync.project import open_project
    from forksync.sign import author_of
    from forksync.sign import sign as put

    if not arguments.what and not arguments.all:
        raise ForksyncError("sign what? Give fingerprints or paths that forksync diff shows, or --all")
    project = open_project(arguments.repo)
    author = arguments.author or author_of(project.repository)
    path, chosen = put(
        project, arguments.what, arguments.reason, author, arguments.link, arguments.entry, arguments.conflict
    )
    counts = f"{len(chosen.new)} new, {len(chosen.changed)} changed; {len(chosen.vanished)} vanished taken out"
    after = (
        "forksync sync goes on from here" if project.repository.path == sync_folder(project.repository) else "commit it"
    )
    say(f"{path}: signed {counts}; {after}")
    return GREEN


def explain(arguments: argparse.Namespace) -> int:
    from forksync.explain import explain as tell
    from forksync.project import open_project

    path, _, line = arguments.where.rpartition(":")
    numbered = bool(path) and line.isdigit()
    project = open_project(arguments.repo)
    show(tell(project, path if numbered else arguments.where, int(line) if numbered else None))
    return GREEN


def report(arguments: argparse.Namespace) -> int:
    from forksync.project import open_project
    from forksync.report import write

    project = open_project(arguments.repo)
    if arguments.fetch:
        project.fetch()
    out = arguments.out or project.repository.common_dir() / "forksync" / "report.html"
    say(str(write(project, arguments.to, out)))
    return GREEN


def watch(arguments: argparse.Namespace) -> int:
    """Fetches and syncs, once or every so often; in a loop it goes on until a sync needs a person."""
    from forksync import state
    from forksync.lock import locked
    from forksync.project import open_project
    from forksync.report import write
    from forksync.watch import newest

    while True:
        project = open_project(arguments.repo)
        with locked(project.repository) as lock:
            project.fetch()
            fresh = arguments.tags and state.load(project.repository) is None
            target = newest(project, arguments.tags) if fresh else None
            code = run_sync(project, target, False, lock)
        if arguments.report:
            write(project, target, arguments.report)
        if code != GREEN or not arguments.every:
            return code
        time.sleep(arguments.every)


def add_all(add: Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]) -> None:
    """Adds the commands to the parser; ``add(name, function, text)`` makes one."""
    to: dict[str, Any] = {"metavar": "REF", "help": "the upstream's commit, tag or branch; default: its branch's tip"}
    offline: dict[str, Any] = {
        "dest": "fetch",
        "action": "store_false",
        "help": "look at what was fetched last; ask no network",
    }

    command = add("sync", sync, "merge a new upstream; goes on with a sync that stopped")
    command.add_argument("--to", **to)
    command.add_argument("--no-fetch", **offline)
    command.add_argument(
        "--accept-rewrite", action="store_true", help="though the upstream's past is another, or newer, than the fork's"
    )
    command.add_argument("--abandon", action="store_true", help="give up the sync in progress; no branch was touched")

    command = add("status", status, "how far behind, which conflicts a sync would have, what has drifted")
    command.add_argument("--to", **to)
    command.add_argument("--no-fetch", **offline)
    command.add_argument("--check", action="store_true", help="exit 1 for drift or conflicts ahead, 3 if only behind")

    command = add("diff", diff, "gate one for the working tree: what differs from the mirror and is not signed off")
    command.add_argument("--signed", action="store_true", help="show what is signed off too")

    command = add("sign", sign, "sign off findings of forksync diff: they become part of the history")
    command.add_argument(
        "what", nargs="*", metavar="FINGERPRINT|PATH", help="findings, by the start of a fingerprint or by file"
    )
    command.add_argument("--all", action="store_true", help="all findings")
    command.add_argument("--reason", default="", help="why the fork differs there; needed for new hunks")
    command.add_argument("--author", default="", help="default: git's user.name and user.email")
    command.add_argument(
        "--link", action="append", default=[], metavar="URL", help="of a discussion, a pull request; may be repeated"
    )
    command.add_argument("--entry", default="", metavar="ID", help="the entry to add to, or the name of a new one")
    command.add_argument(
        "--conflict",
        choices=["ask", "fork", "upstream"],
        default="ask",
        help="where the upstream changes the same lines: ask, keep the fork's, or take the upstream's",
    )

    command = add("explain", explain, "why a line differs from the upstream's")
    command.add_argument("where", metavar="PATH[:LINE]")

    command = add("report", report, "write the state of the fork as one HTML page")
    command.add_argument("--to", **to)
    command.add_argument("--no-fetch", **offline)
    command.add_argument("--out", type=Path, metavar="FILE", help="default: forksync/report.html in the .git folder")

    command = add("watch", watch, "for CI: fetch, sync, and write the report; exit as sync does")
    command.add_argument(
        "--tags",
        default="",
        metavar="PATTERN",
        help="follow the newest tag that matches instead of the branch, e.g. 'v*'",
    )
    command.add_argument(
        "--every",
        type=float,
        default=0,
        metavar="SECONDS",
        help="go on and look again so often, until a person is needed",
    )
    command.add_argument("--report", type=Path, metavar="FILE", help="write the HTML report there each time")
