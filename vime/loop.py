"""The algorithm: collect, train, publish, sync, prove, evaluate, save.

Synchronous: every response is sampled by the weights that the step then changes (max_staleness = 0). What the parts are
made of stands in ``job.py``; how responses are sampled in ``rollout/``; the mathematics in ``training/``.
"""

from __future__ import annotations

from vime.config.sections import Config
from vime.job import Job
from vime.rollout.collect import Outcome, note_advantages
from vime.training.plan import PlanJson, pairs, plan, plan_json, weigh


async def train(job: Job) -> None:
    """Runs the job from its current step to its last."""
    config = job.config
    await sync(job)  # also at the start: resumed weights are not those the servers were started with
    if job.step == 0:
        await job.evaluate()
    job.metrics = {}

    last = False
    while not last:
        with job.clock("step"):
            with job.clock("rollout"):
                batch = await job.collector.collect(job.version, job.show_progress)

            with job.clock("train"):
                if updates := plan_updates(batch, config):  # else: every group was filtered, nothing to learn
                    answer = await job.trainer.train(updates, job.optimizer_steps)
                    job.metrics |= answer["metrics"]
                    note_advantages(batch, answer["advantages"])

            job.step += 1
            job.collector.trained(batch, job.step)
            await sync(job)

            last = job.is_last()
            improved = await job.evaluate() if last or job.due(config.eval.every) else False
        job.record(batch)
        if last or job.due(config.checkpoint.every) or (improved and config.checkpoint.every):
            await job.save()


def plan_updates(batch: list[Outcome], config: Config) -> list[PlanJson]:
    """The batch as optimizer steps: groups split evenly between them, rows weighted over each whole update, then planned."""
    algorithm, trainer = config.algorithm, config.trainer
    compares = algorithm.objective == "dpo"
    groups = [pairs(outcome.rows) if compares else outcome.rows for outcome in batch if outcome.filtered is None]
    groups = [rows for rows in groups if rows]
    share = -(-len(groups) // algorithm.updates) or 1
    updates = []
    for first in range(0, len(groups), share):
        rows = [row for group in groups[first : first + share] for row in group]
        weighed = weigh(rows, algorithm.reduction, algorithm.fixed_length or config.rollout.max_tokens)
        updates.append(plan_json(plan(weighed, trainer.ranks, trainer.tokens_per_micro_batch, compares)))
    return updates


async def sync(job: Job) -> None:
    """The trainer's weights become the servers', and are proved; an error leaves the servers paused."""
    job.metrics |= await job.channel.send(job.version)
    with job.clock("probe"):
        proof = await job.probe.prove(job.version)
    job.metrics |= {
        "weights/version": job.version,
        "weights/probe_abs_diff_mean": proof.mean,
        "weights/probe_abs_diff_max": proof.max,
    }
