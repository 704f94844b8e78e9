"""The driver's handle on the trainer: starts its ranks, sends commands to rank 0.

This is the engine protocol: another engine is another class with ``start``, ``memory``, ``train``, ``evaluate``,
``compare``, ``logprobs``, ``export``, ``export_adapter``, ``save``, ``saved`` and ``stop``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from vime.cluster.local import Process, ProcessError, free_port, python_path
from vime.config.sections import Config

ALLOCATOR = ":".join(  # large pages, and large blocks kept: a third of a CPU step is page faults without
    f"glibc.malloc.{name}" for name in ("hugetlb=1", "mmap_threshold=8589934592", "trim_threshold=17179869184")
)
START, STEP = "start_timeout_s", "step_timeout_s"  # of [trainer]


class TrainerError(Exception):
    """The trainer refused or failed a command; the message is its own."""


class Trainer:
    """All ranks of the torch engine on this machine."""

    def __init__(self, config: Config, session: aiohttp.ClientSession, run_dir: Path, store_dir: Path) -> None:
        self.config, self.session, self.run_dir, self.store_dir = config, session, run_dir, store_dir
        self.processes: list[Process] = []
        self.url = ""

    def command(self, config_file: Path, port: int) -> list[str]:
        return [sys.executable, "-m", "vime.training.worker", str(config_file), str(self.store_dir), str(port)]

    async def start(self, model: Path, state: Path | None = None, say: Callable[[str], None] = lambda _: None) -> None:
        """Starts the ranks and loads ``model``, with the trainer state in ``state`` to resume."""
        config_file = self.run_dir / "config.json"
        config_file.write_text(self.config.model_dump_json())
        port, meeting = free_port(), free_port()
        ranks = self.config.trainer.ranks
        env = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(meeting),
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": python_path(),
            "GLIBC_TUNABLES": ALLOCATOR,
            "OMP_WAIT_POLICY": "passive",  # a thread that waits for another gives it the core
        }
        self.processes = [
            Process(
                f"trainer rank {rank}",
                self.command(config_file, port),
                self.run_dir / "logs" / f"trainer-{rank}.log",
                {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        self.url = f"http://127.0.0.1:{port}"
        await self._wait(say)
        state_folder = str(state.absolute()) if state else None
        await self.call("load", START, model=str(model.absolute()), state=state_folder)

    async def _wait(self, say: Callable[[str], None]) -> None:
        deadline = asyncio.get_running_loop().time() + self.config.trainer.start_timeout_s
        while asyncio.get_running_loop().time() < deadline:
            self.check()
            try:
                async with self.session.get(self.url, timeout=aiohttp.ClientTimeout(total=5)):
                    return
            except (TimeoutError, aiohttp.ClientError):
                say("waiting for the trainer")
                await asyncio.sleep(0.2)
        raise ProcessError(
            f"the trainer did not answer in {self.config.trainer.start_timeout_s:.0f} s (trainer.start_timeout_s); "
            f"see {self.processes[0].log}"
        )

    def check(self) -> None:
        for process in self.processes:
            process.check()

    async def call(self, name: str, deadline: str, **arguments: Any) -> Any:
        """Carries out one command on all ranks, before the ``deadline`` of that name in [trainer]; a rank that ends meanwhile
        is noticed at once."""
        request = asyncio.ensure_future(self._post(name, deadline, arguments))
        while not request.done():
            await asyncio.wait({request}, timeout=1.0)
            try:
                self.check()
            except ProcessError:
                request.cancel()
                raise
        return request.result()

    async def _post(self, name: str, deadline: str, arguments: dict[str, Any]) -> Any:
        seconds = getattr(self.config.trainer, deadline)
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self.session.post(f"{self.url}/{name}", json=arguments, timeout=timeout) as response:
                answer = await response.json(content_type=None)
        except TimeoutError:
            raise TrainerError(
                f"the trainer did not finish {name} in {seconds:g} s (trainer.{deadline}); see {self.processes[0].log}"
            ) from None
        except aiohttp.ClientError as error:
            self.check()
            raise TrainerError(
                f"the trainer's connection broke in {name}: {error}; see {self.processes[0].log}"
            ) from None
        if response.status != 200:
            raise TrainerError(f"{name}: {answer['error']}; the traceback is in {self.processes[0].log}")
        return answer

    async def memory(self) -> str:
        """The predicted peak of a rank's memory, as a table."""
        return await self.call("memory", START)

    async def train(self, updates: list[Any], total_steps: int) -> dict[str, Any]:
        """One optimizer step an update: ``metrics``, and ``advantages`` as [group, index, value] of every row."""
        return await self.call("train", STEP, updates=updates, total_steps=total_steps)

    async def evaluate(self, planned: Any) -> dict[str, float]:
        """The mean ``loss`` of what is planned, and what else the objective measures; no weight changes."""
        return await self.call("evaluate", STEP, planned=planned)

    async def compare(self, updates: list[Any], folder: Path) -> dict[str, float]:
        """The update computed twice, by the engine and by plain transformers: how the two differ; no weight changes.

        ``folder`` is an empty one that takes the weights between the two.
        """
        return await self.call("compare", STEP, updates=updates, folder=str(folder.absolute()))

    async def logprobs(self, rows: list[dict[str, list[int]]]) -> list[list[float]]:
        return await self.call("logprobs", STEP, rows=rows)

    async def export(self, folder: Path, dtype: str) -> None:
        await self.call("export", STEP, folder=str(folder.absolute()), dtype=dtype)

    async def export_adapter(self, folder: Path, dtype: str) -> None:
        await self.call("export_adapter", STEP, folder=str(folder.absolute()), dtype=dtype)

    async def save(self, folder: Path, model: bool = True) -> None:
        """Takes a copy of the state, which is then written below ``folder`` while other commands are carried out; with
        ``model`` as a Hugging Face folder too. ``start`` takes ``folder`` as its ``state``."""
        await self.call("save", STEP, folder=str(folder.absolute()), model=model)

    async def saved(self) -> None:
        """Waits until what was saved last is written; TrainerError where it could not be."""
        await self.call("saved", STEP)

    async def stop(self) -> None:
        await asyncio.gather(*(process.stop() for process in self.processes))
