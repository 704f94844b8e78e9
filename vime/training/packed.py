"""Packed rows with shared prompts: several sequences in one row, no padding, each attending only to itself.

A prompt stands once; its branches (the responses of a group) each go on from it as if they stood alone. Positions and
attention are those of the separate sequences, so log-probabilities and gradients equal theirs; only the arithmetic is
saved.

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
class Layout:
    """Where G prompts and N branches lie in a packed row.

    ``prompts`` [G, P] and ``branches`` [N, L] index the row, padded with 0; ``prompt_valid`` [G, P] marks real tokens;
    ``owner`` [N] is the prompt of each branch. ``back`` [T] is, for each token of the row, its place in the attention's
    padded output: the G * P prompt places, then the N * L branch places. Nothing but attention is padded.
    """

    prompts: torch.Tensor
    prompt_valid: torch.Tensor
    branches: torch.Tensor
    owner: torch.Tensor
    back: torch.Tensor


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
    layout: Layout


def padded(runs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [n, longest] of runs ``(start, length)``, padded with 0, and which entries are real."""
    starts = torch.tensor([start for start, _ in runs])[:, None]
    lengths = torch.tensor([length for _, length in runs])[:, None]
    offsets = torch.arange(int(lengths.max()))[None]
    valid = offsets < lengths
    return torch.where(valid, starts + offsets, 0), valid


def pack(groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], device: torch.device | str = "cpu") -> Packed:
    """Packs ``[(prompt_ids, [response_ids, ...]), ...]``; every prompt and response has at least one token."""
    ids: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    prompts: list[tuple[int, int]] = []
    branches: list[tuple[int, int]] = []
    owner: list[int] = []
    for prompt, responses in groups:
        prompts.append((len(ids), len(prompt)))
        ids += prompt
        positions += range(len(prompt))
        end = len(ids)
        for response in responses:
            first, length = len(ids), len(response) - 1
            branches.append((first, length))
            owner.append(len(prompts) - 1)
            ids += response[:-1]
            positions += range(len(prompt), len(prompt) + length)
            sources += [end - 1, *range(first, first + length)]
            targets += response

    def row(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device)

    prompt_index, prompt_valid = padded(prompts)
    branch_index, branch_valid = padded(branches)
    where = torch.cat([prompt_index.flatten(), branch_index.flatten()])
    places = torch.cat([prompt_valid.flatten(), branch_valid.flatten()]).nonzero().flatten()
    back = torch.empty(len(ids), dtype=torch.long)
    back[where[places]] = places
    parts = (prompt_index, prompt_valid, branch_index, torch.tensor(owner), back)
    layout = Layout(*(part.to(device) for part in parts))
    return Packed(row(ids)[None], row(positions)[None], row(sources), row(targets), layout)


def allowed(layout: Layout, window: int | None) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Which keys a query may see: prompts [P, P] (None: plainly causal), branches [N, 1, L, P + L]."""
    prompt, branch = layout.prompts.shape[1], layout.branches.shape[1]
    device = layout.owner.device
    prompt_at, branch_at = torch.arange(prompt, device=device), torch.arange(branch, device=device)
    own = (branch_at[:, None] >= branch_at[None]).expand(len(layout.owner), -1, -1)
    shared = layout.prompt_valid[layout.owner][:, None].expand(-1, branch, -1)
    if window is None:
        return None, torch.cat([shared, own], dim=-1)[:, None]
    distance = prompt_at[:, None] - prompt_at[None]
    own = own & (branch_at[:, None] - branch_at[None] < window)
    length = layout.prompt_valid.sum(-1)[layout.owner]  # tokens of each branch's prompt
    position = length[:, None, None] + branch_at[None, :, None]
    shared = shared & (position - prompt_at[None, None] < window)
    return (distance >= 0) & (distance < window), torch.cat([shared, own], dim=-1)[:, None]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed row: query [1, H, T, D], key and value [1, H_kv, T, D] to output [1, T, H, D].

    Two calls: the prompts among themselves, then every branch over its prompt and itself. A padded query's output goes
    nowhere.
    """
    if layout is None or dropout or kwargs.get("s_aux") is not None or kwargs.get("softcap"):
        raise ValueError("packed attention needs a layout, and has no dropout, no sinks and no soft-capping")
    dtype = query.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16:  # its backward pass in bfloat16 is several times slower
        query, key, value = query.float(), key.float(), value.float()
    repeats = query.shape[1] // key.shape[1]
    prompt_mask, branch_mask = allowed(layout, sliding_window)

    def take(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        chosen = tensor[0].index_select(1, index.flatten())  # [h, T, D] by [n, l] -> [n, h, l, D]
        return chosen.unflatten(1, index.shape).transpose(0, 1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1)  # [n * l, H, D]

    prompt_key, prompt_value = take(key, layout.prompts), take(value, layout.prompts)
    output = attend(take(query, layout.prompts), prompt_key, prompt_value, prompt_mask)
    if layout.branches.shape[1]:
        keys = torch.cat([prompt_key.index_select(0, layout.owner), take(key, layout.branches)], dim=2)
        values = torch.cat([prompt_value.index_select(0, layout.owner), take(value, layout.branches)], dim=2)
        output = torch.cat([output, attend(take(query, layout.branches), keys, values, branch_mask)])
    return output.index_select(0, layout.back)[None].to(dtype), None


AttentionInterface.register(NAME, packed_attention)
