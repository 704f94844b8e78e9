"""Remote services that rewards ask: JSON over HTTP, tried again where that can help, with a deadline."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""answers of servers that are busy or starting"""
WAIT_S = 0.5
"""before the second try; then twice as long each time"""
SHARE = 0.9
"""of a call's deadline that its tries may take: it ends with what the service said instead of late"""


class ServiceError(Exception):
    """The service does not answer, refuses, or its answer is not what it should be; the message says which."""


class Service:
    """A service at ``url``, whose calls have ``deadline_s`` seconds, tries and waits between them included.

    ``key_env`` names the environment variable with the key that is sent as bearer token.
    """

    def __init__(self, url: str, deadline_s: float, retries: int, key_env: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url = {url!r} does not start with http:// or https://")
        if retries < 0:
            raise ValueError(f"retries must be >= 0, got {retries}")
        if key_env and key_env not in os.environ:
            raise ValueError(
                f"key_env = {key_env!r}: there is no such environment variable; export it before the start"
            )
        self.url, self.deadline_s, self.retries = url.rstrip("/"), SHARE * deadline_s, retries
        self.headers = {"Authorization": f"Bearer {os.environ[key_env]}"} if key_env else {}
        self._session: aiohttp.ClientSession | None = None
        self._model: str | None = None

    async def ask(self, path: str, body: Any = None) -> Any:
        """The JSON answer to a POST of ``body``, or to a GET where there is none. Raises ServiceError."""
        end, said = time.monotonic() + self.deadline_s, "nothing"
        for attempt in range(self.retries + 1):
            try:
                async with asyncio.timeout(max(0.0, end - time.monotonic())):
                    status, answer = await self._once(path, body)
            except TimeoutError:
                raise ServiceError(
                    f"{self.url}{path}: no answer within {self.deadline_s:g} s; before: {said}"
                ) from None
            except OSError as error:  # every fault of a connection is one
                status, said = 0, f"{type(error).__name__}: {error}"
            else:
                if status == 200:
                    return answer
                said = f"HTTP {status}: {answer!s:.300}"
            wait = WAIT_S * 2**attempt
            if status not in (0, *AGAIN) or attempt == self.retries or time.monotonic() + wait > end:
                break
            await asyncio.sleep(wait)
        raise ServiceError(f"{self.url}{path} failed: {said}")

    async def _once(self, path: str, body: Any) -> tuple[int, Any]:
        import aiohttp

        if self._session is None:  # of the worker's event loop; it ends with the worker
            connector, forever = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(headers=self.headers, connector=connector, timeout=forever)
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, f"{self.url}{path}", json=body) as reply:
                if reply.status != 200:
                    return reply.status, await reply.text()
                try:
                    return 200, await reply.json(content_type=None)
                except ValueError:
                    raise ServiceError(f"{self.url}{path} answered no JSON: {await reply.text():.200}") from None
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from None

    async def model(self) -> str:
        """The first model that an OpenAI-compatible server lists."""
        if self._model is None:
            answer = await self.ask("/v1/models")
            try:
                self._model = str(answer["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise ServiceError(f"{self.url}/v1/models lists no model: {answer!s:.200}") from None
        return self._model


class Batches:
    """Calls of ``size`` items, or as many as came within ``window_s`` seconds of the first, sent as one."""

    def __init__(self, send: Callable[[list[Any]], Awaitable[list[Any]]], size: int, window_s: float) -> None:
        self.send, self.size, self.window_s = send, size, window_s
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def result(self, item: Any) -> Any:
        """What ``send`` gives for the item among those that it was sent with."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append((item, future))
        if len(self._waiting) >= self.size:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self.window_s, self._flush)
        return await future

    def _flush(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        if batch := [(item, future) for item, future in batch if not future.done()]:  # the others were cancelled
            task = asyncio.create_task(self._send(batch))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, batch: list[tuple[Any, asyncio.Future[Any]]]) -> None:
        try:
            results = await self.send([item for item, _ in batch])
        except Exception as error:
            results = [error] * len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
