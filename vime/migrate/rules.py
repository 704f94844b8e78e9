"""What is made of flags whose values are to be computed, or that belong together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.migrate.script import Flag
from vime.migrate.table import ADVANTAGES, NATIVE_FUNCTIONS, REWARDS


class Unfit(ValueError):
    """A flag's value has no counterpart; the message says why and what to do."""


@dataclass
class Given:
    """All flags of a script, as rules look at them; ``asynchronous``: it runs train_async.py."""

    flags: dict[str, Flag]
    asynchronous: bool = False
    notes: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self.flags

    def text(self, name: str, default: str = "") -> str:
        return " ".join(self.flags[name].values) if name in self.flags else default

    def number(self, name: str, default: float) -> float:
        return number(self.text(name)) if name in self.flags else default

    def whole(self, name: str, default: int) -> int:
        return int(self.number(name, default))


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise Unfit(f"{text!r} is no number; set it by hand") from None


Options = dict[str, Any]
Rule = Callable[[Given, list[str]], Options | tuple[Options, str]]


def option(name: str, kind: Callable[[str], Any] = str) -> Rule:
    return lambda given, values: {name: kind(" ".join(values))}


def fixed(options: Options, note: str = "") -> Rule:
    return lambda given, values: (options, note)


def updates(given: Given, values: list[str]) -> Options:
    groups, size = given.whole("rollout_batch_size", 0), given.whole("n_samples_per_prompt", 1)
    batch = int(number(values[0]))
    if not groups or groups * size % batch:
        raise Unfit(f"{groups} prompts x {size} samples are no multiple of {batch}; set algorithm.updates by hand")
    if groups % (groups * size // batch):
        raise Unfit(
            f"{groups} prompts cannot be split into {groups * size // batch} updates; set algorithm.updates by hand"
        )
    return {"algorithm.updates": groups * size // batch}


def epochs(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    if "num_rollout" in given:
        return {}, "num_rollout says how many steps"
    data, groups = Path(given.text("prompt_data")), given.whole("rollout_batch_size", 1)
    if not data.is_file() or data.suffix != ".jsonl":
        raise Unfit(f"the rows of {data} cannot be counted; set run.steps = rows x {values[0]} // {groups}")
    with data.open("rb") as lines:
        rows = sum(1 for line in lines if line.strip())
    return {"run.steps": int(rows * number(values[0])) // groups}


def estimator(given: Given, values: list[str]) -> Options:
    if values[0] not in ADVANTAGES:
        raise Unfit(f"{values[0]!r} is not known; see algorithm.advantage")
    advantage, objective = ADVANTAGES[values[0]]
    if "disable_grpo_std_normalization" in given and advantage == "grpo":
        advantage = "dr_grpo"
    finished = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")
    if "disable_rewards_normalization" in given or any(name in given for name in finished):
        advantage = "reward" if advantage in ("grpo", "dr_grpo") else advantage
    token_mean = "calculate_per_token_loss" in given
    return {
        "algorithm.advantage": advantage,
        "algorithm.objective": objective,
        "algorithm.reduction": "token" if token_mean else "rollout",
    }


def clip(given: Given, values: list[str]) -> Options:
    low = number(values[0])
    options: Options = {"algorithm.clip_low": min(low, 1.0)}
    return options if "eps_clip_high" in given else {**options, "algorithm.clip_high": low}


def kl_in_loss(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    if "use_kl_loss" not in given:
        return {}, "without --use-kl-loss it is not used"
    return {"algorithm.kl_coef": number(values[0]), "algorithm.kl_in": "loss"}


def kl_in_reward(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    if not number(values[0]):
        return {}, "0: no penalty"
    estimator = {} if "kl_loss_type" in given else {"algorithm.kl_estimator": "k1"}
    return {"algorithm.kl_coef": number(values[0]), "algorithm.kl_in": "reward", **estimator}


def kl_estimator(given: Given, values: list[str]) -> Options:
    if "use_unbiased_kl" in given and "use_kl_loss" in given:
        return {"algorithm.kl_estimator": "unbiased"}
    return {"algorithm.kl_estimator": {"low_var_kl": "low_variance"}.get(values[0], values[0])}


def tis(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    path = given.text("custom_tis_function_path")
    if path and path.rpartition(".")[2] != "icepop_function":
        return {}, "slime.custom_tis_function_path stands instead"
    name = "icepop" if path else "tis"
    low = given.number("tis_clip_low", 0.0)
    high = given.number("tis_clip", 2.0)
    return {f"algorithm.corrections.{name}.low": low, f"algorithm.corrections.{name}.high": high}


def with_tis(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    return {}, "in the correction's bounds" if "use_tis" in given else "without --use-tis it is not used"


def tis_level(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    if values[0] != "token" and "use_tis" in given:
        raise Unfit(
            "the ratio is a token's; a response's product: algorithm.corrections.tis_sequence, its geometric mean, as a mask: "
            "mask_geometric"
        )
    return with_tis(given, values)


def no_top_p(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    if number(values[0]) != 1.0:
        raise Unfit(
            "only 1: rollout.top_p would change what is trained; the servers would renormalise, the trainer not"
        )
    return {}, "1, as always"


def no_top_k(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    if number(values[0]) > 0:
        raise Unfit("only -1, as with top_p")
    return {}, "-1, as always"


def eval_sets(given: Given, values: list[str]) -> Options:
    names, files = values[::2], values[1::2]
    if len(names) != len(files):
        raise Unfit(f"{len(values)} words are no pairs of a name and a file; write [eval.sets.NAME] by hand")
    samples = given.whole("n_samples_per_eval_prompt", 1)
    temperature = given.number("eval_temperature", given.number("rollout_temperature", 1.0))
    one: Options = {
        "samples": samples,
        "temperature": temperature,
        "prompt_key": given.text("eval_input_key", given.text("input_key", "input")),
        "answer_key": given.text("eval_label_key", given.text("label_key", "label")),
    }
    top_p = given.number("eval_top_p", given.number("rollout_top_p", 1.0))
    top_k = given.number("eval_top_k", given.number("rollout_top_k", -1))
    one |= {"top_p": top_p} if top_p < 1 else {}
    one |= {"top_k": int(top_k)} if top_k > 0 else {}
    if "eval_max_response_len" in given:
        one["max_tokens"] = given.whole("eval_max_response_len", 0)
    return {f"eval.sets.{name}": {"source": file, **one} for name, file in zip(names, files, strict=True)}


def in_sets(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    if "eval_prompt_data" not in given:
        raise Unfit("there is no --eval-prompt-data; set it in [eval.sets.NAME]")
    return {}, "in [eval.sets.NAME]"


def reward(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    if "custom_rm_path" in given:
        return {}, "slime.custom_rm_path stands instead"
    name = values[0].removeprefix("boxed_")
    if name not in REWARDS:
        raise Unfit(f"there is no built-in {values[0]!r}; write it as reward.function = file.py:function")
    return {"reward.function": REWARDS[name]}


def function(given: Given, name: str, values: list[str]) -> Options | tuple[Options, str]:
    """A function by path: ``[slime]``'s own option, or the native one that slime's built-in is."""
    for path in values:
        known = path.rpartition(".")[2]
        if known in NATIVE_FUNCTIONS and path.partition(".")[0] in ("slime", "vime", "examples"):
            native = NATIVE_FUNCTIONS[known]
            if native is None or known == "icepop_function":
                return {}, "what vime does itself"
            return {native[0]: native[1]}
    if any(".sft_rollout" in path for path in values):
        raise Unfit("fine-tuning needs no servers; see `vime sft`")
    return {f"slime.{name}": list(values) if name == "rollout_sample_hook_path" else values[0]}


def devices(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    """Ranks and servers: slime's colocated ones take turns on a device, ours have their own."""
    nodes, each = given.whole("actor_num_nodes", 1), given.whole("actor_num_gpus_per_node", 8)
    engine, model = (
        given.whole("rollout_num_gpus_per_engine", 1),
        given.whole("tensor_model_parallel_size", 1) * given.whole("context_parallel_size", 1),
    )
    total = nodes * each
    if nodes > 1:
        given.notes.append(
            f"{nodes} nodes: the trainer and the servers it starts are on one; further servers go into inference.urls"
        )
        total = each
    if "colocate" not in given:
        servers = max(1, given.whole("rollout_num_gpus", engine) // engine)
        return {"trainer.ranks": total, "inference.servers": servers}
    servers = max(1, total // 2 // engine)
    ranks = max(1, total - servers * engine) // model * model or model
    if total == 1 and engine == 1 and ranks == 1:
        return {"trainer.ranks": 1, "inference.servers": 1}, (
            "both on the one device all the time; vllm.gpu-memory-utilization is the server's share of it"
        )
    if ranks + servers * engine > total:
        return {"trainer.ranks": ranks, "inference.servers": servers}, (
            f"{total} devices, shared in turn before, do not do for both: {servers * engine} for servers and {ranks} for the "
            "trainer; give servers elsewhere by inference.urls, or set fewer"
        )
    note = f"{total} devices, shared in turn before: {servers * engine} for servers, {ranks} for the trainer"
    return {"trainer.ranks": ranks, "inference.servers": servers}, note


def with_devices(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    return {}, "in trainer.ranks and inference.servers"


def engine_devices(given: Given, values: list[str]) -> Options:
    size = int(number(values[0]))
    return {"inference.gpus_per_server": size, **({"vllm.tensor-parallel-size": size} if size > 1 else {})}


def concurrency(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    return {"rollout.concurrency": int(number(values[0])) * max(1, devices_of(given))}, "of all servers together"


def devices_of(given: Given) -> int:
    found = devices(Given(given.flags), [])
    return int((found[0] if isinstance(found, tuple) else found)["inference.servers"])


def warmup(given: Given, values: list[str]) -> Options:
    if "num_rollout" not in given:
        raise Unfit("the number of steps is not known; set trainer.warmup_steps by hand")
    batch = given.whole("rollout_batch_size", 1) * given.whole("n_samples_per_prompt", 1)
    each = given.whole("num_steps_per_rollout", batch // given.whole("global_batch_size", batch))
    steps = given.whole("num_rollout", 0) * max(1, each)
    return {"trainer.warmup_steps": int(number(values[0]) * steps)}


def recompute(given: Given, values: list[str]) -> Options:
    return {"trainer.activation_checkpointing": values[0]}


def flush(given: Given, values: list[str]) -> Options:
    every = int(number(values[0]))
    if every == 1:
        return {}
    return {"rollout.max_staleness": 1, "rollout.in_flight": "keep_cache" if every <= 0 else "recompute"}


def routing(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    if "use_rollout_routing_replay" in given:
        return {}, "--use-rollout-routing-replay stands instead"
    if given.whole("global_batch_size", 0) in (
        0,
        given.whole("rollout_batch_size", 0) * given.whole("n_samples_per_prompt", 1),
    ):
        return {}, "with one update a batch the only one routes as itself"
    return {"algorithm.router_replay": "trainer"}


def loss_type(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    if values[0] == "sft_loss":
        raise Unfit("fine-tuning needs no servers; see `vime sft`")
    return {}, "slime.custom_loss_function_path" if values[0] == "custom_loss" else "the objective"


def custom_config(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    path = Path(values[0])
    if not path.is_file():
        raise Unfit(f"{path} is not there; copy its keys into [slime.args]")
    import yaml

    return {"slime.args": yaml.safe_load(path.read_text()) or {}}


def group_reward(given: Given, values: list[str]) -> Options:
    if "custom_rm_path" not in given:
        raise Unfit("without --custom-rm-path each sample has its own reward")
    return {"slime.group_rm": True}


def whitening(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    if given.text("advantage_estimator").startswith(("reinforce", "ppo")):
        return {}, "in algorithm.advantage"
    raise Unfit('grpo is not whitened; see algorithm.advantage = "grpo_batch_std" and "reinforce_pp_baseline"')


def style(given: Given, values: list[str]) -> Options:
    if values[0] not in ("constant", "cosine"):
        raise Unfit(f"{values[0]!r} is not there; set trainer.schedule")
    return {"trainer.schedule": values[0]}


def adam(given: Given, values: list[str]) -> Options | tuple[Options, str]:
    if values[0] != "adam":
        raise Unfit("only AdamW; see trainer.optimizer")
    return {}, "AdamW, as always"


def betas(given: Given, values: list[str]) -> Options:
    return {"trainer.betas": [given.number("adam_beta1", 0.9), given.number("adam_beta2", 0.999)]}


def urls(given: Given, values: list[str]) -> Options:
    return {"inference.urls": [one if "://" in one else f"http://{one}" for one in values]}


RULES: dict[str, Rule] = {
    "save": lambda given, values: {"run.dir": f"runs/{Path(values[0]).name}"},
    "num_epoch": epochs,
    "global_batch_size": updates,
    "rollout_top_p": no_top_p,
    "rollout_top_k": no_top_k,
    "rollout_stop_token_ids": lambda given, values: {"rollout.stop_token_ids": [int(number(one)) for one in values]},
    "rollout_max_context_len": option("vllm.max-model-len", lambda text: int(number(text))),
    "mask_offpolicy_in_partial_rollout": fixed({"algorithm.mask_stale": True}),
    "rm_type": reward,
    "eval_prompt_data": eval_sets,
    "n_samples_per_eval_prompt": in_sets,
    "eval_temperature": in_sets,
    "eval_max_response_len": in_sets,
    "eval_input_key": in_sets,
    "eval_label_key": in_sets,
    "eval_top_p": in_sets,
    "eval_top_k": in_sets,
    "skip_eval_before_train": fixed({"eval.at_start": False}),
    "eval_max_context_len": fixed({}, "vllm.max-model-len bounds all"),
    "advantage_estimator": estimator,
    "disable_grpo_std_normalization": fixed({}, "in algorithm.advantage"),
    "disable_rewards_normalization": fixed({}, "in algorithm.advantage"),
    "calculate_per_token_loss": fixed({}, "in algorithm.reduction"),
    "loss_type": loss_type,
    "eps_clip": clip,
    "use_kl_loss": fixed({}, "in algorithm.kl_in"),
    "kl_loss_coef": kl_in_loss,
    "kl_coef": kl_in_reward,
    "kl_loss_type": kl_estimator,
    "use_unbiased_kl": fixed({}, "in algorithm.kl_estimator"),
    "use_tis": tis,
    "tis_clip": with_tis,
    "tis_clip_low": with_tis,
    "tis_level": tis_level,
    "use_opsm": lambda given, values: {"algorithm.corrections.opsm.high": given.number("opsm_delta", 1e-4)},
    "opsm_delta": fixed({}, "in algorithm.corrections.opsm"),
    "use_rollout_logprobs": fixed({"algorithm.old_logprobs": "behaviour"}),
    "use_routing_replay": routing,
    "use_rollout_routing_replay": fixed({"algorithm.router_replay": "server"}),
    "moe_aux_loss_coeff": option("algorithm.router_aux_coef", float),
    "optimizer": adam,
    "adam_beta1": betas,
    "adam_beta2": betas,
    "lr_decay_style": style,
    "lr_warmup_fraction": warmup,
    "optimizer_cpu_offload": fixed({"trainer.cpu_offload": "optimizer"}),
    "recompute_granularity": recompute,
    "log_probs_chunk_size": lambda given, values: (
        {"trainer.logprob_chunk": int(values[0])} if number(values[0]) > 0 else {}
    ),
    "actor_num_gpus_per_node": devices,
    "actor_num_nodes": with_devices,
    "rollout_num_gpus": with_devices,
    "colocate": with_devices,
    "rollout_num_gpus_per_engine": engine_devices,
    "rollout_external_engine_addrs": urls,
    "vllm_server_concurrency": concurrency,
    "sglang_server_concurrency": concurrency,
    "flush_cache_interval": flush,
    "custom_config_path": custom_config,
    "group_rm": group_reward,
    "normalize_advantages": whitening,
    "use_wandb": fixed({"log.sinks": ["wandb"]}),
    "target_modules": lambda given, values: {"lora.target_modules": values},
}
