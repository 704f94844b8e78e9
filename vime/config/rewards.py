"""Rewards and filters that cannot work: each combination refused with its reason and its fix."""

from __future__ import annotations

from vime.config.sections import Config, Rollout

SHAPED_PARTS = ("raw", "overlong", "length")  # what shaping adds to a sample's reward parts


def impossible_rewards(config: Config) -> list[str]:
    """One line a fault."""
    rollout, reward, faults = config.rollout, config.reward, []
    for option in ("function", "options", "group"):
        if reward.parts and option in reward.model_fields_set:
            faults.append(
                f"reward.{option} = {getattr(reward, option)!r} and reward.parts are both set; remove one of them, or set "
                f"it as reward.parts.NAME.{option}"
            )
    if reward.overlong_buffer >= rollout.max_tokens:
        faults.append(
            f"reward.overlong_buffer = {reward.overlong_buffer} is not below rollout.max_tokens = {rollout.max_tokens}: "
            "every response would be penalised; set it lower"
        )
    if rollout.accuracy_low > rollout.accuracy_high:
        faults.append(
            f"rollout.accuracy_low = {rollout.accuracy_low} is over rollout.accuracy_high = {rollout.accuracy_high}: no "
            "group would be kept; swap them"
        )
    bounds = (rollout.accuracy_low, rollout.accuracy_high)
    if rollout.filter != "accuracy_band" and bounds != (Rollout().accuracy_low, Rollout().accuracy_high):
        faults.append(
            f"rollout.accuracy_low, accuracy_high = {bounds} with rollout.filter = {rollout.filter!r}, which has no bounds; "
            'set rollout.filter = "accuracy_band" or remove them'
        )
    return faults + (impossible_shaping(config) if reward.shaped else [])


def impossible_shaping(config: Config) -> list[str]:
    off = "set reward.overlong_buffer = 0 and reward.length_penalty = 0"
    faults = [
        f"reward.parts.{name}: shaping logs a part of that name; give yours another"
        for name in config.reward.parts
        if name in SHAPED_PARTS
    ]
    if config.data.response_keys:
        faults.append(f"data.response_keys with shaping: given responses are not shaped; {off}")
    if config.algorithm.advantage == "maxrl":
        faults.append(
            f"algorithm.advantage = 'maxrl' needs rewards >= 0 and shaping may make them negative; {off}, or take "
            "another advantage"
        )
    return faults
