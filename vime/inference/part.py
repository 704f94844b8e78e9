"""One program of the fleet, a vLLM server or the router: its process, where it is ours, and its life."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from vime.cluster.local import Process, ProcessError, useful_lines
from vime.inference.life import Answer, Life, Limits, State


class Part:
    """``launch`` starts its process; None: it is somebody else's. ``ask`` is one look at it."""

    def __init__(
        self, name: str, limits: Limits, ask: Callable[[], Awaitable[Answer]], launch: Callable[[], Process] | None
    ) -> None:
        self.name, self.ask, self.launch = name, ask, launch
        self.process = launch() if launch else None
        self.restarts = 0
        self.busy = False  # with something that may keep it from answering: a weight update
        now = time.monotonic()
        self.life = Life(limits, launch is not None, now, now)

    @property
    def serving(self) -> bool:
        return self.life.state is State.SERVING

    async def look(self) -> Life:
        """The life after one look."""
        life = self.life
        if life.state is State.GONE or self.busy:
            return life
        if self.process and life.state is not State.DOWN and self.process.exit_code is not None:
            return life.fell(f"ended with exit code {self.process.exit_code}", time.monotonic())
        answer = await self.ask()
        return self.life.seen(answer, time.monotonic())  # the state may have changed meanwhile

    async def restart(self) -> None:
        """Ends what is left of it and starts it again."""
        if self.process:
            await self.process.kill()
        if self.launch and self.life.state is State.DOWN:
            self.process = self.launch()
            self.life = self.life.started(time.monotonic())
            self.restarts += 1

    def error(self) -> ProcessError:
        """Why it is down or gone, with the end of its log."""
        end = f"; the end of {self.process.log}:\n{useful_lines(self.process.log)}" if self.process else ""
        return ProcessError(f"{self.name} {self.life.reason}{end}")

    async def stop(self) -> None:
        if self.process:
            await self.process.stop()
