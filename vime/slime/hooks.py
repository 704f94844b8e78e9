"""All functions that ``[slime]`` takes: how each is called, where and when. Data, and what finds a wrong one before a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vime.config.sections import Config
from vime.functions import FunctionError, user_function
from vime.slime import imports
from vime.workers.child import is_coroutine_function

DRIVER, WORKER, TRAINER = "driver", "reward worker", "every trainer rank"
METHODS = {
    "get_samples": 1,
    "add_samples": 1,
    "save": 1,
    "load": 1,
    "__len__": 0,
}  # of a data source, with their arguments


@dataclass(frozen=True)
class Hook:
    """``arguments`` are given by position, ``keywords`` by name, ``optional`` ones by name where the function has them.

    ``kind``: "async" (a coroutine function), "plain" (not one), "either" or "class".
    """

    option: str
    arguments: tuple[str, ...]
    process: str
    when: str
    returns: str
    keywords: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    kind: str = "plain"

    @property
    def signature(self) -> str:
        if self.kind == "class":
            return f"class: __init__(args), {', '.join(METHODS)}"
        optional = f"[, {', '.join(self.optional)}]" if self.optional else ""
        named = ["*", *self.keywords] if self.keywords else []
        return f"{'async ' if self.kind == 'async' else ''}f({', '.join([*self.arguments, *named])}{optional})"


HOOKS: dict[str, Hook] = {
    "generate": Hook(
        "custom_generate_function_path",
        ("args", "sample", "sampling_params"),
        DRIVER,
        "for each response, training and evaluation",
        "a Sample, or a list: samples of one rollout",
        optional=("evaluation",),
        kind="async",
    ),
    "sample": Hook(
        "rollout_sample_hook_path",
        ("args", "sample"),
        DRIVER,
        "for each sample made, before its reward",
        "the Sample, or None: it was changed in place",
        keywords=("rollout_id", "evaluation"),
        kind="either",
    ),
    "reward": Hook(
        "custom_rm_path",
        ("args", "sample"),
        WORKER,
        "for each sample without a reward",
        "a number, or a dict with reward_key",
        kind="either",
    ),
    "group_reward": Hook(
        "custom_rm_path",
        ("args", "samples"),
        WORKER,
        "with group_rm: for each group, when all its samples are made",
        "a list with one reward a sample",
        kind="either",
    ),
    "dynamic_filter": Hook(
        "dynamic_sampling_filter_path",
        ("args", "samples"),
        DRIVER,
        "for each finished group",
        "DynamicFilterOutput(keep, reason)",
    ),
    "buffer_filter": Hook(
        "buffer_filter_path",
        ("args", "rollout_id", "buffer", "num_samples"),
        DRIVER,
        "when groups enough for a batch are ready",
        "the groups of the batch; what it takes out of buffer beside them is dropped",
    ),
    "sample_filter": Hook(
        "rollout_sample_filter_path",
        ("args", "samples"),
        DRIVER,
        "for each batch, before training",
        "None: it sets remove_sample",
    ),
    "all_samples": Hook(
        "rollout_all_samples_process_path",
        ("args", "all_samples", "data_source"),
        DRIVER,
        "for each batch, after the sample filter",
        "None",
    ),
    "reward_post_process": Hook(
        "custom_reward_post_process_path",
        ("args", "samples"),
        DRIVER,
        "for each batch, after all_samples",
        "(raw rewards, rewards)",
    ),
    "convert": Hook(
        "custom_convert_samples_to_train_data_path",
        ("args", "samples"),
        DRIVER,
        "for each batch, after the reward post-process",
        "a dict of lists: tokens, response_lengths, rewards, loss_masks, rollout_log_probs, sample_indices",
    ),
    "rollout_log": Hook(
        "custom_rollout_log_function_path",
        ("rollout_id", "args", "samples", "extra_metrics", "rollout_time"),
        DRIVER,
        "for each batch, last",
        "true: sinks do not get our rollout/ and reward/ metrics",
    ),
    "eval_log": Hook(
        "custom_eval_rollout_log_function_path",
        ("rollout_id", "args", "data", "extra_metrics"),
        DRIVER,
        "after each evaluation",
        "true: sinks do not get our eval/ metrics",
    ),
    "data_source": Hook("data_source_path", ("args",), DRIVER, "at the start", "prompts, by get_samples", kind="class"),
    "rollout": Hook(
        "rollout_function_path",
        ("args", "rollout_id", "data_source"),
        f"{DRIVER}, a thread",
        "for each batch",
        "RolloutFnTrainOutput(samples, metrics), or the samples: a list of groups",
        keywords=("evaluation",),
        kind="either",
    ),
    "eval": Hook(
        "eval_function_path",
        ("args", "rollout_id", "data_source"),
        f"{DRIVER}, a thread",
        "for each evaluation",
        "RolloutFnEvalOutput(data, metrics), data = {set: {rewards, truncated, samples}}",
        keywords=("evaluation",),
        kind="either",
    ),
    "advantage": Hook(
        "custom_advantage_function_path",
        ("args", "rollout_data"),
        TRAINER,
        "for each batch, after log-probabilities",
        "None: it sets rollout_data['advantages'], a tensor a sample",
    ),
    "postprocess": Hook(
        "rollout_data_postprocess_path",
        ("args", "rollout_id", "rollout_data"),
        TRAINER,
        "for each batch, after advantages",
        "None: it may change advantages and loss_masks",
    ),
    "tis": Hook(
        "custom_tis_function_path",
        (),
        TRAINER,
        "for each micro-batch, with the objective's losses",
        "(pg_loss, loss_masks, metrics)",
        keywords=(
            "args",
            "pg_loss",
            "train_log_probs",
            "rollout_log_probs",
            "loss_masks",
            "total_lengths",
            "response_lengths",
        ),
    ),
    "reducer": Hook(
        "custom_pg_loss_reducer_function_path",
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
        TRAINER,
        "for each micro-batch",
        "a function from token losses to their sum over samples",
    ),
    "loss": Hook(
        "custom_loss_function_path",
        ("args", "batch", "logits", "sum_of_sample_mean"),
        TRAINER,
        "for each micro-batch",
        "(loss, metrics)",
    ),
    "init": Hook("custom_megatron_init_path", ("args",), TRAINER, "at the start, before models are loaded", "None"),
    "before_log_prob": Hook(
        "custom_megatron_before_log_prob_hook_path",
        ("args", "model", "store_prefix"),
        TRAINER,
        "before a model's log-probabilities of a batch",
        "None",
    ),
    "before_step": Hook(
        "custom_megatron_before_train_step_hook_path",
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
        TRAINER,
        "before each optimizer step's forward pass",
        "None",
    ),
}


def load_function(path: str) -> Callable[..., Any]:
    """What is at ``package.module.function``, ``package.module:function`` or ``file.py:function``; FunctionError if nothing."""
    imports.install()
    if ":" not in path:
        place, dot, name = path.rpartition(".")
        if not dot or name == "py":
            raise FunctionError(f"{path!r} names no function; write package.module.function or file.py:function")
        path = f"{place}:{name}"
    return user_function(path, None)


def load_hook(kind: str, path: str) -> Callable[..., Any]:
    """The function of that kind, which can be called as the table says; FunctionError if not."""
    hook, found = HOOKS[kind], load_function(path)
    if hook.kind == "class":
        check_class(path, found)
        return found
    is_async = is_coroutine_function(found)
    if hook.kind != "either" and is_async != (hook.kind == "async"):
        what, wanted = ("an async", "def f") if is_async else ("a plain", "async def f")
        raise FunctionError(f"{path} is {what} function; it is to be {wanted}{hook.signature.partition('f')[2]}")
    check_call(path, found, hook.arguments, hook.keywords, hook.signature)
    return found


def check_call(
    path: str, found: Callable[..., Any], arguments: tuple[str, ...], keywords: tuple[str, ...], wanted: str
) -> None:
    try:
        signature = inspect.signature(found)
    except ValueError:  # some of C's have none
        return
    try:
        signature.bind(*arguments, **{name: name for name in keywords})
    except TypeError as error:
        raise FunctionError(f"{path}{signature} cannot be called as {wanted}: {error}") from None


def check_class(path: str, found: Any) -> None:
    if not inspect.isclass(found):
        raise FunctionError(f"{path} is a function; a data source is a class with {', '.join(METHODS)}")
    check_call(path, found, ("args",), (), "__init__(args)")
    for name, arguments in METHODS.items():
        method = getattr(found, name, None)
        if method is None:
            raise FunctionError(f"{path} has no method {name}; a data source has {', '.join(METHODS)}")
        given = ("value",) * (arguments + 1)  # and self
        check_call(f"{path}.{name}", method, given, (), f"{name} with {arguments} arguments")


def has(found: Callable[..., Any], argument: str) -> bool:
    """Whether the function takes the argument by name."""
    parameters = inspect.signature(found).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def configured(config: Config) -> Iterator[tuple[str, str]]:
    """Kind and path of every function that is set."""
    for kind, hook in HOOKS.items():
        if hook.option == "custom_rm_path" and (kind == "group_reward") != config.slime.group_rm:
            continue
        paths = getattr(config.slime, hook.option)
        yield from ((kind, path) for path in ([paths] if isinstance(paths, str) else paths or []))


def wrong_hooks(config: Config) -> list[str]:
    """One line for each function that cannot be loaded or called; a reward's are found where its workers start."""
    faults = []
    for kind, path in configured(config):
        try:
            if HOOKS[kind].process != WORKER:
                load_hook(kind, path)
        except FunctionError as error:
            faults.append(f"slime.{HOOKS[kind].option}: {error}")
    return faults
