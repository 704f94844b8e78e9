"""The torch engine as its processes: two ranks do what one does, micro-batches change nothing, resume goes on."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_config
from vime.checkpoint import Checkpoints
from vime.cluster.local import ProcessError
from vime.sample import Sample, VersionSpan
from vime.store.shared_memory import SharedMemoryStore
from vime.training.client import Trainer, TrainerError
from vime.training.plan import Row, plan, plan_json, weigh
from vime.training.shards import Saved

STEPS = 3


def make_rows(store: SharedMemoryStore, seed: int = 0) -> list[Row]:
    """Five groups of three responses, prompts and responses of unequal lengths, some response tokens not trained."""
    draw = random.Random(seed)
    rows = []
    for group in range(5):
        prompt = [draw.randrange(256) for _ in range(draw.randint(1, 12))]
        samples = []
        for _ in range(3):
            length = draw.randint(1, 9)
            samples.append(
                Sample(
                    prompt,
                    [draw.randrange(256) for _ in range(length)],
                    [-5.0 - draw.random() for _ in range(length)],
                    (VersionSpan(0, 0, length),),
                    "stop",
                    "",
                    [1] + [draw.randrange(2) for _ in range(length - 1)],
                )
            )
        store.put(f"g{group}", samples)
        rows += [
            Row(f"g{group}", i, i, len(prompt), len(s.response_ids), sum(s.loss_mask), draw.gauss(0, 1))
            for i, s in enumerate(samples)
        ]
    return rows


class Runner:
    """Starts a trainer, takes steps on the same rows, and reads back losses and weights."""

    def __init__(self, run: Any, session: Any, folder: Path) -> None:
        self.run, self.session, self.folder = run, session, folder

    def train(
        self,
        model: Path,
        name: str,
        steps: int = STEPS,
        state: Path | None = None,
        save: Path | None = None,
        **trainer: Any,
    ) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        folder = self.folder / name
        store = SharedMemoryStore(folder / "store")
        algorithm = {
            "updates": trainer.pop("updates", 1),
            "reduction": trainer.pop("reduction", "token"),
            "entropy_coef": 0.01,
        }
        # eps: with a smaller one Adam turns the rounding of a gradient that should be zero into a whole step
        config = make_config(
            model,
            trainer={"learning_rate": 1e-3, "weight_decay": 0.1, "eps": 1e-6, **trainer},
            algorithm=algorithm,
            rollout={"temperature": 0.8},
        )
        handle = Trainer(config, self.session, folder, store.folder)
        rows = make_rows(store)
        share = -(-len(rows) // algorithm["updates"])
        updates = [
            plan_json(
                plan(
                    weigh(rows[first : first + share], algorithm["reduction"]),
                    config.trainer.ranks,
                    config.trainer.tokens_per_micro_batch,
                )
            )
            for first in range(0, len(rows), share)
        ]

        async def all_steps() -> list[dict[str, float]]:
            try:
                await handle.start(model, state)
                metrics = []
                for _ in range(steps):
                    metrics.append((await handle.train(updates, 10))["metrics"])
                    await handle.logprobs([{"prompt_ids": [1, 2], "response_ids": [3]}])  # as the probe does each step
                await handle.export(folder / "out", "float32")
                if save:
                    save.mkdir()
                    await handle.save(save)
                    await handle.saved()
                return metrics
            finally:
                await handle.stop()

        return self.run(all_steps()), load_file(folder / "out" / "model.safetensors")


@pytest.fixture(scope="module")
def runner(run: Any, session: Any, tmp_path_factory: Any) -> Runner:
    return Runner(run, session, tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module", params=["tied", "moe"])
def baseline(request: Any, runner: Runner, models: Any) -> tuple[str, list[dict[str, float]], dict[str, torch.Tensor]]:
    metrics, weights = runner.train(models(request.param), f"one-{request.param}")
    return request.param, metrics, weights


def assert_same(mine: Any, other: Any, bound: float = 1e-5) -> None:
    for ours, theirs in zip(mine[0], other[0], strict=True):
        for name in ("train/loss", "train/entropy", "train/kl", "train/grad_norm", "train/logprob_abs_diff_max"):
            assert ours[name] == pytest.approx(theirs[name], abs=bound, rel=bound), name
    for name, tensor in mine[1].items():
        assert (tensor - other[1][name]).abs().max() <= bound, name


def test_training_changes_every_weight(models: Any, baseline: Any) -> None:
    kind, _, weights = baseline
    before = load_file(models(kind) / "model.safetensors")
    assert weights.keys() == before.keys()
    assert all((weights[name] != before[name]).any() for name in before)


def test_two_ranks_give_the_losses_and_weights_of_one(runner: Runner, models: Any, baseline: Any) -> None:
    kind, *one = baseline
    assert_same(one, runner.train(models(kind), f"two-{kind}", ranks=2))


def test_small_micro_batches_give_the_losses_and_weights_of_large_ones(
    runner: Runner, models: Any, baseline: Any
) -> None:
    kind, *one = baseline
    assert_same(one, runner.train(models(kind), f"small-{kind}", tokens_per_micro_batch=16, logprob_chunk=5))


def test_activation_checkpointing_changes_nothing(runner: Runner, models: Any, baseline: Any) -> None:
    kind, *one = baseline
    assert_same(one, runner.train(models(kind), f"recompute-{kind}", activation_checkpointing="selective"), 1e-6)


def test_a_resumed_trainer_goes_on_as_if_never_stopped(runner: Runner, models: Any, tmp_path: Path) -> None:
    options = {"schedule": "cosine", "warmup_steps": 1}
    whole = runner.train(models("untied"), "whole", steps=4, **options)
    first = runner.train(models("untied"), "first", steps=2, save=tmp_path / "saved", **options)
    second = runner.train(models("untied"), "second", steps=2, state=tmp_path / "saved", **options)
    assert_same(whole, ([*first[0], *second[0]], second[1]), 1e-7)


def test_several_updates_a_batch_keep_the_log_probabilities_from_before(runner: Runner, models: Any) -> None:
    metrics, _ = runner.train(models("untied"), "updates", steps=1, updates=3)
    assert metrics[0]["train/clip_fraction"] > 0


def test_a_model_folder_without_some_weights_is_refused_by_their_names(
    run: Any, session: Any, models: Any, tmp_path: Path
) -> None:
    broken = shutil.copytree(models("untied"), tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    trainer = Trainer(make_config(broken), session, tmp_path, tmp_path / "store")

    async def start() -> None:
        try:
            await trainer.start(broken)
        finally:
            await trainer.stop()

    with pytest.raises(TrainerError, match="lacks weights, which would be random: lm_head.weight"):
        run(start())


def test_a_refused_command_says_why_and_the_trainer_lives_on(
    runner: Runner, run: Any, session: Any, models: Any, tmp_path: Path
) -> None:
    store = SharedMemoryStore(tmp_path / "store")
    rows = weigh(make_rows(store), "token")
    trainer = Trainer(make_config(models("untied")), session, tmp_path, store.folder)

    async def steps() -> dict[str, float]:
        await trainer.start(models("untied"))
        try:
            store.drop(["g2"])
            with pytest.raises(TrainerError, match="payload g2, row 0, cannot be read"):
                await trainer.train([plan_json(plan(rows, 1, 4096))], 10)
            make_rows(store)
            return (await trainer.train([plan_json(plan(rows, 1, 4096))], 10))["metrics"]
        finally:
            await trainer.stop()

    assert run(steps())["train/tokens"] > 0


def test_a_trainer_that_hangs_is_given_up_by_the_setting_and_its_log(
    run: Any, session: Any, models: Any, tmp_path: Path
) -> None:
    store = SharedMemoryStore(tmp_path / "store")
    updates = [plan_json(plan(weigh(make_rows(store), "token"), 1, 4096))]
    trainer = Trainer(make_config(models("untied")), session, tmp_path, store.folder)

    async def steps() -> None:
        await trainer.start(models("untied"))
        supervisor = psutil.Process(trainer.processes[0]._popen.pid)
        try:
            await trainer.train(updates, 10)
            ranks = supervisor.children()
            for rank in ranks:
                rank.suspend()
            trainer.config = make_config(models("untied"), trainer={"step_timeout_s": 2})
            log = re.escape(str(tmp_path / "logs" / "trainer-0.log"))
            with pytest.raises(
                TrainerError, match=rf"did not finish train in 2 s \(trainer.step_timeout_s\); see {log}"
            ):
                await trainer.train(updates, 10)
        finally:
            await trainer.stop()
        assert ranks and not any(rank.is_running() for rank in ranks)

    run(steps())


def test_a_rank_killed_while_a_checkpoint_is_written_leaves_the_one_before(
    run: Any, session: Any, models: Any, tmp_path: Path
) -> None:
    """A pipe in the place of a file keeps the writing from its end for as long as nobody reads it."""
    config = make_config(models("untied"), trainer={"threads": 1, "device": "cpu", "ranks": 2})
    store = SharedMemoryStore(tmp_path / "store")
    updates = [plan_json(plan(weigh(make_rows(store), "token"), 2, 4096))]
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    trainer = Trainer(config, session, tmp_path, store.folder)

    async def steps() -> None:
        try:
            await trainer.start(models("untied"))
            await trainer.train(updates, 10)
            await trainer.save(checkpoints.draft(1, {}, ""))
            await trainer.saved()
            checkpoints.commit(1)
            draft = checkpoints.draft(2, {}, "")
            os.mkfifo(draft / "trainer.json")
            await trainer.save(draft)
            saved = asyncio.create_task(trainer.saved())
            assert (await trainer.train(updates, 10))["metrics"]["train/tokens"] > 0
            assert not saved.done()
            trainer.processes[1]._popen.kill()  # the kernel kills the rank with its supervisor
            with pytest.raises(ProcessError, match="trainer rank 1 ended with exit code"):
                await saved
        finally:
            await trainer.stop()

    run(steps())
    assert checkpoints.latest() == checkpoints.path(1)
    assert len(Saved(checkpoints.latest() / "state").names) > 0
