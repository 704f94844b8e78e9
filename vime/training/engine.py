"""The torch engine: one rank of the trainer. Commands come in through ``worker``; the mathematics is in ``losses``."""

from __future__ import annotations

import base64
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from vime.config.sections import Algorithm, Config, Trainer
from vime.store.shared_memory import Payload, SharedMemoryStore
from vime.training import losses
from vime.training.packed import Packed, pack
from vime.training.plan import Row, tokens
from vime.training.policy import load_model, plain_name, shard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class EngineError(Exception):
    """The engine cannot go on; the message says with what."""


def learning_rate_factor(step: int, config: Trainer, total: int) -> float:
    """Fraction of the peak learning rate at optimizer step ``step`` (from 0) of ``total``."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
    floor = config.min_learning_rate / config.learning_rate
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def gather_groups(rows: Sequence[Row], store: SharedMemoryStore) -> tuple[list[Row], list[Payload], Any]:
    """Rows ordered by group, their payloads, and what ``pack`` takes: each prompt once with its responses."""
    rows = sorted(rows, key=lambda row: (row.key, row.index))
    payloads = [store.get(row.key, row.index) for row in rows]
    groups: list[tuple[list[int], list[list[int]]]] = []
    for index, (row, payload) in enumerate(zip(rows, payloads, strict=True)):
        if not index or rows[index - 1].key != row.key:
            groups.append((payload.prompt_ids.tolist(), []))
        groups[-1][1].append(payload.response_ids.tolist())
    return rows, payloads, groups


class Batch:
    """One micro-batch on the device: the packed row and, per response token, what the loss needs."""

    def __init__(self, rows: Sequence[Row], store: SharedMemoryStore, device: torch.device) -> None:
        self.tokens = tokens(rows)
        if not rows:  # other ranks have work: take part in the collectives, weigh nothing
            self.packed = pack([([0], [[0, 0]])], device)
            zeros = torch.zeros(2, device=device)
            self.behaviour, self.mask, self.advantages, self.weights = zeros, zeros.bool(), zeros, zeros
            return
        rows, payloads, groups = gather_groups(rows, store)
        self.packed = pack(groups, device)

        def per_token(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.cat([torch.as_tensor(v, dtype=dtype) for v in values]).to(device)

        def spread(values: list[float]) -> torch.Tensor:
            return per_token([[v] * r.response_tokens for v, r in zip(values, rows, strict=True)], torch.float32)

        self.behaviour = per_token([p.logprobs for p in payloads], torch.float32)
        self.mask = per_token([p.loss_mask for p in payloads], torch.bool)
        self.advantages = spread([row.advantage for row in rows])
        self.weights = spread([row.weight for row in rows]) * self.mask


class Sums:
    """Metrics over trained tokens: weighted sums and maxima, added up over micro-batches and ranks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}

    def add(self, mask: torch.Tensor, **values: torch.Tensor) -> None:
        for name, value in values.items():
            total = torch.where(mask, value.detach().double(), 0.0).sum()
            self.sums[name] = self.sums.get(name, torch.zeros((), device=self.device)) + total

    def maximum(self, mask: torch.Tensor, **values: torch.Tensor) -> None:
        for name, value in values.items():
            top = torch.where(mask, value.detach().double(), 0.0).max()
            self.maxima[name] = torch.maximum(self.maxima.get(name, top), top)

    def reduce(self) -> dict[str, float]:
        """Sums over ranks for every sum, maxima over ranks for every maximum; one collective each."""
        both: dict[str, float] = {}
        for kept, operation in ((self.sums, dist.ReduceOp.SUM), (self.maxima, dist.ReduceOp.MAX)):
            names = sorted(kept)
            stacked = torch.stack([kept[name].double() for name in names])
            dist.all_reduce(stacked, operation)
            both |= dict(zip(names, stacked.tolist(), strict=True))
        return both


class TorchEngine:
    """Model, optimizer and schedule of one rank. Every method is collective: all ranks call it with the same command."""

    def __init__(self, config: Config, store: SharedMemoryStore, rank: int, ranks: int, device: torch.device) -> None:
        self.config, self.store, self.rank, self.ranks, self.device = config, store, rank, ranks, device
        self.steps = 0  # optimizer steps taken

    def load(self, model: str, state: str | None) -> dict[str, Any]:
        """Loads the model folder and, to resume, the trainer state saved beside it."""
        torch.manual_seed(self.config.run.seed)
        section, dtype = self.config.trainer, DTYPES[self.config.model.dtype]
        model_ = load_model(Path(model))
        self.policy = shard(model_, self.ranks, self.device, dtype, section.activation_checkpointing)
        self.policy.train()
        matrices = [p for p in self.policy.parameters() if p.ndim > 1]
        vectors = [p for p in self.policy.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=section.learning_rate,
            betas=section.betas,
            eps=section.eps,
            fused=True,
        )
        if state is not None:
            self._load_state(Path(state))
        return {"parameters": sum(p.numel() for p in self.policy.parameters()), "optimizer_steps": self.steps}

    def _forward(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(packed, self.config.rollout.temperature, self.config.trainer.logprob_chunk)

    def train(self, updates: list[list[list[list[dict[str, Any]]]]], total_steps: int) -> dict[str, float]:
        """One optimizer step per entry of ``updates``: ``updates[u][rank]`` are this rank's micro-batches of rows.

        Returns metrics over all trained tokens of all ranks. Proximal log-probabilities are those before the first
        of several steps; with one step they are the step's own.
        """
        started = time.perf_counter()
        algorithm = self.config.algorithm
        batches = [
            [Batch([Row(**row) for row in micro], self.store, self.device) for micro in update[self.rank]]
            for update in updates
        ]
        proximal: list[list[torch.Tensor | None]] = [[None] * len(update) for update in batches]
        if len(updates) > 1 and algorithm.old_logprobs == "proximal":
            with torch.no_grad():
                proximal = [[self._forward(batch.packed)[0] for batch in update] for update in batches]
        sums = Sums(self.device)
        norms = [self._update(update, old, sums, total_steps) for update, old in zip(batches, proximal, strict=True)]
        sums.add(torch.tensor(True), packed_tokens=torch.tensor(float(sum(b.tokens for u in batches for b in u))))
        return self._metrics(sums.reduce(), norms, time.perf_counter() - started)

    def _update(
        self, batches: list[Batch], proximal: list[torch.Tensor | None], sums: Sums, total_steps: int
    ) -> torch.Tensor:
        section = self.config.trainer
        self.optimizer.zero_grad(set_to_none=True)  # of an update that failed
        for batch, old in zip(batches, proximal, strict=True):
            loss = self._loss(batch, old, sums)
            (loss * self.ranks).backward()  # FSDP averages gradients over ranks; the weights are global already
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), section.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not torch.isfinite(norm):
            raise EngineError(
                f"the gradient norm is {norm.item()} at optimizer step {self.steps}; weights are unchanged"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = section.learning_rate * learning_rate_factor(self.steps, section, total_steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return norm

    def _loss(self, batch: Batch, proximal: torch.Tensor | None, sums: Sums) -> torch.Tensor:
        algorithm: Algorithm = self.config.algorithm
        logprobs, entropy = self._forward(batch.packed)
        old = batch.behaviour if algorithm.old_logprobs == "behaviour" else proximal
        old = logprobs.detach() if old is None else old
        token_loss, clipped = losses.ppo_clip(logprobs, old, batch.advantages, algorithm.clip_low, algorithm.clip_high)
        if algorithm.entropy_coef:
            token_loss = token_loss - algorithm.entropy_coef * entropy
        loss = (token_loss * batch.weights).sum()
        difference = (logprobs.detach() - batch.behaviour).abs()
        sums.add(
            batch.mask,
            tokens=torch.ones_like(logprobs),
            loss=token_loss * batch.weights,
            entropy=entropy,
            clipped=clipped.float(),
            kl=losses.k3(batch.behaviour, logprobs.detach()),
            difference=difference,
        )
        sums.maximum(batch.mask, difference_max=difference)
        return loss

    def _metrics(self, total: dict[str, float], norms: list[torch.Tensor], seconds: float) -> dict[str, float]:
        count = max(total["tokens"], 1.0)
        return {
            "train/loss": total["loss"] / len(norms),
            "train/entropy": total["entropy"] / count,
            "train/kl": total["kl"] / count,
            "train/clip_fraction": total["clipped"] / count,
            "train/grad_norm": max(norm.item() for norm in norms),
            "train/lr": self.optimizer.param_groups[0]["lr"],
            "train/logprob_abs_diff_mean": total["difference"] / count,
            "train/logprob_abs_diff_max": total["difference_max"],
            "train/packed_tokens": total["packed_tokens"],
            "train/tokens": total["tokens"],
            "train/tokens_per_s": total["packed_tokens"] / seconds,
        }

    def logprobs(self, rows: list[dict[str, list[int]]]) -> list[list[float]]:
        """Log-probabilities of given responses under the current weights, for the probe; every rank computes all."""
        with torch.no_grad():
            packed = pack([(row["prompt_ids"], [row["response_ids"]]) for row in rows], self.device)
            values = self._forward(packed)[0].tolist()
        cut, start = [], 0
        for row in rows:
            cut.append(values[start : start + len(row["response_ids"])])
            start += len(row["response_ids"])
        return cut

    def _full(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        """Plain name, local parameter and full float32 tensor of each parameter, tied ones once; collective."""
        for name, parameter in self.policy.named_parameters():
            data = parameter.detach()
            yield plain_name(name), parameter, data.full_tensor() if isinstance(data, DTensor) else data

    def export(self, folder: str, dtype: str) -> dict[str, Any]:
        """Writes the model as a Hugging Face folder; rank 0 writes. Names and layout are transformers' own."""
        state = {}
        for name, _, full in self._full():
            if self.rank == 0:
                state[name] = full.to("cpu", DTYPES[dtype], copy=True)
        if self.rank == 0:
            model = self.policy.model
            model.config.dtype = DTYPES[dtype]
            model.save_pretrained(folder, state_dict=state)
            model.config.dtype = torch.float32
        dist.barrier()
        return {"bytes": sum(t.numel() * t.element_size() for t in state.values())}

    def save(self, folder: str) -> dict[str, Any]:
        """Writes ``model/`` (float32 Hugging Face folder), ``optimizer.safetensors`` and ``trainer.json``."""
        target = Path(folder)
        self.export(str(target / "model"), "float32")
        moments: dict[str, torch.Tensor] = {}
        for name, parameter in self.policy.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                value = self.optimizer.state[parameter].get(key)
                if value is None:
                    continue
                full = value.full_tensor() if isinstance(value, DTensor) else value
                if self.rank == 0:
                    moments[f"{key}.{plain_name(name)}"] = full.cpu().contiguous()
        if self.rank == 0:
            save_file(moments, target / "optimizer.safetensors")
            generator = base64.b64encode(bytes(torch.get_rng_state().tolist())).decode()
            (target / "trainer.json").write_text(json.dumps({"optimizer_steps": self.steps, "torch_rng": generator}))
        dist.barrier()
        return {}

    def _load_state(self, folder: Path) -> None:
        record = json.loads((folder / "trainer.json").read_text())
        self.steps = record["optimizer_steps"]
        torch.set_rng_state(torch.tensor(list(base64.b64decode(record["torch_rng"])), dtype=torch.uint8))
        with safe_open(folder / "optimizer.safetensors", framework="pt") as moments:
            known = set(moments.keys())
            for name, parameter in self.policy.named_parameters():
                if f"exp_avg.{plain_name(name)}" not in known:
                    continue
                state: dict[str, torch.Tensor] = {"step": torch.tensor(float(self.steps), device=self.device)}
                for key in ("exp_avg", "exp_avg_sq"):
                    full = moments.get_tensor(f"{key}.{plain_name(name)}").to(self.device)
                    if isinstance(parameter, DTensor):
                        full = distribute_tensor(full, parameter.device_mesh, parameter.placements)
                    state[key] = full
                self.optimizer.state[parameter] = state  # type: ignore[assignment]


def threads_for(config: Trainer) -> int:
    return config.threads or max(1, (os.cpu_count() or 1) // config.ranks)
