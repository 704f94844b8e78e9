"""Log-probabilities and entropies by chunks: values and gradients are those of the whole softmax."""

from typing import Any

import pytest
import torch

from vime.training.logprobs import chunked_logprobs

N, D, V = 7, 4, 6


def inputs(bias: bool = True, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    hidden, weight, b = random(N, D), random(V, D), random(V)
    return hidden, weight, b if bias else None, torch.randint(V, (N,), generator=generator)


def reference(
    hidden: Any, weight: Any, bias: Any, targets: Any, temperature: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


CHUNKS = (1, 2, 3, N, 100)
cases = pytest.mark.parametrize(("bias", "temperature"), [(True, 1.0), (False, 1.0), (True, 0.7), (False, 1.6)])


@cases
@pytest.mark.parametrize("chunk", CHUNKS)
def test_values_are_those_of_the_whole_softmax(bias: bool, temperature: float, chunk: int) -> None:
    given = inputs(bias)
    logprobs, entropy = chunked_logprobs(*given, temperature, chunk)
    wanted = reference(*given, temperature)
    assert logprobs.shape == entropy.shape == (N,)
    torch.testing.assert_close(logprobs, wanted[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, wanted[1], rtol=1e-12, atol=1e-12)


@cases
@pytest.mark.parametrize("chunk", [3, N])
@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)], ids=["logprob", "entropy", "both"])
def test_gradients_are_the_numerical_ones(bias: bool, temperature: float, chunk: int, outputs: tuple[int, ...]) -> None:
    hidden, weight, b, targets = inputs(bias)

    def chosen(h: torch.Tensor, w: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = chunked_logprobs(h, w, rest[0] if rest else None, targets, temperature, chunk)
        return tuple(found[i] for i in outputs)

    leaves = (hidden, weight, b) if bias else (hidden, weight)
    assert torch.autograd.gradcheck(chosen, leaves, check_undefined_grad=False)  # autograd calls no chunk without any


@cases
@pytest.mark.parametrize("coefficients", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)])
@pytest.mark.parametrize("chunk", [1, 3, N])
def test_gradients_are_those_of_the_whole_softmax(
    bias: bool, temperature: float, coefficients: tuple[float, float], chunk: int
) -> None:
    given = inputs(bias)
    leaves = [tensor for tensor in given[:3] if tensor is not None]
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)

    def gradients(outputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        used = [c * (weights * out).sum() for c, out in zip(coefficients, outputs, strict=True) if c]
        return torch.autograd.grad(sum(used), leaves)  # type: ignore[arg-type]

    mine = gradients(chunked_logprobs(*given, temperature, chunk))
    for found, wanted in zip(mine, gradients(reference(*given, temperature)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_the_same() -> None:
    hidden, weight, bias, targets = inputs()
    (whole,) = torch.autograd.grad(chunked_logprobs(hidden, weight, bias, targets, 1.0, 3)[0].sum(), hidden)
    frozen = chunked_logprobs(hidden, weight.detach(), bias.detach(), targets, 1.0, 3)[0]
    (alone,) = torch.autograd.grad(frozen.sum(), hidden)
    assert torch.equal(whole, alone)


def test_the_inputs_are_left_as_they_were() -> None:
    given = inputs()
    before = [tensor.detach().clone() for tensor in given]
    logprobs, entropy = chunked_logprobs(*given, 0.7, 3)
    (logprobs.sum() + entropy.sum()).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))


def test_a_backward_pass_can_be_made_twice() -> None:
    given = inputs()
    logprobs, entropy = chunked_logprobs(*given, 0.7, 3)
    loss = logprobs.sum() + entropy.sum()
    first = torch.autograd.grad(loss, given[0], retain_graph=True)[0].clone()
    assert torch.equal(first, torch.autograd.grad(loss, given[0])[0])


def test_outputs_are_float32_of_bfloat16_hidden_states_and_gradients_bfloat16() -> None:
    given = inputs(dtype=torch.bfloat16)
    logprobs, entropy = chunked_logprobs(*given, 0.7, 3)
    assert logprobs.dtype == entropy.dtype == torch.float32
    (logprobs.sum() + entropy.sum()).backward()
    assert {tensor.grad.dtype for tensor in given[:3]} == {torch.bfloat16}
    wanted = reference(*(t.detach().double() for t in given[:3]), given[3], 0.7)
    torch.testing.assert_close(logprobs.double(), wanted[0], rtol=0.05, atol=0.05)


def test_sharp_logits_stay_finite() -> None:
    hidden, weight, _, targets = inputs()
    logprobs, entropy = chunked_logprobs(hidden * 1e4, weight, None, targets, 1.0, 3)
    (slope,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), weight)
    assert all(torch.isfinite(t).all() for t in (logprobs, entropy, slope))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_soft_cap_has_the_values_and_gradients_of_the_whole_softmax(temperature: float) -> None:
    hidden, weight, bias, targets = inputs()

    def capped(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return chunked_logprobs(h, w, b, targets, temperature, 3, softcap=1.5)

    wanted = reference(hidden, weight, bias, targets, temperature, 1.5)
    torch.testing.assert_close(capped(hidden, weight, bias), wanted, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(capped, (hidden, weight, bias), check_undefined_grad=False)
