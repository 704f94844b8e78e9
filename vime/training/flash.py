"""Attention of packed rows by flash kernels of variable length: no padding, no masks, no copies of shared prompts.

A row's attention is a sum of kernel calls. One call is causal over all runs: a prompt goes on into its first branch, every
other branch stands alone. A second lets those other branches see their prompts: all of a prompt's branches are one long
sequence of queries over it, so that a shared prompt is read where it lies, and short responses still fill the kernel's
tiles. Where calls share a query their outputs are weighed by their log-sum-exps. The kernel's backward pass makes each
call's probabilities again from the log-sum-exp that it is given: given the whole one, its gradients are exact (Ring
Attention, arXiv 2310.01889, does the same over devices). An attention sink is one more share of the sum.

Sliding windows depend on a branch's place behind its prompt, which the second call does not know. There one call has for
every branch the tail of its prompt that the window reaches, and the branch, as keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

forward_kernel: Any = torch.ops.aten._flash_attention_forward
backward_kernel: Any = torch.ops.aten._flash_attention_backward
DTYPES = (torch.bfloat16, torch.float16)

Run = tuple[int, int]  # first token, number of tokens


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy from pinned memory, for which the host does not wait."""
    if torch.device(device).type != "cuda" or is_fake(tensor):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def takes(query: torch.Tensor) -> bool:
    """Whether the kernels compute heads like these, [..., D]."""
    return query.dtype in DTYPES and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


@dataclass(frozen=True)
class Call:
    """Sequences of queries over as many sequences of keys, each pair by itself.

    ``queries`` and ``keys`` index the row (None: all of it); their sequences end where ``query_ends`` and ``key_ends`` say
    (int32 [n + 1], from 0). ``causal``: the last query sees the last key, each one before it a key less; ``window``: and no
    more than so many.
    """

    queries: torch.Tensor | None
    keys: torch.Tensor | None
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    longest_query: int
    longest_key: int
    causal: bool
    window: int | None = None

    def options(self, scale: float | None) -> dict[str, Any]:
        left, right = (-1, -1) if self.window is None else (self.window - 1, 0)
        return {"scale": scale, "window_size_left": left, "window_size_right": right}

    def ranges(self) -> tuple[Any, ...]:
        return self.query_ends, self.key_ends, self.longest_query, self.longest_key, 0.0

    @property
    def plainly_causal(self) -> bool:
        return self.causal and self.window is None


class Runs:
    """Where prompts and branches lie in a row on ``device``: pairs of a prompt and its branches, right behind it and each
    other. No dataclass: FSDP would look through all of it at every layer."""

    def __init__(self, groups: Sequence[tuple[Run, Sequence[Run]]], device: torch.device | str) -> None:
        self.groups, self.device = groups, device
        self.made: dict[int | None, tuple[Call, ...]] = {}

    def calls(self, window: int | None) -> tuple[Call, ...]:
        """The kernel calls, made once a window and row."""
        longest = max(length + max((n for _, n in own), default=0) for (_, length), own in self.groups)
        if window is not None and window >= longest:
            window = None
        if window not in self.made:
            self.made[window] = self.whole() if window is None else (self.windowed(window),)
        return self.made[window]

    def sequences(self) -> list[tuple[Run, Run | None]]:
        """The row in order: each prompt with its first branch, then the others with the prompt before them."""
        found: list[tuple[Run, Run | None]] = []
        for (start, length), own in self.groups:
            found.append(((start, length + (own[0][1] if own else 0)), None))
            found += [(branch, (start, length)) for branch in own[1:] if branch[1]]
        return found

    def whole(self) -> tuple[Call, ...]:
        runs = [run for run, _ in self.sequences()]
        own = self.call(None, runs, None, runs, causal=True)
        queries, keys = [], []
        for prompt, branches in self.groups:
            if others := sum(length for _, length in branches[1:]):
                queries.append((branches[1][0], others))
                keys.append(prompt)
        return (own, self.call(queries, queries, keys, keys, causal=False)) if queries else (own,)

    def windowed(self, window: int) -> Call:
        runs, pieces, lengths = [], [], []
        for run, prompt in self.sequences():
            tail = min(prompt[1], window - 1) if prompt else 0
            runs.append(run)
            pieces += [(sum(prompt) - tail, tail), run] if prompt else [run]
            lengths.append((0, tail + run[1]))
        return self.call(None, runs, pieces, lengths, causal=True, window=window)

    def call(
        self,
        queries: Sequence[Run] | None,
        query_runs: Sequence[Run],
        keys: Sequence[Run] | None,
        key_runs: Sequence[Run],
        causal: bool,
        window: int | None = None,
    ) -> Call:
        """``queries`` and ``keys``: what is taken of the row; the others: how it is cut into sequences, by length."""

        def index(runs: Sequence[Run] | None) -> torch.Tensor | None:
            if runs is None:
                return None
            return to_device(torch.cat([torch.arange(start, start + length) for start, length in runs]), self.device)

        def ends(runs: Sequence[Run]) -> torch.Tensor:
            return to_device(
                torch.tensor([0, *(length for _, length in runs)]).cumsum(0, dtype=torch.int32), self.device
            )

        longest_query, longest_key = (max(length for _, length in runs) for runs in (query_runs, key_runs))
        return Call(
            index(queries), index(keys), ends(query_runs), ends(key_runs), longest_query, longest_key, causal, window
        )


def taken(tensor: torch.Tensor, index: torch.Tensor | None, dim: int = 0) -> torch.Tensor:
    return tensor if index is None else tensor.index_select(dim, index)


def added(total: torch.Tensor | None, part: torch.Tensor, index: torch.Tensor | None, size: int) -> torch.Tensor:
    """``part`` added where it belongs; in float32 where keys stand several times."""
    if index is None:
        return part if total is None else total + part
    if total is None:
        total = torch.zeros(size, *part.shape[1:], dtype=torch.float32, device=part.device)
    return total.index_add_(0, index, part.to(total.dtype))


class Attention(torch.autograd.Function):
    """query [T, H, D], key and value [T, H_kv, D], sinks [H] or None -> output [T, H, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        calls: tuple[Call, ...],
        scale: float | None,
    ) -> torch.Tensor:
        first, *others = calls
        output, total, state = Attention.attend(first, query, key, value, scale)
        for call in others:
            part, of_part, _ = Attention.attend(call, query, key, value, scale)
            at = call.queries
            before = taken(total, at, 1)
            both = torch.logaddexp(before, of_part)
            merged = taken(output, at) * share(before - both) + part * share(of_part - both)
            output = output.index_copy(0, at, merged.to(output.dtype))  # in place would change what a checkpoint keeps
            total = total.index_copy(1, at, both)
        if sinks is not None:
            both = torch.logaddexp(total, sinks.to(total.dtype)[:, None])
            output = (output * share(total - both)).to(output.dtype)
            total = both
        ctx.save_for_backward(query, key, value, output, total, state, sinks)
        ctx.calls, ctx.scale = calls, scale
        return output

    @staticmethod
    def attend(call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> Any:
        """Output [n, H, D] and log-sum-exp [H, n] of the call's queries, and the kernel's random state, which is unused."""
        inputs = taken(query, call.queries), taken(key, call.keys), taken(value, call.keys)
        return forward_kernel(*inputs, *call.ranges(), call.plainly_causal, False, **call.options(scale))[:3]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, output, total, state, sinks = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        sums: list[torch.Tensor | None] = [None, None, None]
        for call in ctx.calls:
            at = call.queries
            parts = backward_kernel(
                *(taken(gradient, at), taken(query, at), taken(key, call.keys), taken(value, call.keys)),
                *(taken(output, at), taken(total, at, 1), *call.ranges(), call.plainly_causal),
                *(state, torch.empty(0, device=query.device)),
                **call.options(ctx.scale),
            )
            places = (at, call.keys, call.keys)
            sums = [added(s, part, index, len(query)) for s, part, index in zip(sums, parts, places, strict=True)]
        of_sinks = None
        if sinks is not None:  # d loss / d sink = -p_sink (dO . O), the sink's own value being zero
            delta = (gradient.to(total.dtype) * output).sum(-1)
            of_sinks = -(torch.exp(sinks.to(total.dtype)[:, None] - total) * delta.T).sum(-1).to(sinks.dtype)
        return *(s.to(query.dtype) for s in sums if s is not None), of_sinks, None, None


def share(log_share: torch.Tensor) -> torch.Tensor:
    """[H, n] log to [n, H, 1]."""
    return log_share.exp().T[..., None]


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runs: Runs,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [1, H, T, D], key and value [1, H_kv, T, D] to output [1, T, H, D]; fewer key heads than heads are shared."""
    inputs = (x[0].transpose(0, 1) for x in (query, key, value))
    return Attention.apply(*inputs, sinks, runs.calls(window), scale)[None]
