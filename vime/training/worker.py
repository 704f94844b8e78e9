"""One trainer rank as a process: rank 0 takes commands over HTTP, all ranks carry each one out together.

    python -m vime.training.worker CONFIG.json STORE_FOLDER PORT      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set

A command is POST /NAME with a JSON object of its arguments; the answer is JSON. Commands are carried out one at a time, but
for ``saved``: rank 0 answers it alone, while others are carried out.
"""

from __future__ import annotations

import datetime
import json
import os
import queue
import sys
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vime.config.sections import Config, Trainer
from vime.store import STORES
from vime.training.engine import TorchEngine
from vime.training.mesh import broadcast_json
from vime.training.reward import RewardEngine

COMMANDS = ("load", "memory", "train", "evaluate", "compare", "logprobs", "export", "export_adapter", "save")
Engine = TorchEngine | RewardEngine
IDLE = datetime.timedelta(days=30)  # between commands ranks wait as long as a rollout takes


class Call:
    """A command on its way from the HTTP thread to the rank's main thread and back."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self.name, self.arguments = name, arguments
        self.done = threading.Event()
        self.status, self.answer = 500, {"error": "the rank ended"}


def carried_out(engine: Engine, name: str, arguments: dict[str, Any]) -> tuple[int, Any]:
    """HTTP status and answer."""
    try:
        return 200, getattr(engine, name)(**arguments)
    except Exception as error:
        traceback.print_exc()
        return 500, {"error": f"{type(error).__name__}: {error}"}


def serve(port: int, calls: queue.Queue[Call], engine: Engine) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _reply(self, status: int, answer: Any) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._reply(200, {"ready": True})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            name = self.path.strip("/")
            if name == "saved":
                self._reply(*carried_out(engine, name, {}))
                return
            if name not in COMMANDS:
                self._reply(404, {"error": f"{name} is no command; known: {', '.join(COMMANDS)}"})
                return
            call = Call(name, json.loads(body or b"{}"))
            calls.put(call)
            call.done.wait()
            self._reply(call.status, call.answer)

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def threads_for(config: Trainer) -> int:
    return config.threads or max(1, (os.cpu_count() or 1) // config.ranks)


def device_of(section: Trainer) -> str:
    """cpu or cuda."""
    if section.device != "auto":
        return section.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    config = Config.model_validate_json(Path(sys.argv[1]).read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = device_of(config.trainer) == "cuda"
    device = torch.device("cpu")
    if cuda:  # the last devices: servers take the first
        count = torch.cuda.device_count()
        device = torch.device("cuda", (count - ranks + rank) % count)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(threads_for(config.trainer))
    torch.use_deterministic_algorithms(config.run.deterministic)
    timeout = datetime.timedelta(seconds=config.trainer.step_timeout_s)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    commands = dist.new_group(backend="gloo", timeout=IDLE)
    kind: type[Engine] = RewardEngine if config.algorithm.objective == "bradley_terry" else TorchEngine
    engine = kind(config, STORES[config.store.kind](Path(sys.argv[2])), device)
    calls: queue.Queue[Call] = queue.Queue()
    server = serve(int(sys.argv[3]), calls, engine) if rank == 0 else None
    while True:
        call = calls.get() if server else None
        name, arguments = broadcast_json([call.name, call.arguments] if call else None, commands)
        status, answer = carried_out(engine, name, arguments)
        if call:
            call.status, call.answer = status, answer
            call.done.set()
        elif status != 200:
            sys.exit(1)  # the other ranks wait for this one: rank 0 sees it end and says so


if __name__ == "__main__":
    main()
