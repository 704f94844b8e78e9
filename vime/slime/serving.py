"""What functions written for slime ask of the servers: one response, tokenizer and sampling, a POST of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import aiohttp

from vime.rollout.generate import Context, respond
from vime.slime.args import Args
from vime.slime.sample import STATUS, Sample

POST_TIMEOUT_S = 600
RETRY_S = 1.0
SERVER_ERROR = 500


class SamplingParams(dict[str, Any]):
    """vLLM's names; SGLang's for the number of tokens is answered too."""

    def __missing__(self, name: str) -> Any:
        if name == "max_new_tokens":
            return self["max_tokens"]
        raise KeyError(name)

    def copy(self) -> SamplingParams:
        return SamplingParams(self)


class GenerateState:
    """``tokenizer`` and ``sampling_params`` of the run."""

    def __init__(self, args: Args) -> None:
        context = context_of(args)
        self.args, self.tokenizer = args, context.tokenizer
        self.sampling_params = sampling_of(args, context)


def sampling_of(args: Args, context: Context) -> SamplingParams:
    return SamplingParams({"top_p": args.rollout_top_p, "top_k": args.rollout_top_k, **context.sampling})


def context_of(args: Args) -> Context:
    found: Context | None = vars(args).get("_context")
    if found is None:
        raise RuntimeError("there are no servers here: only functions that the driver calls can ask them")
    return found


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The sample with the policy's next words: from its prompt, or from where it is. Tokens, log-probabilities and versions are
    the server's own. Of another event loop too."""
    context = context_of(args)
    given = dict(sampling_params)
    most = int(given.pop("max_new_tokens", given.pop("max_tokens", context.sampling["max_tokens"])))
    given.pop("skip_special_tokens", None)
    if not sample.tokens:
        sample.tokens = tokens_of(context, sample.prompt)
    session = context.session_id or sample.session_id or f"g{sample.group_index}"
    own = replace(context, sampling={**context.sampling, **given, "max_tokens": most}, session_id=session)
    made = await of_driver(args, respond(own, list(sample.tokens)))
    start = sample.response_length
    text = context.tokenizer.decode(made.token_ids, skip_special_tokens=True)
    sample.append_response_tokens(tokens=made.token_ids, log_probs=made.logprobs, text=text)
    sample.spans += [replace(span, start=start + span.start, end=start + span.end) for span in made.versions]
    sample.weight_versions += [str(span.version) for span in made.versions]
    sample.rollout_routed_experts = made.experts
    sample.status = STATUS[made.finish_reason]
    return sample


def tokens_of(context: Context, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        ids: list[int] = context.tokenizer.encode(prompt, add_special_tokens=False)
        return ids
    return list(
        context.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
    )


async def of_driver(args: Args, call: Coroutine[Any, Any, Any]) -> Any:
    """The call's result, made on the driver's event loop, whichever this one is."""
    loop = vars(args)["_loop"]
    if asyncio.get_running_loop() is loop:
        return await call
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))


def run(call: Coroutine[Any, Any, Any]) -> Any:
    """A coroutine's result, in a rollout function, which has a thread of its own."""
    return asyncio.run(call)


async def post(url: str, payload: Any, max_retries: int = 60, headers: dict[str, str] | None = None) -> Any:
    """The JSON answer to a POST; failures of the connection and of the server are tried again, refusals are not."""
    timeout = aiohttp.ClientTimeout(total=POST_TIMEOUT_S)
    for left in reversed(range(max_retries)):
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(url, json=payload, headers=headers) as answer,
            ):
                if answer.status < SERVER_ERROR or not left:
                    answer.raise_for_status()
                    return await answer.json(content_type=None)
        except (TimeoutError, aiohttp.ClientConnectionError):
            if not left:
                raise
        await asyncio.sleep(RETRY_S)
    raise ValueError(f"max_retries = {max_retries} makes no request")
