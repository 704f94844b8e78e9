"""Whether the engine can train a model: asked of the model itself, when it is loaded.

A few random tokens are packed with shared prompts, and their log-probabilities compared with those of the plain model, a
sequence a row, by transformers' eager attention. What the engine does not do shows there: attention that does not go
through our function, state that would leak between packed sequences (Mamba, linear attention, convolutions), another head.
Windows are made shorter than the sequences meanwhile. No list of architectures is kept.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, PreTrainedConfig

from vime.training import packed
from vime.training.parallel import decoder_layers

LAYERS = (
    "full_attention",
    "sliding_attention",
    "attention",
)  # of a configuration's layer_types, what packing keeps apart
LENGTHS = ((7, 6), (3, 10))  # prompt and response tokens of the groups; each has two responses
WINDOW = 4
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
NEXT = "docs/models.md says what is supported"


class ModelRefused(Exception):
    """The model needs something that this engine does not do; the message names it."""


def load_config(folder: Path) -> PreTrainedConfig:
    """The model's configuration with every dropout and jitter at 0: log-probabilities must be those of sampling.

    ModelRefused for what the weights need not be loaded for.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise ModelRefused(
            f"{folder}: transformers has no such architecture, and code from the model's folder is not run ({error})"
        ) from None
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise ModelRefused(f"{folder}: {config.model_type} is an encoder-decoder; only decoders are trained. {NEXT}")
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ModelRefused(
            f"{folder}: its weights are quantised ({method}), and only whole ones are trained; load it with transformers' "
            "dequantize=True and save it again"
        )
    if others := sorted(set(getattr(text, "layer_types", None) or ()) - set(LAYERS)):
        raise ModelRefused(
            f"{folder}: {config.model_type} has layers of {', '.join(others)}, which would mix the sequences of a packed row; "
            f"known are {', '.join(LAYERS)}. {NEXT}"
        )
    for part in (config, text):
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)
    return config


def rope_limit(model: nn.Module) -> int | None:
    """Positions up to which a model's rotary embedding is the same for all sequences, where it depends on their length.

    transformers changes the frequencies of "dynamic" and "longrope" by the longest sequence of a batch: a packed row that
    is longer would change those of its short sequences.
    """
    limits: list[int] = []
    for module in model.modules():
        rope: Any = module
        kinds = getattr(rope, "rope_type", None)
        for layer, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind == "longrope":
                parameters = rope.config.rope_parameters
                limits.append((parameters[layer] if layer else parameters)["original_max_position_embeddings"])
            elif kind and "dynamic" in kind:
                limits.append(rope.original_max_seq_len)
    return min(limits, default=None)


@contextlib.contextmanager
def short_windows(model: nn.Module) -> Iterator[None]:
    """Sliding windows and chunks of attention of at most WINDOW tokens, in the modules and their configurations."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            owners[id(owner)] = owner
    found = [(o, n, getattr(o, n)) for o in owners.values() if o is not None for n in WINDOWS if hasattr(o, n)]
    changed = [one for one in found if isinstance(one[2], int) and one[2] > WINDOW]
    for owner, name, _ in changed:
        setattr(owner, name, WINDOW)
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


@contextlib.contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """The model with transformers' attention ``name``, then with ours again."""
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(packed.NAME)


@contextlib.contextmanager
def noting() -> Iterator[set[nn.Module]]:
    """The modules from which our attention is called inside."""
    callers: set[nn.Module] = set()

    def attention(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        callers.add(module)
        return packed.packed_attention(module, *arguments, **options)

    AttentionInterface.register(packed.NAME, attention)
    try:
        yield callers
    finally:
        AttentionInterface.register(packed.NAME, packed.packed_attention)


def compare(policy: Any) -> tuple[torch.Tensor, set[nn.Module]]:
    """Absolute differences between packed and plain log-probabilities of random tokens, [N], and the modules from which our
    attention was called."""
    model, draw = policy.model, random.Random(0)
    device, vocabulary = next(model.parameters()).device, model.get_output_embeddings().weight.shape[0]

    def ids(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    groups = [(ids(prompt), [ids(response), ids(response)]) for prompt, response in LENGTHS]
    model.train()  # as it learns; some routers and norms then are others
    with noting() as callers:
        mine = policy(packed.pack(groups, device), 1.0, 1024)[0]
    model.eval()
    rows = torch.tensor([prompt + response for prompt, responses in groups for response in responses], device=device)
    with attention_of(model, "eager"):
        log_p = torch.log_softmax(model(input_ids=rows, use_cache=False).logits[:, :-1].float(), dim=-1)
    chosen = log_p.gather(-1, rows[:, 1:, None]).squeeze(-1)
    firsts = [len(prompt) - 1 for prompt, responses in groups for _ in responses]
    plain = torch.cat([row[first:] for row, first in zip(chosen, firsts, strict=True)])
    return (mine - plain).abs(), callers


def made_of(layers: Iterable[nn.Module]) -> str:
    """What the layers are made of, for messages."""
    return ", ".join(sorted({type(child).__name__ for layer in layers for child in layer.children()}))


@torch.no_grad()
def self_check(policy: Any, folder: Path) -> None:
    """ModelRefused where packed log-probabilities are not those of the plain model. Whole model, not sharded yet."""
    model = policy.model
    name, layers = f"{folder}: {type(model).__name__}", decoder_layers(policy.decoder)
    try:
        with short_windows(model):
            differences, callers = compare(policy)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ModelRefused(
            f"{name} cannot be computed packed ({type(error).__name__}: {str(error)[:300]}). {NEXT}"
        ) from error
    if silent := [layer for layer in layers if not callers & set(layer.modules())]:
        raise ModelRefused(
            f"{name} has layers whose tokens meet outside transformers' attention interface, made of {made_of(silent)}: "
            f"packed sequences would not be kept apart. {NEXT}"
        )
    apart = differences.mean().item()
    bound = 0.5 if model.dtype == torch.bfloat16 else 1e-3  # rounding of right models: 0.08 and 1e-5 on SmolLM2-135M
    if not apart <= bound:
        raise ModelRefused(
            f"{name} packed differs from the plain model by {apart:.3g} in log-probability (bound "
            f"{bound:g}), in its layers ({made_of(layers)}) or its head. {NEXT}"
        )
