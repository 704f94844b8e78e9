"""The engine of a reward model: a critic that learns which of two replies to a prompt is the better one."""

from __future__ import annotations

import copy
import json
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

from vime.config.sections import Config
from vime.store.shared_memory import SharedMemoryStore
from vime.training.batch import Batch, Sums, make_batch
from vime.training.engine import DTYPES
from vime.training.kernels import choose
from vime.training.learner import Learner, full_state
from vime.training.mesh import Mesh
from vime.training.out_of_memory import explains_memory
from vime.training.parallel import parallelize
from vime.training.plan import PlanJson, Row, tokens
from vime.training.policy import Critic, ModelRefused, load_critic
from vime.training.shards import Saved, Saver


def bradley_terry(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(r_chosen - r_rejected) of each pair, [P]: the negative log-likelihood of the choice under the model of
    Bradley and Terry (1952). Learning to summarize from human feedback (arXiv 2009.01325), section 3.4."""
    return -F.logsigmoid(chosen - rejected)


class RewardEngine:
    """The reward model and its optimizer on one rank. As in ``TorchEngine``, every method is collective.

    The two rows of a group, chosen and rejected, meet in one micro-batch; their loss masks mark where the score is read.
    """

    def __init__(self, config: Config, store: SharedMemoryStore, device: torch.device) -> None:
        self.config, self.store, self.device = config, store, device
        self.mesh = Mesh(config.trainer, device.type)
        self.saver = Saver(self.mesh, config.trainer.step_timeout_s)
        self.phase = "the start"  # what is going on, should the memory not suffice

    @explains_memory
    def load(self, model: str, state: str | None) -> dict[str, Any]:
        """Loads the model, and, to resume, the optimizer saved in folder ``state``."""
        self.phase = "the loading of the model"
        torch.manual_seed(self.config.run.seed)
        section, dtype = self.config.trainer, DTYPES[self.config.model.dtype]
        kernels = choose(self.config, self.device)
        critic = load_critic(Path(model), DTYPES[section.master_dtype], kernels)
        shape: Any = critic.model.config
        if type(shape) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise ModelRefused(
                f"{model}: transformers has no sequence-classification model of type {shape.model_type!r}, "
                "which a reward model is saved as; take a model of another type"
            )
        offload = section.cpu_offload == "all"
        critic = parallelize(
            critic, self.mesh, self.device, dtype, section.activation_checkpointing, offload, kernels.compile
        )
        self.model = Learner("reward_model", critic, section.learning_rate, section, self.mesh, self.config.run.seed)
        if state is not None:
            record = json.loads(Path(state, "trainer.json").read_text())
            self.model.load(Saved(Path(state, "state")), record["optimizer_steps"])
        return {"parameters": sum(p.numel() for p in critic.parameters()), "optimizer_steps": self.model.steps}

    @explains_memory
    def train(self, updates: list[PlanJson], total_steps: int) -> dict[str, Any]:
        """One optimizer step per entry of ``updates``, as in ``TorchEngine``; ``metrics`` are the last one's."""
        started = time.perf_counter()
        self.phase = "training"
        for planned in updates:
            self.model.clear()
            sums = Sums()
            for micro in planned[self.mesh.data_rank]:
                (self.loss(self.batch(micro), sums) * self.mesh.averaged).backward()
            found = self.averages(sums)
            found["grad_norm"] = self.model.step(total_steps).item()
        packed = sum(tokens([Row(**row) for row in micro]) for planned in updates for micro in chain(*planned))
        found |= {
            "lr": self.model.optimizer.param_groups[0]["lr"],
            "packed_tokens": packed,
            "tokens_per_s": packed / (time.perf_counter() - started),
        }
        return {"metrics": {f"train/{name}": value for name, value in found.items()}, "advantages": []}

    @explains_memory
    @torch.no_grad()
    def evaluate(self, planned: PlanJson) -> dict[str, float]:
        """The ``loss`` of an update with these micro-batches, which is not made, with ``accuracy`` and ``margin``."""
        self.phase = "an evaluation"
        sums = Sums()
        for micro in planned[self.mesh.data_rank]:
            self.loss(self.batch(micro), sums)
        found = self.averages(sums)
        return {name: found[name] for name in ("loss", "accuracy", "margin")}

    def batch(self, micro: list[dict[str, Any]]) -> Batch:
        return make_batch([Row(**row) for row in micro], self.store, self.device, self.mesh)

    def loss(self, batch: Batch, sums: Sums) -> torch.Tensor:
        """The micro-batch's share of the update's mean loss over pairs."""
        chosen, rejected = self.model.module(batch.packed)[batch.mask].view(-1, 2).unbind(-1)
        losses, margin = bradley_terry(chosen, rejected), chosen - rejected
        weighted = losses * batch.weights[batch.mask].view(-1, 2).sum(-1)
        every = torch.ones_like(margin, dtype=torch.bool)
        right = (margin > 0) + 0.5 * (margin == 0)  # of equals half, as if drawn
        sums.add(every, loss=weighted, accuracy=right, margin=margin, pairs=every)
        return weighted.sum()

    def averages(self, sums: Sums) -> dict[str, float]:
        """Over the pairs of all ranks; the loss is averaged by its weights."""
        totals = sums.reduce(self.mesh.data_group)
        count = max(totals["pairs"], 1.0)
        return {
            "loss": totals["loss"],
            "accuracy": totals["accuracy"] / count,
            "margin": totals["margin"] / count,
            "pairs": totals["pairs"],
        }

    def export(self, folder: str, dtype: str) -> dict[str, Any]:
        """Writes a Hugging Face folder that ``AutoModelForSequenceClassification`` loads, with one label; rank 0 writes."""
        state = full_state(self.model.module, DTYPES[dtype], self.mesh.rank == 0)
        if self.mesh.rank == 0:
            save_reward_model(self.model.module, state, folder, DTYPES[dtype])
        dist.barrier()
        return {"bytes": sum(tensor.numel() * tensor.element_size() for tensor in state.values())}

    def save(self, folder: str, model: bool) -> dict[str, Any]:
        """As ``TorchEngine.save``: ``state/``, ``trainer.json`` and, with ``model``, ``model/`` as ``export`` writes it."""
        critic, first = self.model.module, self.mesh.rank == 0
        write_shards = self.saver.stage(self.model.state(), Path(folder, "state"))
        whole = full_state(critic, torch.float32, first) if model else {}
        record = {"optimizer_steps": self.model.steps}

        def write() -> None:
            write_shards()
            if first:
                Path(folder, "trainer.json").write_text(json.dumps(record))
            if whole:
                save_reward_model(critic, whole, str(Path(folder, "model")), torch.float32)

        self.saver.start(write)
        return {}

    def saved(self) -> dict[str, Any]:
        """Waits until all ranks have written what was saved last. Not collective."""
        self.saver.wait()
        return {}


def save_reward_model(critic: Critic, state: dict[str, torch.Tensor], folder: str, dtype: torch.dtype) -> None:
    """Writes ``state``, the critic's whole parameters by plain name, under transformers' own names for them."""
    config: Any = copy.deepcopy(critic.model.config)
    config.num_labels, config.dtype = 1, dtype
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    names = {"head.weight": "score.weight"}
    renamed = {names.get(name, f"{model.base_model_prefix}.{name}"): tensor for name, tensor in state.items()}
    model.save_pretrained(folder, state_dict=renamed)
