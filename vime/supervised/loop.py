"""Learning from given conversations: take a batch, train on it, evaluate, save. Without servers.

The same for SFT and for reward models: what a batch is made of stands in ``data/examples.py``, the loss in
``training/losses.py`` and ``training/reward.py``.
"""

from __future__ import annotations

from vime.supervised.job import SupervisedJob


async def train(job: SupervisedJob) -> None:
    """Runs the job from its current step to its last."""
    config = job.config
    if job.step == 0:
        await job.evaluate(job.owed)
    job.metrics = {}

    last = False
    while not last:
        with job.clock("step"):
            rows = job.take()
            with job.clock("train"):
                answer = await job.trainer.train([job.planned(rows)], job.optimizer_steps)

            job.step += 1
            job.trained(rows, answer["metrics"])

            last = job.is_last()
            improved = await job.evaluate(job.due_sets(last))
        job.record()
        if last or job.due(config.checkpoint.every) or (improved and config.checkpoint.every):
            await job.save(last)
    await job.checkpoints.written()
