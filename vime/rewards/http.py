"""A reward server of the user's: many responses in one POST."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from vime.rewards.service import Batches, Service, ServiceError
from vime.sample import Task


def http(
    *,
    url: str,
    batch: int = 32,
    window_ms: float = 10,
    retries: int = 2,
    key_env: str | None = None,
    deadline_s: float,
) -> Callable[[Task, str], Awaitable[Any]]:
    """POST ``{"samples": [{"id", "messages", "answer", "metadata", "response"}]}`` to ``url``, which answers
    ``{"rewards": [...]}``, one a sample in the same order: a number, an object with "reward" and further numbers, null where
    the reward does not apply, or ``{"error": text}``, which fails that sample alone."""
    if batch < 1:
        raise ValueError(f"batch must be >= 1, got {batch}")
    service = Service(url, deadline_s, retries, key_env)

    async def send(samples: list[dict[str, Any]]) -> list[Any]:
        answer = await service.ask("", {"samples": samples})
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != len(samples):
            raise ServiceError(f'{url} answered {answer!s:.200}, not {{"rewards": [...]}} with {len(samples)} entries')
        return [failure(one) or one for one in rewards]

    batches = Batches(send, batch, window_ms / 1000)

    async def reward(task: Task, response: str) -> Any:
        sample = {"id": task.id, "messages": task.messages, "answer": task.answer, "metadata": task.metadata}
        return await batches.result(sample | {"response": response})

    return reward


def failure(reward: Any) -> ServiceError | None:
    return ServiceError(f"{reward['error']!s:.300}") if isinstance(reward, dict) and "error" in reward else None
