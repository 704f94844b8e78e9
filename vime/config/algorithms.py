"""Algorithms that cannot work: each combination refused with its reason and its fix. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from vime.config.nearest import nearest
from vime.config.sections import Config, Critic
from vime.training.advantages import COMPARING, ESTIMATORS, TOKEN_LEVEL

OBJECTIVES = (
    "ppo",
    "gspo",
    "cispo",
    "sapo",
    "policy_gradient",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
    "dpo",
)
WEIGHING = ("tis", "tis_sequence", "mis", "icepop")  # corrections that carry the importance ratio itself


def unknown(option: str, name: str, known: Sequence[str]) -> list[str]:
    if name in known or ":" in name:
        return []
    return [f"algorithm.{option} = {name!r} is not known{nearest(name, known)} Your own would be module:function"]


def unknown_objective(name: str) -> list[str]:
    if name == "sft":
        return ['algorithm.objective = "sft": supervised fine-tuning needs no servers; run `vime sft CONFIG.toml`']
    return unknown("objective", name, OBJECTIVES)


def impossible_algorithms(config: Config) -> list[str]:
    """One line a fault."""
    algorithm = config.algorithm
    return [
        *unknown("advantage", algorithm.advantage, [*ESTIMATORS, *TOKEN_LEVEL]),
        *unknown_objective(algorithm.objective),
        *impossible_groups(config),
        *impossible_objectives(config),
        *impossible_models(config),
        *impossible_corrections(config),
        *impossible_routing(config),
    ]


def impossible_groups(config: Config) -> list[str]:
    rollout, algorithm, keys = config.rollout, config.algorithm, config.data.response_keys
    faults = []
    size = len(keys) or rollout.samples_per_group
    if size < 2 and algorithm.advantage in COMPARING:
        option = "data.response_keys" if keys else "rollout.samples_per_group"
        faults.append(
            f"{option} makes groups of {size} and algorithm.advantage = {algorithm.advantage!r} compares the samples of a "
            f"group: set {'two keys' if keys else 'rollout.samples_per_group >= 2'}, or an advantage that does not, e.g. "
            "batch_norm or reinforce_pp"
        )
    if keys and algorithm.objective != "dpo":
        faults.append(
            f"data.response_keys = {keys} with algorithm.objective = {algorithm.objective!r}: given responses have no "
            'behaviour log-probabilities; set algorithm.objective = "dpo" or remove the keys. To learn given responses '
            "as they are, run `vime sft`"
        )
    if keys and rollout.filter != "none":
        faults.append(
            f"data.response_keys = {keys} with rollout.filter = {rollout.filter!r}: given responses are not filtered by "
            'reward; set rollout.filter = "none"'
        )
    return faults


def impossible_objectives(config: Config) -> list[str]:
    rollout, algorithm, faults = config.rollout, config.algorithm, []
    if algorithm.objective == "dpo":
        if algorithm.advantage != "pair" or algorithm.reduction != "sequence":
            faults.append(
                f"algorithm.objective = 'dpo' with advantage = {algorithm.advantage!r} and reduction = "
                f'{algorithm.reduction!r}: it compares pairs and averages over them; set advantage = "pair" and '
                'reduction = "sequence"'
            )
        if not config.data.response_keys and rollout.filter != "zero_variance":
            faults.append(
                f"algorithm.objective = 'dpo' with rollout.filter = {rollout.filter!r}: a group of equal rewards has no "
                'pair; set rollout.filter = "zero_variance"'
            )
    if algorithm.dual_clip is not None and algorithm.objective not in ("ppo", "gspo", "clip_cov"):
        faults.append(
            f"algorithm.dual_clip = {algorithm.dual_clip} with objective = {algorithm.objective!r}, which has none; "
            "remove it"
        )
    if algorithm.fixed_length is not None and algorithm.reduction != "fixed":
        faults.append(
            f"algorithm.fixed_length = {algorithm.fixed_length} with reduction = {algorithm.reduction!r}: it would be "
            'ignored; set reduction = "fixed" or remove it'
        )
    return faults


def impossible_models(config: Config) -> list[str]:
    algorithm, reference, teacher, faults = config.algorithm, config.reference, config.teacher, []
    for name, section in (("reference", reference), ("teacher", teacher)):
        if section.path and section.url:
            faults.append(f"{name}.path and {name}.url are both set; remove one: trainer or server scores, not both")
        if section.url and config.rollout.temperature != 1.0:
            faults.append(
                f"{name}.url with rollout.temperature = {config.rollout.temperature}: a server scores prompts at "
                f"temperature 1 only; set rollout.temperature = 1.0, or {name}.path to score in the trainer"
            )
    if (reference.path or reference.url or reference.refresh_every) and not config.needs_reference:
        faults.append(
            "reference is set and nothing uses it; set algorithm.kl_coef > 0 or remove the [reference] section"
        )
    if reference.url and reference.refresh_every:
        faults.append("reference.refresh_every needs the reference in the trainer; remove reference.url or set it to 0")
    distils = algorithm.advantage == "reverse_kl"
    if distils != bool(teacher.path or teacher.url):
        faults.append(
            "algorithm.advantage = 'reverse_kl' needs a teacher; set teacher.path or teacher.url"
            if distils
            else 'a teacher is set and nothing uses it; set algorithm.advantage = "reverse_kl" or remove [teacher]'
        )
    if algorithm.advantage != "gae" and config.critic != Critic():
        faults.append(
            f"[critic] with algorithm.advantage = {algorithm.advantage!r}, which has none; set "
            'algorithm.advantage = "gae" or remove the section'
        )
    if algorithm.kl_in == "reward" and algorithm.kl_estimator == "unbiased":
        faults.append(
            'algorithm.kl_estimator = "unbiased" is a loss; in the reward set it to "k1", or set kl_in = "loss"'
        )
    return faults


def impossible_corrections(config: Config) -> list[str]:
    algorithm, faults = config.algorithm, []
    weighing = [name for name in algorithm.corrections if name in WEIGHING]
    if len(weighing) > 1:
        faults.append(
            f"algorithm.corrections {', '.join(weighing)}: each carries the importance ratio, which would count "
            f"{len(weighing)} times; keep one of them, masks may stay"
        )
    if weighing and algorithm.old_logprobs == "behaviour":
        faults.append(
            f"algorithm.corrections.{weighing[0]} with old_logprobs = 'behaviour': the objective's ratio holds the "
            'importance ratio already; set old_logprobs = "proximal" or remove the correction'
        )
    for name, bounds in algorithm.corrections.items():
        if bounds.low is not None and bounds.high is not None and bounds.low > bounds.high:
            faults.append(f"algorithm.corrections.{name}: low = {bounds.low} is over high = {bounds.high}; swap them")
    return faults


def impossible_routing(config: Config) -> list[str]:
    algorithm, faults = config.algorithm, []
    if algorithm.router_replay == "server" and config.data.response_keys:
        faults.append(
            f"algorithm.router_replay = 'server' with data.response_keys = {config.data.response_keys}: no server samples "
            'given responses, so none tells their experts; set router_replay = "none"'
        )
    if algorithm.router_replay == "trainer" and algorithm.updates == 1:
        faults.append(
            "algorithm.router_replay = 'trainer' with algorithm.updates = 1: the only update routes as itself; set "
            'updates >= 2, or router_replay = "server" or "none"'
        )
    return faults


def warnings(config: Config) -> list[str]:
    """What runs, but hardly as it is meant."""
    algorithm, staleness = config.algorithm, config.rollout.max_staleness
    if staleness and not algorithm.corrections and algorithm.old_logprobs == "proximal" and not algorithm.mask_stale:
        return [
            f"rollout.max_staleness = {staleness} without a correction: tokens of older weights are trained as if they were of "
            'the present ones; set [algorithm.corrections.tis], or algorithm.old_logprobs = "behaviour"'
        ]
    return []
