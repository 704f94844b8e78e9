"""slime's own dynamic filters, for functions that call them and options that name them."""

from __future__ import annotations

from typing import Any

from vime.slime.sample import DynamicFilterOutput, Sample


def check_reward_nonzero_std(args: Any, samples: list[Sample], **_: Any) -> DynamicFilterOutput:
    """Keeps groups whose rewards are not all equal; natively ``rollout.filter = "zero_variance"``."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = max(rewards) != min(rewards)
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{rewards[0]:g}")
