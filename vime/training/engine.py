"""The torch engine: one rank of the trainer. Commands come in through ``worker``; the mathematics is in ``losses``,
``corrections``, ``advantages`` and ``credit``."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vime.config.sections import Config
from vime.functions import user_function
from vime.slime.trainer import trainer_hooks
from vime.store.shared_memory import SharedMemoryStore
from vime.training import adapter, covariance, memory
from vime.training.adapter import AdapterReference
from vime.training.advantages import ESTIMATORS, TOKEN_LEVEL
from vime.training.batch import Batch, Sums, make_batch
from vime.training.corrections import CORRECTIONS, mismatch
from vime.training.credit import assign
from vime.training.kernels import choose
from vime.training.learner import EngineError, Learner, export_model
from vime.training.lora import inject
from vime.training.losses import OBJECTIVES, Tokens, adapt_entropy, k3, kl_loss
from vime.training.mesh import Mesh, SumOut
from vime.training.out_of_memory import explains_memory
from vime.training.packed import Packed, pack
from vime.training.parallel import parallelize
from vime.training.pieces import sharded_parameters
from vime.training.plain import compare
from vime.training.plan import PlanJson, Row
from vime.training.policy import Critic, Policy, Trained, load_critic, load_model
from vime.training.returns import value_loss
from vime.training.routing import Routing, balances, install
from vime.training.shards import Saver
from vime.training.state import load as load_state
from vime.training.state import save as save_state
from vime.training.step_metrics import step_metrics

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COVARIANCE = ("clip_cov", "kl_cov")
# Log-probabilities and entropies [N] of a micro-batch's tokens, its part of the load-balancing loss where there is one.
Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class TorchEngine:
    """Models, optimizers and schedules of one rank. Every method is collective: all ranks call it with the same command."""

    def __init__(self, config: Config, store: SharedMemoryStore, device: torch.device) -> None:
        self.config, self.store, self.device = config, store, device
        self.mesh = Mesh(config.trainer, device.type)
        algorithm = config.algorithm
        self.objective = OBJECTIVES.get(algorithm.objective) or user_function(algorithm.objective, 2)
        self.estimator = None
        if algorithm.advantage not in TOKEN_LEVEL:
            self.estimator = ESTIMATORS.get(algorithm.advantage) or user_function(algorithm.advantage, 1)
        urls = {"reference": config.reference.url, "teacher": config.teacher.url}
        self.scored = [name for name, url in urls.items() if url]  # by servers
        self.saver = Saver(self.mesh, config.trainer.step_timeout_s)
        self.slime = trainer_hooks(config)
        self.batches = 0  # that the policy has learned from
        self.phase = "the start"  # what is going on, should the memory not suffice
        # The weight of the entropy bonus, and whether it acts: an adaptive one waits for a measurement.
        self.entropy_coef, self.entropy_active = algorithm.entropy_coef, algorithm.entropy_target is None

    @explains_memory
    def load(self, model: str, state: str | None) -> dict[str, Any]:
        """Loads the models that the algorithm needs and, to resume, the trainer state saved in folder ``state``, which may be
        of another number of ranks. With [lora] ``model`` is the one that the adapter stands beside."""
        self.phase = "the loading of models"
        torch.manual_seed(self.config.run.seed)
        config, section, dtype = self.config, self.config.trainer, DTYPES[self.config.model.dtype]
        master, offload = DTYPES[section.master_dtype], section.cpu_offload == "all"
        own, kernels = config.model.path, choose(config, self.device)

        def sharded(module: Trained) -> Trained:
            return parallelize(
                module, self.mesh, self.device, dtype, section.activation_checkpointing, offload, kernels.compile
            )

        def learner(name: str, module: Trained, learning_rate: float) -> Learner[Trained]:
            return Learner(name, sharded(module), learning_rate, section, self.mesh, config.run.seed)

        def asked(folder: str | Path) -> Policy:
            # Only asked, so kept in the dtype it computes in.
            other = Policy(load_model(Path(folder), dtype, kernels))
            other = parallelize(other, self.mesh, self.device, dtype, offload=offload, compiled=kernels.compile)
            other.requires_grad_(False)
            sizes = [p.model.get_input_embeddings().num_embeddings for p in (other, self.policy.module)]
            if sizes[0] != sizes[1]:
                raise EngineError(
                    f"{folder} has a vocabulary of {sizes[0]} tokens and the policy one of {sizes[1]}: log-probabilities "
                    "of the same tokens cannot be compared; take a model of the same family"
                )
            return other

        loaded = load_model(Path(model), dtype if config.lora.rank else master, kernels)
        routed = config.algorithm.router_aux_coef > 0 or config.algorithm.router_replay != "none"
        self.routers = install(loaded) if routed else None
        if config.lora.rank:
            inject(loaded, config.lora, model)
        self.policy = learner("policy", Policy(loaded), section.learning_rate)
        self.slime.loaded(self.policy.module)
        self.reference: Policy | AdapterReference | None = None
        self.teacher: Policy | AdapterReference | None = None
        self.critic: Learner[Critic] | None = None
        self.same_at: int | None = None  # the policy's optimizer step at which the reference has its weights
        if config.needs_reference and not config.reference.url:
            if config.lora.rank and config.reference.path in (None, own):
                self.reference = AdapterReference(self.policy.module)
            else:
                self.reference = asked(config.reference.path or own)
            self.same_at = 0 if state is None and config.reference.path in (None, own) else None
        if config.teacher.path:
            shared = config.teacher.path == (config.reference.path or own) and not config.reference.refresh_every
            self.teacher = self.reference if shared and self.reference is not None else asked(config.teacher.path)
        if config.algorithm.advantage == "gae":
            critic = load_critic(Path(config.critic.path or own), master, kernels)
            self.critic = learner("critic", critic, config.critic.learning_rate)
        if state is not None:
            load_state(self, Path(state))
        parameters = sum(p.numel() for p in self.policy.module.parameters())
        return {"parameters": parameters, "optimizer_steps": self.policy.steps}

    def memory(self) -> str | None:
        """The predicted peak of a rank as a table, from rank 0."""
        return None if self.mesh.rank else memory.table(self.config, self.device)

    @property
    def compares(self) -> bool:
        """Whether the objective compares the samples of a group, which then stay in one micro-batch."""
        return self.config.algorithm.objective == "dpo"

    def compare(self, updates: list[PlanJson], folder: str) -> dict[str, float]:
        """How the first update's log-probabilities, loss and gradients differ from plain transformers'; see ``plain``."""
        return compare(self, updates[:1], folder)

    def forward(
        self, policy: Policy | AdapterReference, packed: Packed, routing: Routing | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return policy(packed, self.config.rollout.temperature, self.config.trainer.logprob_chunk, routing)

    def routing(self, batch: Batch) -> Routing | None:
        """For one pass of the policy over the batch: the experts to choose, where they are replayed. Reference, teacher and
        critic are models of their own and route as they do."""
        if self.routers is None:
            return None
        return Routing(None if self.config.algorithm.router_replay == "none" else batch.experts)

    def policy_pass(self, batch: Batch) -> Output:
        """The policy as it learns: with the experts it shall choose, and the load-balancing loss of these."""
        routing = self.routing(batch)
        output = self.forward(self.policy.module, batch.packed, routing)
        if routing is None or batch.balance is None:
            return *output, None
        return *output, SumOut.apply(batch.balance.loss(routing), self.mesh.context_group)

    @explains_memory
    def train(self, updates: list[PlanJson], total_steps: int) -> dict[str, Any]:
        """One optimizer step per entry of ``updates``: ``updates[u][d]`` are data rank d's micro-batches of rows.

        Returns ``metrics`` over all trained tokens of all ranks, and ``advantages`` as [group, index, value], the value a
        mean over the sample's trained tokens. Proximal log-probabilities are those before the first of several steps;
        with one step they are the step's own.
        """
        started = time.perf_counter()
        memory.reset_peak(self.device)
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
        dist.all_reduce(packed_tokens, group=self.mesh.data_group)
        if self.policy.steps > before:  # no critic's warm-up
            self._refresh_reference()
        seconds = time.perf_counter() - started
        metrics = step_metrics(totals | maxima, len(updates), packed_tokens.item(), seconds)
        metrics["train/lr"] = float(self.policy.optimizer.param_groups[0]["lr"])
        if self.config.algorithm.entropy_target is not None:
            metrics["train/entropy_coef"] = self.entropy_coef
        peak = torch.tensor(memory.peak(self.device) / memory.GIB, device=self.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        metrics["train/memory_peak_gib"] = peak.item()
        return {"metrics": metrics, "advantages": advantages}

    @torch.no_grad()
    def evaluate(self, planned: PlanJson) -> dict[str, float]:
        """The ``loss`` of an update with these micro-batches, which is not made, and the number of its trained ``tokens``."""
        (batches,), _ = self.prepare([planned])
        sums = Sums()
        for batch in batches:
            self.loss(batch, self.policy_pass(batch), sums)
        totals = sums.reduce(self.mesh.data_group)
        return {"loss": totals["loss"], "tokens": totals["tokens"]}

    def prepare(self, updates: list[PlanJson]) -> tuple[list[list[Batch]], list[list[Any]]]:
        """This rank's micro-batches of each update with all that the loss needs, and all rows' advantages."""
        replayed = self.routers if self.config.algorithm.router_replay == "server" else None
        batches = [
            [
                make_batch([Row(**row) for row in micro], self.store, self.device, self.mesh, self.scored, replayed)
                for micro in update[self.mesh.data_rank]
            ]
            for update in updates
        ]
        together = list(chain(*batches))
        for plan, own in zip(updates, batches, strict=True):
            planned = [row for rank in plan for micro in rank for row in micro]
            for batch in own:
                batch.of_update = {"samples": len(planned), "tokens": sum(row["trained_tokens"] for row in planned)}
        self._ask_models(together, several=len(updates) > 1)
        rows = [Row(**row) for update in updates for rank in update for micro in rank for row in micro]
        rows.sort(key=lambda row: (row.key, row.index))
        advantages = assign(rows, together, self.config.algorithm, self.estimator, self.mesh.data_group)
        advantages = self.slime.prepared(self, rows, together, advantages)
        if self.config.algorithm.objective in COVARIANCE:
            for number, update in enumerate(batches):
                covariance.choose_in(update, self.config, self.policy.steps + number, self.mesh.data_group)
        if self.routers is not None:
            for update in batches:
                routed = [(batch.predicts(self.mesh), batch.experts) for batch in update if batch.experts is not None]
                for batch, balance in zip(update, balances(routed, self.routers.experts, self.mesh), strict=True):
                    batch.balance = balance
        return batches, [[row.key, row.index, value] for row, value in zip(rows, advantages, strict=True)]

    @torch.no_grad()
    def _ask_models(self, batches: list[Batch], several: bool) -> None:
        """Fills in what the algorithm needs to know of the batch before the step."""
        self.phase = "the forward passes before the step"
        algorithm = self.config.algorithm
        before = (
            several
            or algorithm.objective in COVARIANCE
            or algorithm.advantage == "reverse_kl"
            or (algorithm.kl_in == "reward" and algorithm.kl_coef)
            or self.slime.needs_logprobs
        )
        routes = self.routers is not None and algorithm.router_replay != "server"
        # A replay is the policy's alone: the reference chooses its own experts.
        same = self.same_at == self.policy.steps and algorithm.router_replay == "none"
        if before:
            self.slime.before_logprobs(self.policy.module.model, "")
        if isinstance(self.reference, Policy) and not same:
            self.slime.before_logprobs(self.reference.model, "ref_")
        for batch in batches:
            if before or routes:
                routing = self.routing(batch)
                logprobs = self.forward(self.policy.module, batch.packed, routing)[0]
                batch.proximal = logprobs if before else None
                if routing is not None and batch.experts is None:
                    batch.experts = routing.experts()
            if self.reference is not None and same:  # no second pass; without a first one the step's own will do
                batch.reference, batch.reference_is_policy = batch.proximal, not before
            elif self.reference is not None:
                batch.reference = self.forward(self.reference, batch.packed)[0]
            if self.teacher is not None and self.teacher is self.reference:
                batch.teacher = batch.reference
            elif self.teacher is not None:
                batch.teacher = self.forward(self.teacher, batch.packed)[0]
            if self.critic is not None:
                batch.values = self.critic.module(batch.packed)

    def _update(self, batches: list[Batch], trained: int, total_steps: int) -> dict[str, float]:
        """One optimizer step of the policy, and of the critic where there is one; sums over its trained tokens."""
        algorithm, critic = self.config.algorithm, self.critic
        warming = critic is not None and critic.steps < self.config.critic.warmup_steps
        sums = Sums()
        for learner in (self.policy, critic):  # of an update that failed
            if learner is not None:
                learner.clear()
        self.slime.before_step(self, self.policy.steps % algorithm.updates)
        self._accumulate(batches, trained, warming, sums)
        totals = sums.reduce(self.mesh.data_group)
        count = max(totals["tokens"], 1.0)
        if algorithm.max_mismatch_kl is not None and not totals["mismatch_kl"] / count <= algorithm.max_mismatch_kl:
            raise EngineError(
                f"server and trainer differ by a KL of {totals['mismatch_kl'] / count:.4g} "
                f"(algorithm.max_mismatch_kl = {algorithm.max_mismatch_kl:g}) at optimizer step {self.policy.steps}; "
                "weights are unchanged. Run `vime check` to see where the difference comes from"
            )
        if batches[0].balance is not None:
            totals |= batches[0].balance.metrics()
        self.phase = "the optimizer step"
        totals["policy_norm"] = 0.0 if warming else self.policy.step(total_steps).item()
        if critic is not None:
            totals["critic_norm"] = critic.step(total_steps).item()
        if algorithm.entropy_target is not None:
            self.entropy_coef, self.entropy_active = adapt_entropy(
                self.entropy_coef, totals["entropy"] / count, algorithm
            )
        return totals

    def _accumulate(self, batches: list[Batch], trained: int, warming: bool, sums: Sums) -> None:
        """Gradients and sums of all micro-batches. Nothing in here makes the host wait for the device."""
        for batch in batches:
            self.phase = "the forward pass"
            with torch.set_grad_enabled(not warming):
                if "loss" in self.slime:
                    loss = self.slime.loss(self, batch, sums)
                else:
                    loss = self.loss(batch, self.policy_pass(batch), sums)
            self.phase = "the backward pass"
            if not warming:
                (loss * self.mesh.averaged).backward()  # of the loss the weights are global already
            if self.critic is not None:
                self._critic_loss(self.critic, batch, trained, sums)

    def loss(self, batch: Batch, output: Output, sums: Sums) -> torch.Tensor:
        """The micro-batch's share of the update's loss, from what a pass of the policy over it gives."""
        algorithm = self.config.algorithm
        logprobs, entropy, balance = output
        tokens = batch.seen(logprobs, entropy, algorithm.old_logprobs)
        losses, logs = self.objective(tokens, algorithm)
        losses, logs = self.slime.corrected(batch, tokens, losses, logs)
        with torch.no_grad():
            factor = torch.ones_like(logprobs)
            for name, bounds in algorithm.corrections.items():
                correction, low, high = CORRECTIONS[name]
                low, high = (default if b is None else b for default, b in ((low, bounds.low), (high, bounds.high)))
                weight = correction(tokens, low, high)
                factor = factor * weight
                logs |= {f"{name}_changed": weight != 1.0, f"{name}_mean": weight}
        losses, apart = self.slime.reduced(batch, torch.where(factor == 0, 0.0, losses * factor))
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
        self.note(batch, tokens, sums)
        sums.add(batch.mask, loss=weighted)
        sums.add(batch.mask, **{f"log/{name}": value for name, value in logs.items()})
        loss = weighted.sum()
        if apart is not None:
            sums.add(torch.ones_like(apart, dtype=torch.bool), loss=apart)
            loss = loss + apart
        if balance is not None:
            sums.add(torch.ones_like(balance, dtype=torch.bool), router_aux_loss=balance)
            if algorithm.router_aux_coef:
                loss = loss + algorithm.router_aux_coef * balance
        return loss

    def note(self, batch: Batch, tokens: Tokens, sums: Sums) -> None:
        """Adds what is measured of the tokens whatever the loss."""
        ones, now = torch.ones_like(tokens.logprobs), mismatch(tokens.proximal, tokens.behaviour)
        kl = k3(tokens.behaviour, tokens.logprobs)
        sums.add(batch.mask, tokens=ones, entropy=tokens.entropy, kl=kl, **now)
        sums.maximum(batch.mask, difference_max=now["difference"])

    def _critic_loss(self, critic: Learner[Critic], batch: Batch, trained: int, sums: Sums) -> None:
        assert batch.values is not None and batch.returns is not None
        values = critic.module(batch.packed)
        losses, clipped = value_loss(values, batch.values, batch.returns, self.config.critic.value_clip)
        (torch.where(batch.mask, losses, 0.0).sum() / max(trained, 1) * self.mesh.averaged).backward()
        residual = (batch.returns - batch.values).square()
        sums.add(
            batch.mask,
            value_loss=losses,
            value_clipped=clipped,
            returns=batch.returns,
            returns_squared=batch.returns**2,
        )
        sums.add(batch.mask, value_residual=residual)

    @torch.no_grad()
    def _refresh_reference(self) -> None:
        """The policy, which has just learned from a batch, becomes the reference, on its interval of batches."""
        self.batches += 1
        every = self.config.reference.refresh_every
        if self.reference is None or not every or self.batches % every:
            return
        if isinstance(self.reference, AdapterReference):
            self.reference.refresh()
        else:
            both = (sharded_parameters(module) for module in (self.reference, self.policy.module))
            for (_, held), (_, present) in zip(*both, strict=True):
                held.copy_(present)
        self.same_at = self.policy.steps

    @explains_memory
    def logprobs(self, rows: list[dict[str, list[int]]]) -> list[list[float]]:
        """Log-probabilities of given responses under the current weights, for the probe; every rank computes all."""
        self.phase = "the log-probabilities of given responses"
        with torch.no_grad():
            packed = pack([(row["prompt_ids"], [row["response_ids"]]) for row in rows], self.device, self.mesh)
            values = self.forward(self.policy.module, packed)[0].tolist()
        cut, start = [], 0
        for row in rows:
            cut.append(values[start : start + len(row["response_ids"])])
            start += len(row["response_ids"])
        return cut

    def export(self, folder: str, dtype: str) -> dict[str, Any]:
        """Writes the policy as a Hugging Face folder; rank 0 writes. Names and layout are transformers' own."""
        written = export_model(self.policy.module, folder, DTYPES[dtype], self.mesh.rank == 0)
        dist.barrier()
        return {"bytes": written}

    def export_adapter(self, folder: str, dtype: str) -> dict[str, Any]:
        """Writes the policy's adapter as a peft folder; rank 0 writes."""
        written = adapter.export(self.policy.module, Path(folder), DTYPES[dtype], self.mesh.rank == 0)
        dist.barrier()
        return {"bytes": written}

    def save(self, folder: str, model: bool) -> dict[str, Any]:
        """Copies the state to host memory; a thread then writes ``state/`` and ``trainer.json`` below ``folder``, with
        ``model`` the Hugging Face folder ``model/``, and with [lora] the peft folder ``adapter/``, both in float32. What was
        saved before must be written first: it waits."""
        save_state(self, Path(folder), model)
        return {}

    def saved(self) -> dict[str, Any]:
        """Waits until all ranks have written what was saved last; EngineError where one could not. Not collective."""
        self.saver.wait()
        return {}
