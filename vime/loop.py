"""The algorithm: collect, train, publish, sync, prove, evaluate, save.

Synchronous: every response is sampled by the weights that the step then changes (max_staleness = 0). What the parts are
made of stands in ``job.py``; how responses are sampled in ``rollout/``; the mathematics in ``training/``.
"""

from __future__ import annotations

from vime.job import Job
from vime.training.plan import plan, to_json, weigh


async def train(job: Job) -> None:
    """Runs the job from its current step to its last."""
    config = job.config
    await sync(job)  # also at the start: resumed weights are not those the servers were started with
    if job.step == 0:
        await job.evaluate()

    while job.step < config.run.steps and not job.should_stop():
        with job.clock("step"):
            with job.clock("rollout"):
                batch = await job.collector.collect(job.version, job.show_progress)

            with job.clock("train"):
                share = -(-len(batch) // config.algorithm.updates)
                parts = [batch[i : i + share] for i in range(0, len(batch), share)]
                updates = [
                    plan(
                        weigh([row for group in part for row in group.rows], config.algorithm.reduction),
                        config.trainer.ranks,
                        config.trainer.tokens_per_micro_batch,
                    )
                    for part in parts
                ]
                job.metrics |= await job.trainer.train([to_json(update) for update in updates], job.optimizer_steps)

            job.step += 1
            job.collector.trained(batch, job.step)
            await sync(job)

            last = job.step == config.run.steps or job.should_stop()
            improved = False
            if job.due(config.eval.every) or last:
                improved = await job.evaluate()
            if job.due(config.checkpoint.every) or last or (improved and config.checkpoint.every):
                await job.save()
        job.record(batch)


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
