"""The torch engine: one rank of the trainer. Commands come in through ``worker``; the mathematics is in ``losses``,
``corrections``, ``advantages`` and ``credit``."""

from __future__ import annotations

import base64
import json
import os
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from vime.config.sections import Config, Trainer
from vime.functions import user_function
from vime.store.shared_memory import SharedMemoryStore
from vime.training import covariance
from vime.training.advantages import ESTIMATORS, TOKEN_LEVEL
from vime.training.batch import Batch, Sums, make_batch
from vime.training.corrections import CORRECTIONS, mismatch
from vime.training.credit import assign
from vime.training.learner import EngineError, Learner, export_model, full_state, sharded_parameters
from vime.training.losses import OBJECTIVES, adapt_entropy, k3, kl_loss
from vime.training.packed import Packed, pack
from vime.training.plain import compare
from vime.training.plan import PlanJson, Row
from vime.training.policy import Critic, Policy, Trained, frozen, load_model, shard
from vime.training.returns import value_loss

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COVARIANCE = ("clip_cov", "kl_cov")


class TorchEngine:
    """Models, optimizers and schedules of one rank. Every method is collective: all ranks call it with the same command."""

    def __init__(self, config: Config, store: SharedMemoryStore, rank: int, ranks: int, device: torch.device) -> None:
        self.config, self.store, self.rank, self.ranks, self.device = config, store, rank, ranks, device
        algorithm = config.algorithm
        self.objective = OBJECTIVES.get(algorithm.objective) or user_function(algorithm.objective, 2)
        self.estimator = None
        if algorithm.advantage not in TOKEN_LEVEL:
            self.estimator = ESTIMATORS.get(algorithm.advantage) or user_function(algorithm.advantage, 1)
        urls = {"reference": config.reference.url, "teacher": config.teacher.url}
        self.scored = [name for name, url in urls.items() if url]  # by servers
        self.batches = 0  # that the policy has learned from
        # The weight of the entropy bonus, and whether it acts: an adaptive one waits for a measurement.
        self.entropy_coef, self.entropy_active = algorithm.entropy_coef, algorithm.entropy_target is None

    def load(self, model: str, state: str | None) -> dict[str, Any]:
        """Loads the models that the algorithm needs and, to resume, the trainer state saved in folder ``state``."""
        torch.manual_seed(self.config.run.seed)
        config, section, dtype = self.config, self.config.trainer, DTYPES[self.config.model.dtype]
        own = config.model.path

        def sharded(module: Trained) -> Trained:
            return shard(module, self.ranks, self.device, dtype, section.activation_checkpointing)

        def asked(folder: str | Path) -> Policy:
            other = frozen(Path(folder), self.ranks, self.device, dtype)
            sizes = [p.model.get_input_embeddings().num_embeddings for p in (other, self.policy.module)]
            if sizes[0] != sizes[1]:
                raise EngineError(
                    f"{folder} has a vocabulary of {sizes[0]} tokens and the policy one of {sizes[1]}: log-probabilities "
                    "of the same tokens cannot be compared; take a model of the same family"
                )
            return other

        self.policy = Learner("policy", sharded(Policy(load_model(Path(model)))), section.learning_rate, section)
        self.reference = self.teacher = None
        self.critic: Learner[Critic] | None = None
        if config.needs_reference and not config.reference.url:
            refreshed = Path(state or "", "reference")
            self.reference = asked(refreshed if state and refreshed.exists() else config.reference.path or own)
        if config.teacher.path:
            self.teacher = asked(config.teacher.path)
        if config.algorithm.advantage == "gae":
            critic = sharded(Critic(load_model(Path(config.critic.path or own))))
            self.critic = Learner("critic", critic, config.critic.learning_rate, section)
        if state is not None:
            self._load_state(Path(state))
        parameters = sum(p.numel() for p in self.policy.module.parameters())
        return {"parameters": parameters, "optimizer_steps": self.policy.steps}

    @property
    def compares(self) -> bool:
        """Whether the objective compares the samples of a group, which then stay in one micro-batch."""
        return self.config.algorithm.objective == "dpo"

    def compare(self, updates: list[PlanJson], folder: str) -> dict[str, float]:
        """How the first update's log-probabilities, loss and gradients differ from plain transformers'; see ``plain``."""
        return compare(self, updates[:1], folder)

    def forward(self, policy: Policy, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        return policy(packed, self.config.rollout.temperature, self.config.trainer.logprob_chunk)

    def train(self, updates: list[PlanJson], total_steps: int) -> dict[str, Any]:
        """One optimizer step per entry of ``updates``: ``updates[u][rank]`` are that rank's micro-batches of rows.

        Returns ``metrics`` over all trained tokens of all ranks, and ``advantages`` as [group, index, value], the value a
        mean over the sample's trained tokens. Proximal log-probabilities are those before the first of several steps;
        with one step they are the step's own.
        """
        started = time.perf_counter()
        before = self.policy.steps
        batches, advantages = self.prepare(updates)
        totals: dict[str, float] = defaultdict(float)
        maxima = {"difference_max": 0.0, "policy_norm": 0.0}
        for update, planned in zip(batches, updates, strict=True):
            trained = sum(row["trained_tokens"] for rank in planned for micro in rank for row in micro)
            measured = self._update(update, trained, total_steps)
            for name, value in measured.items():
                if name in maxima:
                    maxima[name] = max(maxima[name], value)
                else:
                    totals[name] += value
        packed_tokens = torch.tensor(float(sum(batch.tokens for batch in chain(*batches))), device=self.device)
        dist.all_reduce(packed_tokens)
        if self.policy.steps > before:  # no critic's warm-up
            self._refresh_reference()
        seconds = time.perf_counter() - started
        metrics = self._metrics(totals | maxima, len(updates), packed_tokens.item(), seconds)
        return {"metrics": metrics, "advantages": advantages}

    def prepare(self, updates: list[PlanJson]) -> tuple[list[list[Batch]], list[list[Any]]]:
        """This rank's micro-batches of each update with all that the loss needs, and all rows' advantages."""
        batches = [
            [
                make_batch([Row(**row) for row in micro], self.store, self.device, self.scored)
                for micro in update[self.rank]
            ]
            for update in updates
        ]
        together = list(chain(*batches))
        self._ask_models(together, several=len(updates) > 1)
        rows = [Row(**row) for update in updates for rank in update for micro in rank for row in micro]
        rows.sort(key=lambda row: (row.key, row.index))
        advantages = assign(rows, together, self.config.algorithm, self.estimator)
        self._choose(batches)
        return batches, [[row.key, row.index, value] for row, value in zip(rows, advantages, strict=True)]

    @torch.no_grad()
    def _ask_models(self, batches: list[Batch], several: bool) -> None:
        """Fills in what the algorithm needs to know of the batch before the step."""
        algorithm = self.config.algorithm
        before = (
            several
            or algorithm.objective in COVARIANCE
            or algorithm.advantage == "reverse_kl"
            or (algorithm.kl_in == "reward" and algorithm.kl_coef)
        )
        for batch in batches:
            if before:
                batch.proximal = self.forward(self.policy.module, batch.packed)[0]
            if self.reference is not None:
                batch.reference = self.forward(self.reference, batch.packed)[0]
            if self.teacher is not None:
                batch.teacher = self.forward(self.teacher, batch.packed)[0]
            if self.critic is not None:
                batch.values = self.critic.module(batch.packed)

    def _choose(self, updates: list[list[Batch]]) -> None:
        """The tokens that a covariance objective chooses, over each whole update."""
        algorithm, run = self.config.algorithm, self.config.run
        if algorithm.objective not in COVARIANCE:
            return
        for number, batches in enumerate(updates):
            step = self.policy.steps + number
            draws = [
                covariance.uniform(run.seed, step, row.key, row.index, row.response_tokens).to(self.device)
                for batch in batches
                for row in batch.rows
            ]
            masks = torch.cat([batch.mask for batch in batches])
            draw = torch.cat([*draws, *(torch.zeros(2, device=self.device) for b in batches if not b.rows)])
            before = torch.cat([batch.proximal for batch in batches if batch.proximal is not None])
            values = covariance.covariances(before[masks], torch.cat([b.advantages for b in batches])[masks])
            chosen = torch.zeros_like(masks)
            chosen[masks] = covariance.choose(algorithm.objective, values, draw[masks], algorithm)
            for batch, own in zip(batches, chosen.split([len(b.mask) for b in batches]), strict=True):
                batch.chosen = own

    def _update(self, batches: list[Batch], trained: int, total_steps: int) -> dict[str, float]:
        """One optimizer step of the policy, and of the critic where there is one; sums over its trained tokens."""
        algorithm, critic = self.config.algorithm, self.critic
        warming = critic is not None and critic.steps < self.config.critic.warmup_steps
        sums = Sums()
        for learner in (self.policy, critic):  # of an update that failed
            if learner is not None:
                learner.clear()
        for batch in batches:
            with torch.set_grad_enabled(not warming):
                loss = self.loss(batch, self.forward(self.policy.module, batch.packed), sums)
            if not warming:
                (loss * self.ranks).backward()  # FSDP averages gradients over ranks; the weights are global already
            if critic is not None:
                self._critic_loss(critic, batch, trained, sums)
        totals = sums.reduce()
        count = max(totals["tokens"], 1.0)
        if algorithm.max_mismatch_kl is not None and not totals["mismatch_kl"] / count <= algorithm.max_mismatch_kl:
            raise EngineError(
                f"server and trainer differ by a KL of {totals['mismatch_kl'] / count:.4g} "
                f"(algorithm.max_mismatch_kl = {algorithm.max_mismatch_kl:g}) at optimizer step {self.policy.steps}; "
                "weights are unchanged. Run `vime check` to see where the difference comes from"
            )
        totals["policy_norm"] = 0.0 if warming else self.policy.step(total_steps).item()
        if critic is not None:
            totals["critic_norm"] = critic.step(total_steps).item()
        if algorithm.entropy_target is not None:
            self.entropy_coef, self.entropy_active = adapt_entropy(
                self.entropy_coef, totals["entropy"] / count, algorithm
            )
        return totals

    def loss(self, batch: Batch, output: tuple[torch.Tensor, torch.Tensor], sums: Sums) -> torch.Tensor:
        """The micro-batch's share of the update's loss, from the policy's log-probabilities and entropies of its tokens."""
        algorithm = self.config.algorithm
        logprobs, entropy = output
        tokens = batch.seen(logprobs, entropy, algorithm.old_logprobs)
        losses, logs = self.objective(tokens, algorithm)
        with torch.no_grad():
            factor = torch.ones_like(logprobs)
            for name, bounds in algorithm.corrections.items():
                correction, low, high = CORRECTIONS[name]
                low, high = (default if b is None else b for default, b in ((low, bounds.low), (high, bounds.high)))
                weight = correction(tokens, low, high)
                factor = factor * weight
                logs |= {f"{name}_changed": weight != 1.0, f"{name}_mean": weight}
            now = mismatch(tokens.proximal, tokens.behaviour)
        losses = torch.where(factor == 0, 0.0, losses * factor)
        if tokens.reference is not None:
            kl = kl_loss(tokens, algorithm)
            if algorithm.kl_in == "loss" and algorithm.kl_coef:
                losses = losses + algorithm.kl_coef * kl
            logs |= {"reference_kl": kl}
        if tokens.teacher is not None:
            logs |= {"teacher_kl": tokens.proximal - tokens.teacher}
        if self.entropy_active and self.entropy_coef:
            losses = losses - self.entropy_coef * entropy
        weighted = torch.where(batch.mask, losses * batch.weights, 0.0)
        ones = torch.ones_like(logprobs)
        sums.add(batch.mask, tokens=ones, loss=weighted, entropy=entropy, kl=k3(tokens.behaviour, logprobs), **now)
        sums.add(batch.mask, **{f"log/{name}": value for name, value in logs.items()})
        sums.maximum(batch.mask, difference_max=now["difference"])
        return weighted.sum()

    def _critic_loss(self, critic: Learner[Critic], batch: Batch, trained: int, sums: Sums) -> None:
        assert batch.values is not None and batch.returns is not None
        values = critic.module(batch.packed)
        losses, clipped = value_loss(values, batch.values, batch.returns, self.config.critic.value_clip)
        (torch.where(batch.mask, losses, 0.0).sum() / max(trained, 1) * self.ranks).backward()
        residual = (batch.returns - batch.values).square()
        sums.add(
            batch.mask,
            value_loss=losses,
            value_clipped=clipped,
            returns=batch.returns,
            returns_squared=batch.returns**2,
        )
        sums.add(batch.mask, value_residual=residual)

    def _metrics(self, total: dict[str, float], updates: int, packed_tokens: float, seconds: float) -> dict[str, float]:
        count = max(total["tokens"], 1.0)
        metrics = {
            "train/loss": total["loss"] / updates,
            "train/entropy": total["entropy"] / count,
            "train/kl": total["kl"] / count,
            "train/grad_norm": total["policy_norm"],
            "train/lr": self.policy.optimizer.param_groups[0]["lr"],
            "train/logprob_abs_diff_mean": total["difference"] / count,
            "train/logprob_abs_diff_max": total["difference_max"],
            "train/mismatch_kl": total["mismatch_kl"] / count,
            # (sum w)^2 / (N sum w^2): the fraction of the tokens that the importance ratios leave effective
            "train/effective_sample_size": total["ratio"] ** 2 / max(count * total["ratio_squared"], 1e-300),
            "train/packed_tokens": packed_tokens,
            "train/tokens": total["tokens"],
            "train/tokens_per_s": packed_tokens / seconds,
        }
        metrics |= {f"train/{name[4:]}": value / count for name, value in total.items() if name.startswith("log/")}
        if self.config.algorithm.entropy_target is not None:
            metrics["train/entropy_coef"] = self.entropy_coef
        if self.critic is not None:
            variance = total["returns_squared"] / count - (total["returns"] / count) ** 2
            metrics |= {
                "train/value_loss": total["value_loss"] / count,
                "train/value_clip_fraction": total["value_clipped"] / count,
                "train/value_grad_norm": total["critic_norm"] / updates,
                "train/explained_variance": 1 - total["value_residual"] / count / variance if variance > 1e-9 else 0.0,
            }
        return metrics

    @torch.no_grad()
    def _refresh_reference(self) -> None:
        """The policy, which has just learned from a batch, becomes the reference, on its interval of batches."""
        self.batches += 1
        every = self.config.reference.refresh_every
        if self.reference is not None and every and self.batches % every == 0:
            both = (sharded_parameters(module) for module in (self.reference, self.policy.module))
            for (_, held), (_, present) in zip(*both, strict=True):
                held.copy_(present)

    def logprobs(self, rows: list[dict[str, list[int]]]) -> list[list[float]]:
        """Log-probabilities of given responses under the current weights, for the probe; every rank computes all."""
        with torch.no_grad():
            packed = pack([(row["prompt_ids"], [row["response_ids"]]) for row in rows], self.device)
            values = self.forward(self.policy.module, packed)[0].tolist()
        cut, start = [], 0
        for row in rows:
            cut.append(values[start : start + len(row["response_ids"])])
            start += len(row["response_ids"])
        return cut

    def export(self, folder: str, dtype: str) -> dict[str, Any]:
        """Writes the policy as a Hugging Face folder; rank 0 writes. Names and layout are transformers' own."""
        written = export_model(self.policy.module, folder, DTYPES[dtype], self.rank == 0)
        dist.barrier()
        return {"bytes": written}

    def save(self, folder: str) -> dict[str, Any]:
        """Writes ``model/`` (float32 Hugging Face folder), the optimizers' moments, ``trainer.json``, and the critic and the
        refreshed reference where there are any."""
        target, write = Path(folder), self.rank == 0
        self.export(str(target / "model"), "float32")
        self.policy.save_moments(target / "optimizer.safetensors", write)
        if self.critic is not None:
            critic = full_state(self.critic.module, torch.float32, write)
            if write:
                save_file(critic, target / "critic.safetensors")
            self.critic.save_moments(target / "critic_optimizer.safetensors", write)
        if self.reference is not None and self.config.reference.refresh_every:
            export_model(self.reference, str(target / "reference"), DTYPES[self.config.model.dtype], write)
        if write:
            record = {
                "optimizer_steps": self.policy.steps,
                "batches": self.batches,
                "critic_steps": self.critic.steps if self.critic is not None else 0,
                "entropy_coef": self.entropy_coef,
                "entropy_active": self.entropy_active,
                "torch_rng": base64.b64encode(bytes(torch.get_rng_state().tolist())).decode(),
            }
            (target / "trainer.json").write_text(json.dumps(record))
        dist.barrier()
        return {}

    def _load_state(self, folder: Path) -> None:
        record = json.loads((folder / "trainer.json").read_text())
        torch.set_rng_state(torch.tensor(list(base64.b64decode(record["torch_rng"])), dtype=torch.uint8))
        self.policy.load_moments(folder / "optimizer.safetensors", record["optimizer_steps"])
        self.batches = record["batches"]
        if self.config.algorithm.entropy_target is not None:
            self.entropy_coef, self.entropy_active = record["entropy_coef"], record["entropy_active"]
        if self.critic is not None:
            if not (folder / "critic.safetensors").exists():
                raise EngineError(f"{folder} holds no critic: the run had another algorithm.advantage")
            self.critic.load_parameters(folder / "critic.safetensors")
            self.critic.load_moments(folder / "critic_optimizer.safetensors", record["critic_steps"])


def threads_for(config: Trainer) -> int:
    return config.threads or max(1, (os.cpu_count() or 1) // config.ranks)
