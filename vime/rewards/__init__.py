"""What a response is worth: built-in rewards by name, user functions by path, called with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vime.config.nearest import nearest
from vime.config.sections import RewardSection
from vime.functions import FunctionError, user_function
from vime.rewards.builtin import BUILTIN
from vime.sample import Task

Reward = Callable[[Task, str], Any]
"""``(task, response text) -> float``, or a dict with "reward" and further named parts, or None where it does not apply to
the task; may be async."""


@dataclass(frozen=True)
class Part:
    """One of several rewards, and its weight in their sum."""

    reward: Reward
    weight: float = 1.0


class RewardError(Exception):
    """A reward cannot be loaded, or failed on one response; the message names it, the task and the cause."""


def load_rewards(section: RewardSection) -> Reward | dict[str, Part]:
    """The configured reward, or its parts by name; RewardError as ``load_reward``."""
    if not section.parts:
        return load_reward(section.function, **section.options)
    return {name: Part(load_reward(part.function, **part.options), part.weight) for name, part in section.parts.items()}


def load_reward(name: str, **options: Any) -> Reward:
    """A built-in by name with its options, or a user's ``module:function`` or ``file.py:function``.

    Raises RewardError.
    """
    if name in BUILTIN:
        known = list(inspect.signature(BUILTIN[name]).parameters)
        for option in options:
            if option not in known:
                raise RewardError(f"reward {name!r} has no option {option!r}{nearest(option, known) if known else ''}")
        try:
            reward = BUILTIN[name](**options)
        except Exception as error:
            raise RewardError(f"reward {name!r}: {error}") from None
        reward.__qualname__ = name  # what errors call it
    elif ":" in name:
        if options:
            raise RewardError(f"reward.options are for built-ins; {name} takes (task, response) only")
        try:
            reward = user_function(name, 2)
        except FunctionError as error:
            raise RewardError(f"{error}; a reward is f(task, response)") from None
    else:
        raise RewardError(f"no reward is called {name!r}{nearest(name, list(BUILTIN))}; your own is module:function")
    return reward


async def score(
    reward: Reward | dict[str, Part], task: Task, text: str, deadline_s: float
) -> tuple[float, dict[str, float]]:
    """The reward of a response and its named parts; each function has ``deadline_s`` seconds.

    RewardError as in ``asked``, and where no reward applies to the task.
    """
    if isinstance(reward, dict):
        return await weighted_sum(reward, task, text, deadline_s)
    name = getattr(reward, "__qualname__", type(reward).__qualname__)
    found = await asked(name, reward, task, text, deadline_s)
    if found is None:
        raise RewardError(
            f"reward {name} failed on task {task.id}: it returned None, which says that it does not apply; return a "
            "number, or have several [reward.parts], of which one applies"
        )
    return found.pop("reward"), found


async def weighted_sum(
    rewards: dict[str, Part], task: Task, text: str, deadline_s: float
) -> tuple[float, dict[str, float]]:
    """Sum of weight times reward over the parts that apply, not divided by their weights; and each part without its weight.

    All are asked at once; the first that fails fails the sample.
    """
    calls = [
        asyncio.ensure_future(asked(f"parts.{name}", part.reward, task, text, deadline_s))
        for name, part in rewards.items()
    ]
    try:
        results = await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()
    found = {name: values for name, values in zip(rewards, results, strict=True) if values is not None}
    if not found:
        raise RewardError(
            f"reward failed on task {task.id}: none of its parts applies, {', '.join(rewards)} returned None; add one of "
            "[reward.parts] that does"
        )
    parts = {
        name if own == "reward" else f"{name}/{own}": value
        for name, values in found.items()
        for own, value in values.items()
    }
    return sum(rewards[name].weight * values["reward"] for name, values in found.items()), parts


async def asked(name: str, reward: Reward, task: Task, text: str, deadline_s: float) -> dict[str, float] | None:
    """What one function gives, as named numbers with "reward" among them; None where it does not apply.

    A plain function runs in a thread of its own, a coroutine on the event loop. RewardError, with the reward, the task
    and the cause, where it raises, is late, or returns anything but finite numbers.
    """
    call = asyncio.ensure_future(called(reward, task, text))
    try:
        # Not wait_for: that waits for a coroutine which will not be cancelled, and takes its TimeoutError for ours.
        await asyncio.wait({call}, timeout=deadline_s)
        if not call.done():
            raise RewardError(f"reward {name} took over {deadline_s:g} s on task {task.id} (reward.timeout_s)")
        result = call.result()
        parts = None if result is None else numbers_of(result)
    except RewardError:
        raise
    except asyncio.CancelledError:
        if not call.cancelled():  # score itself was cancelled
            raise
        raise RewardError(f"reward {name} failed on task {task.id}: it cancelled itself") from None
    except Exception as error:
        raise RewardError(f"reward {name} failed on task {task.id}: {type(error).__name__}: {error}") from None
    finally:
        call.cancel()
    for part, value in (parts or {}).items():
        if not math.isfinite(value):
            what = "" if part == "reward" else f"{part} = "
            raise RewardError(f"reward {name} gave {what}{value} for task {task.id}; rewards are finite numbers")
    return parts


def numbers_of(result: Any) -> dict[str, float]:
    """What a reward returned, as named numbers with "reward" among them; TypeError, ValueError or KeyError if not."""
    parts = result if isinstance(result, dict) else {"reward": result}
    if "reward" not in parts:
        raise KeyError(f"its dict has no 'reward', only {sorted(map(str, parts))}")
    for part, value in parts.items():
        if isinstance(value, (str, bytes)):
            raise TypeError(f"{part} is the text {value!r:.40}, not a number")
    return {str(part): float(value) for part, value in parts.items()}


async def called(reward: Reward, task: Task, text: str) -> Any:
    """What the reward returns; also of an object with an async ``__call__``, or a function that returns a coroutine."""
    try:
        if inspect.iscoroutinefunction(reward):
            return await reward(task, text)
        result = await in_thread(reward, task, text)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:  # out of a task it would end the loop, and the run with it
        raise RuntimeError(f"it called exit({error.code})") from None


def in_thread(function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """The result of a plain function, in a daemon thread of its own.

    Not the event loop's pool: that has a few threads, so a few hung calls would hold up all others, and it waits for
    them when the loop closes. How many run at once is bounded by who calls (``rollout.concurrency``).
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():  # given up meanwhile
            return
        if error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        result: Any = None
        failed: Exception | None = None
        try:
            result = function(*args)
        except SystemExit as error:
            failed = RuntimeError(f"it called exit({error.code})")
        except Exception as error:  # a future refuses StopIteration
            failed = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
        with suppress(RuntimeError):  # the loop is closed, nobody waits
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, daemon=True, name="reward").start()
    return future
