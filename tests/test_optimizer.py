"""AdamW in bfloat16 with stochastic rounding, and torchao's with quantised moments."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engines import (
    distance,
    engine_config,
    load_engine,
    load_policy,
    make_sample,
    plan_each,
    put,
    random_groups,
    save_engine,
    save_model,
    weights,
    world,
)
from tests.tiny import make_config
from vime.store.shared_memory import SharedMemoryStore
from vime.training.client import Trainer
from vime.training.optimizer import (
    StochasticAdamW,
    is_quantised,
    random_bits,
    round_stochastically,
)
from vime.training.pieces import full

OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}


def bits(count: int, key: int = 12345) -> torch.Tensor:
    return random_bits(torch.arange(count), key)


# Rounding


@pytest.mark.parametrize("value", [1.0 + 2**-9, 1.0 + 2**-12, -3.14159, 1e-30, -7e20, 0.1])
def test_the_mean_of_many_roundings_is_the_value(value: float) -> None:
    count = 1 << 18
    exact = torch.full((count,), value)
    rounded = round_stochastically(exact, bits(count)).double()
    near = exact[0].to(torch.bfloat16)
    unit = 2.0 ** (torch.frexp(near.double()).exponent.item() - 8)  # of the last place
    assert ((rounded - exact.double()).abs() < unit).all()
    assert len(rounded.unique()) == 2
    assert abs(rounded.mean() - exact[0].double()) < 5 * unit / 2 / count**0.5


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 2.0**127, float("inf"), -float("inf")])
def test_what_bfloat16_holds_stays_as_it_is(value: float) -> None:
    assert (
        round_stochastically(torch.full((1000,), value), bits(1000)) == torch.tensor(value, dtype=torch.bfloat16)
    ).all()


def test_random_bits_are_uniform_and_of_their_key_and_number_alone() -> None:
    count = 1 << 18
    whole = bits(count)
    assert torch.equal(whole[1000:2000], random_bits(torch.arange(1000, 2000), 12345))
    assert (whole != bits(count, 12346)).float().mean() > 0.999
    assert (whole != torch.roll(whole, 1)).float().mean() > 0.999
    ones = torch.stack([whole >> place & 1 for place in range(32)]).double().mean(1)
    assert (ones - 0.5).abs().max() < 5 * 0.5 / count**0.5
    cells = torch.bincount((whole & 0xFFFF) >> 8, minlength=256).double()
    assert ((cells - count / 256) ** 2 / (count / 256)).sum() < 255 + 5 * (2 * 255) ** 0.5  # chi-squared


# AdamW in bfloat16


def steps(optimizer_class: Any, start: torch.Tensor, gradients: list[torch.Tensor], **options: Any) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = optimizer_class([{"params": [parameter], "numbers": [0], "weight_decay": 0.1}], **OPTIONS, **options)
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return parameter.detach()


def test_a_step_is_adamws_rounded_to_a_neighbour_and_right_in_the_mean() -> None:
    draw = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(4096, generator=draw).to(torch.bfloat16) for _ in range(2))
    exact = steps(torch.optim.AdamW, start.float(), [gradient.float()], lr=3e-4).double()
    found = torch.stack([steps(StochasticAdamW, start, [gradient], lr=3e-4, seed=str(n)) for n in range(200)]).double()
    unit = 2.0 ** (torch.frexp(exact).exponent - 7).double()  # of the last place, or twice it just under a power of two
    assert ((found - exact).abs() <= unit).all()
    error = (found.mean(0) - exact) / (unit / 2 / 200**0.5)  # in standard deviations, or less
    assert error.abs().max() < 5 and error.mean().abs() < 5 / 4096**0.5


def test_small_updates_are_not_lost() -> None:
    """A hundredth of a unit in the last place a step: round-to-nearest loses every one of them."""
    start, lr, count = torch.ones(4096), 4e-5, 100
    gradients = [torch.ones(4096)] * count
    exact = steps(torch.optim.AdamW, start, gradients, lr=lr).mean().item()
    nearest = steps(torch.optim.AdamW, start.bfloat16(), gradients, lr=lr)
    assert (nearest == 1).all() and exact < 1 - 0.003
    found = steps(StochasticAdamW, start.bfloat16(), gradients, lr=lr, seed="0").float().mean().item()
    assert found == pytest.approx(exact, abs=2e-4)


def test_learning_in_bfloat16_goes_where_float32_goes(tmp_path: Path) -> None:
    """No float32 copy of the weights, the same direction."""
    folder = save_model(tmp_path / "model", vocabulary=24)
    end = {}
    for dtype in ("float32", "bfloat16"):
        config = make_config(folder, trainer={"learning_rate": 1e-3, "master_dtype": dtype})
        store = SharedMemoryStore(tmp_path / dtype)
        engine = load_engine(config, store)
        updates = plan_each(config, [put(store, random_groups(1, [[1, 1, 1], [2, 1]]))])
        before = weights(engine.policy.module)
        for _ in range(20):
            engine.train(updates, 100)
        assert all(p.dtype == getattr(torch, dtype) for p in engine.policy.module.parameters())
        after = weights(engine.policy.module)
        end[dtype] = torch.cat([(after[name] - before[name]).flatten() for name in after])
    assert torch.cosine_similarity(end["float32"], end["bfloat16"], dim=0) > 0.9


def test_a_resumed_bfloat16_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    config = engine_config(
        folder, trainer={"master_dtype": "bfloat16"}, algorithm={"advantage": "gae"}, critic={"learning_rate": 0.5}
    )
    store = SharedMemoryStore(tmp_path / "store")
    updates = plan_each(config, [put(store, random_groups(1, [[1, 1, 1]]))])
    engine = load_engine(config, store)
    engine.train(updates, 10)
    resumed = load_engine(config, store, save_engine(engine, tmp_path / "saved"))
    for trained in (engine, resumed):
        trained.train(updates, 10)
    assert distance(weights(resumed.policy.module), weights(engine.policy.module)) == 0


@pytest.mark.parametrize("split", ["ranks", "tensor_parallel"])
def test_two_ranks_round_like_one(split: str, tmp_path: Path, run: Any, session: Any) -> None:
    """Random bits are an element's, wherever it lies. One step of one micro-batch a rank, for gradients are rounded too."""
    folder = save_model(tmp_path / "model", spread=0.1)
    draw = random.Random(0)
    groups = {
        group: [
            make_sample([1, 2], [draw.randrange(24) for _ in range(5)], [-3.0] * 5, draw.random(), r) for r in (0, 1)
        ]
        for group in range(2)
    }
    store = SharedMemoryStore(tmp_path / "store")
    outcomes = put(store, groups)
    trainer = {"master_dtype": "bfloat16", "eps": 1e-3, "learning_rate": 1e-2}
    one, two = (make_config(folder, trainer=trainer | more) for more in ({}, {"ranks": 2, split: 2}))
    engine, before = load_engine(one, store), weights(load_policy(folder))
    engine.train(plan_each(one, [outcomes]), 10)
    alone = weights(engine.policy.module)
    handle, updates = Trainer(two, session, tmp_path, store.folder), plan_each(two, [outcomes])
    assert [len(rank) for rank in updates[0]] == [1] * two.trainer.data_ranks

    async def train_and_export() -> None:
        try:
            await handle.start(folder)
            await handle.train(updates, 10)
            await handle.export(tmp_path / "out", "float32")
        finally:
            await handle.stop()

    run(train_and_export())
    together = load_file(tmp_path / "out" / "model.safetensors")
    changed, different = (
        torch.cat([(alone[name] != other[name]).flatten() for name in alone]).double().mean()
        for other in (before, together)
    )
    assert changed > 0.5 and different < 0.01


# torchao


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The folder in TORCHAO (`pip install --no-deps --target FOLDER torchao`); beside transformers it would slow its import."""
    if folder := os.environ.get("TORCHAO"):
        monkeypatch.syspath_prepend(folder)
    pytest.importorskip("torchao.optim", reason="TORCHAO names no folder with torchao")
    torch.compiler.set_stance("force_eager")  # torchao compiles its step: seconds a shape
    yield
    torch.compiler.set_stance("default")


@pytest.mark.parametrize(("name", "bound"), [("adamw_8bit", 0.03), ("adamw_fp8", 0.3)])
def test_quantised_moments_give_adamws_steps_nearly(torchao: Any, name: str, bound: float, tmp_path: Path) -> None:
    world()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = wide_model(tmp_path / "model", shape)
    moved = {}
    for optimizer in ("adamw", name):
        config = make_config(folder, trainer={"learning_rate": 1e-3, "optimizer": optimizer, "eps": 1e-6})
        store = SharedMemoryStore(tmp_path / f"store-{optimizer}")
        engine = load_engine(config, store)
        before = weights(engine.policy.module)
        for number in range(4):
            engine.train(plan_each(config, [put(store, random_groups(number, [[1, 1, 1]], first=10 * number))]), 10)
        after = weights(engine.policy.module)
        moved[optimizer] = {key: after[key] - before[key] for key in after}
    assert distance(moved[name], moved["adamw"]) < bound


def wide_model(folder: Path, shape: dict[str, Any]) -> Path:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**shape, vocab_size=128, head_dim=16, num_hidden_layers=1, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_fp8"])
def test_quantised_moments_come_back_from_a_checkpoint(torchao: Any, name: str, tmp_path: Path) -> None:
    """Saved are the values that the optimizer computes with; quantised again they change by a hundredth at most."""
    world()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = make_config(wide_model(tmp_path / "model", shape), trainer={"optimizer": name, "learning_rate": 1e-3})
    store = SharedMemoryStore(tmp_path / "store")
    updates = plan_each(config, [put(store, random_groups(1, [[1, 1, 1]]))])
    engine = load_engine(config, store)
    for _ in range(3):
        engine.train(updates, 10)
    resumed = load_engine(config, store, save_engine(engine, tmp_path / "saved"))
    kept, found = engine.policy.state(), resumed.policy.state()
    assert found.keys() == kept.keys() and any(".exp_avg_sq." in key for key in kept)
    assert any(is_quantised(t) for state in resumed.policy.optimizer.state.values() for t in state.values())
    for key, exact in kept.items():
        assert (full(found[key]) - full(exact)).norm() <= 0.01 * full(exact).norm(), key
    for trained in (engine, resumed):
        trained.train(updates, 10)
    assert distance(weights(resumed.policy.module), weights(engine.policy.module)) < 1e-4
