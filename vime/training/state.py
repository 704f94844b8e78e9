"""All that the engine must keep to go on: to the folder of a checkpoint, and back on any number of ranks. Collective."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vime.training import adapter
from vime.training.learner import EngineError, bare, whole_model
from vime.training.pieces import sharded_parameters
from vime.training.shards import Saved, State

if TYPE_CHECKING:
    from vime.training.engine import TorchEngine


def tensors(engine: TorchEngine) -> State:
    """All tensors, as sharded here: of what learns, and of the reference where it is refreshed."""
    state = engine.policy.state()
    if engine.critic is not None:
        state |= engine.critic.state()
    if engine.config.reference.refresh_every:
        state |= of_reference(engine)
    return state


def of_reference(engine: TorchEngine) -> State:
    if engine.reference is None:
        return {}
    if isinstance(engine.reference, adapter.AdapterReference):
        held = engine.reference.state
    else:
        held = {name: parameter.detach() for name, parameter in sharded_parameters(engine.reference)}
    return {f"reference.weight.{name}": tensor for name, tensor in held.items()}


def save(engine: TorchEngine, folder: Path, model: bool) -> None:
    """Copies everything to host memory and lets a thread write it; see ``TorchEngine.save``."""
    policy, first = engine.policy.module, engine.mesh.rank == 0
    write_shards = engine.saver.stage(tensors(engine), folder / "state")
    record = {
        "optimizer_steps": engine.policy.steps,
        "batches": engine.batches,
        "critic_steps": engine.critic.steps if engine.critic is not None else 0,
        "entropy_coef": engine.entropy_coef,
        "entropy_active": engine.entropy_active,
        "torch_rng": base64.b64encode(bytes(torch.get_rng_state().tolist())).decode(),
    }
    whole = whole_model(policy, torch.float32, first) if model else {}
    adapted = adapter.whole(policy, torch.float32, first)
    empty = bare(policy.model, torch.float32) if whole else None

    def write() -> None:
        write_shards()
        if first:
            (folder / "trainer.json").write_text(json.dumps(record))
        if empty is not None:
            empty.save_pretrained(folder / "model", state_dict=whole)
        if adapted:
            adapter.write(policy.model, folder / "adapter", adapted)

    engine.saver.start(write)


def load(engine: TorchEngine, folder: Path) -> None:
    """Takes up what ``save`` wrote; EngineError where it is damaged, or of another model or algorithm."""
    saved = Saved(folder / "state")
    record = json.loads((folder / "trainer.json").read_text())
    engine.policy.load(saved, record["optimizer_steps"])
    if engine.critic is not None:
        if not any(name.startswith("critic.") for name in saved.names):
            raise EngineError(
                f"{saved.folder} holds no critic: the run had another algorithm.advantage; resume with that one, or start "
                "a new run"
            )
        engine.critic.load(saved, record["critic_steps"])
    load_reference(engine, saved)
    engine.batches = record["batches"]
    if engine.config.algorithm.entropy_target is not None:
        engine.entropy_coef, engine.entropy_active = record["entropy_coef"], record["entropy_active"]
    torch.set_rng_state(torch.tensor(list(base64.b64decode(record["torch_rng"])), dtype=torch.uint8))


def load_reference(engine: TorchEngine, saved: Saved) -> None:
    names = {name.removeprefix("reference.weight.") for name in saved.names if name.startswith("reference.")}
    if names and isinstance(engine.reference, adapter.AdapterReference):  # which may not have been refreshed yet
        held = {name: p for name, p in adapter.parameters(engine.policy.module) if name in names}
        engine.reference.state = {name: torch.empty_like(parameter) for name, parameter in held.items()}
    if names:
        saved.load(of_reference(engine))
