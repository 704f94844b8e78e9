"""slime's rewards in a worker process: args rebuilt from JSON, samples from their fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from vime.config.sections import Config
from vime.functions import FunctionError
from vime.slime.args import Args
from vime.slime.hooks import load_hook
from vime.slime.sample import Sample
from vime.workers.child import is_coroutine_function

Fields = dict[str, Any]


def scorer(path: str, group: bool, config: dict[str, Any]) -> Callable[[str, list[Fields]], Any]:
    """``custom_rm_path`` as a function of the router's URL and the fields of a sample, or of a group's, that gives a list of
    rewards, each a number or a dict of numbers."""
    try:
        reward = load_hook("group_reward" if group else "reward", path)
    except FunctionError as error:
        raise FunctionError(f"slime.custom_rm_path: {error}") from None
    parsed = Config.model_validate(config)
    args_at = cache(lambda front: Args(parsed, front))

    def arguments(front: str, rows: list[Fields]) -> tuple[Args, Any]:
        samples = [Sample.from_dict(row) for row in rows]
        return args_at(front), samples if group else samples[0]

    def results(value: Any, count: int) -> list[Any]:
        values = list(value) if group else [value]
        if len(values) != count:
            raise ValueError(f"it returned {len(values)} rewards for {count} samples")
        return [plain(one) for one in values]

    def call(front: str, rows: list[Fields]) -> Any:
        made = reward(*arguments(front, rows))
        return later(made, len(rows)) if inspect.isawaitable(made) else results(made, len(rows))

    async def later(made: Any, count: int) -> list[Any]:
        return results(await made, count)

    async def call_async(front: str, rows: list[Fields]) -> list[Any]:
        return results(await reward(*arguments(front, rows)), len(rows))

    return call_async if is_coroutine_function(reward) else call


def plain(value: Any) -> Any:
    """A number, or a dict's numbers, as JSON has them; TypeError or ValueError for what is none."""
    if isinstance(value, dict):
        numbers = {}
        for name, one in value.items():
            if not isinstance(one, (str, bytes, list, dict)) and one is not None:
                numbers[str(name)] = float(one)
        return numbers
    if value is None or isinstance(value, (str, bytes)):
        raise TypeError(f"it returned {value!r:.60}; a reward is a number or a dict of numbers")
    return float(value)
