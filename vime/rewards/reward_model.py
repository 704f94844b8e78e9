"""A reward model behind a vLLM server (``--runner pooling``), such as ``vime reward-model`` makes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from vime.rewards.service import Service, ServiceError
from vime.sample import Message, Task


def reward_model(
    *, url: str, model: str | None = None, retries: int = 2, key_env: str | None = None, deadline_s: float
) -> Callable[[Task, str], Awaitable[float]]:
    """The model's one score of the whole conversation, as its own chat template renders it; no activation is put on it."""
    service = Service(url, deadline_s, retries, key_env)

    async def reward(task: Task, response: str) -> float:
        body: dict[str, Any] = {
            "model": model or await service.model(),
            "messages": conversation(task, response),
            "use_activation": False,
        }
        if task.tools:
            body["chat_template_kwargs"] = {"tools": task.tools}
        answer = await service.ask("/classify", body)
        try:
            (scores,) = [one["probs"] for one in answer["data"]]
            (score,) = scores
        except (KeyError, TypeError, ValueError):
            raise ServiceError(
                f"{url}/classify answered no single score, as of a model with one label: {answer!s:.200}"
            ) from None
        return float(score)

    return reward


def conversation(task: Task, response: str) -> list[Message]:
    """The task's messages and all that followed: one reply, or the turns that a generate function left in the metadata."""
    turns = task.metadata.get("messages")
    several = isinstance(turns, list) and turns and turns[-1] == {"role": "assistant", "content": response}
    return [*task.messages, *(turns if several else [{"role": "assistant", "content": response}])]  # type: ignore[misc]
