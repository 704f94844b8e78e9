"""Functions written for slime in the trainer: each does to the step what the same option of ours does."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engines import (
    SIZES,
    Gradients,
    distance,
    engine_config,
    load_engine,
    note_gradients,
    put,
    random_groups,
    save_model,
)
from vime.config.sections import Config
from vime.contract import inputs
from vime.loop import plan_updates
from vime.slime.hooks import load_function
from vime.slime.trainer import take, view
from vime.store.shared_memory import SharedMemoryStore
from vime.training.engine import TorchEngine
from vime.training.learner import EngineError
from vime.training.plan import PlanJson

hooks: Any = importlib.import_module(load_function("tests.slime_hooks.tag").__module__)
HERE = "tests.slime_hooks."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_updates(config: Config, store: SharedMemoryStore) -> list[PlanJson]:
    """A batch of four groups, as ``algorithm.updates`` updates."""
    groups = random_groups(3, SIZES[0]) | random_groups(4, SIZES[1], first=len(SIZES[0]))
    return plan_updates(put(store, groups), config)


def stepped(model: Path, folder: Path, **sections: Any) -> tuple[TorchEngine, Gradients, dict[str, float]]:
    """An engine after a batch of one update, the gradients of its step, what it measured."""
    config = engine_config(model, **sections)
    store = SharedMemoryStore(folder)
    engine = load_engine(config, store)
    noted = note_gradients(engine.policy)
    updates = make_updates(config, store)
    metrics = engine.train(updates, 10)["metrics"]
    return engine, noted, metrics


def test_a_custom_loss_from_logits_is_the_objective_that_it_writes_out(model: Path, tmp_path: Path) -> None:
    options = {"objective": "policy_gradient", "reduction": "sequence", "advantage": "dr_grpo"}
    _, native, wanted = stepped(model, tmp_path / "a", algorithm=options)
    slime = {"custom_loss_function_path": HERE + "policy_gradient"}
    _, own, found = stepped(model, tmp_path / "b", algorithm=options, slime=slime)
    assert distance(own[0], native[0]) < 1e-4
    assert found["train/loss"] == pytest.approx(wanted["train/loss"], abs=1e-5)
    assert found["train/my_entropy"] > 0 and found["train/tokens"] == wanted["train/tokens"]


def test_a_custom_tis_is_ours(model: Path, tmp_path: Path) -> None:
    bounds = {"corrections": {"tis": {"low": 0.0, "high": 2.0}}}
    _, native, _ = stepped(model, tmp_path / "a", algorithm=bounds)
    _, own, found = stepped(model, tmp_path / "b", slime={"custom_tis_function_path": HERE + "truncated_tis"})
    assert distance(own[0], native[0]) < 1e-5 and found["train/tis"] > 0


def test_a_custom_reducer_is_the_fixed_reduction(model: Path, tmp_path: Path) -> None:
    fixed = {"reduction": "fixed", "fixed_length": 16}
    _, native, wanted = stepped(model, tmp_path / "a", algorithm=fixed)
    slime = {"custom_pg_loss_reducer_function_path": HERE + "constant_length"}
    _, own, found = stepped(model, tmp_path / "b", algorithm={"reduction": "sequence"}, slime=slime)
    assert distance(own[0], native[0]) < 1e-5
    assert found["train/loss"] == pytest.approx(wanted["train/loss"], abs=1e-5)


def test_custom_advantages_and_masks_are_what_is_trained(model: Path, tmp_path: Path) -> None:
    slime = {"custom_advantage_function_path": HERE + "whole_batch_advantage"}
    engine, own, plain = stepped(model, tmp_path / "a", slime=slime)
    slime["rollout_data_postprocess_path"] = HERE + "mask_first"
    _, masked, found = stepped(model, tmp_path / "b", slime=slime)
    assert found["train/tokens"] < plain["train/tokens"] and distance(masked[0], own[0]) > 1e-3
    config = engine.config
    store = SharedMemoryStore(tmp_path / "a")
    updates = make_updates(config, store)
    rows = [row for rank in updates[0] for micro in rank for row in micro]
    mean = sum(row["reward"] for row in rows) / len(rows)
    _, advantages = engine.prepare(updates)
    by_row = {(row["key"], row["index"]): row["reward"] - mean for row in rows if row["trained_tokens"]}
    found_by_row = {(key, index): value for key, index, value in advantages if (key, index) in by_row}
    assert found_by_row == pytest.approx(by_row, abs=1e-5)


def test_functions_around_the_step_are_called_when_they_say(model: Path, tmp_path: Path) -> None:
    hooks.CALLS.clear()
    slime = {
        "custom_megatron_init_path": HERE + "note_start",
        "custom_megatron_before_log_prob_hook_path": HERE + "note_model",
        "custom_megatron_before_train_step_hook_path": HERE + "note_step",
    }
    config = engine_config(model, slime=slime, algorithm={"updates": 2, "kl_coef": 0.1})
    store = SharedMemoryStore(tmp_path)
    engine = load_engine(config, store)
    updates = make_updates(config, store)
    engine.train(updates, 10)
    engine.train(updates, 10)
    assert hooks.CALLS[0] == ("start", config.rollout.groups)
    assert [call for call in hooks.CALLS if call[0] == "step"] == [
        ("step", batch, step, True) for batch in range(2) for step in range(2)
    ]
    assert [call[1] for call in hooks.CALLS if call[0] == "log_prob"] == ["", "", "ref_"], "at first both are the same"


def test_a_function_that_fails_in_the_trainer_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(args, rollout_data):\n    rollout_data['advantages'] = []\n")
    with pytest.raises(EngineError, match="advantages has 0 entries"):
        stepped(model, tmp_path / "s", slime={"custom_advantage_function_path": f"{tmp_path}/bad.py:f"})
    (tmp_path / "worse.py").write_text("def f(args, rollout_data):\n    1 / 0\n")
    with pytest.raises(EngineError, match=r"custom_advantage_function_path failed: ZeroDivisionError.*line 2"):
        stepped(model, tmp_path / "t", slime={"custom_advantage_function_path": f"{tmp_path}/worse.py:f"})
    assert torch.is_grad_enabled()


def test_tokens_that_a_function_masks_weigh_nothing(tmp_path: Path) -> None:
    batch = inputs.batch(SharedMemoryStore(tmp_path))
    data = view(SimpleNamespace(store=SharedMemoryStore(tmp_path), device="cpu"), batch)  # type: ignore[arg-type]
    data["loss_masks"] = [mask * (index != 1) for index, mask in enumerate(data["loss_masks"])]
    before = batch.weights.clone()
    take(batch, data)
    masked = batch.sequence == 1
    assert before[masked].any() and not batch.weights[masked].any() and not batch.mask[masked].any()
    assert torch.equal(batch.weights[~masked], before[~masked])
