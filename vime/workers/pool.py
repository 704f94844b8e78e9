"""Calls of the user's functions in worker processes, each with a deadline, made again where that can help."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Self

from vime.observe import trace
from vime.workers.child import encoded
from vime.workers.dispatch import AT_ONCE, Call, Dispatch
from vime.workers.worker import CallError, CallLate, Function, Worker, WorkerError

TICK_S = 0.05
"""how often deadlines are looked at"""
HEARD_S = 2.0
"""a worker of coroutines that has not heard of a cancellation after so long has one that never yields"""
STARTS = 5
"""starts of one worker that may fail in a row; between them 1, 2, 4, ... seconds"""
LOG_BYTES = 64 * 2**20
"""of a worker's log, which is emptied when it is longer"""

logger = logging.getLogger(__name__)


class Pool:
    """``workers`` processes for plain functions, and as many for coroutines, as far as there are such functions.

    ``async with`` starts it: WorkerError where a function cannot be loaded. ``name`` is what the workers are called, and
    their files in ``logs``. A worker runs ``at_once`` coroutines side by side at most. One that ends is replaced; ``restarts``
    counts that.
    """

    def __init__(
        self,
        name: str,
        functions: Mapping[str, Function],
        workers: int,
        memory_mb: int,
        logs: Path,
        at_once: int = AT_ONCE,
    ) -> None:
        self.name, self.functions, self.memory_mb, self.logs = name, functions, memory_mb, logs
        self.workers, self.at_once, self.restarts = workers, at_once, 0
        self._coroutines: set[str] = set()
        self._dispatches: dict[str, Dispatch[Worker]] = {
            kind: Dispatch(kind == "concurrent") for kind in ("plain", "concurrent")
        }
        self._numbers = itertools.count()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._broken = ""

    async def __aenter__(self) -> Self:
        first = self._worker("plain", 0)
        self._coroutines = set(await first.start(self.functions, self.memory_mb))
        if "plain" not in self.kinds():
            await first.stop()
        for kind, index in itertools.product(self.kinds(), range(self.workers)):
            ready = first if (kind, index) == ("plain", 0) else None
            self._begin(self._keep(kind, index, ready))
        self._begin(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._break("the workers were stopped")

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Keeps it going until the end of the pool; where it fails, it breaks the pool."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()):
                logger.error("the %s workers cannot be kept", self.name, exc_info=error)
                self._break(f"the {self.name} workers cannot be kept: {type(error).__name__}: {error}")

        self._tasks.append(asyncio.create_task(work))
        self._tasks[-1].add_done_callback(ended)

    def kinds(self) -> list[str]:
        """Of workers that there are, once it has started."""
        return sorted({self._kind(name) for name in self.functions})

    async def call(self, function: str, arguments: list[Any], deadline_s: float, retries: int) -> Any:
        """The function's result. CallError where it raised; CallLate where it took over ``deadline_s``, CallError where its
        worker ended or ran out of memory, each after so many ``retries``."""
        if self._broken:
            raise CallError(self._broken)
        number = next(self._numbers)
        try:
            message = encoded({"id": number, "function": function, "arguments": arguments})
        except (TypeError, ValueError) as error:
            raise CallError(f"its arguments are no JSON: {error}") from None
        call = Call(number, message, deadline_s, retries, beside=self.at_once)
        future = self._futures[call.id] = asyncio.get_running_loop().create_future()
        kind, asked = self._kind(function), trace.now()
        self._dispatches[kind].waiting.append(call)
        self._send(kind)
        try:
            result = await future
            trace.note_call(self.name, asked, call.began, call.worker)
            return result
        finally:
            if self._futures.pop(call.id, None):  # we were cancelled
                self._give_up(call)

    def _kind(self, function: str) -> str:
        return "concurrent" if function in self._coroutines else "plain"

    def _worker(self, kind: str, index: int) -> Worker:
        name = f"{self.name}-{'async-' if kind == 'concurrent' else ''}worker-{index}"
        return Worker(name, kind, self.logs / f"{name}.log", self._answered)

    def _send(self, kind: str) -> None:
        """Gives waiting calls to workers that have room."""
        now = asyncio.get_running_loop().time()
        messages: dict[Worker, list[bytes]] = {}
        while found := self._dispatches[kind].next(now):
            worker, call = found
            messages.setdefault(worker, []).append(call.message)
        for worker, its in messages.items():
            worker.send(b"".join(its))

    def _settle(self, number: int, result: Any) -> None:
        """Ends a call with its result or an exception."""
        future = self._futures.pop(number, None)
        if future is None or future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _give_up(self, call: Call) -> None:
        call.given_up = True
        worker = self._dispatches["concurrent"].where(call)
        if worker and call.cancelled is None:
            self._cancel(worker, call)

    def _cancel(self, worker: Worker, call: Call) -> None:
        call.cancelled = asyncio.get_running_loop().time()
        worker.send(encoded({"cancel": call.id}))

    def _answered(self, worker: Worker, answers: list[dict[str, Any]]) -> None:
        for answer in answers:
            self._note(worker, answer)
        self._send(worker.kind)

    def _note(self, worker: Worker, answer: dict[str, Any]) -> None:
        dispatch = self._dispatches[worker.kind]
        call = dispatch.done(worker, answer.get("id", -1), asyncio.get_running_loop().time())
        if call is None:  # it was cancelled while its result was on the way
            return
        if "cancelled" in answer:
            self._charge(dispatch, call, late(call))
        elif answer.get("exhausted"):
            error = CallError(f"{answer['error']}; it used all of its worker's memory_mb = {self.memory_mb}")
            self._charge(dispatch, call, error)
            self._end(worker, error, suspect=False)
        else:
            call.worker = worker.name
            self._settle(call.id, CallError(answer["error"]) if "error" in answer else answer["result"])

    def _end(self, worker: Worker, cause: CallError, suspect: bool = True) -> None:
        self._dispatches[worker.kind].close(worker)
        worker.end(cause, suspect)

    def _charge(self, dispatch: Dispatch[Worker], call: Call, error: CallError) -> None:
        if dispatch.charge(call):
            self._settle(call.id, error)

    def _break(self, cause: str) -> None:
        """Ends all calls, and those to come."""
        self._broken = cause
        for number in list(self._futures):
            self._settle(number, CallError(cause))

    async def _keep(self, kind: str, index: int, worker: Worker | None) -> None:
        """One worker, and those that take its place."""
        dispatch = self._dispatches[kind]
        while worker := worker or await self._started(kind, index):
            try:
                dispatch.open(worker)
                self._send(kind)
                await worker.ended
                self.restarts += 1
                dispatch.close(worker)
                if worker.cause is None:
                    await worker.stop()  # then it can say how it ended
                    logger.warning("%s %s and is replaced; its output is in %s", worker.name, worker.fate(), worker.log)
                self._lost(dispatch, worker)
            finally:
                await worker.stop()
            worker = None

    async def _started(self, kind: str, index: int) -> Worker | None:
        """A new worker; None where its start failed too often, which breaks the pool."""
        for attempt in range(STARTS):
            worker = self._worker(kind, index)
            try:
                await worker.start(self.functions, self.memory_mb)
                return worker
            except (WorkerError, OSError) as error:
                cause = str(error)
                logger.warning("%s cannot be started: %s", worker.name, cause)
                await asyncio.sleep(2**attempt)
        self._break(f"{worker.name} could not be started {STARTS} times in a row; the last: {cause}")
        return None

    def _lost(self, dispatch: Dispatch[Worker], worker: Worker) -> None:
        """The worker's calls are made again by others, less those that have failed."""
        cause = worker.cause or CallError(f"its worker {worker.fate()}; its output is in {worker.log}")
        for call in dispatch.lost(worker, worker.suspect):
            self._settle(call.id, cause)
        self._send(worker.kind)

    async def _watch(self) -> None:
        """Ends what is late, and keeps the logs short."""
        while True:
            await asyncio.sleep(TICK_S)
            now = asyncio.get_running_loop().time()
            for worker, call in self._dispatches["plain"].late(now):
                self._end(worker, late(call))
            self._dispatches["plain"].recall(now)
            self._send("plain")
            for worker, call in self._dispatches["concurrent"].late(now):
                if call.cancelled is None:
                    self._cancel(worker, call)
                elif now > call.cancelled + HEARD_S:
                    self._end(worker, late(call))
            for log in self.logs.glob(f"{self.name}-*worker-*.log"):
                with contextlib.suppress(OSError):
                    if log.stat().st_size > LOG_BYTES:
                        os.truncate(log, 0)


def late(call: Call) -> CallLate:
    return CallLate(f"took over {call.deadline_s:g} s")
