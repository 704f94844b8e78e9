"""Packed rows with shared prompts: log-probabilities and gradients are those of the separate sequences, not packed."""

import copy
import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from vime.training import packed
from vime.training.packed import pack
from vime.training.policy import Policy

TEMPERATURE = 0.8
VOCABULARY = 32
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
WINDOW = 4
CONFIGS: dict[str, Any] = {
    "llama-tied": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama-untied-mha": LlamaConfig(**{**COMMON, "num_key_value_heads": 4}, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**COMMON, head_dim=8, tie_word_embeddings=True),
    "qwen3-untied-mqa": Qwen3Config(**{**COMMON, "num_key_value_heads": 1}, head_dim=4, tie_word_embeddings=False),
    "mistral-window": MistralConfig(**COMMON, sliding_window=WINDOW),
    "qwen2-half-window": Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
}

Groups = list[tuple[list[int], list[list[int]]]]


def groups_of(*lengths: tuple[int, list[int]]) -> Groups:
    """Random token ids in ``(prompt length, [response length, ...])``."""
    draw = random.Random(str(lengths))

    def ids(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(count)]

    return [(ids(prompt), [ids(response) for response in responses]) for prompt, responses in lengths]


BATCHES = {
    "unequal": groups_of((5, [3, 7, 1]), (2, [4, 9])),
    "single branches": groups_of((3, [4]), (9, [2]), (1, [6])),
    "responses of one token": groups_of((4, [1, 1]), (7, [1])),
    "one sequence": groups_of((6, [5])),
    "past the window": groups_of((WINDOW + 3, [WINDOW + 4, 2]), (WINDOW, [WINDOW])),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Such small sums are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def models(name: str) -> tuple[Policy, Any]:
    """The policy with packed attention, and transformers' own model with the same weights."""
    torch.manual_seed(0)
    model, plain = (  # each with a configuration of its own: the attention is noted there
        AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation=attention)
        for attention in (packed.NAME, "eager")
    )
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which would start at one and zero
            parameter += 0.05 * torch.randn_like(parameter)
    plain.load_state_dict(model.state_dict())
    return Policy(model), plain


def separately(plain: Any, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of all response tokens, each sequence in a forward pass of its own."""
    logprobs, entropies = [], []
    for prompt, responses in groups:
        for response in responses:
            logits = plain(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            log_p = torch.log_softmax(logits.float() / TEMPERATURE, -1)
            logprobs.append(log_p[torch.arange(len(response)), torch.tensor(response)])
            entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def together(policy: Policy, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    return policy(pack(groups), TEMPERATURE, 4)


def gradients(model: torch.nn.Module, logprobs: torch.Tensor, entropies: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a sum that weighs every token otherwise, by plain parameter name."""
    weights = torch.linspace(-1, 1.5, len(logprobs))
    model.zero_grad()
    ((weights * logprobs).sum() + 0.1 * (weights * entropies).sum()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


everywhere = pytest.mark.parametrize("name", list(CONFIGS))


@everywhere
@pytest.mark.parametrize("batch", list(BATCHES))
def test_packed_log_probabilities_and_gradients_are_those_of_separate_sequences(name: str, batch: str) -> None:
    policy, plain = models(name)
    mine, theirs = together(policy, BATCHES[batch]), separately(plain, BATCHES[batch])
    assert_equal(mine, theirs)
    found, wanted = gradients(policy.model, *mine), gradients(plain, *theirs)
    assert found.keys() == wanted.keys() == dict(plain.named_parameters()).keys()
    assert_equal(found, wanted)


@everywhere
def test_the_window_matters_in_these_tests_exactly_where_there_is_one(name: str) -> None:
    """The first prompt token, out of a window of two layers, reaches the last response token only without a window."""
    policy, _ = models(name)
    prompt, (response,) = groups_of((2, [12]))[0]
    changed = [(prompt[0] + 1) % VOCABULARY, *prompt[1:]]
    one, other = (together(policy, [(ids, [response])])[0][-1] for ids in (prompt, changed))
    assert (one == other) == (name == "mistral-window")


@pytest.mark.parametrize("name", ["llama-tied", "qwen2-half-window"])
def test_the_order_of_groups_and_of_branches_changes_no_result(name: str) -> None:
    policy, _ = models(name)
    groups = groups_of((5, [3, 7, 1]), (2, [4, 9]), (8, [2]))

    def results(given: Groups) -> dict[tuple[int, ...], torch.Tensor]:
        found, start = {}, 0
        values = together(policy, given)[0]
        for prompt, responses in given:
            for response in responses:
                found[(*prompt, -1, *response)] = values[start : start + len(response)]
                start += len(response)
        assert start == len(values)
        return found

    moved = [(prompt, responses[::-1]) for prompt, responses in groups[::-1]]
    assert_equal(results(moved), results(groups))


def test_a_prompt_shared_or_repeated_gives_the_same() -> None:
    policy, _ = models("qwen3-tied")
    ((prompt, responses),) = groups_of((5, [3, 7, 1]))
    shared = together(policy, [(prompt, responses)])
    repeated = together(policy, [(prompt, [response]) for response in responses])
    assert_equal(shared, repeated)


def test_one_branch_does_not_see_another() -> None:
    policy, _ = models("llama-tied")
    ((prompt, responses),) = groups_of((5, [6, 7]))
    other = [responses[0], [(token + 1) % VOCABULARY for token in responses[1]]]
    one, two = (together(policy, [(prompt, given)])[0] for given in (responses, other))
    assert torch.equal(one[:6], two[:6])
    assert not torch.equal(one[6:], two[6:])


def test_a_prompt_stands_once_and_the_last_token_of_a_response_not_at_all() -> None:
    row = pack([([1, 2, 3], [[4, 5, 6], [7]]), ([8], [[9, 10]])])
    assert row.input_ids.tolist() == [[1, 2, 3, 4, 5, 8, 9]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert row.targets.tolist() == [4, 5, 6, 7, 9, 10]
    assert row.input_ids[0, row.sources].tolist() == [3, 4, 5, 3, 8, 9]


def test_packed_attention_outside_a_packed_row_is_refused() -> None:
    policy, _ = models("llama-tied")
    with pytest.raises(ValueError, match="packed attention needs a layout"):
        policy.model(torch.tensor([[1, 2, 3]]))
