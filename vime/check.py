"""``vime check``: one step of the user's own configuration, computed both ways, and every difference with a verdict.

Server against trainer, before and after an update; the engine against plain transformers (``training/plain``). The bounds
are of right implementations: what is over them is a fault, or a model whose numerics are worth a look.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vime.config.sections import Config
from vime.job import Job
from vime.loop import plan_updates, sync
from vime.rollout.outcome import Outcome
from vime.training.plan import Row
from vime.weights.probe import bound_of

GROUPS = 4  # a check looks at this many prompts at most
ENGINE_BOUNDS = {  # float32: rounding of another order of sums; bfloat16: of 8 bits of mantissa through all layers
    "logprob_mean": {"float32": 1e-4, "bfloat16": 0.1},
    "logprob_max": {"float32": 1e-3, "bfloat16": 2.0},
    "loss": {"float32": 1e-4, "bfloat16": 0.05},
    "gradient": {"float32": 1e-3, "bfloat16": 0.25},
    "split_gradient": {"float32": 1e-4, "bfloat16": 0.25},
}
ENGINE_NAMES = {
    "logprob_mean": "plain, trainer: logprob difference, mean",
    "logprob_max": "plain, trainer: logprob difference, max",
    "loss": "plain, trainer: loss, relative",
    "gradient": "plain, trainer: gradient, relative",
    "split_gradient": "single, packed: gradient, relative",
}


@dataclass(frozen=True)
class Comparison:
    """One row of the table; ``ok`` is value <= bound."""

    name: str
    value: float
    bound: float
    ok: bool


def comparison(name: str, value: float, bound: float) -> Comparison:
    return Comparison(name, value, bound, value <= bound)


def for_check(config: Config) -> Config:
    """The configuration with one small step in a folder of its own, every group kept."""
    rollout = config.rollout.model_copy(update={"groups": min(GROUPS, config.rollout.groups), "filter": "none"})
    algorithm = config.algorithm.model_copy(update={"updates": 1, "max_mismatch_kl": None})
    run = config.run.model_copy(update={"dir": f"{config.run.dir}-check"})
    return config.model_copy(update={"rollout": rollout, "algorithm": algorithm, "run": run})


def with_differences(batch: list[Outcome]) -> tuple[list[Outcome], int]:
    """The batch with rewards 0, 1, 0, 1, ... in groups whose rewards are all equal (they would have no gradient), and how
    many groups those are."""

    def differ(outcome: Outcome) -> list[Row]:
        return [replace(row, reward=float(row.rollout % 2)) for row in outcome.rows]

    equal = [max(outcome.rewards) == min(outcome.rewards) for outcome in batch]
    changed = [replace(o, rows=differ(o)) if same else o for o, same in zip(batch, equal, strict=True)]
    return changed, sum(equal)


async def check(job: Job) -> tuple[list[Comparison], list[str]]:
    """All comparisons, and notes on what was done for them."""
    config = job.config
    bound = bound_of(config)
    async with job.sync.lock:
        await sync(job)
    first = job.metrics["weights/probe_abs_diff_mean"]
    batch = [o for o in await job.scheduler.collect() if o.filtered is None]
    batch, equal = with_differences(batch)
    updates = plan_updates(batch, config)
    folder = Path(config.run.dir, "weights")
    async with job.sync.lock:
        engine = await job.trainer.compare(updates, folder)
        shutil.rmtree(folder, ignore_errors=True)
        metrics = (await job.trainer.train(updates, job.optimizer_steps))["metrics"]
        job.step += 1
        await sync(job)
    second = job.metrics["weights/probe_abs_diff_mean"]
    rows = [comparison("start: server, trainer: logprob diff., mean", first, bound)]
    if "server_mean" in engine:
        mean, worst = metrics["train/logprob_abs_diff_mean"], metrics["train/logprob_abs_diff_max"]
        rows += [
            comparison("rollout: server, trainer: logprob diff., mean", mean, bound),
            comparison("rollout: server, trainer: logprob diff., max", worst, 30 * bound),
            comparison("rollout: server, trainer: KL (k3)", metrics["train/mismatch_kl"], bound),
            comparison("rollout: server, plain: logprob diff., mean", engine["server_mean"], bound),
        ]
    rows += [
        comparison(text, engine[name], ENGINE_BOUNDS[name][config.model.dtype])
        for name, text in ENGINE_NAMES.items()
        if name in engine
    ]
    rows.append(comparison("step: server, trainer: logprob diff., mean", second, bound))
    notes = [f"{len(batch)} groups, {metrics['train/tokens']:.0f} trained tokens, {config.model.dtype}"]
    if "unreplayed_mean" in engine:
        notes.append(
            f"rollout: server, trainer: logprob difference, mean: {metrics['train/logprob_abs_diff_mean']:.3g} with the "
            f"server's experts, {engine['unreplayed_mean']:.3g} with the trainer's own"
        )
    if equal:
        notes.append(f"{equal} groups had equal rewards and got 0, 1, 0, 1, ... for the check")
    return rows, notes


def as_json(config: Config, rows: list[Comparison], notes: list[str]) -> dict[str, Any]:
    """For ``--json``: every comparison with name, value, bound, ok; a value that is no number is null."""
    listed = [asdict(row) | {"value": row.value if math.isfinite(row.value) else None} for row in rows]
    return {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "ok": all(row.ok for row in rows),
        "comparisons": listed,
        "notes": notes,
    }
