"""Samples and completions: one log-probability a token, versions told apart, and nothing padded or guessed."""

from typing import Any

import pytest

from vime.inference.client import InferenceError, parse_completion, parse_scores
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


def refusal(answer: Any) -> str:
    with pytest.raises(InferenceError) as caught:
        parse_completion(answer, 3)
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
    ],
)
def test_a_sample_without_one_value_a_token_cannot_be_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(**changes)


def test_a_sample_is_as_old_as_its_oldest_token_and_truncated_only_by_length() -> None:
    assert sample(versions=(VersionSpan(4, 0, 1), VersionSpan(3, 1, 2))).oldest_version == 3
    assert sample(finish_reason="length").truncated
    assert not sample(finish_reason="stop").truncated


def test_a_groups_rewards_are_those_of_its_scored_samples_in_order() -> None:
    group = Group(0, Task("t", ()), [sample(reward=1.0), sample(), sample(reward=0.0)])
    assert group.rewards == [1.0, 0.0]


def test_a_whole_response_is_taken_as_the_server_gave_it() -> None:
    completion = parse_completion(body(), 3)
    assert completion.token_ids == [5, 6, 7]
    assert completion.logprobs == [-2.5, -3.0, -3.5]
    assert completion.finish_reason == "stop"


def test_without_versions_all_tokens_are_of_the_assumed_one() -> None:
    for answer in (body(), body(weight_versions=None), body(weight_versions=[])):
        assert parse_completion(answer, 3).versions == (VersionSpan(3, 0, 3),)


def test_version_spans_are_the_servers_and_default_is_version_0() -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "42", "start": 1, "end": 3}]
    assert parse_completion(body(weight_versions=spans), 3).versions == (VersionSpan(0, 0, 1), VersionSpan(42, 1, 3))


def test_log_probabilities_that_carry_their_token_must_carry_the_right_one() -> None:
    right = [{"token_id": t, "logprob": -1.0} for t in (5, 6, 7)]
    assert parse_completion(body(logprobs={"content": right}), 0).logprobs == [-1.0] * 3
    wrong = [*right[:2], {"token_id": 8, "logprob": -1.0}]
    assert "of other tokens than the ids" in refusal(body(logprobs={"content": wrong}))


@pytest.mark.parametrize("count", [0, 2, 4])
def test_fewer_or_more_log_probabilities_than_ids_are_refused(count: int) -> None:
    assert f"3 token ids and {count} log-probabilities" in refusal(body(logprobs=logprobs(*[-1.0] * count)))


@pytest.mark.parametrize("absent", [None, {}, {"content": None}])
def test_absent_log_probabilities_are_refused(absent: Any) -> None:
    assert "3 token ids and 0 log-probabilities" in refusal(body(logprobs=absent))


@pytest.mark.parametrize("value", [float("nan"), -9999.0, float("-inf"), float("inf"), 0.25])
def test_a_log_probability_that_is_none_is_refused(value: float) -> None:
    assert "is not a finite number <= 0" in refusal(body(logprobs=logprobs(-1.0, value, -1.0)))


def test_a_log_probability_of_zero_is_fine() -> None:
    assert parse_completion(body(logprobs=logprobs(0.0, -0.0, -8999.0)), 0).logprobs[0] == 0.0


@pytest.mark.parametrize("ids", [None, []])
def test_missing_ids_are_refused(ids: Any) -> None:
    assert "0 token ids" in refusal(body(token_ids=ids, logprobs=None))


@pytest.mark.parametrize("finish", [None, "error", ""])
def test_an_unknown_finish_is_refused(finish: Any) -> None:
    assert f"finish_reason {finish!r}" in refusal(body(finish_reason=finish))


@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
def test_the_three_finishes_are_kept(finish: str) -> None:
    assert parse_completion(body(finish_reason=finish), 0).finish_reason == finish


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


def test_tokens_of_older_weights_are_taken_out_of_the_loss_and_counted() -> None:
    spans = (VersionSpan(1, 0, 2), VersionSpan(2, 2, 3), VersionSpan(3, 3, 5))
    sample = Sample([1], [5] * 5, [-1.0] * 5, spans, "stop", "", loss_mask=[1, 0, 1, 1, 1])
    assert sample.mask_stale(3) == 2  # one of the first two was no part of the loss
    assert sample.loss_mask == [0, 0, 0, 1, 1]
    assert sample.mask_stale(3) == 0


def test_tokens_of_the_present_weights_stay_in_the_loss() -> None:
    sample = Sample([1], [5] * 3, [-1.0] * 3, (VersionSpan(4, 0, 3),), "stop", "")
    assert sample.mask_stale(4) == 0 and sample.loss_mask == [1, 1, 1]


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
