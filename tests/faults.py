"""Faults on order: a folder of files, each of which one request or one call of the reward takes, and obeys.

The server's are put in by vLLM's own option for middleware (``--middleware tests.faults.Faults``), the reward's by a reward
function; nothing in vime knows of them. A file is named ``KIND-NUMBER``; who takes it renames it to ``taken-KIND-NUMBER``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

FOLDER = "VIME_FAULTS"
OF_RESPONSES = ("cut", "garbage", "truncated", "nan", "wrong_ids", "error")
OF_REWARDS = ("raises", "hangs", "allocates", "exits", "not_a_number")
NO_TOKENS = (-5, 999_999_999)
GENERATE = "/inference/v1/generate"


def take(kinds: tuple[str, ...]) -> str:
    """The kind of a fault that waits, which is now taken, or ""."""
    folder = Path(os.environ[FOLDER])
    for name in sorted(os.listdir(folder)):
        kind = name.rpartition("-")[0]
        if kind in kinds:
            try:
                os.rename(folder / name, folder / f"taken-{name}")
            except FileNotFoundError:  # another was faster
                continue
            return kind
    return ""


def reward(task: Any, response: str) -> float:
    """The share of lower-case letters; or, on order, something else."""
    match take(OF_REWARDS):
        case "raises":
            raise ValueError("on order")
        case "hangs":
            time.sleep(3600)
        case "allocates":
            held = []
            while True:
                held.append(bytearray(1 << 24))
        case "exits":
            os._exit(3)
        case "not_a_number":
            return float("nan")
    return sum("a" <= c <= "z" for c in response) / 8


class Faults:
    """ASGI middleware: spoils the answers to generate requests for which a fault waits."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != GENERATE or not (kind := take(OF_RESPONSES)):
            await self.app(scope, receive, send)
            return
        start: dict[str, Any] = {}
        body = b""

        async def hold(message: Any) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
            else:
                body += message.get("body", b"")

        await self.app(scope, receive, hold)
        promised = len(body)
        body = spoilt(kind, body)
        start["status"] = 500 if kind == "error" else start["status"]
        length = promised if kind == "cut" else len(body)
        kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        await send({**start, "headers": [*kept, (b"content-length", str(length).encode())]})
        await send({"type": "http.response.body", "body": body})
        if kind == "cut":
            raise ConnectionError("cut on order")


def spoilt(kind: str, body: bytes) -> bytes:
    """An answer as the fault leaves it."""
    if kind == "garbage":
        return b"\xff\x00{]garbage"
    if kind in ("cut", "truncated"):
        return body[: len(body) // 2]
    if kind in ("nan", "wrong_ids"):
        answer = json.loads(body)
        choice = answer["choices"][0]
        if kind == "wrong_ids":
            choice["token_ids"] = [NO_TOKENS[place % 2] for place in range(len(choice["token_ids"]))]
        for entry in choice["logprobs"]["content"] if kind == "nan" else ():
            entry["logprob"] = float("nan")
        return json.dumps(answer).encode()
    return body
