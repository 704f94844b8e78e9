"""``args`` as slime's functions know it: a read-only view of the configuration under slime's flag names and under ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any
from urllib.parse import urlsplit

from vime.config.nearest import nearest
from vime.config.sections import Config
from vime.slime.flags import OPTIONS


def correction(config: Config, name: str, bound: str, default: float) -> float:
    section = config.algorithm.corrections.get(name)  # type: ignore[call-overload]
    found = None if section is None else getattr(section, bound)
    return default if found is None else float(found)


COMPUTED: dict[str, Callable[[Config], Any]] = {  # flags whose value is made of several options, or has another unit
    "global_batch_size": lambda c: c.rollout.groups * c.rollout.samples_per_group // c.algorithm.updates,
    "over_sampling_batch_size": lambda c: c.rollout.groups,
    "use_kl_loss": lambda c: c.algorithm.kl_in == "loss" and c.algorithm.kl_coef > 0,
    "kl_loss_coef": lambda c: c.algorithm.kl_coef if c.algorithm.kl_in == "loss" else 0.0,
    "kl_coef": lambda c: c.algorithm.kl_coef if c.algorithm.kl_in == "reward" else 0.0,
    "kl_loss_type": lambda c: {"low_variance": "low_var_kl"}.get(c.algorithm.kl_estimator, c.algorithm.kl_estimator),
    "use_unbiased_kl": lambda c: c.algorithm.kl_estimator == "unbiased",
    "use_tis": lambda c: (
        bool({"tis", "icepop"} & c.algorithm.corrections.keys()) or bool(c.slime.custom_tis_function_path)
    ),
    "tis_clip": lambda c: correction(c, "tis", "high", 2.0),
    "tis_clip_low": lambda c: correction(c, "tis", "low", 0.0),
    "use_opsm": lambda c: "opsm" in c.algorithm.corrections,
    "opsm_delta": lambda c: correction(c, "opsm", "high", 1e-4),
    "use_rollout_logprobs": lambda c: c.algorithm.old_logprobs == "behaviour",
    "calculate_per_token_loss": lambda c: c.algorithm.reduction == "token",
    "loss_type": lambda c: "custom_loss" if c.slime.custom_loss_function_path else "policy_loss",
    "adam_beta1": lambda c: c.trainer.betas[0],
    "adam_beta2": lambda c: c.trainer.betas[1],
    "save": lambda c: c.run.dir,
    "load": lambda c: c.run.dir,
    "eval_prompt_data": lambda c: [word for name, one in c.eval.sets.items() for word in (name, one.source)],
    "rollout_max_prompt_len": lambda c: None,
    "rollout_max_context_len": lambda c: c.vllm.get("max-model-len", c.vllm.get("max_model_len")),
    "rollout_stop": lambda c: None,
    "rollout_skip_special_tokens": lambda c: True,
    "rollout_shuffle": lambda c: True,
    "partial_rollout": lambda c: False,  # responses go on in place: none is ever handed back half made
    "colocate": lambda c: False,
    "debug_rollout_only": lambda c: False,
    "debug_train_only": lambda c: False,
    "ci_test": lambda c: False,
    "rm_type": lambda c: c.reward.function,
}


class Args:
    """Answers to slime's flag names, to the sections of our configuration (``args.rollout.groups``), to ``[slime.args]``, and
    to the addresses of the router. AttributeError, with the nearest name, for all else. Nothing can be set."""

    def __init__(self, config: Config, front: str = "", **private: Any) -> None:
        """``front`` is the router's URL, or the only server's; ``private`` names begin with "_"."""
        address = urlsplit(front)
        given = {"router_ip": address.hostname, "router_port": address.port} if front else {}
        named = {f"{engine}_{name}": value for engine in ("vllm", "sglang") for name, value in given.items()}
        vars(self).update(private, _config=config, _named={**named, **config.slime.args})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask for such
            raise AttributeError(name)
        config: Config = self._config
        if name in self._named:
            return self._named[name]
        if name in OPTIONS:
            return reduce(getattr, OPTIONS[name].split("."), config)
        if name in COMPUTED:
            return COMPUTED[name](config)
        if name in type(config.slime).model_fields and name != "args":
            return getattr(config.slime, name)
        if name in type(config).model_fields:
            return getattr(config, name)
        raise AttributeError(
            f"args has no {name!r}{self._hint(name)} What --custom-config-path added goes into [slime.args]"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"args.{name} = {value!r:.60}: args is read-only, as every process has its own; set it in [slime.args], or keep "
            "it in your module"
        )

    def __dir__(self) -> list[str]:
        config: Config = self._config
        return sorted({*self._named, *OPTIONS, *COMPUTED, *type(config.slime).model_fields, *type(config).model_fields})

    def _hint(self, name: str) -> str:
        hint = nearest(name, dir(self))
        return hint if "did you mean" in hint else "."

    def _within(self, **private: Any) -> Args:
        """The same, with other private names."""
        other = object.__new__(Args)
        vars(other).update(vars(self), **private)
        return other
