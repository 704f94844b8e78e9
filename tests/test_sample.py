"""Samples and completions: one log-probability a token, versions told apart, and nothing padded or guessed."""

import asyncio
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults import spoilt
from tests.tiny import make_config
from vime.inference.client import Completion, InferenceError, Server, decode, parse_completion, parse_scores
from vime.inference.fleet import Fleet
from vime.sample import Group, Sample, Task, VersionSpan


def sample(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "prompt_ids": [1, 2], "response_ids": [3, 4], "logprobs": [-0.1, -0.2], "versions": (VersionSpan(0, 0, 2),),
        "finish_reason": "stop", "text": "ab",
    }  # fmt: skip
    return Sample(**{**fields, **changes})


def body(**changes: Any) -> dict[str, Any]:
    """What vLLM answers on /inference/v1/generate, as it is recorded from a server."""
    choice: dict[str, Any] = {
        "token_ids": [5, 6, 7],
        "logprobs": {"content": [{"token": f"token_id:{t}", "logprob": -0.5 * t} for t in (5, 6, 7)]},
        "finish_reason": "stop",
    }
    return {"choices": [{**choice, **changes}]}


def logprobs(*values: Any) -> dict[str, Any]:
    return {"content": [{"logprob": value} for value in values]}


def parsed(answer: Any, *arguments: Any) -> Completion:
    return parse_completion(decode(json.dumps(answer).encode()), *arguments)


def refusal(answer: Any) -> str:
    with pytest.raises(InferenceError) as caught:
        parsed(answer, 3)
    return str(caught.value)


def test_every_response_token_is_trained_unless_said_otherwise() -> None:
    assert sample().loss_mask == [1, 1]
    assert sample(loss_mask=[0, 1]).loss_mask == [0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [-0.1]}, "logprobs has 1 entries for 2 response tokens"),
        ({"logprobs": []}, "logprobs has 0 entries for 2 response tokens"),
        ({"logprobs": [-0.1, -0.1, -0.1]}, "logprobs has 3 entries for 2 response tokens"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries for 2 response tokens"),
        ({"experts": np.zeros((4, 1, 1))}, "experts has 4 entries for 4 tokens; all but the last must have one"),
    ],
)
def test_a_sample_without_one_value_a_token_cannot_be_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(**changes)


SPANS = [
    ([1, 1, 1], [(0, 3)], ""),
    ([1, 1, 1], [(0, 1), (1, 3)], ""),
    ([1, 0, 1], [(0, 1), (2, 3)], ""),
    ([0, 1, 0], [(1, 2)], ""),
    ([1, 1, 1], [], "versions is empty"),
    ([0, 0, 0], [], "versions is empty"),
    ([1, 1, 1], [(0, 2)], r"leaves out \[2, 3\), where tokens are trained; shift the spans"),
    ([1, 1, 1], [(0, 1), (2, 3)], r"leaves out \[1, 2\)"),
    ([0, 1, 1], [(2, 3)], r"leaves out \[0, 2\)"),
    ([1, 1, 1], [(0, 2), (0, 1)], r"has \[0, 1\) where it must be within \[2, 3\); shift the spans"),
    ([1, 1, 1], [(2, 3), (0, 2)], r"has \[0, 2\) where it must be within \[3, 3\)"),
    ([1, 1, 1], [(0, 4)], r"has \[0, 4\) where it must be within \[0, 3\)"),
    ([1, 1, 1], [(-1, 3)], r"has \[-1, 3\)"),
    ([1, 1, 1], [(0, 0), (0, 3)], r"has \[0, 0\)"),
]


@pytest.mark.parametrize(("mask", "spans", "message"), SPANS)
def test_every_trained_token_is_in_one_version_span(mask: list[int], spans: list[Any], message: str) -> None:
    versions = tuple(VersionSpan(number, *span) for number, span in enumerate(spans))
    one = Sample([1], [2, 3, 4], [-0.5] * 3, versions, "stop", "", loss_mask=mask)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        one.check()


def test_a_sample_that_was_changed_is_checked_again() -> None:
    one = Sample([1], [2], [-0.5], (VersionSpan(0, 0, 1),), "stop", "")
    one.response_ids.append(3)
    with pytest.raises(ValueError, match="logprobs has 1 entries for 2 response tokens"):
        one.check()
    with pytest.raises(ValueError, match="versions has the version '7'"):
        Sample([1], [2], [-0.5], (VersionSpan("7", 0, 1),), "stop", "").check()  # type: ignore[arg-type]


def test_a_sample_is_truncated_only_by_length() -> None:
    assert sample(finish_reason="length").truncated
    assert not sample(finish_reason="stop").truncated


def test_a_groups_rewards_are_those_of_its_scored_samples_in_order() -> None:
    group = Group(0, Task("t", ()), [sample(reward=1.0), sample(), sample(reward=0.0)])
    assert group.rewards == [1.0, 0.0]


def test_a_whole_response_is_taken_as_the_server_gave_it() -> None:
    completion = parsed(body(), 3)
    assert completion.token_ids == [5, 6, 7]
    assert completion.logprobs == [-2.5, -3.0, -3.5]
    assert completion.finish_reason == "stop"


def test_without_versions_all_tokens_are_of_the_assumed_one() -> None:
    for answer in (body(), body(weight_versions=None), body(weight_versions=[])):
        assert parsed(answer, 3).versions == (VersionSpan(3, 0, 3),)


def test_version_spans_are_the_servers_and_default_is_version_0() -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "42", "start": 1, "end": 3}]
    assert parsed(body(weight_versions=spans), 3).versions == (VersionSpan(0, 0, 1), VersionSpan(42, 1, 3))


def test_log_probabilities_that_carry_their_token_must_carry_the_right_one() -> None:
    right = [{"token_id": t, "logprob": -1.0} for t in (5, 6, 7)]
    assert parsed(body(logprobs={"content": right}), 0).logprobs == [-1.0] * 3
    wrong = [*right[:2], {"token_id": 8, "logprob": -1.0}]
    assert "of other tokens than the ids" in refusal(body(logprobs={"content": wrong}))


@pytest.mark.parametrize("wrong", [-5, 288, 999_999_999])
def test_ids_that_are_no_tokens_of_the_model_are_refused(wrong: int) -> None:
    assert parsed(body(token_ids=[0, 1, 287]), 0, None, False, 288).token_ids == [0, 1, 287]
    with pytest.raises(InferenceError, match=f"the token ids go from .*{wrong}.*; the model knows 0 to 287"):
        parsed(body(token_ids=[5, wrong, 7]), 0, None, False, 288)


def test_no_id_is_below_0_whatever_the_model() -> None:
    assert "the token ids go from -5 to 7" in refusal(body(token_ids=[-5, 6, 7]))


def test_the_servers_of_a_run_know_its_models_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 288}')
    fleet = Fleet(make_config(tmp_path, inference={"urls": ["http://x"]}, vllm={}), None, tmp_path)  # type: ignore[arg-type]
    assert fleet.front.vocabulary == fleet._given("http://x").server.vocabulary == 288
    with pytest.raises(InferenceError, match="the token ids go from -5 to 999999999"):
        asyncio.run(answering(fleet.front, spoilt("wrong_ids", json.dumps(body()).encode())).generate([1], {}, 1))


def answering(server: Server, answer: bytes) -> Server:
    """The server, whose every call is answered so."""

    async def call(*arguments: Any, **_: Any) -> Any:
        return decode(answer)

    server._call = call  # type: ignore[method-assign]
    return server


@pytest.mark.parametrize("count", [0, 2, 4])
def test_fewer_or_more_log_probabilities_than_ids_are_refused(count: int) -> None:
    assert f"3 token ids and {count} log-probabilities" in refusal(body(logprobs=logprobs(*[-1.0] * count)))


@pytest.mark.parametrize("absent", [None, {}, {"content": None}])
def test_absent_log_probabilities_are_refused(absent: Any) -> None:
    assert "3 token ids and 0 log-probabilities" in refusal(body(logprobs=absent))


@pytest.mark.parametrize("value", [-9999.0, 0.25])
def test_a_log_probability_that_is_none_is_refused(value: float) -> None:
    assert "is not a finite number <= 0" in refusal(body(logprobs=logprobs(-1.0, value, -1.0)))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_what_is_no_number_in_json_is_refused(value: float) -> None:
    assert "this is no generate response" in refusal(body(logprobs=logprobs(-1.0, value, -1.0)))


def test_a_log_probability_of_zero_is_fine() -> None:
    assert parsed(body(logprobs=logprobs(0.0, -0.0, -8999.0)), 0).logprobs[0] == 0.0


@pytest.mark.parametrize("ids", [None, []])
def test_missing_ids_are_refused(ids: Any) -> None:
    assert "0 token ids" in refusal(body(token_ids=ids, logprobs=None))


@pytest.mark.parametrize("finish", [None, "error", ""])
def test_an_unknown_finish_is_refused(finish: Any) -> None:
    assert f"finish_reason {finish!r}" in refusal(body(finish_reason=finish))


@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
def test_the_three_finishes_are_kept(finish: str) -> None:
    assert parsed(body(finish_reason=finish), 0).finish_reason == finish


def encoded(experts: np.ndarray) -> str:
    """As vLLM writes arrays."""
    buffer = io.BytesIO()
    np.save(buffer, experts, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


def test_experts_are_taken_where_they_are_asked_for_whatever_weights_made_their_tokens() -> None:
    told = (
        np.random.default_rng(0).integers(0, 300, (6, 4, 2)).astype(np.uint16)
    )  # a prompt of 4, 3 of response, less one
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
    answer = body(routed_experts=encoded(told), weight_versions=spans)
    experts = parsed(answer, 0, 4).experts
    assert experts is not None and experts.dtype == np.uint16 and np.array_equal(experts, told)
    assert parsed(answer, 0).experts is None
    for kind in (np.uint8, np.int32):
        experts = parsed(body(routed_experts=encoded((told % 8).astype(kind))), 0, 4).experts
        assert experts is not None and np.array_equal(experts, told % 8)
        assert experts.dtype == (np.uint8 if kind is np.uint8 else np.uint16)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (None, "has no routed experts, .* start the server with --enable-return-routed-experts"),
        ("", "has no routed experts"),
        ("AAAA", "the routed experts are no array"),
        ("not base64!", "the routed experts are no array"),
        (base64.b64encode(b"\x93NUMPY").decode(), "the routed experts are no array"),
        (encoded(np.zeros((5, 4, 2), np.uint8)), r"uint8 \[5, 4, 2\]; needed are whole numbers, \[6, layers, experts"),
        (encoded(np.zeros((6, 8), np.uint8)), r"uint8 \[6, 8\]"),
        (encoded(np.zeros((6, 4, 2), np.float32)), "float32"),
        (encoded(np.full((6, 4, 2), -1, np.int32)), "go from -1 to -1: some tokens have none"),
    ],
)
def test_a_response_whose_experts_cannot_be_replayed_is_refused(told: Any, message: str) -> None:
    with pytest.raises(InferenceError, match=message):
        parsed(body(routed_experts=told), 0, 4)


def without(name: str) -> dict[str, Any]:
    return {"choices": [{key: value for key, value in body()["choices"][0].items() if key != name}]}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        None,
        [],
        {"choices": []},
        {"choices": [None]},
        {"error": "overloaded"},
        without("token_ids"),
        without("finish_reason"),
        body(logprobs={"content": [{}, {}, {}]}),
        body(logprobs=logprobs(-1.0, None, -1.0)),
        body(logprobs={"content": [None, None, None]}),
        body(logprobs={"content": [{"logprob": "x"}] * 3}),
        body(weight_versions=[{"version": "1"}]),
    ],
)
def test_an_answer_with_missing_fields_is_refused_as_an_inference_error(answer: Any) -> None:
    assert refusal(answer)


def scores(*entries: Any) -> list[float]:
    return parse_scores({"choices": [{"prompt_logprobs": [None, *entries]}]}, [7, 8])


def test_scores_are_those_of_the_responses_own_tokens() -> None:
    assert scores(
        {"5": {"logprob": -9.0}}, {"7": {"logprob": -1.0}, "1": {"logprob": -2.0}}, {"8": {"logprob": 0.0}}
    ) == [
        -1.0,
        0.0,
    ]


@pytest.mark.parametrize(
    "entries",
    [
        [{"7": {"logprob": -1.0}}],  # too few: the prompt's first is None
        [{"7": {"logprob": -1.0}}, {"9": {"logprob": -1.0}}],  # of another token
        [{"7": {"logprob": -1.0}}, {"8": {"logprob": -9999.0}}],  # vLLM's minus infinity
        [{"7": {"logprob": -1.0}}, {"8": {"logprob": float("nan")}}],
        [{"7": {"logprob": -1.0}}, {"8": {"logprob": 0.1}}],
        [{"7": {"logprob": -1.0}}, {"8": {}}],
    ],
)
def test_scores_that_cannot_be_trained_on_are_refused(entries: list[Any]) -> None:
    with pytest.raises(InferenceError):
        scores(*entries)


@pytest.mark.parametrize("answer", [None, {}, {"choices": []}, {"choices": [{"prompt_logprobs": None}]}])
def test_an_answer_without_scores_is_refused(answer: Any) -> None:
    with pytest.raises(InferenceError, match="these are no prompt log-probabilities"):
        parse_scores(answer, [7])
