"""What a response is worth: built-in rewards by name, user functions by path, called with a deadline."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from vime.config.load import nearest
from vime.rewards.builtin import BUILTIN
from vime.sample import Task

Reward = Callable[[Task, str], Any]
"""``(task, response text) -> float``, or a dict with "reward" and further named parts; may be async."""


class RewardError(Exception):
    """A reward cannot be loaded, or failed on one response; the message names it, the task and the cause."""


def load_reward(name: str, **options: Any) -> Reward:
    """A built-in by name with its options, or a user's ``module:function`` / ``file.py:function``; raises RewardError."""
    if name in BUILTIN:
        known = list(inspect.signature(BUILTIN[name]).parameters)
        for option in options:
            if option not in known:
                raise RewardError(f"reward {name!r} has no option {option!r}{nearest(option, known) if known else ''}")
        try:
            reward = BUILTIN[name](**options)
        except Exception as error:
            raise RewardError(f"reward {name!r}: {error}") from None
    elif ":" in name:
        if options:
            raise RewardError(f"reward.options are for built-ins; {name} takes (task, response) only")
        reward = user_function(name)
    else:
        raise RewardError(f"no reward is called {name!r}{nearest(name, list(BUILTIN))}; your own is module:function")
    return reward


def user_function(path: str) -> Reward:
    place, _, attribute = path.rpartition(":")
    module = load_module(place, path)
    found = getattr(module, attribute, None)
    if found is None:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise RewardError(f"{path}: {place} has no {attribute!r}{nearest(attribute, names) if names else ''}")
    if not callable(found):
        raise RewardError(f"{path} is a {type(found).__name__}, not a function of (task, response)")
    try:
        inspect.signature(found).bind(None, "")
    except TypeError:
        raise RewardError(f"{path}{inspect.signature(found)} cannot be called as f(task, response)") from None
    return found


def load_module(place: str, path: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            if "" not in sys.path:
                sys.path.insert(0, "")
            return importlib.import_module(place)
        if not Path(place).exists():
            raise RewardError(f"{path}: the file {place} does not exist")
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(f"{path}: {place} cannot be imported: {type(error).__name__}: {error}") from None


async def score(reward: Reward, task: Task, text: str, deadline_s: float) -> tuple[float, dict[str, float]]:
    """The reward of a response and its named parts. Runs off the event loop; RewardError on failure or deadline."""
    name = getattr(reward, "__qualname__", repr(reward))
    try:
        if inspect.iscoroutinefunction(reward):
            result = await asyncio.wait_for(reward(task, text), deadline_s)
        else:
            result = await asyncio.wait_for(asyncio.to_thread(reward, task, text), deadline_s)
        parts = dict(result) if isinstance(result, dict) else {"reward": result}
        values = {key: float(value) for key, value in parts.items()}
        total = values.pop("reward")
    except TimeoutError:
        raise RewardError(f"reward {name} took over {deadline_s:g} s on task {task.id} (reward.timeout_s)") from None
    except Exception as error:
        raise RewardError(f"reward {name} failed on task {task.id}: {type(error).__name__}: {error}") from None
    if not math.isfinite(total):
        raise RewardError(f"reward {name} gave {total} for task {task.id}; rewards are finite numbers")
    return total, values
