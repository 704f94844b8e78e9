"""What a response is worth: built-in rewards by name, user functions by path, called with a deadline."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import pkgutil
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
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
        signature = inspect.signature(found)
    except ValueError:  # some of C's have none
        return found
    try:
        signature.bind(None, "")
    except TypeError:
        raise RewardError(f"{path}{signature} cannot be called as f(task, response)") from None
    return found


def load_module(place: str, path: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            if "" not in sys.path:
                sys.path.insert(0, "")
            return importlib.import_module(place)
        if not Path(place).exists():
            files = [str(file) for file in Path(place).parent.glob("*.py")]
            raise RewardError(f"{path}: the file {place} does not exist{nearest(place, files) if files else ''}")
        spec = importlib.util.spec_from_file_location(f"reward file {place}", place)  # the name of no other module
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        hint = module_hint(place) if isinstance(error, ModuleNotFoundError) and error.name == place else ""
        raise RewardError(f"{path}: {place} cannot be imported: {type(error).__name__}: {error}{hint}") from None


def module_hint(place: str) -> str:
    """``"; did you mean X?"`` for the closest module beside a missing one, "" where none is close."""
    parent, _, name = place.rpartition(".")
    folders = sys.modules[parent].__path__ if parent else None
    hint = nearest(name, [module.name for module in pkgutil.iter_modules(folders)])
    return hint if "did you mean" in hint else ""


async def score(reward: Reward, task: Task, text: str, deadline_s: float) -> tuple[float, dict[str, float]]:
    """The reward of a response and its named parts, within ``deadline_s`` seconds.

    A plain function runs in a thread of its own, a coroutine on the event loop. RewardError, with the reward, the task
    and the cause, where it raises, is late, or returns anything but finite numbers.
    """
    name = getattr(reward, "__qualname__", type(reward).__qualname__)
    call = asyncio.ensure_future(called(reward, task, text))
    try:
        # Not wait_for: that waits for a coroutine which will not be cancelled, and takes its TimeoutError for ours.
        await asyncio.wait({call}, timeout=deadline_s)
        if not call.done():
            raise RewardError(f"reward {name} took over {deadline_s:g} s on task {task.id} (reward.timeout_s)")
        parts = numbers_of(call.result())
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
    for part, value in parts.items():
        if not math.isfinite(value):
            what = "" if part == "reward" else f"{part} = "
            raise RewardError(f"reward {name} gave {what}{value} for task {task.id}; rewards are finite numbers")
    return parts.pop("reward"), parts


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
