"""From the trainer's weights to a server's.

A channel's ``publish(version)``: the trainer makes the weights available. ``take(server)``: one server gets what is published;
with ``pauses`` it is paused for that and not resumed here. ``tidy()`` removes what no server needs any more; ``close()``
takes away what a run leaves on servers that go on without it. With an adapter nothing is paused: see ``adapters``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from vime.beside import beside
from vime.config.sections import Config
from vime.inference.client import InferenceError, Server
from vime.inference.fleet import Fleet
from vime.training.client import Trainer


class SharedMemoryChannel:
    """safetensors in a memory-backed folder of the same host, a new folder a version; the one before is removed."""

    pauses = True

    def __init__(self, config: Config, trainer: Trainer, fleet: Fleet, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self.dtype, self.published = config.model.dtype, folder
        folder.mkdir(parents=True, exist_ok=True)

    async def publish(self, version: int) -> None:
        target = self.folder / f"v{version:06d}"
        draft = target.with_suffix(".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        await self.trainer.export(draft, self.dtype)
        draft.rename(target)
        self.version, self.published = version, target

    async def take(self, server: Server) -> None:
        """Updates a paused server; InferenceError, and it stays paused, where it fails or then says another version."""
        await server.update_weights({"path": str(self.published)}, self.version)
        held = await server.weight_version()
        if held not in (None, str(self.version)):
            raise InferenceError(
                f"{server.url} says it holds version {held} after the update to {self.version}; it stays paused"
            )

    async def tidy(self) -> None:
        for old in set(self.folder.iterdir()) - {self.published}:  # gigabytes of memory to give back
            await beside(shutil.rmtree, old, ignore_errors=True)

    async def close(self) -> None:
        """Nothing: the weights are the servers'."""


CHANNELS = {"shared_memory": SharedMemoryChannel}
