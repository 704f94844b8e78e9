"""Rewards in a worker process: built-in ones by name, the user's by path, and what they return as numbers."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from vime.config.nearest import nearest
from vime.functions import FunctionError, built_in, user_function
from vime.rewards import RewardError
from vime.rewards.builtin import BUILTIN
from vime.sample import Task
from vime.workers.child import is_coroutine_function

Reward = Callable[[Task, Any], Any]
"""``(task, response text) -> float``, or a dict with "reward" and further named parts, or None where it does not apply to
the task; may be async. Of a group ``(task, list of response texts) ->`` a list of these, one a response, or None."""
Numbers = dict[str, float]


def load_reward(
    name: str, options: Mapping[str, Any] | None = None, deadline_s: float = 30.0, group: bool = False
) -> Reward:
    """A built-in by name with its options, or a user's ``module:function`` or ``file.py:function``, whose calls have
    ``deadline_s``; of groups, a user's.

    Raises RewardError.
    """
    arguments = f"(task, {'responses' if group else 'response'})"
    if name in BUILTIN and group:
        raise RewardError(f"reward {name!r} scores one response alone; remove group = true, which is for your own")
    if name not in BUILTIN and ":" not in name:
        raise RewardError(f"no reward is called {name!r}{nearest(name, list(BUILTIN))}; your own is module:function")
    if name not in BUILTIN and options:
        raise RewardError(f"reward.options are for built-ins; {name} takes {arguments} only")
    try:
        if name in BUILTIN:
            return built_in(BUILTIN[name], f"reward {name!r}", options or {}, deadline_s)
        return user_function(name, 2)
    except FunctionError as error:
        raise RewardError(f"{error}" if name in BUILTIN else f"{error}; a reward is f{arguments}") from None


def numbers_of(result: Any) -> Numbers | None:
    """What a reward returned, as named numbers with "reward" among them, or None; TypeError, ValueError or KeyError if not."""
    if result is None:
        return None
    parts = result if isinstance(result, dict) else {"reward": result}
    if "reward" not in parts:
        raise KeyError(f"its dict has no 'reward', only {sorted(map(str, parts))}")
    for part, value in parts.items():
        if isinstance(value, (str, bytes)):
            raise TypeError(f"{part} is the text {value!r:.40}, not a number")
    return {str(part): float(value) for part, value in parts.items()}


def group_numbers(result: Any, responses: list[str]) -> list[Numbers | None]:
    """What a reward of groups returned, as for each response alone; TypeError, ValueError or KeyError if not."""
    if result is None:
        return [None] * len(responses)
    if isinstance(result, (str, bytes, dict)) or not isinstance(result, Iterable):
        raise TypeError(f"it returned a {type(result).__name__} for {len(responses)} responses, not a list")
    listed = list(result)
    if len(listed) != len(responses):
        raise ValueError(f"it returned {len(listed)} rewards for {len(responses)} responses")
    return [numbers_of(one) for one in listed]


def scorer(name: str, options: dict[str, Any], deadline_s: float, group: bool) -> Callable[[dict[str, Any], Any], Any]:
    """The reward as a function in a worker: it takes a task's fields and a response, and gives numbers or None; of a group
    responses, and gives a list of these."""
    reward = load_reward(name, options, deadline_s, group)

    def checked(result: Any, response: Any) -> Any:
        return group_numbers(result, response) if group else numbers_of(result)

    def task_of(fields: dict[str, Any]) -> Task:
        return Task(
            fields["id"], tuple(fields["messages"]), fields["answer"], fields["metadata"], tuple(fields["tools"])
        )

    async def later(result: Awaitable[Any], response: Any) -> Any:
        return checked(await result, response)

    def plain(task: dict[str, Any], response: Any) -> Any:
        result = reward(task_of(task), response)
        return later(result, response) if inspect.isawaitable(result) else checked(result, response)

    async def coroutine(task: dict[str, Any], response: Any) -> Any:
        return checked(await reward(task_of(task), response), response)

    return coroutine if is_coroutine_function(reward) else plain
