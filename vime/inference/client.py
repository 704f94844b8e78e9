"""The only module that knows vLLM's HTTP paths.

Each call has a deadline. A call that fails raises InferenceError with the server, the path and what the server said.
Versions 0.26 to 0.33 are in range: what a server can do is read from its ``/openapi.json`` once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp

from vime.sample import VersionSpan

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
NEEDED = (GENERATE, "/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update")
FIX = {
    GENERATE: "start the server with --enable-scale-out",
    "other": "start the server with VLLM_SERVER_DEV_MODE=1 (vLLM 0.26 or newer)",
}


class InferenceError(Exception):
    """A server refused, failed, or answered with something that cannot be trained on."""


class RequestRefused(InferenceError):
    """The server understood and said no (HTTP 4xx), a prompt too long for example: asking again gives the same answer."""


@dataclass(frozen=True)
class Completion:
    """What the server sampled: ids, log-probabilities under the sampling temperature, version spans."""

    token_ids: list[int]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...]
    finish_reason: str


def parse_completion(body: Any, assumed_version: int) -> Completion:
    """A Completion from a generate response, or InferenceError: nothing is padded or guessed.

    ``assumed_version`` labels all tokens where the server reports no versions (vLLM 0.26).
    """
    try:
        choice = body["choices"][0]
        ids, finish = choice["token_ids"] or [], choice["finish_reason"]
        content = (choice.get("logprobs") or {}).get("content") or []
        logprobs = [float(entry["logprob"]) for entry in content]
        tokens = [entry.get("token_id", token) for entry, token in zip(content, ids, strict=False)]
        versions = choice.get("weight_versions") or []
        spans = tuple(VersionSpan(_version(s["version"]), s["start"], s["end"]) for s in versions)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InferenceError(f"this is no generate response, {error!r}: {str(body)[:200]}") from None
    if not ids or finish not in ("stop", "length", "abort"):
        raise InferenceError(f"the response has {len(ids)} token ids and finish_reason {finish!r}")
    if len(content) != len(ids):
        raise InferenceError(f"the response has {len(ids)} token ids and {len(content)} log-probabilities")
    if tokens != ids:
        raise InferenceError("the log-probabilities are of other tokens than the ids")
    if not all(-9000.0 < value <= 0.0 for value in logprobs):  # vLLM writes NaN and -inf as -9999
        raise InferenceError(f"a log-probability is not a finite number <= 0: {min(logprobs)} to {max(logprobs)}")
    spans = spans or (VersionSpan(assumed_version, 0, len(ids)),)
    if [span.start for span in spans] + [len(ids)] != [0] + [span.end for span in spans]:
        raise InferenceError(f"the weight versions {spans} do not cover the {len(ids)} tokens")
    return Completion(ids, logprobs, spans, finish)


def parse_scores(body: Any, token_ids: list[int]) -> list[float]:
    """Log-probabilities of the last tokens of a prompt, or InferenceError where they are not all there."""
    try:
        entries = body["choices"][0]["prompt_logprobs"][-len(token_ids) :]
        scores = [float(entry[str(token)]["logprob"]) for entry, token in zip(entries, token_ids, strict=True)]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InferenceError(f"these are no prompt log-probabilities, {error!r}: {str(body)[:200]}") from None
    if not all(-9000.0 < value <= 0.0 for value in scores):
        raise InferenceError(f"a log-probability is not a finite number <= 0: {min(scores)} to {max(scores)}")
    return scores


def _version(text: str) -> int:
    return int(text) if text.isdigit() else 0  # "default": the weights the server started with


class Server:
    """One vLLM server: its URL and the calls we make. ``requests_url`` is where sampling goes (a router, or the server)."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, control_timeout_s: float, model: str = "policy"
    ) -> None:
        self.url, self.session, self.model = url.rstrip("/"), session, model
        self.requests_url = self.url
        self.timeout_s = control_timeout_s
        self.needed: tuple[str, ...] = NEEDED
        self.paths: frozenset[str] = frozenset()

    async def _call(self, method: str, url: str, timeout_s: float, body: Any = None, headers: Any = None) -> Any:
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self.session.request(method, url, json=body, timeout=timeout, headers=headers) as response:
                if response.status != 200:
                    kind = RequestRefused if 400 <= response.status < 500 else InferenceError
                    raise kind(f"{method} {url} answered {response.status}: {(await response.text())[:500]}")
                return await response.json(content_type=None)
        except TimeoutError:
            raise InferenceError(f"{method} {url} gave no answer in {timeout_s:.0f} s") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise InferenceError(f"{method} {url}: {type(error).__name__}: {error}") from None

    async def _control(self, path: str, body: Any = None) -> Any:
        return await self._call("POST", self.url + path, self.timeout_s, body)

    async def healthy(self) -> bool:
        try:
            async with self.session.get(self.url + "/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False

    async def learn_paths(self) -> None:
        """Reads what the server offers; raises InferenceError naming every needed path that is missing and the fix."""
        document = await self._call("GET", self.url + "/openapi.json", self.timeout_s)
        self.paths = frozenset(document.get("paths", {}))
        if missing := [path for path in self.needed if path not in self.paths]:
            raise InferenceError(
                f"{self.url} lacks " + "; ".join(f"{path}: {FIX.get(path, FIX['other'])}" for path in missing)
            )

    async def model_name(self) -> str:
        """The name under which the server serves its model."""
        return (await self._call("GET", self.url + "/v1/models", self.timeout_s))["data"][0]["id"]

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: dict[str, Any],
        timeout_s: float,
        version: int,
        session_id: str = "",
        direct: bool = False,
    ) -> Completion:
        """Samples one response. ``sampling`` is vLLM's sampling_params; log-probabilities are always asked for.

        ``session_id`` keeps requests that share a prompt on one server; ``direct`` goes past the router.
        """
        body = {
            "model": self.model,
            "token_ids": prompt_ids,
            "sampling_params": {**sampling, "logprobs": 0, "detokenize": False},
            "stream": False,
        }
        headers = {"X-Session-ID": session_id} if session_id else None
        url = self.url if direct else self.requests_url
        return parse_completion(await self._call("POST", url + GENERATE, timeout_s, body, headers), version)

    async def score(self, prompt_ids: list[int], response_ids: list[int], timeout_s: float) -> list[float]:
        """Log-probability of each response token under the server's model, at temperature 1."""
        body = {
            "model": self.model,
            "prompt": prompt_ids + response_ids,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "temperature": 1.0,
        }
        answer = await self._call("POST", self.requests_url + COMPLETIONS, timeout_s, body)
        return parse_scores(answer, response_ids)

    async def pause(self) -> None:
        """Stops scheduling; running requests wait and will recompute their cache under the next weights."""
        await self._control("/pause?mode=keep&clear_cache=true")

    async def resume(self) -> None:
        await self._control("/resume")

    async def is_paused(self) -> bool:
        return bool((await self._call("GET", self.url + "/is_paused", self.timeout_s))["is_paused"])

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        await self._control("/init_weight_transfer_engine", {"init_info": info})

    async def update_weights(self, info: dict[str, Any], version: int) -> None:
        """One whole update of a paused server; raises InferenceError and leaves it paused if any part fails."""
        await self._control("/start_weight_update")
        await self._control("/update_weights", {"update_info": info})
        await self._control("/finish_weight_update", {"weight_version": str(version)})

    async def weight_version(self) -> str | None:
        """The version the server says it holds, or None where it cannot say (vLLM 0.26)."""
        if "/weight_info" not in self.paths:
            return None
        return (await self._call("GET", self.url + "/weight_info", self.timeout_s))["weight_version"]


async def fan_out(servers: list[Server], call: Any) -> list[Any]:
    """``call(server)`` on every server at once; the first error is raised after all have answered."""
    results = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
