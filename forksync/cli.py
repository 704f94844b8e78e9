"""The ``forksync`` command. Exit codes: 0 well, 1 something was found for a person to see, 2 bad input, 130 stopped.

Bad input ends in one clear message, never in a traceback, and changes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forksync.commands import add_all
from forksync.errors import ForksyncError

DESCRIPTION = """\
Keeps a derived code base aligned with its upstream: the upstream is translated by a table, what differs from that is
signed off one by one, and a new upstream is merged only if exactly the signed-off differences are left and the
measurements are green.
"""


def init(arguments: argparse.Namespace) -> int:
    from forksync.git import open_repository
    from forksync.init import init as start
    from forksync.words import counted

    done = start(open_repository(arguments.repo), arguments.upstream, arguments.branch, arguments.base, arguments.fork)
    learned = done.learned
    pairs, rules = counted(len(learned.pairs), "pair"), counted(len(learned.rules), "rule")
    print(f"upstream {done.base[:12]}: {pairs} of files belong together, {rules} proposed")
    for rule in learned.rules:
        print(f"{learned.gains.get(rule.name, 0):7} lines  {rule.name}")
    print(
        f"lines of the upstream that the fork does not have: {learned.lines_before} before, {learned.lines_after} after"
    )
    for file in done.files:
        print(file)
    print(
        "read the table, commit both files, then: forksync diff shows what is left, forksync sign takes it into the history"
    )
    return 0


def mirror(arguments: argparse.Namespace) -> int:
    from forksync.mirror import mirror as make
    from forksync.mirror import publish
    from forksync.project import open_project

    project = open_project(arguments.repo)
    made = make(project.repository, project.upstream_commit(arguments.to), project.table)
    if not arguments.dry_run:
        branch = project.config.fork.mirror
        print(f"{branch} {publish(project.repository, branch, made)[:12]}")
    print(
        f"upstream {made.upstream[:12]}, table {made.table[:12]}, {len(made.sources)} files, {made.translated} translated now"
    )
    for rule in project.table.rules:
        print(f"{made.uses[rule.name]:7} {rule.name}")
    for warning in made.warnings:
        print(f"warning: {warning}")
    return 1 if made.warnings else 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="forksync", description=DESCRIPTION, allow_abbrev=False)
    top.add_argument("--repo", type=Path, default=Path(), metavar="FOLDER", help="the fork's checkout; default: here")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, function: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=function)
        return command

    command = add("init", init, "propose a configuration and a first table from the upstream and an existing fork")
    command.add_argument("--upstream", required=True, metavar="URL", help="what git fetch takes; . for this repository")
    command.add_argument("--branch", default="main", help="the upstream's branch; default: main")
    command.add_argument(
        "--base", metavar="REF", help="the upstream's commit or tag the fork was made from; default: its tip"
    )
    command.add_argument("--fork", metavar="BRANCH", help="the fork's branch; default: the one checked out")
    command = add("mirror", mirror, "translate the upstream and write it to the mirror's branch")
    command.add_argument("--to", metavar="REF", help="the upstream's commit, tag or branch; default: its branch's tip")
    command.add_argument("--dry-run", action="store_true", help="count and warn; move no branch")
    add_all(add)
    return top


def main(words: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(words)
    try:
        return int(arguments.run(arguments))
    except ForksyncError as error:
        print(f"forksync: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("forksync: stopped; nothing was left half done", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
