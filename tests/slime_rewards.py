"""Rewards written as for slime, for tests; without torch, as workers import them."""

from __future__ import annotations

from typing import Any

from slime.utils.types import Sample  # type: ignore[import-not-found]


async def rm(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    return {"score": float(sample.label in sample.response) * args.scale, "length": sample.response_length}


async def group_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    longest = max(sample.response_length for sample in samples)
    return [sample.response_length / longest for sample in samples]


async def nan_rm(args: Any, sample: Any) -> float:
    return float("nan")


async def short_group_rm(args: Any, samples: Any) -> list[float]:
    return [0.0]
