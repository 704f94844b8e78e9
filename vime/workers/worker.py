"""One worker process as the driver holds it: started, spoken to over a socket, ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vime.cluster.local import Process, python_path, useful_lines
from vime.workers.child import RESULT_BYTES, encoded

COMMAND = (sys.executable, "-P", "-m", "vime.workers.child")
START_S = 300
"""deadline of a start: the function's module may load a model"""


@dataclass(frozen=True)
class Function:
    """A function in a worker: what ``maker`` ("module:function") gives for the options. It takes and returns JSON."""

    maker: str
    options: dict[str, Any] = field(default_factory=dict)


class WorkerError(Exception):
    """A worker cannot be started, or cannot load a function; the message is the cause."""


class CallError(Exception):
    """The function raised, or its worker ended; the message is the cause."""


class CallLate(CallError):
    """The function was not done at its deadline."""


class Worker(asyncio.Protocol):
    """A process of ``kind`` "plain" or "concurrent" (vime.workers.child), and the wire to it."""

    def __init__(
        self, name: str, kind: str, log: Path, answered: Callable[[Worker, list[dict[str, Any]]], None]
    ) -> None:
        self.name, self.kind, self.log, self.answered = name, kind, log, answered
        self.cause: CallError | None = None  # why we ended it, where we did
        self.suspect = True  # whether what it ran may be at fault
        self._rest = bytearray()
        self._transport: asyncio.Transport | None = None

    async def start(self, functions: Mapping[str, Function], memory_mb: int) -> list[str]:
        """Waits until it has loaded the functions; returns the names of those that are coroutines. WorkerError if not."""
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._loaded: asyncio.Future[dict[str, Any]] = loop.create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            arguments = [str(descriptor), str(memory_mb), self.kind]
            self._process = Process(self.name, [*COMMAND, *arguments], self.log, environment(), [descriptor])
        try:
            self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
            self.send(encoded({name: asdict(function) for name, function in functions.items()}))
            both = (self._loaded, self.ended)
            if not (await asyncio.wait(both, timeout=START_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                raise WorkerError(f"{self.name} was not ready after {START_S} s; its output is in {self.log}")
            if self.ended.done():
                await self.stop()
                raise WorkerError(f"{self.name} {self.fate()}; the end of {self.log}:\n{useful_lines(self.log)}")
            answer = self._loaded.result()
            if "error" in answer:
                raise WorkerError(answer["error"])
        except BaseException:
            await self.stop()
            raise
        return list(answer["coroutines"])

    def send(self, messages: bytes) -> None:
        assert self._transport
        self._transport.write(messages)

    def data_received(self, data: bytes) -> None:
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        answers, broken = [], len(self._rest) > 2 * RESULT_BYTES
        for line in lines:
            try:
                answers.append(dict(json.loads(line)))
            except (TypeError, ValueError):
                broken = True
                break
        if answers and not self._loaded.done():
            self._loaded.set_result(answers[0])
        elif answers:
            self.answered(self, answers)
        if broken:
            self.end(CallError("its worker said what is no answer: a function wrote to a descriptor not its own"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def end(self, cause: CallError, suspect: bool = True) -> None:
        """Breaks the connection; ``stop`` then ends the process."""
        assert self._transport
        if self.cause is None:
            self.cause, self.suspect = cause, suspect
        self._transport.abort()

    async def stop(self) -> None:
        """Ends the process, and all that its functions started, at once; returns when nothing is left."""
        if self._transport:
            self._transport.abort()
        await self._process.kill()

    def fate(self) -> str:
        """How the process ended, where we did not end it: "was ended by SIGSEGV"."""
        code = self._process.exit_code or 0
        number = -code if code < 0 else code - 128  # of the supervisor's own end, or of what it reports
        try:
            return f"was ended by {signal.Signals(number).name}"
        except ValueError:
            return f"ended with exit code {code}"


def environment() -> dict[str, str]:
    """One thread of arithmetic, as there are several workers, and texts that hash alike in all of them and in every run."""
    return {
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
    }
