"""The same update by plain means, to check the engine: transformers' own attention, one sequence at a time, whole logits,
float32, no sharding, one backward pass. Slow and easy to trust; nothing here is used in training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from vime.training.batch import Batch, Sums
from vime.training.learner import export_model, full, sharded_parameters
from vime.training.plan import PlanJson

if TYPE_CHECKING:
    from vime.training.engine import TorchEngine


def plain_output(model: torch.nn.Module, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies [N] of the batch's response tokens, a forward pass a sequence."""
    logprobs, entropies = [], []
    for sequence, row in enumerate(batch.rows):
        response = batch.packed.targets[batch.sequence == sequence]
        first = batch.packed.sources[batch.sequence == sequence][0]  # the prompt's last token in the packed row
        prompt = batch.packed.input_ids[0, first + 1 - row.prompt_tokens : first + 1]
        logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0]
        log_p = torch.log_softmax(logits[len(prompt) - 1 : -1].float() / temperature, dim=-1)
        logprobs.append(log_p.gather(-1, response[:, None]).squeeze(-1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(parameters: Iterable[tuple[str, torch.nn.Parameter]], write: bool) -> dict[str, torch.Tensor]:
    """Full gradients on the CPU by name, then cleared; an empty dict unless ``write``."""
    found = {}
    for name, parameter in parameters:
        if parameter.grad is not None:
            whole = full(parameter.grad)
            if write:
                found[name] = whole.to("cpu", torch.float32, copy=True)
        parameter.grad = None
    return found


def distance(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """|mine - other| / |other| over all tensors, in float64."""
    apart = sum((mine[name].double() - other[name].double()).square().sum().item() for name in other)
    size = sum(tensor.double().square().sum().item() for tensor in other.values())
    return (apart / max(size, 1e-300)) ** 0.5


def prepared(engine: TorchEngine, updates: list[PlanJson]) -> list[Batch]:
    """The update's micro-batches, with the server's log-probabilities for those before the step where these are the step's
    own: at a ratio of exactly 1 a loss would not depend on what is compared."""
    (batches,), _ = engine.prepare(updates)
    for batch in batches:
        if batch.proximal is None and not batch.behaviour.isnan().any():
            batch.proximal = batch.behaviour
    return batches


def by_engine(engine: TorchEngine, batches: list[Batch]) -> tuple[list[torch.Tensor], float, dict[str, torch.Tensor]]:
    """Log-probabilities, loss and gradients as in training."""
    engine.policy.clear()
    logprobs, loss = [], 0.0
    for batch in batches:
        output = engine.forward(engine.policy.module, batch.packed)
        share = engine.loss(batch, output, Sums())
        (share * engine.ranks).backward()
        logprobs.append(output[0].detach())
        loss += share.item()
    total = torch.tensor(loss, dtype=torch.double, device=engine.device)
    dist.all_reduce(total)
    return logprobs, total.item(), gradients(sharded_parameters(engine.policy.module), engine.rank == 0)


def compare(engine: TorchEngine, updates: list[PlanJson], folder: str) -> dict[str, float]:
    """The engine against plain transformers on one update, and against itself with a micro-batch a row. Collective;
    ``folder`` is an empty one for the weights.

    Absolute differences of log-probabilities over trained tokens (``logprob_mean``, ``logprob_max``, and ``server_mean`` for
    the server's); of the loss, over the sum of weights times absolute advantages (``loss``); of gradients, over their norm
    (``gradient``, ``split_gradient``). What cannot be compared is left out: the server's where it sampled nothing, single
    samples where the objective compares them.
    """
    batches = prepared(engine, updates)
    logprobs, loss, mine = by_engine(engine, batches)
    scale = torch.stack([(batch.weights * batch.advantages.abs()).sum() for batch in batches]).sum().double()
    dist.all_reduce(scale)

    single = [[[[row] for row in chain(*rank)] for rank in update] for update in updates]
    longest = max(len(rank) for rank in single[0])
    for rank in single[0]:
        rank.extend([[] for _ in range(longest - len(rank))])
    found = {}
    if not engine.compares:
        found["split_gradient"] = distance(by_engine(engine, prepared(engine, single))[2], mine)

    plain = by_plain(engine, batches, logprobs, folder)
    if not engine.config.data.response_keys:
        found["server_mean"] = plain.server_mean
    return found | {
        "logprob_mean": plain.logprob_mean,
        "logprob_max": plain.logprob_max,
        "loss": abs(loss - plain.loss) / max(scale.item(), 1e-12),
        "gradient": distance(mine, plain.gradients),
    }


@dataclass(frozen=True)
class Plain:
    """Loss and gradients by plain means, and how far the engine's and the server's log-probabilities lie from the plain ones."""

    loss: float
    gradients: dict[str, torch.Tensor]
    logprob_mean: float
    logprob_max: float
    server_mean: float


def by_plain(engine: TorchEngine, batches: list[Batch], logprobs: list[torch.Tensor], folder: str) -> Plain:
    """Each rank its own batches; sums, the maximum and gradients over all."""
    model = plain_copy(engine, folder)
    here, server, worst, count, total = 0.0, 0.0, 0.0, 0, 0.0
    for batch, ours in zip(batches, logprobs, strict=True):
        if not batch.rows:
            continue
        output = plain_output(model, batch, engine.config.rollout.temperature)
        share = engine.loss(batch, output, Sums())
        share.backward()
        total += share.item()
        apart, servers = ((x - output[0].detach()).abs()[batch.mask] for x in (ours, batch.behaviour))
        here, server, count = here + apart.sum().item(), server + servers.nansum().item(), count + len(apart)
        worst = max(worst, apart.max().item() if len(apart) else 0.0)
    sums = torch.tensor([total, here, server, float(count)], dtype=torch.double, device=engine.device)
    dist.all_reduce(sums)
    most = torch.tensor(worst, device=engine.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
    loss, here, server, tokens = sums.tolist()
    tokens = max(tokens, 1.0)
    return Plain(
        loss, gradients(model.named_parameters(), engine.rank == 0), here / tokens, most.item(), server / tokens
    )


def plain_copy(engine: TorchEngine, folder: str) -> torch.nn.Module:
    """The policy's present weights in a plain transformers model, by way of ``folder``, whole and in float32 on every rank."""
    export_model(engine.policy.module, folder, torch.float32, engine.rank == 0)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        Path(folder), dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return torch.nn.Module.to(model, engine.device).train()
