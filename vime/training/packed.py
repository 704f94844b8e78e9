"""Packed rows with shared prompts: several sequences in one row, no padding, each attending only to itself.

A segment is one prompt and its branches (the responses of a group): the prompt's tokens stand once, every branch goes on
from it as if it stood alone. Positions and attention are those of the separate sequences, so log-probabilities and
gradients equal theirs; only the arithmetic is saved.

The attention function below is registered with transformers and applied to any model that routes through its attention
interface: the model's code is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

NAME = "vime_packed"


@dataclass(frozen=True)
class Segment:
    """Where one prompt and its branches lie in a packed row.

    ``prompt`` is a slice of the row; ``branches`` [n, L] indexes the row, padded with the prompt's first token;
    ``valid`` [n, L] marks real tokens.
    """

    prompt: slice
    branches: torch.Tensor
    valid: torch.Tensor


@dataclass(frozen=True)
class Packed:
    """A micro-batch as one row of T tokens.

    ``input_ids``, ``position_ids`` [1, T]. ``sources`` [N]: the position whose hidden state predicts each response token;
    ``targets`` [N]: those tokens; N counts all response tokens, in the order of the given sequences.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    segments: tuple[Segment, ...]


def pack(groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], device: torch.device | str = "cpu") -> Packed:
    """Packs ``[(prompt_ids, [response_ids, ...]), ...]``; every prompt and response has at least one token."""
    ids: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    segments = []
    for prompt, responses in groups:
        start = len(ids)
        ids += prompt
        positions += range(len(prompt))
        end = len(ids)
        longest = max(len(response) for response in responses) - 1
        branches = torch.full((len(responses), longest), start)
        valid = torch.zeros(len(responses), longest, dtype=torch.bool)
        for i, response in enumerate(responses):
            first, length = len(ids), len(response) - 1
            ids += response[:-1]
            positions += range(len(prompt), len(prompt) + length)
            branches[i, :length] = torch.arange(first, first + length)
            valid[i, :length] = True
            sources += [end - 1, *range(first, first + length)]
            targets += response
        segments.append(Segment(slice(start, end), branches.to(device), valid.to(device)))

    def row(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device)

    return Packed(row(ids)[None], row(positions)[None], row(sources), row(targets), tuple(segments))


def causal(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Mask [queries, keys], true where a query may look; the last query stands at the last key."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None]
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: tuple[Segment, ...] | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed row: query [1, H, T, D], key and value [1, H_kv, T, D] to output [1, T, H, D]."""
    if segments is None or dropout or kwargs.get("s_aux") is not None or kwargs.get("softcap"):
        raise ValueError("packed attention needs segments, and has no dropout, no sinks and no soft-capping")
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    output = torch.empty_like(query)
    for segment in segments:
        here = segment.prompt
        q, k, v = (t[:, :, here] for t in (query, key, value))
        mask = causal(q.shape[2], q.shape[2], sliding_window, q.device) if sliding_window else None
        output[:, :, here] = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling)
        n, length = segment.branches.shape
        if not length:
            continue
        q, own_k, own_v = (t[0][:, segment.branches].transpose(0, 1) for t in (query, key, value))  # [n, H, L, D]
        k, v = (torch.cat([p.expand(n, -1, -1, -1), o], dim=2) for p, o in ((k, own_k), (v, own_v)))
        mask = causal(length, k.shape[2], sliding_window, q.device)
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling)
        output[0, :, segment.branches[segment.valid]] = out.transpose(1, 2)[segment.valid].transpose(0, 1)
    return output.transpose(1, 2), None


AttentionInterface.register(NAME, packed_attention)
