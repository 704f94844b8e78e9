"""The only module that knows vLLM's HTTP paths.

Each call has a deadline. A call that fails raises InferenceError with the server, the path and what the server said.
Versions 0.26 to 0.33 are in range: what a server can do is read from its ``/openapi.json`` once.
"""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
import numpy as np

from vime.inference.life import Answer
from vime.inference.limiter import Limiter
from vime.inference.load import parse_load
from vime.observe import trace
from vime.rollout.admission import Load
from vime.sample import VersionSpan

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
NEEDED = (GENERATE, "/pause", "/resume", "/start_weight_update", "/update_weights", "/finish_weight_update")
WEIGHT_INFO = "/weight_info"  # servers that offer it also say which weights made which token (not vLLM 0.26)
UNBOUNDED = 1 << 31  # the vocabulary of a model whose size is not known
ALIVE = ("/is_sleeping", "/health")  # the first reaches the engine's own process, which /health does not
LOOK_TIMEOUT_S = 5.0
ANSWERS_AT_ONCE = 4
"""Answers taken up in one turn of the event loop: each is work for one to three milliseconds, until its reward is asked for; an
update of the weights may end thousands of responses at once."""
PAUSES = {  # rollout.in_flight
    "recompute": "mode=keep&clear_cache=true",
    "keep_cache": "mode=keep&clear_cache=false",
    "abort": "mode=abort&clear_cache=true",
    "finish": "mode=wait&clear_cache=true",
}
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NEEDED_FOR_ADAPTERS = (GENERATE, LOAD_ADAPTER, UNLOAD_ADAPTER)
ADAPTERS = "--enable-lora, --max-lora-rank of lora.rank or more, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
FIX = {
    GENERATE: "start the server with --enable-scale-out",
    LOAD_ADAPTER: f"start the server with {ADAPTERS}",
    UNLOAD_ADAPTER: f"start the server with {ADAPTERS}",
    "other": "start the server with VLLM_SERVER_DEV_MODE=1 (vLLM 0.26 or newer)",
}


class InferenceError(Exception):
    """A server refused, failed, or answered with something that cannot be trained on."""


class Late(InferenceError):
    """The server did not answer in time."""


class RequestRefused(InferenceError):
    """The server understood and said no (HTTP 4xx), a prompt too long for example: asking again gives the same answer."""


@dataclass(frozen=True)
class Completion:
    """What the server sampled: ids, log-probabilities under the sampling temperature, version spans, and, where they were
    asked for, the experts of prompt and response (``Sample.experts``)."""

    token_ids: list[int]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    experts: np.ndarray | None = None

    def followed_by(self, rest: Completion) -> Completion:
        """This one, which was aborted, and the completion of prompt and this as one; where it began later weights go on."""
        done = len(self.token_ids)
        spans = [VersionSpan(s.version, s.start + done, s.end + done) for s in rest.versions if s.end > s.start]
        if self.versions and spans and self.versions[-1].version == spans[0].version:
            spans[0] = replace(spans[0], start=self.versions[-1].start)
            spans = [*self.versions[:-1], *spans]
        else:
            spans = [*self.versions, *spans]
        experts = rest.experts
        if self.experts is not None:  # of these tokens: how they were routed when they were sampled
            experts = self.experts if experts is None else np.concatenate([self.experts, experts[len(self.experts) :]])
        return Completion(
            self.token_ids + rest.token_ids, self.logprobs + rest.logprobs, tuple(spans), rest.finish_reason, experts
        )


@dataclass(frozen=True)
class Adapter:
    """One version of a LoRA adapter as servers know it. ``name`` is used for no other, ever: it names the weights."""

    name: str
    path: str
    version: int


class Token(msgspec.Struct, gc=False):
    """One entry of a generate response's log-probabilities; what else it holds is passed over."""

    logprob: float
    token_id: int | None = None


class Logprobs(msgspec.Struct):
    content: list[Token] | None = None


class Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    token_ids: list[int] | None
    finish_reason: str | None
    logprobs: Logprobs | None = None
    weight_versions: list[Span] | None = None
    routed_experts: str | None = None


class Times(msgspec.Struct):
    """Milliseconds until it was computed, and then until the first token; a server tells them, or not."""

    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None


class Generated(msgspec.Struct):
    """A generate response. Typed, it is decoded in a thirtieth of json's time, in which a long one would hold up all others."""

    choices: list[Choice]
    model: str | None = None
    metrics: Times | None = None


DECODER = msgspec.json.Decoder(Generated)


def decode(body: bytes) -> Generated:
    try:
        return DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise InferenceError(f"this is no generate response, {error}: {body[:200]!r}") from None


def open_session() -> aiohttp.ClientSession:
    """A session for any number of requests at once; to be closed."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), json_serialize=lambda value: msgspec.json.encode(value).decode()
    )


def parse_completion(
    body: Generated,
    assumed_version: int,
    routed_prompt: int | None = None,
    changed: bool = False,
    vocabulary: int = UNBOUNDED,
) -> Completion:
    """A Completion from a generate response, or InferenceError: nothing is padded or guessed. Only an aborted one may be empty.

    ``assumed_version`` labels all tokens where the server reports no versions (vLLM 0.26), unless the weights ``changed``
    since it was asked and nothing aborted it before. ``routed_prompt``: the response must tell the experts of the prompt, of so
    many tokens, and its own. Token ids are below ``vocabulary``.
    """
    try:
        choice = body.choices[0]
    except IndexError:
        raise InferenceError("this is no generate response: it has no choices") from None
    ids, finish = choice.token_ids or [], choice.finish_reason
    content = (choice.logprobs and choice.logprobs.content) or []
    logprobs = [token.logprob for token in content]
    spans = tuple(VersionSpan(_version(s.version), s.start, s.end) for s in choice.weight_versions or ())
    if finish not in ("stop", "length", "abort") or (not ids and finish != "abort"):
        raise InferenceError(f"the response has {len(ids)} token ids and finish_reason {finish!r}")
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise InferenceError(f"the token ids go from {min(ids)} to {max(ids)}; the model knows 0 to {vocabulary - 1}")
    if len(content) != len(ids):
        raise InferenceError(f"the response has {len(ids)} token ids and {len(content)} log-probabilities")
    if any(token.token_id not in (None, id) for token, id in zip(content, ids, strict=True)):
        raise InferenceError("the log-probabilities are of other tokens than the ids")
    if not all(-9000.0 < value <= 0.0 for value in logprobs):  # vLLM writes NaN and -inf as -9999
        raise InferenceError(f"a log-probability is not a finite number <= 0: {min(logprobs)} to {max(logprobs)}")
    if ids and not spans:
        if changed and finish != "abort":
            raise InferenceError(
                "the weights changed under a response of a server that does not say which made which token"
            )
        spans = (VersionSpan(assumed_version, 0, len(ids)),)
    if [span.start for span in spans] + [len(ids)] != [0] + [span.end for span in spans]:
        raise InferenceError(f"the weight versions {spans} do not cover the {len(ids)} tokens")
    experts = None if routed_prompt is None or not ids else parse_experts(choice, routed_prompt + len(ids) - 1)
    return Completion(ids, logprobs, spans, finish, experts)


def parse_experts(choice: Choice, tokens: int) -> np.ndarray:
    """Where the server routed ``tokens`` tokens: uint8 or uint16 [tokens, layers, experts a token], or InferenceError."""
    encoded = choice.routed_experts
    if not encoded:
        raise InferenceError(
            "the response has no routed experts, which algorithm.router_replay = 'server' needs; start the server with "
            "--enable-return-routed-experts"
        )
    try:
        experts = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except (ValueError, TypeError, EOFError) as error:
        raise InferenceError(f"the routed experts are no array: {error}") from None
    if experts.ndim != 3 or len(experts) != tokens or experts.dtype.kind not in "iu":
        raise InferenceError(
            f"the routed experts are {experts.dtype} {list(experts.shape)}; needed are whole numbers, [{tokens}, layers, "
            "experts a token]"
        )
    if experts.size and not 0 <= experts.min() <= experts.max() < 2**15:
        raise InferenceError(f"the routed experts go from {experts.min()} to {experts.max()}: some tokens have none")
    return experts if experts.dtype == np.uint8 else experts.astype(np.uint16)


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
    """One vLLM server, or the router in front of several: its URL and the calls we make. Control calls are for servers only.

    ``version`` is that of the weights it was given last, ``adapter`` the one that requests name, if any, and ``in_flight``
    counts the requests of each name.
    """

    def __init__(
        self, url: str, session: aiohttp.ClientSession, control_timeout_s: float, model: str = "policy"
    ) -> None:
        self.url, self.session, self.model = url.rstrip("/"), session, model
        self.timeout_s = control_timeout_s
        self.needed: tuple[str, ...] = NEEDED
        self.paths: frozenset[str] = frozenset()
        self.version = 0
        self.adapter: Adapter | None = None
        self.in_flight: Counter[str] = Counter()
        self.salt: str | None = None  # of a run whose servers keep their cache through an update
        self.answers = Limiter(ANSWERS_AT_ONCE)
        self.vocabulary = UNBOUNDED
        self.bases: set[int] = set()  # versions of the model's own weights that answered for an adapter

    async def _call(
        self, method: str, url: str, timeout_s: float, body: Any = None, headers: Any = None, parse: Any = json.loads
    ) -> Any:
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self.session.request(method, url, json=body, timeout=timeout, headers=headers) as response:
                if response.status != 200:
                    kind = RequestRefused if 400 <= response.status < 500 else InferenceError
                    raise kind(f"{method} {url} answered {response.status}: {(await response.text())[:500]}")
                answer = await response.read()
            await self.answers.passed()
            return parse(answer)
        except TimeoutError:
            raise Late(f"{method} {url} gave no answer in {timeout_s:g} s") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise InferenceError(f"{method} {url}: {type(error).__name__}: {error}") from None

    async def _control(self, path: str, body: Any = None) -> Any:
        return await self._call("POST", self.url + path, self.timeout_s, body)

    async def answer(self) -> Answer:
        """One look at it: whether it, and where it can be asked its engine, answers."""
        path = next((path for path in ALIVE if path in self.paths), ALIVE[-1])
        return await answer_of(self.session, self.url + path)

    @property
    def tells_versions(self) -> bool:
        """Whether its responses say which weights made which token."""
        return WEIGHT_INFO in self.paths

    async def load(self, timeout_s: float) -> Load:
        """What the server says of its load; InferenceError where it says nothing (--disable-log-stats)."""
        return await self._call("GET", self.url + "/metrics", timeout_s, parse=parse_load)

    async def learn_paths(self) -> None:
        """Reads what the server offers; raises InferenceError naming every needed path that is missing and the fix."""
        document = await self._call("GET", self.url + "/openapi.json", self.timeout_s)
        self.paths = frozenset(document.get("paths", {}))
        if missing := [path for path in self.needed if path not in self.paths]:
            raise InferenceError(
                f"{self.url} lacks " + "; ".join(f"{path}: {FIX.get(path, FIX['other'])}" for path in missing)
            )

    @property
    def served(self) -> str:
        """What requests name: the adapter, or the model."""
        return self.adapter.name if self.adapter else self.model

    async def model_name(self) -> str:
        """The name under which the server serves its model: ours, where it is one of several."""
        names = [model["id"] for model in (await self._call("GET", self.url + "/v1/models", self.timeout_s))["data"]]
        return self.model if self.model in names else names[0]

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: dict[str, Any],
        timeout_s: float,
        session_id: str = "",
        routed: bool = False,
        priority: int | None = None,
        adapter: Adapter | None = None,
    ) -> Completion:
        """Samples one response. ``sampling`` is vLLM's sampling_params; log-probabilities are always asked for.

        ``session_id`` keeps requests that share a prompt on one server behind the router; ``routed``: the response must come
        with the experts of each token. A request that names an adapter, ``adapter`` or else the present one, is answered by
        it to the end, whatever is loaded meanwhile.
        """
        adapter, version = adapter or self.adapter, self.version
        model = adapter.name if adapter else self.served
        body = {
            "model": model,
            "token_ids": prompt_ids,
            "sampling_params": {**sampling, "logprobs": 0, "detokenize": False},
            "stream": False,
        }
        if priority is not None:  # the lowest first, on a server that schedules by it
            body["priority"] = priority
        if self.salt:  # what other weights left in the cache is for the responses that they began
            body["cache_salt"] = f"{self.salt}-{version}"
        headers = {"X-Session-ID": session_id} if session_id else None
        self.in_flight[model] += 1
        sent = trace.now()
        try:
            answer = await self._call("POST", self.url + GENERATE, timeout_s, body, headers, decode)
        except InferenceError:
            trace.note("failed", sent, trace.place(self.url))
            raise
        finally:
            self.in_flight[model] -= 1
        self._note(answer, sent)
        routed_prompt = len(prompt_ids) if routed else None
        if adapter is None:
            return parse_completion(answer, version, routed_prompt, version != self.version, self.vocabulary)
        return self.of_adapter(adapter, answer, routed_prompt)

    def _note(self, answer: Generated, sent: float) -> None:
        """In the trace; a server of ours behind the router tells its name as that of its model."""
        named = answer.model not in (None, self.model, self.served)
        where = answer.model if named and answer.model else trace.place(self.url)
        tokens = sum(len(choice.token_ids or []) for choice in answer.choices)
        told = answer.metrics and (answer.metrics.queue_time_ms, answer.metrics.time_to_first_token_ms)
        split = [(ms or 0.0) / 1000 for ms in told] if told and any(told) else ()
        trace.note("generate", sent, where, tokens, split)

    def of_adapter(self, adapter: Adapter, answer: Generated, routed_prompt: int | None = None) -> Completion:
        """The completion, its tokens the adapter's version; InferenceError where the adapter was not alone in making them."""
        completion = parse_completion(answer, 0, routed_prompt, vocabulary=self.vocabulary)
        if answer.model not in (None, adapter.name):
            raise InferenceError(f"asked of adapter {adapter.name}, answered by {answer.model!r}")
        self.bases.update(span.version for span in completion.versions)
        if len(self.bases) > 1:
            raise InferenceError(
                f"{self.url}: the model under the adapter changed (weight versions {sorted(self.bases)}): another run "
                "updates it as a whole; give that run a server of its own"
            )
        ids = completion.token_ids
        return replace(completion, versions=(VersionSpan(adapter.version, 0, len(ids)),) if ids else ())

    async def score(self, prompt_ids: list[int], response_ids: list[int], timeout_s: float) -> list[float]:
        """Log-probability of each response token under the server's model, at temperature 1."""
        body = {
            "model": self.served,
            "prompt": prompt_ids + response_ids,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "temperature": 1.0,
        }
        sent = trace.now()
        answer = await self._call("POST", self.url + COMPLETIONS, timeout_s, body)
        trace.note("score", sent, trace.place(self.url))
        return parse_scores(answer, response_ids)

    async def pause(self, in_flight: str = "recompute", timeout_s: float | None = None) -> None:
        """Stops scheduling. What becomes of running requests is ``rollout.in_flight``."""
        await self._call("POST", f"{self.url}/pause?{PAUSES[in_flight]}", timeout_s or self.timeout_s)

    async def withhold(self) -> None:
        """Stops what is not proved from being sampled: an adapter is taken away, other weights are paused."""
        await (self.unload_adapter(self.adapter.name) if self.adapter else self.pause())

    async def load_adapter(self, adapter: Adapter) -> None:
        """Makes the adapter known beside those that are; nothing is paused, nothing else changes."""
        body = {"lora_name": adapter.name, "lora_path": adapter.path}
        try:
            await self._call("POST", self.url + LOAD_ADAPTER, self.timeout_s, body, parse=bytes)
        except InferenceError as error:
            raise InferenceError(f"{error}; servers of adapters are started with {ADAPTERS}") from None

    async def unload_adapter(self, name: str) -> None:
        """Requests that the server has taken for it go on to their end; new ones are refused."""
        await self._call("POST", self.url + UNLOAD_ADAPTER, self.timeout_s, {"lora_name": name}, parse=bytes)

    async def adapters(self) -> list[str]:
        """Names of the adapters that the server knows, of all runs."""
        listed = (await self._call("GET", self.url + "/v1/models", self.timeout_s))["data"]
        return [model["id"] for model in listed if model.get("parent")]

    async def resume(self) -> None:
        await self._control("/resume")

    async def is_paused(self) -> bool:
        return bool((await self._call("GET", self.url + "/is_paused", self.timeout_s))["is_paused"])

    async def held_requests(self) -> int:
        """Requests for responses that it has and has not answered; of a server that was told to count them."""
        return (await self._call("GET", self.url + "/load", self.timeout_s))["server_load"]

    async def seed_sampling(self, seed: int) -> None:
        await self._control("/collective_rpc", {"method": "seed_sampling", "args": [seed]})

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        await self._control("/init_weight_transfer_engine", {"init_info": info})

    async def update_weights(self, info: dict[str, Any], version: int) -> None:
        """One whole update of a paused server; raises InferenceError and leaves it paused if any part fails."""
        await self._control("/start_weight_update")
        await self._control("/update_weights", {"update_info": info})
        await self._control("/finish_weight_update", {"weight_version": str(version)})

    async def weight_version(self) -> str | None:
        """The version the server says it holds, or None where it cannot say (vLLM 0.26)."""
        if not self.tells_versions:
            return None
        return (await self._call("GET", self.url + WEIGHT_INFO, self.timeout_s))["weight_version"]


async def answer_of(session: aiohttp.ClientSession, url: str) -> Answer:
    """What a look at the URL gives."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)) as response:
            return Answer.YES if response.status == 200 else Answer.NO
    except TimeoutError:
        return Answer.SILENT
    except aiohttp.ClientError:
        return Answer.NO
