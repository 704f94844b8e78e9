"""vllm-router in front of the servers: its process, and which servers it sends requests to."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import aiohttp

from vime.cluster.local import Process, free_port
from vime.config.sections import Config
from vime.inference.client import answer_of
from vime.inference.commands import router_command
from vime.inference.life import Answer, Limits
from vime.inference.part import Part

CALL_TIMEOUT_S = 5.0


class Router(Part):
    """Started without a server. ``workers`` are the URLs it sends requests to."""

    def __init__(self, config: Config, session: aiohttp.ClientSession, log: Path, limits: Limits) -> None:
        self.session, self.workers = session, frozenset[str]()
        port, metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = router_command(config, port, metrics_port)

        def launch() -> Process:
            self.workers = frozenset()
            return Process("vllm-router", command, log)

        super().__init__("vllm-router", limits, self._answer, launch)

    async def _answer(self) -> Answer:
        return await answer_of(self.session, f"{self.url}/liveness")

    async def route(self, wanted: frozenset[str]) -> bool:
        """Makes ``wanted`` its workers; False where it did not take part of that."""
        for url in self.workers - wanted:
            if await self._told("remove_worker", url):
                self.workers -= {url}
        for url in wanted - self.workers:
            if await self._told("add_worker", url):
                self.workers |= {url}
        return self.workers == wanted

    async def _told(self, what: str, url: str) -> bool:
        call, timeout = f"{self.url}/{what}?url={quote(url, safe='')}", aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        try:
            async with self.session.post(call, timeout=timeout) as response:
                return response.status == 200 or "already exists" in await response.text()
        except (TimeoutError, aiohttp.ClientError):
            return False
