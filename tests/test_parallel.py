"""Splits that cannot be are refused, naming what is in the way and what fits; what they compute is in test_splits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.engines import SHAPE
from vime.training.parallel import check_sizes
from vime.training.tensor_parallel import SplitRefused, split_tensors


def mesh(tensors: int = 1, contexts: int = 1) -> Any:
    return SimpleNamespace(tensors=tensors, contexts=contexts)


HEADS = SimpleNamespace(num_attention_heads=12, num_key_value_heads=4)


@pytest.mark.parametrize(("tensors", "contexts"), [(1, 1), (2, 1), (4, 1), (1, 12), (1, 2), (2, 6), (4, 3)])
def test_sizes_that_divide_the_heads_fit(tensors: int, contexts: int) -> None:
    check_sizes(HEADS, mesh(tensors, contexts))


@pytest.mark.parametrize(
    ("tensors", "contexts", "said"),
    [
        (
            3,
            1,
            "tensor_parallel = 3 does not divide the model's 12 attention and 4 key/value heads; sizes that fit: .1, 2, 4.",
        ),
        (1, 5, "context_parallel = 5 does not fit 12 attention and 4 key/value heads; sizes that fit: .1, 2, 4, 12."),
        (1, 3, "context_parallel = 3 does not fit"),
        (4, 2, r"heads \(of each of 4 tensor ranks\); sizes that fit: .1, 3."),
    ],
)
def test_sizes_that_do_not_are_refused_with_those_that_do(tensors: int, contexts: int, said: str) -> None:
    with pytest.raises(SplitRefused, match=said):
        check_sizes(HEADS, mesh(tensors, contexts))


def decoder(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).get_decoder()


@pytest.mark.parametrize("style", ["packed_colwise", "mla_kv_a_proj"])
def test_a_plan_with_a_style_that_is_not_known_of_a_module_is_refused_by_its_name(style: str) -> None:
    model = decoder(Qwen3Config(**SHAPE, vocab_size=24, num_hidden_layers=1))
    model.config.base_model_tp_plan = {"layers.*.mlp.up_proj": style}
    with pytest.raises(
        SplitRefused, match=f"qwen3: the tensor-parallel style '{style}' of layers.0.mlp.up_proj is not known"
    ):
        split_tensors(model, mesh(2))


def test_a_model_without_a_plan_is_refused() -> None:
    model = decoder(Qwen3Config(**SHAPE, vocab_size=24, num_hidden_layers=1))
    model.config.base_model_tp_plan = None
    with pytest.raises(
        SplitRefused, match="qwen3 models carry no tensor-parallel plan; set trainer.tensor_parallel = 1"
    ):
        split_tensors(model, mesh(2))
