"""The objectives and KL estimators against the papers' formulas, token by token in plain Python floats, and their gradients
against finite differences of those formulas."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
import torch

from vime.config.sections import Algorithm
from vime.training.losses import KL, OBJECTIVES, Tokens, adapt_entropy, k3, kl_loss, low_variance

SEEDS = range(4)


@pytest.fixture(autouse=True, scope="module")
def float64() -> Iterator[None]:
    """Options become tensors of the default type on the way."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Batches in plain numbers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Token:
    """``frozen`` is ``logprob`` where a formula stops its gradient."""

    logprob: float
    frozen: float
    old: float
    reference: float
    advantage: float
    trained: bool
    chosen: bool
    sequence: int
    group: int


Batch = list[Token]


def make(seed: int, preference: bool = False) -> Batch:
    """8 sequences of 1 to 6 tokens in 4 interleaved groups of two; about one token in four is not trained."""
    draw = random.Random(seed)
    batch = []
    for sequence in range(8):
        advantage = (1.0 if sequence < 4 else -1.0) if preference else draw.gauss(0, 1)
        drift = draw.gauss(0, 0.25)
        for position in range(draw.randint(1, 6)):
            old = -0.3 - 2.5 * draw.random()
            logprob = min(old + drift + draw.gauss(0, 0.5), -0.02)
            batch.append(
                Token(
                    logprob=logprob,
                    frozen=logprob,
                    old=old,
                    reference=old + draw.gauss(0, 0.4),
                    advantage=advantage,
                    trained=position == 0 or draw.random() > 0.25,
                    chosen=draw.random() < 0.4,
                    sequence=sequence,
                    group=sequence % 4,
                )
            )
    return batch


def tensors(batch: Batch, logprobs: torch.Tensor | None = None, dtype: torch.dtype = torch.float64) -> Tokens:
    """The batch as an objective takes it; ``logprobs`` instead of its own, to take gradients."""

    def column(name: str, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in batch], dtype=dtype)

    return Tokens(
        logprobs=column("logprob") if logprobs is None else logprobs,
        entropy=torch.ones(len(batch), dtype=dtype),
        old=column("old"),
        proximal=column("old"),
        behaviour=column("old"),
        advantages=column("advantage"),
        mask=column("trained", torch.bool),
        sequence=column("sequence", torch.long),
        group=column("group", torch.long),
        reference=column("reference"),
        chosen=column("chosen", torch.bool),
    )


def leaf(batch: Batch, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([token.logprob for token in batch], dtype=dtype, requires_grad=True)


def differentiated(
    name: str, options: Algorithm, batch: Batch, coefficients: Sequence[float] | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Losses, logs and the gradient of the trained tokens' sum, each times its coefficient."""
    logprobs = leaf(batch)
    losses, logs = OBJECTIVES[name](tensors(batch, logprobs), options)
    factors = torch.tensor([1.0] * len(batch) if coefficients is None else coefficients)
    mask = torch.tensor([token.trained for token in batch])
    (slope,) = torch.autograd.grad((losses * factors)[mask].sum(), logprobs)
    return losses.detach(), logs, slope


# The papers' formulas ----------------------------------------------------------------------------------------------------


def clipped(ratio: float, advantage: float, options: Algorithm) -> float:
    """PPO by the advantage's sign: only the bound on the side to which it pushes acts, and dual_clip on the other."""
    if advantage >= 0:
        return -min(ratio, 1 + options.clip_high) * advantage
    return -min(max(ratio, 1 - options.clip_low), options.dual_clip or math.inf) * advantage


def ppo(token: Token, batch: Batch, options: Algorithm) -> float:
    return clipped(math.exp(token.logprob) / math.exp(token.old), token.advantage, options)


def gspo(token: Token, batch: Batch, options: Algorithm) -> float:
    ratios = [math.exp(t.logprob) / math.exp(t.old) for t in batch if t.trained and t.sequence == token.sequence]
    return clipped(math.prod(ratios) ** (1 / len(ratios)), token.advantage, options)


def cispo(token: Token, batch: Batch, options: Algorithm) -> float:
    weight = min(max(math.exp(token.frozen - token.old), 1 - options.clip_low), 1 + options.clip_high)
    return -weight * token.advantage * token.logprob


def sapo(token: Token, batch: Batch, options: Algorithm) -> float:
    tau = options.sapo_tau_positive if token.advantage > 0 else options.sapo_tau_negative
    ratio = math.exp(token.logprob) / math.exp(token.old)
    return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * token.advantage


def policy_gradient(token: Token, batch: Batch, options: Algorithm) -> float:
    return -token.advantage * token.logprob


def unless_outward(token: Token, divergence: float, options: Algorithm) -> float:
    """DPPO's surrogate: nothing where the policy has gone too far already and the advantage pushes further."""
    too_far = divergence > options.dppo_delta
    if too_far and token.advantage > 0 and token.frozen > token.old:
        return 0.0
    if too_far and token.advantage < 0 and token.frozen < token.old:
        return 0.0
    return -math.exp(token.logprob) / math.exp(token.old) * token.advantage


def dppo_tv(token: Token, batch: Batch, options: Algorithm) -> float:
    return unless_outward(token, abs(math.exp(token.frozen) - math.exp(token.old)), options)


def dppo_kl(token: Token, batch: Batch, options: Algorithm) -> float:
    p, q = math.exp(token.old), math.exp(token.frozen)
    return unless_outward(token, p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), options)


def clip_cov(token: Token, batch: Batch, options: Algorithm) -> float:
    return ppo(replace(token, logprob=token.frozen) if token.chosen else token, batch, options)


def kl_cov(token: Token, batch: Batch, options: Algorithm) -> float:
    penalty = options.cov_coef * abs(token.logprob - token.old) if token.chosen else 0.0
    return -math.exp(token.logprob) / math.exp(token.old) * token.advantage + penalty


def sft(token: Token, batch: Batch, options: Algorithm) -> float:
    return -token.logprob


def dpo(token: Token, batch: Batch, options: Algorithm) -> float:
    mine = [t for t in batch if t.trained and t.group == token.group]
    rewards = {
        side: options.dpo_beta * sum(t.logprob - t.reference for t in mine if t.advantage == side) for side in (1, -1)
    }
    return -math.log(1 / (1 + math.exp(-(rewards[1] - rewards[-1]))))


FORMULAS: dict[str, Callable[[Token, Batch, Algorithm], float]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "policy_gradient": policy_gradient,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "sft": sft,
    "dpo": dpo,
}
OPTIONS: dict[str, list[dict[str, float]]] = {  # beside the defaults
    "ppo": [{"clip_low": 0.1, "clip_high": 0.3}, {"dual_clip": 1.5}],
    "gspo": [{"clip_low": 0.05, "clip_high": 0.1}, {"dual_clip": 1.25}],
    "cispo": [{"clip_low": 1.0, "clip_high": 0.3}],
    "sapo": [{"sapo_tau_positive": 0.6, "sapo_tau_negative": 2.5}],
    "dppo_tv": [{"dppo_delta": 0.05}],
    "dppo_kl": [{"dppo_delta": 0.01}],
    "clip_cov": [{"clip_low": 0.1, "clip_high": 0.3}, {"dual_clip": 1.5}],
    "kl_cov": [{"cov_coef": 0.25}],
    "dpo": [{"dpo_beta": 1.3}],
}
CASES = [(name, options) for name in OBJECTIVES for options in [{}, *OPTIONS.get(name, [])]]
STOPPED = {"cispo", "clip_cov"}  # their gradient is not their value's: only the formula with ``frozen`` has it


def formula(name: str, batch: Batch, options: Algorithm) -> list[float]:
    assert name in FORMULAS, f"the objective {name} has no reference in this test: add its paper's formula"
    return [FORMULAS[name](token, batch, options) for token in batch]


# Objectives --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_an_objective_is_the_papers_for_every_trained_token(name: str, options: dict[str, float], seed: int) -> None:
    batch, algorithm = make(seed, preference=name == "dpo"), Algorithm.model_validate(options)
    losses, _ = OBJECTIVES[name](tensors(batch), algorithm)
    assert losses.shape == (len(batch),)
    trained = [token.trained for token in batch]
    expected = np.asarray(formula(name, batch, algorithm))
    np.testing.assert_allclose(losses.numpy()[trained], expected[trained], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_its_gradient_is_the_papers_too(name: str, options: dict[str, float], seed: int) -> None:
    """Central differences of the formula; every token's loss has its own coefficient, as under the weights of a reduction."""
    batch, algorithm = make(seed, preference=name == "dpo"), Algorithm.model_validate(options)
    draw, step = random.Random(seed), 1e-6
    coefficients = [draw.uniform(0.5, 1.5) * token.trained for token in batch]

    def total(moved: Batch) -> float:
        return math.fsum(c * x for c, x in zip(coefficients, formula(name, moved, algorithm), strict=True))

    expected = [
        (
            total([*batch[:i], replace(token, logprob=token.logprob + step), *batch[i + 1 :]])
            - total([*batch[:i], replace(token, logprob=token.logprob - step), *batch[i + 1 :]])
        )
        / (2 * step)
        for i, token in enumerate(batch)
    ]
    _, _, slope = differentiated(name, algorithm, batch, coefficients)
    np.testing.assert_allclose(slope.numpy(), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] not in STOPPED])
def test_the_gradient_is_the_numerical_one_of_the_loss_itself(name: str, options: dict[str, float]) -> None:
    batch, algorithm = make(5, preference=name == "dpo"), Algorithm.model_validate(options)
    assert torch.autograd.gradcheck(lambda x: OBJECTIVES[name](tensors(batch, x), algorithm)[0], leaf(batch))


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - {"sft", "dpo"}))
def test_on_policy_an_objectives_gradient_is_minus_the_advantage(name: str) -> None:
    batch = [replace(token, old=token.logprob, chosen=False) for token in make(0)]
    _, _, slope = differentiated(name, Algorithm(), batch)
    expected = [-token.advantage * token.trained for token in batch]
    np.testing.assert_allclose(slope.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_order_of_sequences_does_not_matter(name: str) -> None:
    batch = make(1, preference=name == "dpo")
    order = random.Random(3).sample(range(8), 8)
    moved = [replace(t, sequence=new) for new, old in enumerate(order) for t in batch if t.sequence == old]
    places = [i for old in order for i, token in enumerate(batch) if token.sequence == old]
    straight, logs, slope = differentiated(name, Algorithm(), batch)
    other, other_logs, other_slope = differentiated(name, Algorithm(), moved)
    torch.testing.assert_close(other, straight[places])
    torch.testing.assert_close(other_slope, slope[places])
    for log, values in logs.items():
        torch.testing.assert_close(other_logs[log], values[places])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_tokens_that_are_not_trained_neither_matter_nor_learn(name: str) -> None:
    batch = make(2, preference=name == "dpo")
    noise = random.Random(4)
    other = [t if t.trained else replace(t, logprob=-9 * noise.random(), reference=-1.0, chosen=True) for t in batch]
    trained = torch.tensor([token.trained for token in batch])
    losses, _, slope = differentiated(name, Algorithm(), batch)
    other_losses, _, other_slope = differentiated(name, Algorithm(), other)
    torch.testing.assert_close(other_losses[trained], losses[trained])
    torch.testing.assert_close(other_slope, slope)
    assert (slope[~trained] == 0).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_log_ratio_of_50_either_way_leaves_loss_and_gradient_finite(name: str) -> None:
    draw = random.Random(6)
    batch = [replace(t, logprob=t.old + draw.choice([-50.0, 50.0])) for t in make(3, preference=name == "dpo")]
    logprobs = leaf(batch, torch.float32)
    losses, _ = OBJECTIVES[name](tensors(batch, logprobs, torch.float32), Algorithm(dual_clip=3.0))
    (slope,) = torch.autograd.grad(losses.sum(), logprobs)
    assert losses.dtype == torch.float32
    assert torch.isfinite(losses).all() and torch.isfinite(slope).all()


# What counts as clipped --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo", {}),
        ("ppo", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5}),
        ("gspo", {"clip_low": 0.05, "clip_high": 0.1}),
        ("gspo", {"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.15}),
        ("dppo_tv", {"dppo_delta": 0.05}),
        ("dppo_kl", {"dppo_delta": 0.01}),
    ],
)
def test_tokens_count_as_clipped_exactly_where_the_gradient_stops(
    name: str, options: dict[str, float], seed: int
) -> None:
    batch = make(seed)
    _, logs, slope = differentiated(name, Algorithm.model_validate(options), batch)
    trained = torch.tensor([token.trained for token in batch])
    counted = logs["clip_fraction"][trained]
    assert counted.any() and not counted.all()
    assert torch.equal(counted, slope[trained] == 0)


def test_cispo_counts_bounded_weights_and_keeps_every_gradient() -> None:
    batch = make(0)
    _, logs, slope = differentiated("cispo", Algorithm(), batch)
    ratios = [math.exp(token.logprob - token.old) for token in batch]
    assert logs["clip_fraction"].tolist() == [not 0.8 <= ratio <= 1.2 for ratio in ratios]
    assert (slope[torch.tensor([token.trained for token in batch])] != 0).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.29, 1.0, -1.29, False),
        (1.31, 1.0, -1.3, True),  # good, and already more likely by enough
        (1.31, -1.0, 1.31, False),  # bad and more likely: pushed down
        (2.99, -1.0, 2.99, False),
        (3.01, -1.0, 3.0, True),  # dual clip: not without bound
        (0.81, -1.0, 0.81, False),
        (0.79, -1.0, 0.8, True),  # bad, and already less likely by enough
        (0.79, 1.0, -0.79, False),  # good and less likely: pulled up without bound
        (5.0, 0.0, 0.0, False),
    ],
)
@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_clipping_worked_by_hand(name: str, ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    old = -4.0
    token = replace(make(0)[0], logprob=old + math.log(ratio), old=old, advantage=advantage, trained=True)
    losses, logs, slope = differentiated(name, Algorithm(clip_high=0.3, dual_clip=3.0), [token])
    assert losses.item() == pytest.approx(loss)
    assert bool(logs["clip_fraction"]) == clipped
    assert slope.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("over", [True, False])
def test_dppo_masks_just_over_its_divergence_and_only_outwards(
    name: str, advantage: float, direction: int, over: bool
) -> None:
    """The policy's probability is where the divergence is delta, a hair further or less."""
    old, delta = 0.4, 0.05

    def divergence(p: float) -> float:
        return abs(p - old) if name == "dppo_tv" else old * math.log(old / p) + 0.6 * math.log(0.6 / (1 - p))

    inner, outer = old, 1 - 1e-9 if direction > 0 else 1e-9
    for _ in range(200):  # bisection
        middle = (inner + outer) / 2
        inner, outer = (middle, outer) if divergence(middle) < delta else (inner, middle)
    probability = inner + direction * (1e-9 if over else -1e-9)
    token = replace(make(0)[0], logprob=math.log(probability), old=math.log(old), advantage=advantage, trained=True)
    losses, logs, slope = differentiated(name, Algorithm(dppo_delta=delta), [token])
    masked = over and direction == advantage
    assert bool(logs["clip_fraction"]) == masked
    assert losses.item() == pytest.approx(0.0 if masked else -probability / old * advantage)
    assert slope.item() == pytest.approx(0.0 if masked else -probability / old * advantage)


def test_gspo_is_ppo_where_every_sequence_has_one_token() -> None:
    batch = [replace(token, sequence=i, trained=True) for i, token in enumerate(make(0))]
    for mine, other in zip(*(differentiated(name, Algorithm(), batch) for name in ("gspo", "ppo")), strict=True):
        torch.testing.assert_close(mine, other)


def test_dpo_under_sequence_weights_is_the_mean_over_pairs_however_long_the_responses() -> None:
    batch = make(0, preference=True)
    losses = OBJECTIVES["dpo"](tensors(batch), Algorithm(dpo_beta=0.5))[0].tolist()
    counts = [sum(t.trained for t in batch if t.sequence == s) for s in range(8)]
    total = sum(x / (8 * counts[t.sequence]) for x, t in zip(losses, batch, strict=True) if t.trained)
    of_pairs = [dpo(next(t for t in batch if t.group == g), batch, Algorithm(dpo_beta=0.5)) for g in range(4)]
    assert total == pytest.approx(sum(of_pairs) / 4)


# KL estimators -----------------------------------------------------------------------------------------------------------

KL_FORMULAS: dict[str, Callable[[float, float], float]] = {  # of log pi and log other
    "k1": lambda p, q: p - q,
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "k3": lambda p, q: math.exp(q) / math.exp(p) - (q - p) - 1,
    "low_variance": lambda p, q: min(math.exp(q) / math.exp(p) - (q - p) - 1, 10.0),
}
VOCABULARY = 6


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the policy, log-probabilities of the reference and of the policy that sampled."""
    torch.manual_seed(seed)
    reference, old = (torch.randn(VOCABULARY).log_softmax(0) for _ in range(2))
    return torch.randn(VOCABULARY, requires_grad=True), reference, old


def true_kl(logits: torch.Tensor, reference: torch.Tensor) -> tuple[float, list[float]]:
    """KL(policy || reference) and its gradient pi_j (log pi_j - log ref_j - KL), by the definition."""
    p = [math.exp(x) for x in logits.tolist()]
    p = [x / sum(p) for x in p]
    logs = [math.log(x) - r for x, r in zip(p, reference.tolist(), strict=True)]
    kl = sum(x * d for x, d in zip(p, logs, strict=True))
    return kl, [x * (d - kl) for x, d in zip(p, logs, strict=True)]


def every_token(logits: torch.Tensor, reference: torch.Tensor, old: torch.Tensor) -> Tokens:
    """All tokens of the vocabulary, once each: an expectation is their sum times their probability."""
    logprobs, zeros = logits.log_softmax(0), torch.zeros(VOCABULARY)
    place = torch.arange(VOCABULARY)
    return Tokens(logprobs, zeros, old, old, old, zeros, torch.ones(VOCABULARY).bool(), place, place, reference)


@pytest.mark.parametrize("name", KL)
def test_a_kl_estimator_is_its_formula_for_every_token(name: str) -> None:
    assert name in KL_FORMULAS, f"the KL estimator {name} has no reference in this test: add its formula"
    batch = make(0)
    values = KL[name](tensors(batch).logprobs, tensors(batch).reference)  # type: ignore[arg-type]
    expected = [KL_FORMULAS[name](token.logprob, token.reference) for token in batch]
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", get_args(Algorithm.model_fields["kl_estimator"].annotation))
def test_every_estimator_makes_a_loss_with_the_numerical_gradient(name: str) -> None:
    batch, options = make(0), Algorithm.model_validate({"kl_estimator": name})
    assert torch.autograd.gradcheck(lambda x: kl_loss(tensors(batch, x), options), leaf(batch))
    expected = [
        math.exp(t.logprob - t.old) * KL_FORMULAS["k3"](t.logprob, t.reference)
        if name == "unbiased"
        else KL_FORMULAS[name](t.logprob, t.reference)
        for t in batch
    ]
    np.testing.assert_allclose(kl_loss(tensors(batch), options).numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_k1_and_k3_have_the_divergence_as_their_mean_under_the_policy(seed: int) -> None:
    logits, reference, _ = distributions(seed)
    policy = logits.detach().log_softmax(0)
    for name in ("k1", "k3"):
        mean = (policy.exp() * KL[name](policy, reference)).sum()
        assert mean.item() == pytest.approx(true_kl(logits, reference)[0], rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_mean_gradients_on_policy_are_what_the_docstrings_say(seed: int) -> None:
    """k1: none. k2: the divergence's. k3: that of KL(reference || policy), pi - ref."""
    logits, reference, _ = distributions(seed)
    logprobs = logits.log_softmax(0)
    policy = logprobs.detach().exp()
    expected = {
        "k1": [0.0] * VOCABULARY,
        "k2": true_kl(logits, reference)[1],
        "k3": (policy - reference.exp()).tolist(),
    }
    for name, gradient in expected.items():
        (slope,) = torch.autograd.grad((policy * KL[name](logprobs, reference)).sum(), logits, retain_graph=True)
        np.testing.assert_allclose(slope.numpy(), gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_unbiased_kl_has_the_divergences_own_mean_and_gradient_also_off_policy(seed: int, on_policy: bool) -> None:
    """All tokens that the old policy may sample, each times its probability."""
    logits, reference, old = distributions(seed)
    old = logits.detach().log_softmax(0) if on_policy else old
    tokens = every_token(logits, reference, old)
    mean = (old.exp() * kl_loss(tokens, Algorithm(kl_estimator="unbiased"))).sum()
    kl, gradient = true_kl(logits, reference)
    assert mean.item() == pytest.approx(kl, rel=1e-12)
    np.testing.assert_allclose(torch.autograd.grad(mean, logits)[0].numpy(), gradient, rtol=1e-10, atol=1e-14)


def test_k3_is_zero_for_equal_policies_positive_else_and_exact_where_they_hardly_differ() -> None:
    tokens = tensors(make(0))
    assert (k3(tokens.logprobs, tokens.logprobs) == 0).all()
    assert (k3(tokens.logprobs, tokens.old) > 0).all()
    tiny = torch.tensor([1e-6])
    assert k3(torch.zeros_like(tiny), tiny).item() == pytest.approx(5e-13, rel=1e-3)


@pytest.mark.parametrize("difference", [-1000.0, -50.0, -21.0, 5.0, 21.0, 50.0, 1000.0])
def test_low_variance_neither_overflows_nor_pulls_where_the_policies_are_far_apart(difference: float) -> None:
    logprob = torch.tensor([-3.0], dtype=torch.float32, requires_grad=True)
    value = low_variance(logprob, logprob.detach() + difference)
    (slope,) = torch.autograd.grad(value.sum(), logprob)
    assert value.item() == 10.0
    assert slope.item() == 0.0


def test_low_variance_is_k3_within_its_bounds() -> None:
    logprobs, other = torch.full((50,), -3.0), torch.linspace(-13.0, -0.5, 50)  # k3 from 9.0 over 0 to 8.7
    torch.testing.assert_close(low_variance(logprobs, other), k3(logprobs, other))


# The adaptive entropy weight ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coef", "entropy", "after", "active"),
    [
        (0.004, 0.1, 0.005, True),  # at the target
        (0.004, 0.09, 0.005, True),
        (0.004, 0.11, 0.003, False),
        (0.0095, 0.09, 0.01, True),  # at most entropy_coef_max
        (0.0005, 0.11, 0.0, False),  # at least 0
        (0.0, 0.09, 0.001, True),  # and up again from there
    ],
)
def test_the_entropy_weight_rises_at_or_under_the_target_and_falls_over_it(
    coef: float, entropy: float, after: float, active: bool
) -> None:
    options = Algorithm(entropy_target=0.1, entropy_delta=0.001, entropy_coef_max=0.01)
    assert adapt_entropy(coef, entropy, options) == (pytest.approx(after), active)
