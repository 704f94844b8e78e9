"""The same update by plain means, to check the engine: transformers' own attention, one sequence at a time, whole logits,
float32, no sharding, one backward pass. Slow and easy to trust; nothing here is used in training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from vime.training import adapter
from vime.training.batch import Batch, Sums, sample_experts
from vime.training.learner import export_model
from vime.training.pieces import full, sharded_parameters
from vime.training.plan import PlanJson
from vime.training.routing import Routing, install

if TYPE_CHECKING:
    from vime.training.engine import Output, TorchEngine


def plain_output(engine: TorchEngine, model: torch.nn.Module, batch: Batch) -> Output:
    """What ``engine.policy_pass`` gives of the batch's response tokens, a forward pass a sequence."""
    logprobs, entropies, balances = [], [], []
    for row in batch.rows:
        payload = engine.store.get(row.key, row.index)
        prompt, response = (
            torch.tensor(ids.tolist(), device=engine.device) for ids in (payload.prompt_ids, payload.response_ids)
        )
        routing, forced = None, None
        if engine.routers is not None:
            if engine.config.algorithm.router_replay == "server":
                forced = torch.from_numpy(sample_experts(row, payload, engine.store, engine.routers)).to(engine.device)
            routing = Routing(forced)
        extra = {"routing": routing} if routing else {}
        logits = model(input_ids=torch.cat([prompt, response[:-1]])[None], use_cache=False, **extra).logits[0]
        log_p = torch.log_softmax(logits[len(prompt) - 1 :].float() / engine.config.rollout.temperature, dim=-1)
        logprobs.append(log_p.gather(-1, response[:, None]).squeeze(-1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        if routing and batch.balance:
            predicts = torch.tensor([0] * (len(prompt) - 1) + payload.loss_mask.tolist(), device=engine.device)
            balances.append(replace(batch.balance, predicts=predicts.float()).loss(routing))
    return torch.cat(logprobs), torch.cat(entropies), torch.stack(balances).sum() if balances else None


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
        output = engine.policy_pass(batch)
        share = engine.loss(batch, output, Sums())
        (share * engine.mesh.averaged).backward()
        logprobs.append(output[0].detach())
        loss += share.item()
    total = torch.tensor(loss, dtype=torch.double, device=engine.device)
    dist.all_reduce(total, group=engine.mesh.data_group)
    return logprobs, total.item(), gradients(sharded_parameters(engine.policy.module), engine.mesh.rank == 0)


def compare(engine: TorchEngine, updates: list[PlanJson], folder: str) -> dict[str, float]:
    """The engine against plain transformers on one update, and against itself with a micro-batch a row. Collective;
    ``folder`` is an empty one for the weights.

    Absolute differences of log-probabilities over trained tokens (``logprob_mean``, ``logprob_max``, and ``server_mean`` for
    the server's, ``unreplayed_mean`` for the server's where its experts are replayed and here are not); of the loss, over
    the sum of weights times absolute advantages (``loss``); of gradients, over their norm (``gradient``,
    ``split_gradient``). What cannot be compared is left out: the server's where it sampled nothing, single samples where
    the objective compares them.
    """
    batches = prepared(engine, updates)
    logprobs, loss, mine = by_engine(engine, batches)
    scale = torch.stack([(batch.weights * batch.advantages.abs()).sum() for batch in batches]).sum().double()
    dist.all_reduce(scale, group=engine.mesh.data_group)

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
    if engine.config.algorithm.router_replay == "server":
        found["unreplayed_mean"] = unreplayed(engine, batches)
    return found | {
        "logprob_mean": plain.logprob_mean,
        "logprob_max": plain.logprob_max,
        "loss": abs(loss - plain.loss) / max(scale.item(), 1e-12),
        "gradient": distance(mine, plain.gradients),
    }


@torch.no_grad()
def unreplayed(engine: TorchEngine, batches: list[Batch]) -> float:
    """The mean difference between the server's log-probabilities and the engine's where it chooses the experts itself."""
    apart = torch.zeros(2, dtype=torch.double, device=engine.device)
    for batch in batches:
        difference = (engine.forward(engine.policy.module, batch.packed)[0] - batch.behaviour).abs()[batch.mask]
        apart += torch.stack([difference.double().sum(), batch.mask.sum()])
    dist.all_reduce(apart, group=engine.mesh.data_group)
    return (apart[0] / apart[1]).item()


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
        output = plain_output(engine, model, batch)
        share = engine.loss(batch, output, Sums())
        share.backward()
        total += share.item()
        apart, servers = ((x - output[0].detach()).abs()[batch.mask] for x in (ours, batch.behaviour))
        here, server, count = here + apart.sum().item(), server + servers.nansum().item(), count + len(apart)
        worst = max(worst, apart.max().item() if len(apart) else 0.0)
    sums = torch.tensor([total, here, server, float(count)], dtype=torch.double, device=engine.device)
    dist.all_reduce(sums, group=engine.mesh.data_group)
    most = torch.tensor(worst, device=engine.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=engine.mesh.data_group)
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=engine.mesh.data_group)
    loss, here, server, tokens = sums.tolist()
    tokens = max(tokens, 1.0)
    return Plain(
        loss, gradients(model.named_parameters(), engine.mesh.rank == 0), here / tokens, most.item(), server / tokens
    )


def plain_copy(engine: TorchEngine, folder: str) -> torch.nn.Module:
    """The policy's present weights in a plain transformers model, by way of ``folder``, whole and in float32 on every rank;
    an adapter in plain peft."""
    policy, write = engine.policy.module, engine.mesh.rank == 0
    lora = bool(engine.config.lora.rank)
    if lora:
        adapter.export(policy, Path(folder), torch.float32, write)
    else:
        export_model(policy, folder, torch.float32, write)
    dist.barrier()
    model: Any = AutoModelForCausalLM.from_pretrained(
        engine.config.model.path if lora else folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
    )
    if engine.routers is not None:
        install(model)
    if lora:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder, is_trainable=True).base_model.model
    return torch.nn.Module.to(model, engine.device).train()
