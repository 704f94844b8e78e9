"""The off-policy corrections against their definitions in plain Python floats, and what they are at the extremes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from vime.training.corrections import CORRECTIONS, mismatch
from vime.training.losses import Tokens

SEEDS = range(4)


@dataclass(frozen=True)
class Token:
    """``ratio`` is w, trainer over server before the step; ``drift`` is behaviour - logprobs now."""

    ratio: float
    drift: float
    advantage: float
    trained: bool
    sequence: int


Batch = list[Token]


def make(seed: int) -> Batch:
    """10 sequences of 1 to 7 tokens, about one in four not trained, some far off policy."""
    draw = random.Random(seed)
    batch = []
    for sequence in range(10):
        advantage, shift = draw.gauss(0, 1), draw.gauss(0, 0.15)
        for position in range(draw.randint(1, 7)):
            batch.append(
                Token(
                    ratio=math.exp(shift + draw.gauss(0, 0.3)),
                    drift=shift + draw.gauss(0, 0.1),
                    advantage=advantage,
                    trained=position == 0 or draw.random() > 0.25,
                    sequence=sequence,
                )
            )
    return batch


def tensors(batch: Batch, dtype: torch.dtype = torch.float64) -> Tokens:
    def column(values: list[float], dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    behaviour = column([-1.0 - i % 3 for i in range(len(batch))])
    proximal = behaviour + column([math.log(token.ratio) for token in batch])
    sequence = column([token.sequence for token in batch], torch.long)
    return Tokens(
        logprobs=(behaviour - column([token.drift for token in batch])).requires_grad_(),
        entropy=torch.ones_like(behaviour),
        old=proximal,
        proximal=proximal,
        behaviour=behaviour,
        advantages=column([token.advantage for token in batch]),
        mask=column([token.trained for token in batch], torch.bool),
        sequence=sequence,
        group=sequence,
    )


def of_sequence(token: Token, batch: Batch) -> Batch:
    return [other for other in batch if other.trained and other.sequence == token.sequence]


# The definitions ---------------------------------------------------------------------------------------------------------


def truncated(ratio: float, low: float, high: float) -> float:
    return low if ratio < low else high if ratio > high else ratio


def inside(ratio: float, low: float, high: float) -> bool:
    return low <= ratio <= high


def tis(token: Token, batch: Batch, low: float, high: float) -> float:
    return truncated(token.ratio, low, high)


def tis_sequence(token: Token, batch: Batch, low: float, high: float) -> float:
    return truncated(math.prod(t.ratio for t in of_sequence(token, batch)), low, high)


def mis(token: Token, batch: Batch, low: float, high: float) -> float:
    ratio = math.prod(t.ratio for t in of_sequence(token, batch))
    return ratio if inside(ratio, low, high) else 0.0


def icepop(token: Token, batch: Batch, low: float, high: float) -> float:
    return token.ratio if inside(token.ratio, low, high) else 0.0


def mask_geometric(token: Token, batch: Batch, low: float, high: float) -> float:
    ratios = [t.ratio for t in of_sequence(token, batch)]
    return float(inside(math.prod(ratios) ** (1 / len(ratios)), low, high))


def mask_worst(token: Token, batch: Batch, low: float, high: float) -> float:
    return float(all(inside(t.ratio, low, high) for t in of_sequence(token, batch)))


def opsm(token: Token, batch: Batch, low: float, high: float) -> float:
    drifts = [t.drift for t in of_sequence(token, batch)]
    return 0.0 if token.advantage < 0 and sum(drifts) / len(drifts) > high else 1.0


DEFINITIONS: dict[str, Callable[[Token, Batch, float, float], float]] = {
    "tis": tis,
    "tis_sequence": tis_sequence,
    "mis": mis,
    "icepop": icepop,
    "mask_geometric": mask_geometric,
    "mask_worst": mask_worst,
    "opsm": opsm,
}
BOUNDS = {  # beside the defaults: such that some tokens are within and some are not
    "tis": (0.8, 1.3),
    "tis_sequence": (0.6, 1.5),
    "mis": (0.5, 1.8),
    "icepop": (0.8, 1.3),
    "mask_geometric": (0.85, 1.2),
    "mask_worst": (0.6, 1.6),
    "opsm": (0.0, 0.02),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_is_its_definition_for_every_trained_token(name: str, seed: int) -> None:
    assert name in DEFINITIONS, f"the correction {name} has no reference in this test: add its definition"
    batch = make(seed)
    correction, *default = CORRECTIONS[name]
    trained = [token.trained for token in batch]
    for low, high in (default, BOUNDS[name]):
        expected = np.asarray([DEFINITIONS[name](token, batch, low, high) for token in batch])
        values = correction(tensors(batch), low, high).detach().numpy()
        assert values.shape == expected.shape
        np.testing.assert_allclose(values[trained], expected[trained], rtol=1e-12)
    assert len(set(expected[trained])) > 1


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_has_no_gradient(name: str) -> None:
    correction, low, high = CORRECTIONS[name]
    assert not correction(tensors(make(0)), low, high).requires_grad


@pytest.mark.parametrize("name", CORRECTIONS)
def test_on_policy_every_correction_is_one(name: str) -> None:
    batch = [replace(token, ratio=1.0, drift=0.0) for token in make(0)]
    correction, low, high = CORRECTIONS[name]
    assert (correction(tensors(batch), low, high) == 1.0).all()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_tokens_that_are_not_trained_do_not_change_the_others(name: str) -> None:
    batch = make(1)
    other = [token if token.trained else replace(token, ratio=1e-20, drift=30.0) for token in batch]
    trained = torch.tensor([token.trained for token in batch])
    correction, *_ = CORRECTIONS[name]
    straight, moved = (correction(tensors(tokens), *BOUNDS[name])[trained] for tokens in (batch, other))
    assert torch.equal(straight, moved)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_sequence_without_trained_tokens_gives_numbers(name: str) -> None:
    batch = [replace(token, trained=token.trained and token.sequence != 3) for token in make(2)]
    assert torch.isfinite(CORRECTIONS[name][0](tensors(batch), *BOUNDS[name])).all()


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("difference", [-50.0, 50.0, None])
@pytest.mark.parametrize("length", [1, 2, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_differences_of_50_leave_every_weight_finite(
    name: str, difference: float | None, length: int, dtype: torch.dtype
) -> None:
    """Over whole sequences, as the trainer computes them, in float32; None: both signs mixed."""
    draw = random.Random(0)
    batch = [
        Token(math.exp(log_ratio), -log_ratio, advantage, True, sequence)
        for sequence, advantage in enumerate((1.0, -1.0))
        for log_ratio in (difference or draw.choice([-50.0, 50.0]) for _ in range(length))
    ]
    correction, low, high = CORRECTIONS[name]
    weights = correction(tensors(batch, dtype), low, high)
    assert torch.isfinite(weights).all(), f"{name}: {weights}"
    if math.isfinite(high) and name != "opsm":
        assert ((weights >= 0) & (weights <= max(high, 1.0))).all()


@pytest.mark.parametrize("name", ["mis", "icepop", "mask_geometric", "mask_worst"])
def test_bounds_are_inclusive(name: str) -> None:
    for ratio in (0.5, 2.0):
        batch = [Token(ratio, 0.0, 1.0, True, 0)]
        weight = CORRECTIONS[name][0](tensors(batch), 0.5 - 1e-12, 2.0 + 1e-12)
        assert weight.item() > 0
        outside = CORRECTIONS[name][0](tensors(batch), 0.5 + 1e-9, 2.0 - 1e-9)
        assert outside.item() == 0


def test_mask_worst_lets_one_trained_token_veto_its_sequence_and_no_other() -> None:
    def ratios(of_first: list[float], trained: bool) -> list[float]:
        first = [Token(ratio, 0.0, 1.0, trained or ratio == 1.0, 0) for ratio in of_first]
        second = [Token(1.0, 0.0, 1.0, True, 1)] * 2
        return CORRECTIONS["mask_worst"][0](tensors(first + second), 1e-4, math.inf).tolist()

    assert ratios([1.0, 1.0, 1.0], True) == [1, 1, 1, 1, 1]
    assert ratios([1.0, 0.9e-4, 1.0], True) == [0, 0, 0, 1, 1]
    assert ratios([1.0, 1.1e-4, 1.0], True) == [1, 1, 1, 1, 1]
    assert ratios([1.0, 1e20, 1.0], True) == [1, 1, 1, 1, 1]
    assert ratios([1.0, 0.9e-4, 1.0], False) == [1, 1, 1, 1, 1]  # a token that is not trained has no veto


@pytest.mark.parametrize(
    ("advantage", "drift", "kept"),
    [(-1.0, 0.11, 0.0), (-1.0, 0.09, 1.0), (-1.0, -5.0, 1.0), (1.0, 5.0, 1.0), (0.0, 5.0, 1.0)],
)
def test_opsm_drops_only_sequences_of_negative_advantage_that_drifted(
    advantage: float, drift: float, kept: float
) -> None:
    """Drift as the mean over the sequence: 0 on one token and twice the mean on the other."""
    batch = [Token(1.0, 0.0, advantage, True, 0), Token(1.0, 2 * drift, advantage, True, 0)]
    assert CORRECTIONS["opsm"][0](tensors(batch), 0.0, 0.1).tolist() == [kept, kept]


def test_opsm_looks_at_the_present_policy_and_the_server_whatever_the_policy_before_the_step() -> None:
    batch = [Token(1.0, 0.5, -1.0, True, 0), Token(1e6, 0.0, -1.0, True, 1)]
    assert CORRECTIONS["opsm"][0](tensors(batch), 0.0, 0.1).tolist() == [0.0, 1.0]


# Mismatch metrics --------------------------------------------------------------------------------------------------------


def test_the_mismatch_metrics_are_their_definitions() -> None:
    batch = make(0)
    tokens = tensors(batch)
    values = mismatch(tokens.proximal, tokens.behaviour)
    expected = {
        "difference": [abs(math.log(token.ratio)) for token in batch],
        "mismatch_kl": [token.ratio - math.log(token.ratio) - 1 for token in batch],
        "ratio": [token.ratio for token in batch],
        "ratio_squared": [token.ratio**2 for token in batch],
    }
    assert values.keys() == expected.keys()
    for name, numbers in expected.items():
        np.testing.assert_allclose(values[name].numpy(), numbers, rtol=1e-9, atol=1e-12)


def test_the_mismatch_kl_has_kl_of_server_to_trainer_as_its_mean_over_what_the_server_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    trainer, server = (torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    mean = (server.exp() * mismatch(trainer, server)["mismatch_kl"]).sum().item()
    p, q = server.exp().tolist(), trainer.exp().tolist()
    assert mean == pytest.approx(sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)), rel=1e-12)


@pytest.mark.parametrize("difference", [-50.0, 50.0])
def test_mismatch_metrics_stay_finite_in_float32(difference: float) -> None:
    behaviour = torch.tensor([-51.0])
    for values in mismatch(behaviour + difference, behaviour).values():
        assert torch.isfinite(values).all()
