"""Losses, corrections and advantages against TRL's own code: values and gradients, in float64.

TRL's trainers are made without their ``__init__``: options come from TRL's own configuration classes, given tensors stand for
models and samples, and the rest of what runs on their side is theirs. Ours is put together as the engine does it: token losses
times corrections, plus the KL term, less the entropy bonus, times the weights of the reduction, which are computed here from
their definition. At the end of the run the largest deviation of every comparison is printed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import trl
from accelerate import Accelerator

from vime.config.sections import Algorithm
from vime.training import advantages
from vime.training.advantages import ESTIMATORS, Scored
from vime.training.corrections import CORRECTIONS
from vime.training.losses import KL, OBJECTIVES, Tokens, adapt_entropy, kl_loss

with mock.patch("trl.import_utils.is_vllm_available", return_value=False):  # else TRL imports vLLM into this process
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_config import RLOOConfig
    from trl.trainer.rloo_trainer import RLOOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

BOUND = 1e-9  # of a relative deviation; what is promised is 1e-5
SEEDS = range(5)
GROUPS, GROUP = 4, 4
DEVIATIONS: dict[str, float] = {}
COUNTS: dict[str, int] = defaultdict(int)


@pytest.fixture(autouse=True, scope="module")
def float64() -> Iterator[None]:
    """TRL makes tensors of the default type on the way."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True, scope="module")
def report(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    plugins = request.config.pluginmanager
    width = max(map(len, DEVIATIONS), default=0)
    lines = [f"{name:{width}}  {COUNTS[name]:6}  {deviation:.1e}" for name, deviation in DEVIATIONS.items()]
    title = f"\n\n{f'comparison with TRL {trl.__version__}':{width}}  values  largest relative deviation"
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        for line in (title, *lines):
            plugins.getplugin("terminalreporter").write_line(line)


def agree(name: str, ours: Any, theirs: Any, bound: float = BOUND) -> None:
    """Every number of ``ours`` is within ``bound`` times the largest of ``theirs``; notes the deviation under ``name``."""
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (ours, theirs))
    assert ours.shape == theirs.shape
    assert torch.isfinite(theirs).all()
    deviation = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
    DEVIATIONS[name] = max(DEVIATIONS.get(name, 0.0), deviation)
    COUNTS[name] += ours.numel()
    assert deviation <= bound, f"{name}: {deviation:.2e}\nours   {ours}\ntheirs {theirs}"


def slope(loss: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


# Batches -----------------------------------------------------------------------------------------------------------------


@dataclass
class Padded:
    """A ragged batch as TRL holds it: [B, T], right-padded; ``flat`` gives the same tokens as ours."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    proximal: torch.Tensor
    behaviour: torch.Tensor
    reference: torch.Tensor
    lengths: list[int]
    completion_mask: torch.Tensor
    tool_mask: torch.Tensor  # 0 within a response: a tool wrote it
    advantages: torch.Tensor
    rewards: list[float]

    def flat(self) -> Tokens:
        real = self.completion_mask.bool()
        return Tokens(
            logprobs=self.logprobs[real],
            entropy=self.entropy[real],
            old=self.proximal[real],
            proximal=self.proximal[real],
            behaviour=self.behaviour[real],
            advantages=self.advantages[:, None].expand(real.shape)[real],
            mask=self.tool_mask[real].bool(),
            sequence=torch.arange(len(real))[:, None].expand(real.shape)[real],
            group=torch.arange(len(real))[:, None].expand(real.shape)[real] // GROUP,
            reference=self.reference[real],
        )


def ragged(seed: int, longest: int = 12) -> Padded:
    """16 sequences of 1 to 12 tokens, one in four masked, at least one trained; ratios far from 1, garbage in the padding."""
    torch.manual_seed(seed)
    count = GROUPS * GROUP
    lengths = torch.randint(1, longest + 1, (count,))
    lengths[0] = longest
    shape = (count, longest)
    completion = (torch.arange(longest)[None] < lengths[:, None]).long()
    tool = (torch.rand(shape) > 0.25).long()
    tool[:, 0] = 1
    proximal = -0.3 - 3 * torch.rand(shape)
    return Padded(
        logprobs=(proximal + 0.3 * torch.randn(count, 1) + 0.4 * torch.randn(shape)).requires_grad_(),
        entropy=(2 * torch.rand(shape)).requires_grad_(),
        proximal=proximal,
        behaviour=proximal + 0.15 * torch.randn(count, 1) + 0.3 * torch.randn(shape),
        reference=proximal + 0.6 * torch.randn(shape),
        lengths=lengths.tolist(),
        completion_mask=completion,
        tool_mask=tool,
        advantages=torch.randn(count),
        rewards=torch.randn(count).tolist(),
    )


# Ours --------------------------------------------------------------------------------------------------------------------


def weights(tokens: Tokens, options: Algorithm) -> torch.Tensor:
    """token: 1/N; sequence: 1/(S n_s); fixed: 1/(S L)."""
    trained = [int(tokens.mask[tokens.sequence == s].sum()) for s in range(int(tokens.sequence.max()) + 1)]
    sequences = sum(n > 0 for n in trained)
    of_sequence = {
        "token": [1 / sum(trained) for _ in trained],
        "sequence": [1 / (sequences * max(n, 1)) for n in trained],
        "fixed": [1 / (sequences * (options.fixed_length or 1)) for _ in trained],
    }[options.reduction]
    return torch.tensor(of_sequence)[tokens.sequence]


def our_loss(batch: Padded, options: Algorithm) -> torch.Tensor:
    tokens = batch.flat()
    losses = OBJECTIVES[options.objective](tokens, options)[0]
    for name, bounds in options.corrections.items():
        losses = losses * CORRECTIONS[name][0](tokens, bounds.low or 0.0, bounds.high or float("inf"))
    if options.kl_coef:
        losses = losses + options.kl_coef * kl_loss(tokens, options)
    losses = losses - options.entropy_coef * tokens.entropy
    return (losses * weights(tokens, options))[tokens.mask].sum()


# Theirs ------------------------------------------------------------------------------------------------------------------


def configured(trainer: Any, config: Any, model: Any) -> None:
    """What a trainer's ``__init__`` takes over from its configuration, and the rest of what its losses read."""
    for field in fields(config):
        if not isinstance(getattr(type(trainer), field.name, None), property):
            setattr(trainer, field.name, getattr(config, field.name))
    trainer.args = config
    trainer.accelerator = Accelerator(cpu=True)
    trainer.model = model
    trainer.aux_loss_enabled, trainer.current_gradient_accumulation_steps = False, 1
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer._total_train_tokens, trainer._tp_size = 0, 1


def common(**options: Any) -> dict[str, Any]:
    return {"output_dir": "/nonexistent", "report_to": [], "bf16": False, "use_cpu": True} | options


REFERENCE_MODEL = object()


class Sampled:
    """In place of models, servers and reward functions: the tensors of a batch."""

    batch: Padded

    def sample(self, batch: Padded) -> None:
        self.batch = batch
        vars(self).update(
            ref_model=REFERENCE_MODEL,
            reward_funcs=[None],
            reward_func_names=["reward"],
            reward_weights=torch.ones(1),
            environment_factories=None,
            environments=None,
            tools=[],
            eos_token_ids=[],
            _tokenizer=SimpleNamespace(pad_token_id=0),
            _logs={"rewards": defaultdict(list), "extra": defaultdict(list)}
            | {name: [] for name in ("prompt", "completion", "advantages")},
            _pending_extra_logs={},
            _pending_metrics={},
        )

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Any, Any, None]:
        if model is REFERENCE_MODEL:
            return self.batch.reference, None, None
        if not torch.is_grad_enabled():  # before the step
            return self.batch.proximal, None, None
        return self.batch.logprobs, self.batch.entropy, None

    def _calculate_rewards(self, *_: Any) -> torch.Tensor:
        return torch.tensor(self.batch.rewards)[:, None]

    def completions(self) -> list[list[int]]:
        return [[1] * length for length in self.batch.lengths]


class Grpo(Sampled, GRPOTrainer):
    def __init__(self, batch: Padded, **options: Any) -> None:
        config = GRPOConfig(
            **common(per_device_train_batch_size=GROUPS * GROUP, num_generations=GROUP, gradient_accumulation_steps=1),
            **options,
        )
        configured(self, config, SimpleNamespace(training=True, is_gradient_checkpointing=False))
        self.sample(batch)
        self.epsilon_low = config.epsilon
        self.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        self._entropy_bonus_enabled = config.entropy_coef != 0.0 or config.use_adaptive_entropy
        self._last_world_entropy, self._entropy_window_stats = float("inf"), None

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        tool = [row[:n].tolist() for row, n in zip(self.batch.tool_mask, self.batch.lengths, strict=True)]
        logprobs = [row[:n].tolist() for row, n in zip(self.batch.behaviour, self.batch.lengths, strict=True)]
        prompt_ids = [[1]] * len(prompts)
        return prompt_ids, self.completions(), tool, [""] * len(prompts), logprobs, {}, None, [None] * len(prompts)

    def scored(self) -> dict[str, torch.Tensor]:
        """Advantages and importance ratios, from their code for samples."""
        return self._generate_and_score_completions([{"prompt": ""}] * len(self.batch.lengths))

    def inputs(self) -> dict[str, torch.Tensor]:
        """The inputs of a step with the batch's own advantages."""
        batch, count = self.batch, len(self.batch.lengths)
        return {
            "prompt_ids": torch.ones(count, 1, dtype=torch.long),
            "prompt_mask": torch.ones(count, 1, dtype=torch.long),
            "completion_ids": torch.ones_like(batch.completion_mask),
            "completion_mask": batch.completion_mask,
            "tool_mask": batch.tool_mask,
            "advantages": batch.advantages,
            "num_items_in_batch": (batch.completion_mask * batch.tool_mask).sum(),
            "old_per_token_logps": batch.proximal,
            "sampling_per_token_logps": batch.behaviour,
            "ref_per_token_logps": batch.reference,
        }

    def loss(self, inputs: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        return self._compute_loss(self.model, self.inputs() if inputs is None else inputs)


class Rloo(Sampled, RLOOTrainer):
    def __init__(self, batch: Padded, **options: Any) -> None:
        config = RLOOConfig(
            **common(per_device_train_batch_size=GROUPS * GROUP, num_generations=GROUP, gradient_accumulation_steps=1),
            **options,
        )
        configured(self, config, SimpleNamespace(training=True, is_gradient_checkpointing=False))
        self.sample(batch)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        return [[1]] * len(prompts), self.completions(), [""] * len(prompts)

    def scored_advantages(self) -> torch.Tensor:
        return self._generate_and_score_completions([{"prompt": ""}] * len(self.batch.lengths))["advantages"]


def same_step(name: str, batch: Padded, options: Algorithm, trainer: Grpo, inputs: Any = None) -> None:
    """Value and gradients of the loss, with respect to log-probabilities and entropies."""
    mine, other = our_loss(batch, options), trainer.loss(inputs)
    agree(name, mine, other)
    theirs = slope(other, batch.logprobs)
    assert theirs.count_nonzero() > 0
    agree(name, slope(mine, batch.logprobs), theirs)
    if options.entropy_coef:
        agree(name, slope(mine, batch.entropy), slope(other, batch.entropy))


# Objectives and reductions -----------------------------------------------------------------------------------------------

SEQUENCE = {"importance_sampling_level": "sequence"}
OBJECTIVE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ppo, sequence = grpo": ({"objective": "ppo", "reduction": "sequence"}, {"loss_type": "grpo"}),
    "ppo, token = bnpo": ({"objective": "ppo", "reduction": "token"}, {"loss_type": "bnpo"}),
    "ppo, token, clip higher = dapo": (
        {"objective": "ppo", "reduction": "token", "clip_high": 0.28},
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "ppo, fixed = dr_grpo": (
        {"objective": "ppo", "reduction": "fixed", "fixed_length": 17},
        {"loss_type": "dr_grpo", "max_completion_length": 17},
    ),
    "ppo, dual_clip = grpo, delta": (
        {"objective": "ppo", "reduction": "sequence", "dual_clip": 1.6},
        {"loss_type": "grpo", "delta": 1.6},
    ),
    "gspo, sequence = grpo, sequence level": (
        {"objective": "gspo", "reduction": "sequence", "clip_low": 0.1, "clip_high": 0.15},
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.15, **SEQUENCE},
    ),
    "gspo, token = dapo, sequence level": (
        {"objective": "gspo", "reduction": "token"},
        {"loss_type": "dapo", **SEQUENCE},
    ),
    "gspo, fixed 1 = luspo": (
        {"objective": "gspo", "reduction": "fixed", "fixed_length": 1},
        {"loss_type": "luspo", **SEQUENCE},
    ),
    "gspo, dual_clip = grpo, sequence level, delta": (
        {"objective": "gspo", "reduction": "sequence", "dual_clip": 1.3},
        {"loss_type": "grpo", "delta": 1.3, **SEQUENCE},
    ),
    "cispo, token = cispo": (
        {"objective": "cispo", "reduction": "token", "clip_low": 1.0, "clip_high": 0.3},
        {"loss_type": "cispo", "epsilon_high": 1.3},  # theirs is the bound itself, and they have none below
    ),
    "sapo, sequence = sapo": ({"objective": "sapo", "reduction": "sequence"}, {"loss_type": "sapo"}),
    "sapo, other temperatures": (
        {"objective": "sapo", "reduction": "sequence", "sapo_tau_positive": 0.7, "sapo_tau_negative": 2.1},
        {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.1},
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", OBJECTIVE_CASES)
def test_an_objective_and_its_reduction_are_trls(name: str, seed: int) -> None:
    ours, theirs = OBJECTIVE_CASES[name]
    batch, options = ragged(seed), Algorithm.model_validate(ours)
    same_step(name, batch, options, Grpo(batch, **theirs))
    tokens = batch.flat()
    logs = OBJECTIVES[options.objective](tokens, options)[1]
    if "clip_fraction" in logs:
        assert 0 < logs["clip_fraction"][tokens.mask].double().mean() < 1


@pytest.mark.parametrize("seed", SEEDS)
def test_the_clip_fraction_is_trls(seed: int) -> None:
    batch = ragged(seed)
    trainer = Grpo(batch, loss_type="dapo", epsilon_high=0.3)
    trainer.loss()
    tokens = batch.flat()
    clipped = OBJECTIVES["ppo"](tokens, Algorithm(clip_high=0.3))[1]["clip_fraction"][tokens.mask]
    theirs = trainer._metrics["train"]["clip_ratio/region_mean"]
    agree("clip_fraction = clip_ratio/region_mean", clipped.double().mean(), theirs[0], bound=1e-6)  # theirs: float32


KL_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kl k3, sequence = beta": (
        {"kl_coef": 0.3, "kl_estimator": "k3", "reduction": "sequence"},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "kl k3, token = beta": (
        {"kl_coef": 0.3, "kl_estimator": "k3"},
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "kl unbiased = use_bias_correction_kl": (
        {"kl_coef": 0.3, "kl_estimator": "unbiased"},
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "kl unbiased, fixed = use_bias_correction_kl, dr_grpo": (
        {"kl_coef": 0.3, "kl_estimator": "unbiased", "reduction": "fixed", "fixed_length": 20},
        {"loss_type": "dr_grpo", "beta": 0.3, "use_bias_correction_kl": True, "max_completion_length": 20},
    ),
    "entropy_coef = entropy_coef": ({"entropy_coef": 0.05}, {"loss_type": "dapo", "entropy_coef": 0.05}),
    "opsm = off_policy_mask_threshold": (
        {"corrections": {"opsm": {"high": 0.05}}},
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
    ),
    "opsm, sequence = off_policy_mask_threshold, grpo": (
        {"corrections": {"opsm": {"high": 0.1}}, "reduction": "sequence"},
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.1},
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", KL_CASES)
def test_a_further_term_of_the_loss_is_trls(name: str, seed: int) -> None:
    ours, theirs = KL_CASES[name]
    batch = ragged(seed)
    same_step(name, batch, Algorithm.model_validate(ours), Grpo(batch, **theirs))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_off_policy_sequence_mask_is_trls(seed: int) -> None:
    batch = ragged(seed)
    mask = batch.completion_mask * batch.tool_mask
    theirs = GRPOTrainer.get_off_policy_mask(batch.advantages[:, None], batch.logprobs, batch.behaviour, mask, 0.05)
    tokens = batch.flat()
    ours = CORRECTIONS["opsm"][0](tokens, 0.0, 0.05)
    assert 0 < theirs.double().mean() < 1
    agree("opsm = get_off_policy_mask", ours, theirs[:, 0][tokens.sequence])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_adaptive_entropy_weight_goes_through_trls_states(seed: int) -> None:
    """Over a run whose entropy crosses the target often, at both ends of the weight's range."""
    options = Algorithm(entropy_coef=0.015, entropy_target=0.9, entropy_delta=0.01, entropy_coef_max=0.025)
    batch = ragged(seed)
    trainer = Grpo(
        batch,
        loss_type="dapo",
        use_adaptive_entropy=True,
        entropy_coef=options.entropy_coef,
        entropy_target=options.entropy_target,
        entropy_coef_delta=options.entropy_delta,
        entropy_coef_max=options.entropy_coef_max,
    )
    mask = (batch.completion_mask * batch.tool_mask).bool()
    draws, applied, coefs = random.Random(seed), [], []
    coef, active = options.entropy_coef, False
    scales = [0.5, 0.5, 0.5, 2.0, 2.0, 2.0, 2.0, *(draws.choice([0.5, 2.0]) for _ in range(13))]
    for scale in scales:
        batch.entropy = (torch.rand(mask.shape) * scale).requires_grad_()
        theirs = -slope(trainer.loss(), batch.entropy)[mask].sum()  # of the mean over tokens: the weight
        applied.append((coef if active else 0.0, theirs.item()))
        coef, active = adapt_entropy(coef, batch.entropy[mask].mean().item(), options)
        coefs.append((coef, trainer.entropy_coef))
    assert len({round(theirs, 9) for _, theirs in applied}) >= 3
    for name, pairs in (("adapt_entropy: weight applied", applied), ("adapt_entropy: weight kept", coefs)):
        agree(name, [ours for ours, _ in pairs], [theirs for _, theirs in pairs])


# Corrections -------------------------------------------------------------------------------------------------------------

IS_CASES: dict[str, tuple[str, float, float, str]] = {
    "tis = token_truncate": ("tis", 0.0, 1.3, "token_truncate"),
    "tis, both bounds = token_truncate": ("tis", 0.8, 1.3, "token_truncate"),
    "tis_sequence = sequence_truncate": ("tis_sequence", 0.0, 1.5, "sequence_truncate"),
    "icepop = token_mask": ("icepop", 0.0, 1.3, "token_mask"),
    "icepop, both bounds = token_mask": ("icepop", 0.8, 1.3, "token_mask"),
    "mis = sequence_mask": ("mis", 0.0, 1.5, "sequence_mask"),
    "mis, both bounds = sequence_mask": ("mis", 0.5, 1.5, "sequence_mask"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", IS_CASES)
def test_an_importance_sampling_correction_is_trls(name: str, seed: int) -> None:
    """From the samples' log-probabilities to the gradient, all in TRL's own code."""
    correction, low, high, mode = IS_CASES[name]
    batch = ragged(seed)
    trainer = Grpo(
        batch,
        loss_type="dapo",
        use_vllm=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low or None,
        vllm_importance_sampling_clip_max=high,
    )
    scored, tokens = trainer.scored(), batch.flat()
    theirs = scored["importance_sampling_ratio"].expand(batch.logprobs.shape)[batch.completion_mask.bool()]
    ours = CORRECTIONS[correction][0](tokens, low, high)
    assert (ours != torch.exp(tokens.proximal - tokens.behaviour))[tokens.mask].any()
    agree(name, ours[tokens.mask], theirs[tokens.mask])
    batch.advantages = scored["advantages"]
    options = Algorithm.model_validate({"corrections": {correction: {"low": low, "high": high}}})
    same_step(name, batch, options, trainer, scored)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_whole_step_with_everything_at_once_is_trls(seed: int) -> None:
    """Rewards to gradient: grpo advantages, clip, opsm, tis, unbiased KL and entropy bonus, token mean."""
    batch = ragged(seed)
    trainer = Grpo(
        batch,
        loss_type="dapo",
        epsilon_high=0.28,
        delta=2.0,
        beta=0.2,
        use_bias_correction_kl=True,
        entropy_coef=0.03,
        off_policy_mask_threshold=0.1,
        use_vllm=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
    )
    scored = trainer.scored()
    options = Algorithm.model_validate(
        {
            "clip_high": 0.28,
            "dual_clip": 2.0,
            "kl_coef": 0.2,
            "kl_estimator": "unbiased",
            "entropy_coef": 0.03,
            "corrections": {"opsm": {"high": 0.1}, "tis": {"low": 0.0, "high": 2.0}},
        }
    )
    with mock.patch.object(advantages, "EPSILON", 1e-4):  # theirs
        batch.advantages = torch.tensor(estimated("grpo", batch.rewards))
    same_step("a whole step: rewards to gradient", batch, options, trainer, scored)


# Advantages --------------------------------------------------------------------------------------------------------------


def estimated(name: str, rewards: list[float]) -> list[float]:
    """Our estimator on the same rewards in another order: groups belong together by their name only."""
    order = random.Random(1).sample(range(len(rewards)), len(rewards))
    values = ESTIMATORS[name]([Scored(str(i // GROUP), rewards[i]) for i in order])
    by_index = dict(zip(order, values, strict=True))
    return [by_index[i] for i in range(len(rewards))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "mode"), [("grpo", "group"), ("grpo_batch_std", "batch"), ("dr_grpo", "none")])
def test_group_advantages_are_trls(name: str, mode: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ragged(seed)
    batch.rewards[:GROUP] = [0.5] * GROUP  # a group that agrees
    theirs = Grpo(batch, scale_rewards=mode).scored()["advantages"]
    monkeypatch.setattr(advantages, "EPSILON", 1e-4)  # theirs
    agree(f"{name} = scale_rewards {mode}", estimated(name, batch.rewards), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_leave_one_out_advantages_are_trls(seed: int) -> None:
    batch = ragged(seed)
    agree("rloo = RLOOTrainer", estimated("rloo", batch.rewards), Rloo(batch, beta=0.0).scored_advantages())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_k1_penalty_in_the_reward_is_trls(seed: int) -> None:
    batch = ragged(seed)
    batch.tool_mask = torch.ones_like(batch.tool_mask)  # RLOOTrainer has no tools
    theirs = Rloo(batch, beta=0.2).scored_advantages()
    penalty = (KL["k1"](batch.proximal, batch.reference) * batch.completion_mask).sum(-1)
    rewards = [r - 0.2 * p for r, p in zip(batch.rewards, penalty.tolist(), strict=True)]
    agree("rloo, k1 in the reward = RLOOTrainer, beta", estimated("rloo", rewards), theirs)


# Preferences and supervision ---------------------------------------------------------------------------------------------


class Outputs:
    """In place of a model with TRL's fused head: log-probabilities, 0 where nothing is learned."""

    training, is_gradient_checkpointing, _modules = True, False, ()

    def __init__(self, log_probs: torch.Tensor, mask: torch.Tensor) -> None:
        zeros = torch.zeros_like(log_probs)
        self.outputs = SimpleNamespace(
            log_probs=log_probs * mask, entropy=zeros, mean_logits=zeros, is_top1=mask.bool(), label_mask=mask
        )

    def __call__(self, **_: Any) -> SimpleNamespace:
        return self.outputs


class Dpo(DPOTrainer):
    def __init__(self, policy: Outputs, reference: Outputs, beta: float) -> None:
        configured(self, DPOConfig(**common(beta=beta)), policy)
        vars(self)["ref_model"] = reference
        self.loss_types, self.loss_weights, self.precompute_ref_logps = ["sigmoid"], [1.0], False


class Sft(SFTTrainer):
    def __init__(self, policy: Outputs) -> None:
        configured(self, SFTConfig(**common()), policy)
        self.compute_loss_func, self.label_smoother = None, None


def padded_inputs(mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """A prompt of one token before the response."""
    first = torch.zeros(len(mask), 1, dtype=torch.long)
    ids = torch.ones(len(mask), mask.shape[1] + 1, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": ids, "completion_mask": torch.cat([first, mask], 1)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("beta", [0.1, 1.5])
def test_dpo_is_trls(beta: float, seed: int) -> None:
    batch = ragged(seed)
    count = len(batch.lengths)
    pair = torch.arange(count) % (count // 2)  # as TRL has them: all chosen, then all rejected
    batch.advantages = torch.tensor([1.0] * (count // 2) + [-1.0] * (count // 2))
    mask = batch.completion_mask * batch.tool_mask
    theirs = Dpo(Outputs(batch.logprobs, mask), Outputs(batch.reference, mask), beta)
    other = theirs._compute_loss(theirs.model, padded_inputs(mask), return_outputs=False)
    flat = batch.flat()
    tokens = Tokens(**{**vars(flat), "group": pair[flat.sequence]})
    options = Algorithm(objective="dpo", dpo_beta=beta, reduction="sequence")
    losses, logs = OBJECTIVES["dpo"](tokens, options)
    mine = (losses * weights(tokens, options))[tokens.mask].sum()
    agree("dpo = DPOTrainer, sigmoid", mine, other)
    agree("dpo = DPOTrainer, sigmoid", slope(mine, batch.logprobs), slope(other, batch.logprobs))
    first = [int((tokens.sequence == s).nonzero()[0]) for s in range(count // 2)]
    metrics = theirs._metrics["train"]
    agree("dpo_margin = rewards/margins", beta * logs["dpo_margin"][first].mean(), metrics["rewards/margins"][0])
    accuracy = logs["dpo_accuracy"][first].double().mean()
    agree("dpo_accuracy = rewards/accuracies", accuracy, metrics["rewards/accuracies"][0], bound=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_sft_is_trls(seed: int) -> None:
    batch = ragged(seed)
    mask = batch.completion_mask * batch.tool_mask
    theirs = Sft(Outputs(batch.logprobs, mask))
    other = theirs.compute_loss(theirs.model, padded_inputs(mask))
    mine = our_loss(batch, Algorithm(objective="sft"))
    agree("sft, token = SFTTrainer", mine, other)
    agree("sft, token = SFTTrainer", slope(mine, batch.logprobs), slope(other, batch.logprobs))


@pytest.mark.parametrize("seed", SEEDS)
def test_sft_is_torchs_cross_entropy(seed: int) -> None:
    """Of random logits, with ignored positions, down to the logits' gradient."""
    batch = ragged(seed)
    real = batch.completion_mask.bool()
    logits = torch.randn(int(real.sum()), 11, requires_grad=True)
    targets = torch.randint(0, 11, (len(logits),))
    flat = batch.flat()
    logprobs = logits.log_softmax(-1)[torch.arange(len(logits)), targets]
    tokens = Tokens(**{**vars(flat), "logprobs": logprobs})
    options = Algorithm(objective="sft")
    mine = (OBJECTIVES["sft"](tokens, options)[0] * weights(tokens, options))[tokens.mask].sum()
    other = F.cross_entropy(logits, targets.where(flat.mask, torch.tensor(-100)), ignore_index=-100)
    agree("sft, token = torch cross_entropy", mine, other)
    agree("sft, token = torch cross_entropy", slope(mine, logits), slope(other, logits))
