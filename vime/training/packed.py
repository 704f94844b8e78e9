"""Packed rows with shared prompts: several sequences in one row, no padding, each attending only to itself.

A prompt stands once; its branches (the responses of a group) each go on from it as if they stood alone. Positions and
attention are those of the separate sequences, so log-probabilities and gradients equal theirs; only the arithmetic is
saved.

The attention function below is registered with transformers and applied to any model that routes through its attention
interface: the model's code is not touched. Attention is computed by kernels of variable length (``flash``) or, padded, by
PyTorch's scaled_dot_product_attention.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface

from vime.training.flash import Run, Runs, flash_attention, takes, to_device
from vime.training.mesh import Mesh, SumOut, heads_to_tokens, tokens_to_heads

NAME = "vime_packed"
FLASH = "vime_varlen"  # a name with "flash" would make transformers look for a kernel of its own


@dataclass(eq=False)  # torch.compile would guard every field of a frozen one, and compile again for others
class Layout:
    """Where G prompts and N branches lie in a packed row.

    ``prompts`` [G, P] and ``branches`` [N, L] index the row, padded with 0; ``prompt_valid`` [G, P] marks real tokens;
    ``owner`` [N] is the prompt of each branch. ``back`` [T] is, for each token of the row, its place in the attention's
    padded output: the G * P prompt places, then the N * L branch places. Nothing but attention is padded. ``runs`` are the
    same places as flash kernels take them.
    """

    prompts: torch.Tensor
    prompt_valid: torch.Tensor
    branches: torch.Tensor
    owner: torch.Tensor
    back: torch.Tensor
    runs: Runs


@dataclass(frozen=True)
class Packed:
    """A micro-batch as one row of T tokens, or a rank's share of it.

    ``input_ids``, ``position_ids`` [1, T]. ``sources`` [N]: the position whose hidden state predicts each response token;
    ``targets`` [N]: those tokens; N counts all response tokens, in the order of the given sequences. Ranks that share a row
    hold consecutive T/contexts tokens each; of the response tokens each has ``own`` [n], from 0 to N, with ``sources`` in its
    tokens and ``targets`` [n]. ``layout`` is always the whole row's.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    layout: Layout
    count: int
    own: torch.Tensor | None = None

    def gather(self, values: torch.Tensor, mesh: Mesh | None) -> torch.Tensor:
        """[N] from each rank's [n] values; a gradient goes to the rank that has the token."""
        if self.own is None or mesh is None:
            return values
        spread = values.new_zeros(self.count).index_copy(0, self.own, values)
        return SumOut.apply(spread, mesh.model_group)


def padded(runs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [n, longest] of runs ``(start, length)``, padded with 0, and which entries are real."""
    starts = torch.tensor([start for start, _ in runs])[:, None]
    lengths = torch.tensor([length for _, length in runs])[:, None]
    offsets = torch.arange(int(lengths.max()))[None]
    valid = offsets < lengths
    return torch.where(valid, starts + offsets, 0), valid


def pack(
    groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
    device: torch.device | str = "cpu",
    mesh: Mesh | None = None,
) -> Packed:
    """Packs ``[(prompt_ids, [response_ids, ...]), ...]``; every prompt and response has at least one token. With a mesh, this
    rank's share; a row is filled up to a multiple of its context ranks by a prompt without responses."""
    ids: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    prompts: list[tuple[int, int]] = []
    branches: list[tuple[int, int]] = []
    owner: list[int] = []
    runs: list[tuple[Run, list[Run]]] = []
    for prompt, responses in groups:
        prompts.append((len(ids), len(prompt)))
        runs.append((prompts[-1], []))
        ids += prompt
        positions += range(len(prompt))
        end = len(ids)
        for response in responses:
            first, length = len(ids), len(response) - 1
            branches.append((first, length))
            runs[-1][1].append(branches[-1])
            owner.append(len(prompts) - 1)
            ids += response[:-1]
            positions += range(len(prompt), len(prompt) + length)
            sources += [end - 1, *range(first, first + length)]
            targets += response

    if mesh is not None and (missing := -len(ids) % mesh.contexts):
        prompts.append((len(ids), missing))
        runs.append((prompts[-1], []))
        ids += [0] * missing
        positions += range(missing)
    prompt_index, prompt_valid = padded(prompts)
    branch_index, branch_valid = padded(branches)
    where = torch.cat([prompt_index.flatten(), branch_index.flatten()])
    places = torch.cat([prompt_valid.flatten(), branch_valid.flatten()]).nonzero().flatten()
    back = torch.empty(len(ids), dtype=torch.long)
    back[where[places]] = places
    places_of = (prompt_index, prompt_valid, branch_index, torch.tensor(owner), back)
    prompt_index, prompt_valid, branch_index, owners, back = (to_device(part, device) for part in places_of)
    layout = Layout(prompt_index, prompt_valid, branch_index, owners, back, Runs(runs, device))
    row = [torch.tensor(values) for values in (ids, positions, sources, targets)]
    own = None
    if mesh is not None and mesh.contexts * mesh.tensors > 1:
        length = len(ids) // mesh.contexts
        first = mesh.context_rank * length
        mine = slice(first, first + length)
        own = ((row[2] >= first) & (row[2] < first + length)).nonzero().flatten()[mesh.tensor_rank :: mesh.tensors]
        row = [row[0][mine], row[1][mine], row[2][own] - first, row[3][own]]
        own = to_device(own, device)
    ids_row, position_row, source_row, target_row = (to_device(values, device) for values in row)
    return Packed(ids_row[None], position_row[None], source_row, target_row, layout, len(targets), own)


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


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [n, H, L, D] over key and value [n, H_kv, K, D] to [n * L, H, D]; ``mask`` None is causal.

    ``softcap`` c makes c tanh(s / c) of the scores s (Gemma 2). ``sinks`` [H]: each head's logit more in the softmax's
    denominator (gpt-oss); it stands as one more key, which every query's one more dimension sees, with a value of zero.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    if mask is None and (softcap or sinks is not None):
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if sinks is not None:
        assert mask is not None
        logits = (sinks.to(key.dtype) / scaling)[None, :, None, None].expand(len(key), -1, 1, -1)
        query = F.pad(F.pad(query, (0, 1), value=1.0), (0, 7))  # kernels want a multiple of 8
        key = torch.cat([F.pad(key, (0, 8)), F.pad(F.pad(logits, (key.shape[-1], 0)), (0, 7))], dim=2)
        value, mask = F.pad(value, (0, 0, 0, 1)), F.pad(mask, (0, 1), value=True)
    if softcap:
        scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap))
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1, dtype=torch.float32)  # type: ignore[operator]
        out = weights.to(value.dtype) @ value
    else:
        out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scaling)
    return out.transpose(1, 2).flatten(0, 1)


@torch.compiler.disable  # its shapes are every row's own: a compiled layer calls it as it is
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    layout: Layout | None = None,
    context: dist.ProcessGroup | None = None,
    flash: bool = False,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed row: query [1, H, T, D], key and value [1, H_kv, T, D] to output [1, T, H, D].

    By ``flash`` kernels where they take such heads and no ``softcap`` is asked for, else padded. The ranks of ``context``
    give T tokens each and compute some heads each over all of them. What else a model asks of its attention is refused:
    transformers makes no masks for this function, so a mask is the model's own.
    """
    extra = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name != "position_ids"]
    extra += ["attention_mask"] if attention_mask is not None else []
    extra += ["keys beside the tokens'"] if key.shape[2] != query.shape[2] else []
    if layout is None:
        raise ValueError(
            "packed attention needs a layout: the model was called without one, or does not pass on its own"
        )
    if dropout or extra:
        raise ValueError(f"packed attention has no dropout (here {dropout}) and cannot take {', '.join(extra) or 'it'}")
    if context is not None:
        if (ranks := dist.get_world_size(context)) > key.shape[1]:  # a head for every rank
            key, value = (t.repeat_interleave(ranks // key.shape[1], dim=1) for t in (key, value))
        query, key, value = (tokens_to_heads(t, context) for t in (query, key, value))
        s_aux = None if s_aux is None else s_aux.chunk(ranks)[dist.get_rank(context)]
    if flash and not softcap and takes(query):
        output = flash_attention(query, key, value, layout.runs, scaling, sliding_window, s_aux)
    else:
        output = padded_attention(query, key, value, layout, scaling, sliding_window, softcap, s_aux)
    return (output if context is None else heads_to_tokens(output, context)), None


def padded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Two calls of PyTorch's attention: the prompts among themselves, then every branch over its prompt and itself. A padded
    query's output goes nowhere."""
    dtype = query.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16:  # its backward pass in bfloat16 is several times slower
        query, key, value = query.float(), key.float(), value.float()
    scaling = scaling or query.shape[-1] ** -0.5
    prompt_mask, branch_mask = allowed(layout, sliding_window)

    def take(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        chosen = tensor[0].index_select(1, index.flatten())  # [h, T, D] by [n, l] -> [n, h, l, D]
        return chosen.unflatten(1, index.shape).transpose(0, 1)

    prompt_key, prompt_value = take(key, layout.prompts), take(value, layout.prompts)
    output = attend(take(query, layout.prompts), prompt_key, prompt_value, prompt_mask, scaling, softcap, s_aux)
    if layout.branches.shape[1]:
        keys = torch.cat([prompt_key.index_select(0, layout.owner), take(key, layout.branches)], dim=2)
        values = torch.cat([prompt_value.index_select(0, layout.owner), take(value, layout.branches)], dim=2)
        mine = attend(take(query, layout.branches), keys, values, branch_mask, scaling, softcap, s_aux)
        output = torch.cat([output, mine])
    return output.index_select(0, layout.back)[None].to(dtype)


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(FLASH, functools.partial(packed_attention, flash=True))
