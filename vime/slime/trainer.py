"""The functions of ``[slime]`` that a trainer rank calls, and our tensors as slime's lists of tensors, one a sample.

A rank sees the samples of its own micro-batches. Denominators are those of the whole update, as everywhere here: a function
that masks tokens does not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.fsdp import register_fsdp_forward_method

from vime.config.sections import Config
from vime.slime.args import Args
from vime.slime.calls import cause_of
from vime.slime.hooks import HOOKS, TRAINER, configured, load_hook
from vime.training.batch import Batch, Sums
from vime.training.credit import assign_means
from vime.training.learner import EngineError
from vime.training.losses import Loss, Tokens
from vime.training.packed import pack
from vime.training.plan import Row
from vime.training.policy import Policy

if TYPE_CHECKING:
    from vime.training.engine import TorchEngine

NOTHING = Row("", 0, 0, 1, 2, 0, 0.0)  # what a micro-batch without rows holds: all ranks log the same and meet


def trainer_hooks(config: Config) -> TrainerHooks:
    """The functions for trainer ranks; that of the start has been called."""
    wanted = [(kind, path) for kind, path in configured(config) if HOOKS[kind].process == TRAINER]
    hooks = TrainerHooks(config, {kind: load_hook(kind, path) for kind, path in wanted})
    if "init" in hooks:
        hooks.call("init", hooks.args)
    return hooks


class TrainerHooks:
    """Where a function is not set, what it would change stays as it is."""

    def __init__(self, config: Config, functions: dict[str, Callable[..., Any]]) -> None:
        self.config, self.args, self.functions = config, Args(config), functions

    def __contains__(self, kind: str) -> bool:
        return kind in self.functions

    def call(self, kind: str, *arguments: Any, **named: Any) -> Any:
        try:
            return self.functions[kind](*arguments, **named)
        except Exception as error:
            raise EngineError(f"slime.{HOOKS[kind].option} failed: {cause_of(error)}") from error

    @property
    def needs_logprobs(self) -> bool:
        """Whether the trainer's log-probabilities are wanted before the step."""
        return "advantage" in self or "postprocess" in self

    # Before the step

    def prepared(
        self, engine: TorchEngine, rows: Sequence[Row], batches: Sequence[Batch], advantages: list[float]
    ) -> list[float]:
        """Advantages and masks after the functions that see the rank's batch; each row's advantage."""
        if not self.needs_logprobs:
            return advantages
        filled = [batch for batch in batches if batch.rows]
        data: dict[str, Any] = {}
        for batch in filled:
            for name, values in view(engine, batch).items():
                data[name] = data.get(name, []) + values
        if "advantage" in self and filled:
            data.pop("advantages")
            data.pop("returns", None)
            self.call("advantage", self.args, data)
            if "advantages" not in data:
                raise EngineError(f"slime.{HOOKS['advantage'].option} did not set rollout_data['advantages']")
        if "postprocess" in self and filled:
            self.call("postprocess", self.args, engine.batches, data)
        first = 0
        for batch in filled:
            own = slice(first, first := first + len(batch.rows))
            take(batch, {name: data[name][own] for name in ("advantages", "loss_masks")})
        return assign_means(rows, batches, engine.mesh.data_group)

    def loaded(self, policy: Policy) -> None:
        if "loss" in self:
            register_fsdp_forward_method(policy, "logits")

    def before_logprobs(self, model: torch.nn.Module, prefix: str) -> None:
        if "before_log_prob" in self:
            self.call("before_log_prob", self.args, [model], prefix)

    def before_step(self, engine: TorchEngine, step: int) -> None:
        if "before_step" in self:
            learner = engine.policy
            self.call("before_step", self.args, engine.batches, step, [learner.module.model], learner.optimizer, None)

    # In the step

    def corrected(self, batch: Batch, tokens: Tokens, losses: torch.Tensor, logs: dict[str, torch.Tensor]) -> Loss:
        """The objective's losses after custom_tis_function_path, 0 where its masks are, and what it logs."""
        if "tis" not in self:
            return losses, logs
        rows = batch.rows or [NOTHING]
        lengths = [row.response_tokens for row in rows]
        masks = split(tokens.mask, lengths)
        with torch.no_grad():
            given = split(tokens.proximal, lengths), split(tokens.behaviour, lengths)
        found = self.call(
            "tis",
            args=self.args,
            pg_loss=losses,
            train_log_probs=given[0],
            rollout_log_probs=given[1],
            loss_masks=[mask.to(losses) for mask in masks],
            total_lengths=[row.prompt_tokens + row.response_tokens for row in rows],
            response_lengths=lengths,
        )
        option = f"slime.{HOOKS['tis'].option}"
        if not isinstance(found, tuple) or len(found) != 3:
            raise EngineError(f"{option} returned {found!r:.80}; return (pg_loss, loss_masks, metrics)")
        changed, kept = found[0], flat(option, "loss_masks", found[1], tokens.mask)
        if not isinstance(changed, torch.Tensor) or changed.shape != losses.shape:
            raise EngineError(f"{option}: pg_loss is to have one entry a response token, {tuple(losses.shape)}")
        more = {f"{name}": flat(option, name, value, losses).detach() for name, value in (found[2] or {}).items()}
        return torch.where(kept.bool(), changed, 0.0), logs | more

    def reduced(self, batch: Batch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The losses that the weights average, and the sum of those that custom_pg_loss_reducer_function_path averages."""
        if "reducer" not in self:
            return losses, None
        rows = batch.rows or [NOTHING]
        lengths = [row.response_tokens for row in rows]
        totals = [row.prompt_tokens + row.response_tokens for row in rows]
        per_token = self.args.calculate_per_token_loss
        reducer = self.call("reducer", totals, lengths, split(batch.mask.float(), lengths), per_token)
        found = reducer(losses)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise EngineError(f"slime.{HOOKS['reducer'].option} gave {found!r:.80}; its function is to give one number")
        total = found.reshape(()) * self.scale(batch)
        return torch.zeros_like(losses), total if batch.rows else losses.sum() * 0.0

    def scale(self, batch: Batch) -> float:
        """What a sum over samples, or over tokens where losses are means over tokens, is multiplied by."""
        return 1 / max(batch.of_update["tokens" if self.args.calculate_per_token_loss else "samples"], 1)

    def loss(self, engine: TorchEngine, batch: Batch, sums: Sums) -> torch.Tensor:
        """The micro-batch's share of the loss by custom_loss_function_path, from the logits of its samples, each of which stands
        alone with its prompt."""
        seen = view(engine, batch)
        logits = logits_of(engine, seen["unconcat_tokens"])
        with torch.no_grad():
            logprobs, entropy = response_log_probs(self.args, seen, logits.detach())
            tokens = batch.seen(torch.cat(logprobs), torch.cat(entropy), engine.config.algorithm.old_logprobs)
        seen.setdefault("log_probs", logprobs)  # before the only step they are its own
        if batch.reference_is_policy:
            seen["ref_log_probs"] = seen["log_probs"]
        per_token = self.args.calculate_per_token_loss
        mean = partial(sum_of_sample_mean, masks=seen["loss_masks"], per_token=per_token)
        found = self.call("loss", self.args, seen, logits, mean)
        option = f"slime.{HOOKS['loss'].option}"
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], torch.Tensor):
            raise EngineError(f"{option} returned {found!r:.80}; return (loss, metrics), loss a tensor with a gradient")
        if found[0].numel() != 1 or not found[0].requires_grad:
            raise EngineError(f"{option}: loss is to be one number with a gradient, got shape {tuple(found[0].shape)}")
        scale = self.scale(batch)
        loss = found[0].reshape(()) * scale if batch.rows else logits.sum() * 0.0
        engine.note(batch, tokens, sums)
        one = torch.ones(1, dtype=torch.bool, device=loss.device)
        share = scale * batch.of_update["tokens"]  # metrics are divided by the update's trained tokens
        logged = {
            f"log/{name}": torch.as_tensor(v).detach().reshape(1).to(loss) * share for name, v in found[1].items()
        }
        sums.add(one, loss=loss.reshape(1), **logged)
        return loss


def split(values: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    return list(values.split(list(lengths)))


def tokens_of(engine: TorchEngine, batch: Batch) -> list[torch.Tensor]:
    if not batch.rows:
        return [torch.zeros(3, dtype=torch.long, device=engine.device)]
    payloads = [engine.store.get(row.key, row.index) for row in batch.rows]
    whole = [np.concatenate([one.prompt_ids, one.response_ids]) for one in payloads]
    return [torch.from_numpy(ids).long().to(engine.device) for ids in whole]


def view(engine: TorchEngine, batch: Batch) -> dict[str, Any]:
    """A micro-batch as slime's dict of lists, an entry a sample; tensors of response tokens."""
    rows = batch.rows or [NOTHING]
    lengths = [row.response_tokens for row in rows]
    tokens = tokens_of(engine, batch)
    found: dict[str, Any] = {
        "tokens": tokens,
        "unconcat_tokens": tokens,
        "total_lengths": [row.prompt_tokens + row.response_tokens for row in rows],
        "response_lengths": lengths,
        "rewards": [row.reward for row in rows],
        "loss_masks": split(batch.mask.float(), lengths),
        "advantages": split(batch.advantages, lengths),
        "sample_indices": [(row.key, row.index) for row in rows],
        "rollout_ids": [(row.key, row.rollout) for row in rows],
    }
    others = {
        "rollout_log_probs": batch.behaviour,
        "log_probs": batch.proximal,
        "ref_log_probs": batch.reference,
        "teacher_log_probs": batch.teacher,
        "values": batch.values,
        "returns": batch.returns,
    }
    return found | {name: split(value, lengths) for name, value in others.items() if value is not None}


def take(batch: Batch, data: dict[str, Any]) -> None:
    """Puts changed advantages and masks into the batch."""
    batch.advantages = flat("rollout_data", "advantages", data["advantages"], batch.advantages).detach()
    mask = flat("rollout_data", "loss_masks", data["loss_masks"], batch.advantages).bool()
    if bool((mask & ~batch.mask).any()):
        raise EngineError("rollout_data['loss_masks'] trains tokens that were masked; they can be taken out only")
    batch.mask = mask
    batch.weights = batch.weights * mask


def flat(option: str, name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    """[N] from a tensor of response tokens or a list with one a sample, or a number; EngineError for any other length."""
    if isinstance(value, (list, tuple)):
        value = torch.cat([like.new_zeros(0), *(torch.as_tensor(one).reshape(-1).to(like.device) for one in value)])
    tensor = torch.as_tensor(value, device=like.device)
    if tensor.numel() == 1:
        tensor = tensor.reshape(()).expand(like.shape)
    if tensor.shape != like.shape:
        raise EngineError(f"{option}: {name} has {tensor.numel()} entries for {like.numel()} response tokens")
    return tensor if tensor.dtype == torch.bool else tensor.float()


def sum_of_sample_mean(values: torch.Tensor, masks: Sequence[torch.Tensor], per_token: bool) -> torch.Tensor:
    """Of [N] response tokens: the sum over samples of their means over trained tokens; the sum over all where losses are means
    over tokens."""
    parts = values.split([len(mask) for mask in masks])
    counts = [1 if per_token else mask.sum().clamp(min=1) for mask in masks]
    return torch.stack([(p * m).sum() / n for p, m, n in zip(parts, masks, counts, strict=True)]).sum()


def logits_of(engine: TorchEngine, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
    """The logits [1, T, V] of all T tokens of sequences that stand one after the other, before the temperature."""
    policy = engine.policy.module
    register_fsdp_forward_method(policy, "logits")
    ids = [one.tolist() for one in tokens]
    packed = pack([(one[:1], [[*one[1:], 0]]) for one in ids], engine.device, engine.mesh)
    return policy.logits(packed)[None]


def response_log_probs(
    args: Args, batch: dict[str, Any], logits: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probabilities and entropies of the response tokens of each sample, with gradients, from what a custom loss gets; at
    the temperature that they were sampled with."""
    logprobs, entropies, end = [], [], 0
    for tokens, total, length in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        end += total
        log_p = torch.log_softmax(logits[0, end - length - 1 : end - 1].float() / args.rollout_temperature, -1)
        logprobs.append(log_p.gather(-1, tokens[-length:, None]).squeeze(-1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return logprobs, entropies
