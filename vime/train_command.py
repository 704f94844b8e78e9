"""The command ``vime train``: the whole, a half of it (``--debug``), or what it would be (``--dry-run``)."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from vime.config.algorithms import warnings
from vime.config.load import ConfigError, dump
from vime.config.sections import Config

if TYPE_CHECKING:
    from vime.run import Run


def run_train(given: argparse.Namespace, config: Config) -> int:
    """``vime train``: the whole, a half of it, or what it would be."""
    check_train(given)
    if given.dry_run:
        dry_run(config, given.debug)
        if given.memory:
            print("\n".join(f"# {line}" for line in predicted_memory(config).splitlines()))
        return 0
    if given.debug == "train":
        return asyncio.run(run_replay(config, given.replay, given.start, given.resume))
    return asyncio.run(run_training(config, given.resume, given.debug == "rollout"))


def check_train(given: argparse.Namespace) -> None:
    """Refuses flags that what is to be done has no use for."""
    if given.memory and not given.dry_run:
        raise ConfigError("--memory is for --dry-run; a run says it by itself")
    if given.debug == "train" and not given.replay:
        raise ConfigError(
            "--debug train needs the batches to train: --replay RUN/dumps, of a run with log.dump_every over 0"
        )
    for flag, value in (("--replay", given.replay), ("--from", given.start)):
        if value and given.debug != "train":
            raise ConfigError(f"{flag} {value} is for --debug train; add that, or remove it")
    if given.debug == "rollout" and given.resume:
        raise ConfigError("--resume with --debug rollout: it keeps no checkpoint; remove one of the two")
    if given.start and given.resume:
        raise ConfigError(
            "--resume goes on from the replay's own checkpoint and --from names another; remove one of the two"
        )


def dry_run(config: Config, half: str | None = None) -> None:
    """Prints the resolved configuration and the processes that would run, of a half alone where one is named."""
    from vime.inference.commands import ROUTER, check_all_flags, server_command, server_env
    from vime.job import check_functions
    from vime.slime.parts import check_workers
    from vime.tools.calls import check_tools

    known = check_all_flags(config)
    check_functions(config)
    workers = asyncio.run(check_workers(config)) + asyncio.run(check_tools(config.tools))
    print(dump(config))
    for line in warnings(config):
        print(f"# note: {line}")
    print("# processes")
    served, trained = half != "train", half != "rollout"
    for url in config.inference.urls if served else []:
        print(f"# vLLM server at {url} (runs already)")
    if served and not config.inference.urls:
        for index in range(config.inference.servers):
            env = " ".join(f"{k}={v}" for k, v in server_env(config, index).items() if k != "PYTHONPATH")
            print(f"# vLLM server {index}: {env} {shlex.join(server_command(config, 0, index, known))}")
        if config.inference.servers > 1:
            print(f"# router: {' '.join(ROUTER)} in front of {config.inference.servers} servers")
    for rank in range(config.trainer.ranks if trained else 0):
        print(f"# trainer rank {rank} of {config.trainer.ranks}: python -m vime.training.worker")
    for worker in workers if served else []:
        print(f"# {worker}")


def predicted_memory(config: Config) -> str:
    """The peak of a trainer rank on this machine, as a table."""
    import torch

    from vime.training.memory import table
    from vime.training.worker import device_of

    return table(config, torch.device(device_of(config.trainer)))


async def run_training(config: Config, resume: bool, rollout_only: bool = False) -> int:
    from vime.debug import RolloutJob, for_rollout
    from vime.job import Job, open_job
    from vime.loop import train
    from vime.observe.live import LiveView

    config, kind = (for_rollout(config), RolloutJob) if rollout_only else (config, Job)
    with LiveView(f"vime {Path(config.run.dir).name}", config.run.steps) as view:
        async with open_job(config, view, resume, kind) as job:
            await train(job)
            report = job.finish()
    print_results(job, report)
    return 0


async def run_replay(config: Config, given: Path, start: Path | None, resume: bool) -> int:
    from vime.debug import ReplayJob, dumps_for, for_replay, open_replay
    from vime.loop import train
    from vime.observe.live import LiveView

    config, dumps = for_replay(config), dumps_for(config, given)
    with LiveView(f"vime {Path(config.run.dir).name}", dumps[-1].step) as view:
        async with open_replay(ReplayJob(config, view, dumps), resume, start) as job:
            await train(job)
            report = job.finish()
    print_results(job, report)
    return 0


def print_results(job: Run, report: Path) -> None:
    """What a run came to, and where it is."""
    from rich.console import Console

    from vime.observe.live import before_after_table

    if job.evals:
        Console().print(before_after_table(job.evals))
    print(f"summary     {job.run_dir / 'summary.json'}")
    print(f"report      {report}")
    if (model := job.checkpoints.path(job.step) / "model").exists():
        print(f"model       {model}")
