"""An adapter's way from the trainer to the servers: every version is a new adapter with a name and a folder of its own.

The new one is loaded beside the old, requests name it from then on, and the old is unloaded once no response of it is on its
way. A name stands for the same weights for ever, so a token's weights are known by the name that its request bore, nothing
cached under one name is used for another, and several runs may share servers: none pauses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

from vime.config.sections import Config
from vime.inference.client import Adapter, InferenceError, Server
from vime.inference.fleet import Fleet
from vime.training.client import Trainer


def prefix_of(run_dir: str) -> str:
    """What the names of a run's adapters start with, after a restart too: its folder's name, and a digest of host and path."""
    folder = Path(run_dir).absolute()
    return f"{folder.name}-{hashlib.sha256(f'{socket.gethostname()}:{folder}'.encode()).hexdigest()[:8]}-"


async def give(server: Server, adapter: Adapter) -> None:
    """The server has the adapter, beside others, and names it in its requests."""
    if adapter.name not in await server.adapters():
        await server.load_adapter(adapter)
    server.adapter = adapter


class AdapterChannel:
    """peft folders in a memory-backed folder of the same host."""

    pauses = False

    def __init__(self, config: Config, trainer: Trainer, fleet: Fleet, folder: Path) -> None:
        self.trainer, self.fleet, self.folder = trainer, fleet, folder
        self.dtype, self.prefix = config.model.dtype, prefix_of(config.run.dir)
        self.adapter: Adapter | None = None
        self.kept: Adapter | None = None  # an older one that is still asked
        folder.mkdir(parents=True, exist_ok=True)

    async def publish(self, version: int) -> None:
        name = f"{self.prefix}v{version:06d}-{uuid.uuid4().hex[:8]}"
        adapter = Adapter(name, str(self.folder / name), version)
        await self.trainer.export_adapter(Path(adapter.path), self.dtype)
        self.adapter = adapter

    async def take(self, server: Server) -> None:
        """InferenceError where the server refuses; then it goes on knowing the old one."""
        assert self.adapter, "publish comes first"
        if self.kept:
            await give(server, self.kept)
        await give(server, self.adapter)

    @contextlib.contextmanager
    def keeping(self, adapter: Adapter) -> Iterator[None]:
        """Inside, this version stays on the servers, and comes to those that join, whatever is published meanwhile."""
        self.kept = adapter
        try:
            yield
        finally:
            self.kept = None

    async def tidy(self) -> None:
        await self.unload_others({one.name for one in (self.adapter, self.kept) if one})

    async def unload_others(self, keep: set[str]) -> None:
        """Unloads the run's adapters, also those that a killed one left, but for ``keep`` and those of responses on their way.
        Folders go one version later: a server may still read from one for a request that was given up."""
        servers = self.fleet.servers
        keep = keep | {n for server in (*servers, self.fleet.front) for n, count in server.in_flight.items() if count}
        known = {one.name for one in (self.adapter, self.kept) if one}

        async def unload(server: Server) -> None:
            mine = [name for name in await server.adapters() if name.startswith(self.prefix)]
            known.update(mine)
            for name in mine:
                if name not in keep:
                    await server.unload_adapter(name)

        for error in await asyncio.gather(*map(unload, servers), return_exceptions=True):
            if error and not isinstance(error, InferenceError):  # of a server that is lost the fleet takes care
                raise error
        for folder in self.folder.iterdir():
            if folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)

    async def close(self) -> None:
        """Unloads the run's adapters from servers that are still there."""
        await self.unload_others(set())
