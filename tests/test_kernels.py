"""The choice of kernels, its refusals, and what compiled layers do not do again."""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from tests.engines import world
from tests.test_packed import CONFIGS, assert_equal, groups_of
from vime.config.kernels import kernel_faults
from vime.config.sections import Config
from vime.training import packed
from vime.training.kernels import Kernels, KernelsRefused, apply_liger, choose, compile_layers
from vime.training.logprobs import chunked_logprobs
from vime.training.packed import pack
from vime.training.policy import Policy

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def config(dtype: str = "bfloat16", device: str = "auto", **trainer: Any) -> Any:
    tree = {"model": {"path": "-", "dtype": dtype}, "data": {"source": "-"}, "trainer": {"device": device, **trainer}}
    return Config.model_validate(tree)


@pytest.mark.parametrize(("dtype", "device", "trainer", "chosen"), [
    ("bfloat16", GPU, {}, Kernels(flash=True, compile=True, liger=False)),
    ("float32", GPU, {}, Kernels(flash=False, compile=True, liger=False)),
    ("bfloat16", GPU, {"attention": "sdpa", "compile": False}, Kernels()),
    ("bfloat16", GPU, {"kernels": "liger"}, Kernels(flash=True, compile=False, liger=True)),
    ("bfloat16", GPU, {"ranks": 2, "tensor_parallel": 2}, Kernels(flash=True, compile=False, liger=False)),
    ("bfloat16", GPU, {"activation_checkpointing": "full"}, Kernels(flash=True, compile=True, liger=False)),
    ("bfloat16", GPU, {"activation_checkpointing": "selective"}, Kernels(flash=True, compile=False, liger=False)),
    ("bfloat16", CPU, {}, Kernels()),
])  # fmt: skip
def test_the_choice_by_device_and_dtype(dtype: str, device: torch.device, trainer: Any, chosen: Kernels) -> None:
    assert choose(config(dtype, **trainer), device) == chosen


@pytest.mark.parametrize(("dtype", "device", "trainer", "message"), [
    ("bfloat16", "cpu", {"attention": "flash"}, 'trainer.attention = "flash" on a CPU'),
    ("bfloat16", "cpu", {"compile": True}, "trainer.compile = true on a CPU"),
    ("bfloat16", "cpu", {"kernels": "liger"}, 'trainer.kernels = "liger" on a CPU'),
    ("float32", "auto", {"attention": "flash"}, "flash kernels compute in bfloat16"),
    ("bfloat16", "auto", {"compile": True, "kernels": "liger"}, "both fuse the same operations"),
    ("bfloat16", "auto", {"compile": True, "ranks": 2, "tensor_parallel": 2}, "trainer.tensor_parallel = 2"),
    ("bfloat16", "auto", {"compile": True, "activation_checkpointing": "selective"}, "cannot be chosen inside compiled code"),
])  # fmt: skip
def test_what_cannot_be_had_is_refused(dtype: str, device: str, trainer: Any, message: str) -> None:
    (fault,) = kernel_faults(config(dtype, device, **trainer), device)
    assert message in fault


def test_on_a_machine_without_gpu_it_is_refused_when_the_model_is_loaded() -> None:
    with pytest.raises(KernelsRefused, match="on a CPU"):
        choose(config(attention="flash"), CPU)


def test_liger_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(KernelsRefused, match=r"pip install \"vime\[liger\]\""):
        apply_liger(AutoModelForCausalLM.from_config(CONFIGS["llama-tied"]))


def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile that traces and guards but makes no code: what is compiled, and when again, is the same."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def test_layers_are_compiled_once_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    world()
    traced(monkeypatch)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3-tied"], attn_implementation=packed.NAME)
    policy, plain = (
        Policy(model),
        Policy(AutoModelForCausalLM.from_config(model.config, attn_implementation=packed.NAME)),
    )
    plain.load_state_dict(policy.state_dict())
    compile_layers(policy.decoder.layers)
    draw, frames = random.Random(0), []
    for _ in range(6):
        shapes = [
            (draw.randint(1, 9), [draw.randint(1, 9) for _ in range(draw.randint(1, 4))])
            for _ in range(draw.randint(1, 3))
        ]
        row = pack(groups_of(*shapes))
        found, wanted = policy(row, 1.0, 4), plain(row, 1.0, 4)
        found[0].sum().backward()
        with torch.no_grad():
            policy(row, 1.0, 4)
        assert_equal(found, wanted)
        frames.append(counters["frames"]["total"])
    assert frames[0] > 0
    assert frames == [frames[0]] * 6


def test_chunks_are_compiled_once_for_all_sizes_and_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    traced(monkeypatch)
    from vime.training import logprobs

    logprobs.fused.cache_clear()
    generator, frames = torch.Generator().manual_seed(0), []
    for count in (7, 5, 12, 9, 23):
        hidden, weight = (torch.randn(n, 6, generator=generator, requires_grad=True) for n in (count, 11))
        targets = torch.randint(11, (count,), generator=generator)
        results = []
        for compiled in (True, False):
            output = chunked_logprobs(hidden, weight, None, targets, 0.7, 5, None, compiled)
            gradients = torch.autograd.grad(output[0].square().sum() + 0.3 * output[1].sum(), (hidden, weight))
            results.append([*output, *gradients])
        assert_equal(*results)
        frames.append(counters["frames"]["total"])
    logprobs.fused.cache_clear()
    assert frames[1:] == [frames[1]] * 4
