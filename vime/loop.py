"""The algorithm: collect, train, publish, sync, prove, evaluate, save.

With rollout.max_staleness = 0 every response is sampled by the weights that the step then changes. Over 0 the scheduler goes
on making groups while the rest of the step runs; the loop is the same. What the parts are made of stands in ``job.py``; how
responses are sampled in ``rollout/``; the mathematics in ``training/``.
"""

from __future__ import annotations

from vime.beside import beside
from vime.config.sections import Config
from vime.config.shape import hidden_size
from vime.job import Job
from vime.observe import trace
from vime.rollout.outcome import Outcome, note_advantages, stored_keys
from vime.training.plan import PlanJson, pairs, plan, plan_json, weigh


async def train(job: Job) -> None:
    """Runs the job from its current step to its last."""
    config = job.config
    async with job.sync.lock:
        await sync(job)  # also at the start: resumed weights are not those the servers were started with
    await job.evaluate(job.owed)  # at the start all sets; after a resume those that the run did not come to
    job.metrics = {}

    last = False
    while not last:
        with job.clock("step"):
            with job.clock("rollout"):
                batch = await job.collect()
            await job.dump(batch)

            async with job.sync.lock:  # no server joins while the trainer's weights are not those that are published
                with job.clock("train"):
                    if updates := await beside(plan_updates, batch, config):  # else: nothing to learn
                        answer = await job.trainer.train(updates, job.optimizer_steps)
                        job.metrics |= answer["metrics"]
                        await beside(note_advantages, batch, answer["advantages"])

                job.step += 1
                job.scheduler.trained(batch, job.step)
                await beside(job.store.drop, stored_keys(batch))
                await sync(job)

            last = job.is_last()
            improved = await job.evaluate(job.due_sets(last), last)
        await job.record_batch(batch)
        await beside(let_go, batch)
        if last or job.due(config.checkpoint.every) or (improved and config.checkpoint.every):
            await job.save(last)
    await job.checkpoints.written()


def let_go(batch: list[Outcome]) -> None:
    """Frees a batch little by little: all its objects at once would take a tenth of a second, in which nothing else happens."""
    while batch:
        batch.pop()


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
        budget = trainer.tokens_per_micro_batch * trainer.context_parallel
        updates.append(plan_json(plan(weighed, trainer.data_ranks, budget, compares, hidden_size(config.model.path))))
    return updates


async def sync(job: Job) -> None:
    """The trainer's weights become the servers', and are proved; a server that fails is out until it joins again."""
    await job.let_evaluation_end()
    job.view.phase("sync")
    with trace.phase("sync", job.step):
        job.metrics |= await job.sync.send(job.version)
    job.metrics["weights/version"] = job.version
