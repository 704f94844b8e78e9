"""LoRA settings that cannot work: each refused with its reason and its fix. Imports no torch."""

from __future__ import annotations

from vime.config.sections import Config, Lora

SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""what vLLM takes as --max-lora-rank"""
EMBEDDINGS = ("lm_head", "embed_tokens")
SEVERAL = ("api-server-count", "data-parallel-size")
"""flags that start several API processes, of which an adapter reaches one"""


def served_rank(rank: int) -> int:
    """The smallest --max-lora-rank for adapters of this rank."""
    return next(served for served in SERVED_RANKS if served >= rank)


def impossible_lora(config: Config) -> list[str]:
    """One line a fault."""
    lora, reference, faults = config.lora, config.reference, []
    if not lora.rank:
        given = [f"lora.{name}" for name in Lora.model_fields if getattr(lora, name) != getattr(Lora(), name)]
        return (
            [f"{', '.join(given)} with lora.rank = 0, which trains no adapter; set lora.rank, 16 say"] if given else []
        )
    targets = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules
    if not targets:
        faults.append('lora.target_modules = []: nothing would train; set it to "all-linear" or to names of modules')
    if found := [name for name in targets if name.split(".")[-1] in EMBEDDINGS]:
        faults.append(
            f"lora.target_modules: {', '.join(found)} cannot have an adapter: log-probabilities are computed from the "
            "head's own weights, and tied ones would change the embedding too; take it out"
        )
    if reference.refresh_every and reference.path not in (None, config.model.path):
        faults.append(
            f"reference.refresh_every with [lora] and reference.path = {reference.path!r}: a refresh copies the adapter, "
            "which is of model.path; remove reference.path or set refresh_every = 0"
        )
    if lora.sync == "adapter":
        if config.rollout.in_flight != "recompute":
            faults.append(
                f"rollout.in_flight = {config.rollout.in_flight!r} with lora.sync = 'adapter': nothing is interrupted, a "
                "response is finished by the adapter that began it; remove it"
            )
        if lora.rank > SERVED_RANKS[-1]:
            faults.append(
                f"lora.rank = {lora.rank} with lora.sync = 'adapter': vLLM serves ranks up to {SERVED_RANKS[-1]}; set "
                'lora.sync = "merged"'
            )
        flags = {name.replace("_", "-"): value for name, value in config.vllm.items()}
        if found := [name for name in SEVERAL if flags.get(name, 1) not in (0, 1)]:
            faults.append(
                f"vllm.{found[0]} = {flags[found[0]]} with lora.sync = 'adapter': vLLM hands an adapter to one of its API "
                'processes only; set inference.servers instead, or lora.sync = "merged"'
            )
    return faults
