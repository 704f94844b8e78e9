"""Functions written as for slime, imports and all, for tests."""

from __future__ import annotations

from typing import Any

import torch
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput  # type: ignore[import-not-found]
from slime.rollout.data_source import DataSource  # type: ignore[import-not-found]
from slime.rollout.filter_hub.base_types import DynamicFilterOutput  # type: ignore[import-not-found]
from slime.rollout.sglang_rollout import GenerateState, generate  # type: ignore[import-not-found]
from slime.utils.async_utils import run  # type: ignore[import-not-found]
from slime.utils.types import Sample  # type: ignore[import-not-found]

from tests.slime_rewards import group_rm, nan_rm, rm, short_group_rm  # noqa: F401
from vime.slime.trainer import response_log_probs

CALLS: list[Any] = []


async def two_turns(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A reply, something the policy is told, a reply."""
    state = GenerateState(args)
    half = dict(sampling_params, max_new_tokens=sampling_params["max_new_tokens"] // 2)
    sample = await generate(args, sample, half)
    told = state.tokenizer.encode("<|end|><|user|>Sure?<|end|><|assistant|>", add_special_tokens=False)
    sample.append_response_tokens(tokens=told, trainable=False, text="Sure?")
    sample.metadata["turns"] = 2
    return await generate(args, sample, half)


async def split(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> list[Sample]:
    """Two samples of one rollout."""
    made = [await generate(args, Sample.from_dict(sample.to_dict()), sampling_params) for _ in range(2)]
    for one in made:
        one.reward = 0.25
        one.metadata["evaluation"] = evaluation
    return made


def tag(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    sample.metadata["tags"] = [*sample.metadata.get("tags", []), rollout_id]


async def shout(args: Any, sample: Sample, *, rollout_id: int | None = None, evaluation: bool = False) -> Sample:
    sample.response = sample.response.upper()
    return sample


def not_all_equal(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    rewards = [sample.reward for sample in samples]
    keep = len(set(rewards)) > 1
    return DynamicFilterOutput(keep=keep, reason=None if keep else "all_equal")


def newest_first(args: Any, rollout_id: Any, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    chosen = sorted(buffer, key=lambda group: -group[0].group_index)[:num_samples]
    for group in chosen:
        buffer.remove(group)
    return chosen


def no_truncated(args: Any, samples: list[list[Sample]]) -> None:
    for group in samples:
        for sample in group:
            sample.remove_sample = sample.response_length > args.longest


def count_all(args: Any, all_samples: list[list[Sample]], data_source: Any) -> None:
    CALLS.append(("all", [len(group) for group in all_samples], len(data_source)))


def centred(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    raw = [sample.get_reward_value(args) for sample in samples]
    mean = sum(raw) / len(raw)
    return raw, [value - mean for value in raw]


def first_half(args: Any, samples: list[Sample]) -> dict[str, Any]:
    """Trains the first two samples of each group, and of their responses all but the last token."""
    kept = [sample for sample in samples if sample.index % args.n_samples_per_prompt < 2]
    return {
        "tokens": [sample.tokens[:-1] for sample in kept],
        "response_lengths": [sample.response_length - 1 for sample in kept],
        "rewards": [sample.reward * 2 for sample in kept],
        "loss_masks": [[1] * (sample.response_length - 1) for sample in kept],
        "rollout_log_probs": [sample.rollout_log_probs[:-1] for sample in kept],
        "sample_indices": [sample.index for sample in kept],
        "truncated": [0] * len(kept),
    }


def log_rollout(rollout_id: int, args: Any, samples: list[Sample], extra_metrics: Any, rollout_time: float) -> bool:
    extra_metrics["mine/samples"] = len(samples)
    return True


def log_eval(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: Any) -> bool:
    extra_metrics.update({f"mine/{name}": sum(one["rewards"]) for name, one in data.items()})
    return False


class Counting(DataSource):  # type: ignore[misc]
    """What is n + n?"""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.n = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        made = []
        for _ in range(num_samples):
            one = Sample(prompt=f"{self.n} + {self.n}?", label=str(2 * self.n), metadata={"n": self.n})
            made.append([one] * self.args.n_samples_per_prompt)
            self.n += 1
        return made

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]

    def __len__(self) -> int:
        return 100


def rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """A batch, one prompt more than is needed given back."""
    groups = data_source.get_samples(args.rollout_batch_size + 1)
    data_source.add_samples(groups[-1:])

    async def whole() -> None:
        for group in groups[:-1]:
            for sample in group:
                await generate(args, sample, GenerateState(args).sampling_params)
                sample.reward = float(sample.index % 2)

    run(whole())
    return RolloutFnTrainOutput(samples=groups[:-1], metrics={"mine/rollout": rollout_id})


def evaluation(args: Any, rollout_id: int, data_source: Any, evaluation: bool = True) -> RolloutFnEvalOutput:
    return RolloutFnEvalOutput(
        data={name: {"rewards": [1.0, 0.0], "truncated": [False, True]} for name in data_source.sets}
    )


def whole_batch_advantage(args: Any, rollout_data: dict[str, Any]) -> None:
    rewards = torch.tensor(rollout_data["rewards"])
    values = rewards - rewards.mean()
    rollout_data["advantages"] = [
        torch.full((length,), float(value))
        for value, length in zip(values, rollout_data["response_lengths"], strict=True)
    ]
    rollout_data["returns"] = rollout_data["advantages"]


def mask_first(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    for mask in rollout_data["loss_masks"]:
        mask[0] = 0


def truncated_tis(
    args: Any, *, pg_loss: Any, train_log_probs: Any, rollout_log_probs: Any, loss_masks: Any, **kw: Any
) -> Any:
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    weight = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weight, loss_masks, {"tis": weight}


def constant_length(
    total_lengths: Any, response_lengths: Any, loss_masks: Any, calculate_per_token_loss: bool = False
) -> Any:
    """Dr. GRPO's: a sample's sum divided by a constant."""
    mask = torch.cat(loss_masks)
    return lambda values: (values * mask).sum() / 16


def policy_gradient(args: Any, batch: dict[str, Any], logits: Any, sum_of_sample_mean: Any) -> Any:
    logprobs, entropies = response_log_probs(args, batch, logits)
    loss = sum_of_sample_mean(-torch.cat(batch["advantages"]) * torch.cat(logprobs))
    return loss, {"my_entropy": sum_of_sample_mean(torch.cat(entropies))}


def note_start(args: Any) -> None:
    CALLS.append(("start", args.rollout_batch_size))


def note_model(args: Any, model: Any, store_prefix: str) -> None:
    CALLS.append(("log_prob", store_prefix))


def note_step(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
    CALLS.append(("step", rollout_id, step_id, sum(p.numel() for p in model[0].parameters()) > 0))


# What is wrong with each of these is its name.


def plain_generate(args: Any, sample: Any, sampling_params: Any) -> Any:
    return sample


async def generate_of_two(args: Any, sample: Any) -> Any:
    return sample


async def short_mask(args: Any, sample: Any, sampling_params: Any) -> Any:
    sample = await generate(args, sample, sampling_params)
    sample.loss_mask = sample.loss_mask[:-1]
    return sample


async def no_logprobs(args: Any, sample: Any, sampling_params: Any) -> Any:
    sample = await generate(args, sample, sampling_params)
    sample.rollout_log_probs = None
    return sample


def no_reward_lists(args: Any, samples: Any) -> Any:
    return [1.0], [1.0]


class Sourceless:
    def __init__(self, args: Any) -> None: ...
    def get_samples(self, num_samples: int) -> Any: ...
