"""The flash path of packed attention: its kernel calls, merges and gradients, the kernels emulated by their definition.

An emulated call computes each pair of sequences alone: scores, the causal mask aligned at the bottom right, the window, the
log-sum-exp; its backward pass takes output and log-sum-exp as given, as the kernel's does. Against the padded SDPA path in
float64.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vime.training import flash
from vime.training.checkpointing import checkpointed
from vime.training.packed import pack, packed_attention

HEADS, KEY_HEADS, SIZE = 4, 2, 8
SCALE = 0.3


def pairs(query_ends: torch.Tensor, key_ends: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    q, k = query_ends.tolist(), key_ends.tolist()
    for i in range(len(q) - 1):
        yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])


def probabilities_of(query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float, left: int, right: int) -> Any:
    """Scores [H, q, k] with -inf where a query may not look."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    behind = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))[None]
    right = 0 if causal else right
    everything = len(query) + len(key)
    allowed = (behind >= -(right if right >= 0 else everything)) & (behind <= (left if left >= 0 else everything))
    return scores.masked_fill(~allowed, float("-inf"))


def emulated_forward(
    query, key, value, query_ends, key_ends, longest_query, longest_key, dropout, causal, debug, *,
    scale, window_size_left, window_size_right,
):  # fmt: skip
    output, total = torch.full_like(query, torch.nan), query.new_full((query.shape[1], len(query)), torch.nan)
    lengths = [(a.stop - a.start, b.stop - b.start) for a, b in pairs(query_ends, key_ends)]
    assert longest_query == max(a for a, _ in lengths) and longest_key == max(b for _, b in lengths)
    for at, of in pairs(query_ends, key_ends):
        scores = probabilities_of(query[at], key[of], causal, scale, window_size_left, window_size_right)
        values = value[of].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        output[at] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        total[:, at] = scores.logsumexp(-1)
    return output, total, None, None, None


def emulated_backward(
    gradient, query, key, value, output, total, query_ends, key_ends, longest_query, longest_key, dropout, causal, state,
    unused, *, scale, window_size_left, window_size_right,
):  # fmt: skip
    of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    for at, of in pairs(query_ends, key_ends):
        scores = probabilities_of(query[at], key[of], causal, scale, window_size_left, window_size_right)
        p = torch.exp(scores - total[:, at, None])
        keys, values = (x[of].repeat_interleave(groups, dim=1) for x in (key, value))
        delta = (gradient[at] * output[at]).sum(-1).T[..., None]
        slope = p * (torch.einsum("qhd,khd->hqk", gradient[at], values) - delta) * scale
        of_query[at] = torch.einsum("hqk,khd->qhd", slope, keys)
        of_key[of] = torch.einsum("hqk,qhd->khd", slope, query[at]).unflatten(1, (-1, groups)).sum(2)
        of_value[of] = torch.einsum("hqk,qhd->khd", p, gradient[at]).unflatten(1, (-1, groups)).sum(2)
    return of_query, of_key, of_value


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "forward_kernel", emulated_forward)
    monkeypatch.setattr(flash, "backward_kernel", emulated_backward)
    monkeypatch.setattr(flash, "DTYPES", (torch.float64,))


def row(*lengths: tuple[int, list[int]]) -> Any:
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(9) for _ in range(count)]

    return pack([(ids(prompt), [ids(response) for response in responses]) for prompt, responses in lengths])


ROWS = {
    "unequal": row((5, [3, 7, 2]), (2, [4, 9])),
    "single branches": row((3, [4]), (9, [2]), (1, [6])),
    "branches without tokens": row((4, [1, 1]), (7, [1, 3, 1, 5])),
    "one sequence": row((6, [5])),
    "long prompt": row((17, [3, 2, 9, 1]), (2, [12, 2])),
}


def attention_inputs(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, HEADS, tokens, SIZE), (1, KEY_HEADS, tokens, SIZE), (1, KEY_HEADS, tokens, SIZE)]
    return [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


def computed(inputs: list[torch.Tensor], weights: torch.Tensor, attend: Any) -> list[torch.Tensor]:
    output = attend(*inputs)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("window", [None, 1, 2, 4, 6, 100])
@pytest.mark.parametrize("name", list(ROWS))
def test_flash_calls_give_outputs_and_gradients_of_the_padded_path(name: str, window: int | None) -> None:
    packed = ROWS[name]
    inputs = attention_inputs(packed.input_ids.shape[1])
    weights = torch.randn(1, packed.input_ids.shape[1], HEADS, SIZE, dtype=torch.float64)
    module = torch.nn.Module()

    def attend(flash: bool) -> Any:
        return lambda q, k, v: packed_attention(
            module, q, k, v, None, SCALE, 0.0, window, layout=packed.layout, flash=flash
        )[0]

    found, wanted = (computed(inputs, weights, attend(flash)) for flash in (True, False))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)  # keys that stand several times add up in float32
    if window is None:
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_sinks_take_their_share_of_every_softmax() -> None:
    packed = ROWS["unequal"]
    tokens = packed.input_ids.shape[1]
    inputs = [*attention_inputs(tokens), torch.randn(HEADS, dtype=torch.float64, requires_grad=True)]
    weights = torch.randn(1, tokens, HEADS, SIZE, dtype=torch.float64)

    def by_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return flash.flash_attention(q, k, v, packed.layout.runs, SCALE, None, sinks)

    def plainly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        """The whole matrix of scores, a column more for the sinks."""
        seen = torch.zeros(tokens, tokens, dtype=torch.bool)
        for (start, length), own in packed.layout.runs.groups:
            for first, count in [(start, length), *own]:
                seen[first : first + count, start : start + length] = True
                seen[first : first + count, first : first + count] = True
        k, v = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(~seen.tril(), float("-inf"))
        column = sinks[None, :, None, None].expand(1, HEADS, tokens, 1)
        return (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)

    found, wanted = (computed(inputs, weights, attend) for attend in (by_flash, plainly))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_shared_prompt_is_neither_copied_nor_padded() -> None:
    own, cross = ROWS["long prompt"].layout.runs.calls(None)
    assert own.queries is None and own.keys is None
    assert (
        own.query_ends.tolist() == own.key_ends.tolist() == [0, 19, 20, 28, 41, 42]
    )  # prompt and first branch, others
    assert cross.query_ends.tolist() == [0, 9, 10] and cross.key_ends.tolist() == [0, 17, 19]
    assert cross.keys is not None and cross.keys.tolist() == [*range(17), 28, 29]


def test_what_a_selective_checkpoint_keeps_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's results are kept where prompts are shared too, and not computed again."""
    packed, calls = ROWS["unequal"], []

    @torch.library.custom_op("vime_tests::flash_attention", mutates_args=())
    def kept(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        *inputs, options = calls[number]
        return emulated_forward(query, key, value, *inputs, **options)[:2]

    def forward(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        calls.append((*rest, options))
        return *kept(query, key, value, len(calls) - 1), None, None, None

    monkeypatch.setattr(flash, "forward_kernel", forward)
    inputs = attention_inputs(packed.input_ids.shape[1])
    weights = torch.randn(1, packed.input_ids.shape[1], HEADS, SIZE, dtype=torch.float64)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash.flash_attention(2 * q, k, v, packed.layout.runs, SCALE, None)

    layer = torch.nn.Module()
    layer.forward = attend  # type: ignore[method-assign]
    found, wanted = (computed(inputs, weights, checkpointed(layer, mode)) for mode in ("selective", "none"))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_unshared_prompts_are_a_single_call_and_a_window_no_row_reaches_is_none() -> None:
    assert len(ROWS["single branches"].layout.runs.calls(None)) == 1
    runs = ROWS["unequal"].layout.runs
    assert runs.calls(100) is runs.calls(None)
    assert runs.calls(4) is runs.calls(4)
    assert len(runs.calls(4)) == 1


@pytest.mark.parametrize(("size", "dtype", "taken"), [
    (64, torch.float64, True), (256, torch.float64, True), (12, torch.float64, False), (512, torch.float64, False),
    (64, torch.float32, False),
])  # fmt: skip
def test_heads_that_the_kernels_do_not_take(size: int, dtype: torch.dtype, taken: bool) -> None:
    assert flash.takes(torch.zeros(1, 1, 2, size, dtype=dtype)) == taken
