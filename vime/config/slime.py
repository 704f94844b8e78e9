"""Functions written for slime or vime (the fork of it), under the names of their flags; and combinations that cannot work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from vime.config.base import Section

if TYPE_CHECKING:
    from vime.config.sections import Config


class Slime(Section):
    """Functions with slime's signatures, each `package.module.function`, `package.module:function` or `file.py:function`; when
    each is called: docs/hooks.md."""

    custom_generate_function_path: str | None = None
    """async f(args, sample, sampling_params[, evaluation]): one sample, or a list"""
    rollout_sample_hook_path: list[str] = []
    """f(args, sample, *, rollout_id=None, evaluation=False), after a sample is made, before its reward; several, in this order"""
    custom_rm_path: str | None = None
    """f(args, sample): a number, or a dict with reward_key; instead of [reward]; in its worker processes"""
    group_rm: bool = False
    """custom_rm_path is f(args, samples), called with a whole group, and gives a list"""
    reward_key: str | None = None
    """the reward's key where custom_rm_path gives a dict"""
    eval_reward_key: str | None = None
    """the same in evaluation; default: reward_key"""
    dynamic_sampling_filter_path: str | None = None
    """f(args, samples): an object with keep and reason, for a finished group; beside rollout.filter"""
    buffer_filter_path: str | None = None
    """f(args, rollout_id, buffer, num_samples): which of the finished groups that wait make up the next batch"""
    rollout_sample_filter_path: str | None = None
    """f(args, samples), the groups of a batch: sets sample.remove_sample where a sample is not to be trained"""
    rollout_all_samples_process_path: str | None = None
    """f(args, all_samples, data_source), the groups of a batch and those filtered since the one before"""
    custom_reward_post_process_path: str | None = None
    """f(args, samples): raw rewards and rewards of a batch; needs algorithm.advantage = "reward" or one of tokens"""
    custom_convert_samples_to_train_data_path: str | None = None
    """f(args, samples): a dict of lists that is trained instead of the batch; needs the same"""
    custom_rollout_log_function_path: str | None = None
    """f(rollout_id, args, samples, extra_metrics, rollout_time); true: rollout/ and reward/ metrics go to metrics.jsonl alone"""
    custom_eval_rollout_log_function_path: str | None = None
    """f(rollout_id, args, data, extra_metrics), after an evaluation; true: its metrics go to metrics.jsonl alone"""
    data_source_path: str | None = None
    """class with get_samples, add_samples, save, load and __len__, instead of shuffled epochs over data.source"""
    rollout_function_path: str | None = None
    """f(args, rollout_id, data_source, evaluation=False): makes a whole batch, instead of the scheduler"""
    eval_function_path: str | None = None
    """f(args, rollout_id, data_source, evaluation=True): makes an evaluation, instead of that of [eval]"""
    custom_advantage_function_path: str | None = None
    """trainer: f(args, rollout_data) writes rollout_data["advantages"], instead of algorithm.advantage"""
    rollout_data_postprocess_path: str | None = None
    """trainer: f(args, rollout_id, rollout_data), with log-probabilities and advantages there; may change advantages and masks"""
    custom_tis_function_path: str | None = None
    """trainer: f(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths), instead of
    algorithm.corrections"""
    custom_pg_loss_reducer_function_path: str | None = None
    """trainer: f(total_lengths, response_lengths, loss_masks, calculate_per_token_loss), gives what sums up the objective"""
    custom_loss_function_path: str | None = None
    """trainer: f(args, batch, logits, sum_of_sample_mean), the whole loss; the logits of a micro-batch exist at once"""
    custom_megatron_init_path: str | None = None
    """trainer: f(args), on every rank at its start"""
    custom_megatron_before_log_prob_hook_path: str | None = None
    """trainer: f(args, model, store_prefix), before the log-probabilities of the policy ("") or the reference ("ref_")"""
    custom_megatron_before_train_step_hook_path: str | None = None
    """trainer: f(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), before each step; the last is None"""
    apply_chat_template: bool = True
    """sample.prompt is the prompt as text under the chat template; false: its messages"""
    timeout_s: Annotated[float, Field(gt=0)] = 600
    """deadline of a call in the driver; rollout.generate_timeout_s for custom_generate_function_path, reward.timeout_s for
    custom_rm_path, rollout_function_path and eval_function_path have rollout.generate_timeout_s"""
    args: dict[str, Any] = {}
    """further attributes of args, as --custom-config-path adds them"""

    @property
    def reads_batches(self) -> bool:
        """Whether samples of a batch are needed in the driver, with their tokens."""
        return any(getattr(self, name) is not None for name in BATCH_HOOKS)


BATCH_HOOKS = (
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
    "custom_rollout_log_function_path",
)
FINISHED_REWARDS = ("reward", "gae", "reinforce_pp")  # advantages that take rewards as they are


def impossible_slime(config: Config) -> list[str]:
    """One line a fault."""
    return [*impossible_in_driver(config), *impossible_samples(config), *impossible_in_trainer(config)]


class Faults(list[str]):
    def __init__(self, slime: Slime) -> None:
        super().__init__()
        self.slime = slime

    def refuse(self, option: str, reason: str) -> None:
        """Where the option is set."""
        if getattr(self.slime, option):
            self.append(f"slime.{option} = {getattr(self.slime, option)!r} {reason}")


def impossible_in_driver(config: Config) -> list[str]:
    slime, faults = config.slime, Faults(config.slime)
    if config.rollout.generate != "single_turn":
        faults.refuse(
            "custom_generate_function_path", f"and rollout.generate = {config.rollout.generate!r}: remove one of them"
        )
    if slime.group_rm and not slime.custom_rm_path:
        faults.append("slime.group_rm needs slime.custom_rm_path; set it, or remove group_rm")
    if config.reward.parts or config.reward.model_fields_set & {"function", "options"}:
        faults.refuse("custom_rm_path", "stands instead of [reward]'s function and parts: remove one of them")
    for option in ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"):
        if config.algorithm.advantage not in FINISHED_REWARDS:
            faults.refuse(
                option,
                f"gives rewards that algorithm.advantage = {config.algorithm.advantage!r} would compare again; set "
                'algorithm.advantage = "reward"',
            )
    if config.rollout.max_staleness and config.rollout.stale == "wait":
        faults.refuse(
            "buffer_filter_path",
            'may leave groups until they are too old, and rollout.stale = "wait" promises that none is lost; set '
            'rollout.stale = "drop" or "mask"',
        )
    if config.run.deterministic:
        faults.refuse(
            "rollout_function_path", "with run.deterministic: it asks the servers as it likes; set it to false"
        )
    if slime.rollout_function_path:
        for option in ("dynamic_sampling_filter_path", "buffer_filter_path"):
            faults.refuse(
                option, "with slime.rollout_function_path, which chooses its groups itself: remove one of them"
            )
    return faults


def impossible_samples(config: Config) -> list[str]:
    faults = Faults(config.slime)
    if not config.eval.sets:
        for option in ("eval_function_path", "custom_eval_rollout_log_function_path"):
            faults.refuse(option, "and there is nothing to evaluate: add an [eval.sets.NAME]")
    given = config.data.response_keys
    if given:
        for option in ("custom_generate_function_path", "rollout_function_path", "custom_rm_path"):
            faults.refuse(
                option, f"with data.response_keys = {given}: given responses are not sampled; remove one of them"
            )
    return faults


def impossible_in_trainer(config: Config) -> list[str]:
    slime, algorithm, trainer, faults = config.slime, config.algorithm, config.trainer, []
    if slime.custom_tis_function_path and algorithm.corrections:
        faults.append(
            f"slime.custom_tis_function_path and algorithm.corrections {', '.join(algorithm.corrections)}: both correct the "
            "same ratio; remove one of them"
        )
    if slime.custom_advantage_function_path and algorithm.advantage == "gae":
        faults.append(
            'slime.custom_advantage_function_path with algorithm.advantage = "gae", which it replaces; set another to have '
            "no critic"
        )
    for option in ("custom_loss_function_path", "custom_tis_function_path", "custom_pg_loss_reducer_function_path"):
        if getattr(slime, option) and algorithm.objective in ("dpo", "clip_cov", "kl_cov"):
            faults.append(
                f'slime.{option} with algorithm.objective = "{algorithm.objective}": set algorithm.objective = "ppo"'
            )
    if slime.custom_loss_function_path:
        spread = trainer.context_parallel * trainer.tensor_parallel
        if spread > 1:
            faults.append(
                f"slime.custom_loss_function_path needs the logits of whole sequences on one rank, and context_parallel x "
                f"tensor_parallel = {spread}; set both to 1, or write an objective: algorithm.objective = module:function"
            )
        for option in ("custom_tis_function_path", "custom_pg_loss_reducer_function_path"):
            if getattr(slime, option):
                faults.append(
                    f"slime.{option} with slime.custom_loss_function_path, which is the whole loss: remove one"
                )
        if algorithm.router_aux_coef:
            faults.append(
                f"algorithm.router_aux_coef = {algorithm.router_aux_coef} with slime.custom_loss_function_path, which is the "
                "whole loss and does not see the routers: set it to 0"
            )
    return faults
