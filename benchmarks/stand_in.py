"""Stand-ins for a vLLM server and for the trainer, which sample nothing and learn nothing: for ``driver_lag.py``.

    python benchmarks/stand_in.py server PORT MEAN_TOKENS MS_PER_TOKEN
    python benchmarks/stand_in.py trainer PORT SECONDS_PER_STEP

They speak the whole protocol, so that a real run talks to them. Responses have the sizes of real ones and take their time;
their bodies are made once, in vLLM's form: for each token its id, log-probability, rank and top log-probabilities.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIETY = 64
"""Different responses."""
LOGPROB = -1.2345678806304932
"""Of every token, in the server and in the trainer: the probe agrees."""
GENERATE = "/inference/v1/generate"
CONTROL = ("/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_info")


def respond(body: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class Connection(asyncio.Protocol):
    """HTTP of one connection: ``handle(path, body, reply)`` is called for each request."""

    def __init__(self, handle: Callable[[str, bytes, Callable[[bytes], None]], None]) -> None:
        self.handle, self.received = handle, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, separator, body = self.received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        size = int(length[1]) if length else 0
        if separator and len(body) >= size:
            self.received = body[size:]
            path = head.split(b" ", 2)[1].decode().partition("?")[0]
            self.handle(path, body[:size], self.transport.write)


class Server:
    """Responses of log-normal length, MEAN_TOKENS on average, at MS_PER_TOKEN."""

    def __init__(self, mean_tokens: int, ms_per_token: float) -> None:
        self.rng, self.ms_per_token, self.running, self.version = random.Random(0), ms_per_token, 0, "default"
        lengths = [max(1, round(mean_tokens * self.rng.lognormvariate(-0.125, 0.5))) for _ in range(VARIETY)]
        self.bodies = [(tokens, self.body(tokens)) for tokens in lengths]

    def body(self, tokens: int) -> bytes:
        """All of a response but its versions."""
        ids = [self.rng.randrange(1000, 49_000) for _ in range(tokens)]
        content = []
        for token in ids:
            entry = {"token_id": token, "logprob": LOGPROB, "rank": self.rng.randint(1, 50)}
            content.append({**entry, "top_logprobs": [entry]})
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": ids,
            "routed_experts": None,
            "sampling_mask": None,
            "logprobs": {"content": content},
        }
        usage = {"prompt_tokens": 100, "total_tokens": 100 + tokens, "completion_tokens": tokens}
        whole = {"request_id": "generate-tokens-0", "model": "policy", "usage": usage, "choices": [choice]}
        return compact(whole)[:-3]

    def handle(self, path: str, body: bytes, reply: Callable[[bytes], None]) -> None:
        if path == GENERATE:
            self.generate(int(re.search(rb'"max_tokens": *(\d+)', body)[1]), reply)  # type: ignore[index]
        elif path == "/metrics":
            reply(respond(self.metrics(), "text/plain"))
        else:
            if path == "/finish_weight_update":
                self.version = json.loads(body)["weight_version"]
            answers = {
                "/openapi.json": {"paths": {known: {} for known in (GENERATE, *CONTROL)}},
                "/v1/models": {"data": [{"id": "policy"}]},
                "/weight_info": {"weight_version": self.version},
            }
            reply(respond(compact(answers.get(path, {}))))

    def generate(self, most: int, reply: Callable[[bytes], None]) -> None:
        tokens, body = (most, self.body(most)) if most < 100 else self.rng.choice(self.bodies)
        seconds = tokens * self.ms_per_token / 1000 * self.rng.uniform(0.8, 1.2)
        self.running += 1
        asyncio.get_running_loop().call_later(seconds, self.end, tokens, body, self.version, reply)

    def end(self, tokens: int, body: bytes, began: str, reply: Callable[[bytes], None]) -> None:
        """Where the weights were updated meanwhile, the second half is of the new ones."""
        self.running -= 1
        half = tokens // 2 if began != self.version else tokens
        spans = [{"version": began, "start": 0, "end": half}, {"version": self.version, "start": half, "end": tokens}]
        versions = compact([span for span in spans if span["start"] < span["end"]])
        reply(respond(body + b',"weight_versions":' + versions + b"}]}"))

    def metrics(self) -> bytes:
        told = {
            "num_requests_running": self.running,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0.5,
            "num_preemptions_total": 0,
        }
        return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in told.items()).encode()


class Trainer:
    """Takes SECONDS_PER_STEP for a step, reads nothing, writes nothing."""

    def __init__(self, seconds_per_step: float) -> None:
        self.seconds_per_step = seconds_per_step

    def handle(self, path: str, body: bytes, reply: Callable[[bytes], None]) -> None:
        arguments = json.loads(body or b"{}")
        name, answer, seconds = path.strip("/"), None, 0.0
        if name in ("export", "save"):
            Path(arguments["folder"], "model" if name == "save" else "").mkdir(parents=True, exist_ok=True)
        elif name == "memory":
            answer = "a stand-in trainer"
        elif name == "logprobs":
            answer = [[LOGPROB] * len(row["response_ids"]) for row in arguments["rows"]]
        elif name == "train":
            rows = [row for update in arguments["updates"] for rank in update for micro in rank for row in micro]
            advantages = [[row["key"], row["index"], row["reward"]] for row in rows]
            answer, seconds = {"metrics": {}, "advantages": advantages}, self.seconds_per_step
        asyncio.get_running_loop().call_later(seconds, reply, respond(compact(answer)))


async def serve(port: int, handle: Callable[[str, bytes, Callable[[bytes], None]], None]) -> None:
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Connection(handle), "127.0.0.1", port, backlog=4096)
    await listening.serve_forever()


if __name__ == "__main__":
    kind, port, *numbers = sys.argv[1:]
    stand_in = Server(int(numbers[0]), float(numbers[1])) if kind == "server" else Trainer(float(numbers[0]))
    asyncio.run(serve(int(port), stand_in.handle))
