"""A run of ``vime sft`` or ``vime reward-model``: its parts and its state."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from vime.config.shape import hidden_size
from vime.config.supervised import Supervised
from vime.data.cursor import PromptCursor
from vime.observe.live import LiveView
from vime.run import Run
from vime.supervised.data import Data
from vime.training.plan import PlanJson, Row, plan, plan_json, weigh

OF_SERVERS = ("kl", "logprob_abs_diff_mean", "logprob_abs_diff_max", "mismatch_kl", "effective_sample_size")


class SupervisedJob(Run):
    """Reads ``data`` in batches of rows for the trainer and measures its evaluation sets."""

    def __init__(self, config: Supervised, data: Data, view: LiveView) -> None:
        super().__init__(config, config.engine("bradley_terry" if data.pairs else "sft"), view, time.monotonic())
        self.config, self.data, self.tokenizer = config, data, data.tokenizer
        self.kind = "reward-model" if data.pairs else "sft"
        self.padding = data.padding() if data.pairs else None
        self.cursor = PromptCursor(data.train, config.run.seed)
        self.held_out: dict[str, list[Row]] = {}

    @property
    def steps(self) -> int:
        return self.data.steps

    def take(self) -> list[Row]:
        """The rows of the next batch, which now lie in the store; the last batch of all epochs may be smaller."""
        size = min(self.config.batch.size, self.data.drawn - self.cursor.drawn)
        taken = [self.cursor.take() for _ in range(size)]
        return [row for number, example in taken for row in example.put(self.store, f"g{number}")]

    def planned(self, rows: Sequence[Row]) -> PlanJson:
        """One optimizer step of the rows: weighted over all of them, then split into micro-batches."""
        trainer, pairs = self.config.trainer, self.data.pairs
        weighed = weigh(rows, "sequence" if pairs else self.config.batch.reduction)
        budget = trainer.tokens_per_micro_batch * trainer.context_parallel
        return plan_json(plan(weighed, trainer.data_ranks, budget, pairs, hidden_size(self.config.model.path)))

    def trained(self, rows: Sequence[Row], metrics: dict[str, float]) -> None:
        """The rows were learned from; of the trainer's metrics those are kept that do not compare it with servers."""
        keys = list(dict.fromkeys(row.key for row in rows))
        for key in keys:
            self.cursor.finish(int(key[1:]))
        self.store.drop(keys)
        self.metrics |= {
            name: value for name, value in metrics.items() if name.removeprefix("train/") not in OF_SERVERS
        }
        self.metrics["train/epoch"] = self.cursor.drawn / len(self.data.train)

    def put_held_out(self) -> None:
        """Writes the evaluation sets to the store, where they stay."""
        for place, (name, examples) in enumerate(self.data.held_out.items()):
            put = [one.put(self.store, f"e{place}-{number}") for number, one in enumerate(examples)]
            self.held_out[name] = [row for rows in put for row in rows]

    @property
    def default_metric(self) -> str:
        return f"eval/{next(iter(self.config.eval.sets), '')}/loss"

    async def evaluate(self, names: Sequence[str]) -> bool:
        """Measures these evaluation sets; True where the best metric improved."""
        if not names:
            return False
        metrics: dict[str, float] = {}
        with self.clock("eval"):
            for name in names:
                found = await self.trainer.evaluate(self.planned(self.held_out[name]))
                found["prompts"] = len(self.data.held_out[name])
                metrics |= {f"eval/{name}/{metric}": value for metric, value in found.items()}
        return self.note_evaluation(self.step, metrics)

    def complete(self, model: Path) -> None:
        super().complete(model)
        if self.data.pairs:  # transformers reads the score at the last token that is no padding
            config = json.loads((model / "config.json").read_text()) | {"pad_token_id": self.padding}
            (model / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def summary(self) -> dict[str, Any]:
        name = next(iter(self.held_out), "")
        seconds_train = self.total("time/train")

        def measured(place: int, metric: str) -> float | None:
            return self.evals[place][1].get(f"eval/{name}/{metric}") if self.evals else None

        return {
            "task": self.config.data.source,
            "model": self.config.model.path,
            "dtype": self.config.model.dtype,
            "steps": self.step,
            "examples": len(self.data.train),
            "dropped": self.data.dropped,
            "epochs": self.cursor.drawn / len(self.data.train),
            "eval_loss_before": measured(0, "loss"),
            "eval_loss_after": measured(-1, "loss"),
            **({"eval_accuracy_after": measured(-1, "accuracy")} if self.data.pairs else {}),
            "loss_first": self.history[0]["train/loss"] if self.history else None,
            "loss_last": self.history[-1]["train/loss"] if self.history else None,
            "train_tokens_per_s": self.total("train/packed_tokens") / seconds_train if seconds_train else None,
            "seconds_total": self.seconds_before + time.monotonic() - self.started,
        }


@contextlib.asynccontextmanager
async def open_supervised(config: Supervised, data: Data, view: LiveView, resume: bool) -> AsyncIterator[SupervisedJob]:
    """Makes all parts, starts the trainer, and closes everything whatever happens."""
    job = SupervisedJob(config, data, view)
    checkpoint = job.prepare_folder(resume)
    if checkpoint:
        job.restore(checkpoint)
    async with job.opened(bool(checkpoint)):
        for line in data.notes():
            view.message(line)
        view.phase("starting", "the trainer")
        await job.trainer.start(Path(config.model.path), checkpoint)
        if not data.pairs:
            view.message(await job.trainer.memory())
        job.put_held_out()
        async with job.running():
            yield job
