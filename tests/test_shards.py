"""The trainer's state in shards: any number of ranks and any split save it and take it up; damage and misfits are refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import splits
from tests.engines import (
    MEASURED,
    VOCABULARY,
    distance,
    engine_config,
    load_engine,
    plan_each,
    put,
    random_groups,
    save_engine,
    save_model,
    weights,
    world,
)
from tests.ranks import on_ranks
from tests.tiny import make_model
from vime.config.sections import Config
from vime.sample import Sample
from vime.store.shared_memory import SharedMemoryStore
from vime.training import shards
from vime.training.engine import TorchEngine
from vime.training.learner import EngineError
from vime.training.pieces import full
from vime.training.shards import Saved, State
from vime.training.state import tensors

# Any split

SECTIONS: dict[str, dict[str, Any]] = {
    "algorithm": {"advantage": "gae", "kl_coef": 0.3},
    "critic": {"learning_rate": 0.5},
    "reference": {"refresh_every": 1},
}
LAYOUTS: dict[str, dict[str, int]] = {
    "fsdp": {},
    "hsdp": {"replicas": 2},
    "whole copies": {"replicas": 4},
    "fsdp and tensor": {"tensor_parallel": 2},
    "replicas and tensor": {"replicas": 2, "tensor_parallel": 2},
    "tensor and context": {"tensor_parallel": 2, "context_parallel": 2},
}
Groups = dict[int, list[Sample]]


def on_split(config: Config, **sizes: int) -> Config:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=sizes)})


def train(engine: TorchEngine, batches: Sequence[Groups]) -> list[dict[str, float]]:
    """The metrics of a step a batch."""
    found = []
    for groups in batches:
        plans = plan_each(engine.config, [put(engine.store, groups)])
        found.append(engine.train(plans, 10)["metrics"])
    return found


def whole(engine: TorchEngine) -> State:
    return {name: full(tensor).clone() for name, tensor in tensors(engine).items()}


def start(config: Config, store: Path, saved: Path | None) -> TorchEngine:
    engine = TorchEngine(config, SharedMemoryStore(store / str(dist.get_rank())), torch.device("cpu"))
    engine.load(config.model.path, str(saved) if saved else None)
    return engine


def load_and_save(rank: int, config: Config, root: Path) -> list[str]:
    """Loads what one rank saved into every layout and saves it; the names of layouts that hold something else."""
    wrong = []
    for layout, sizes in LAYOUTS.items():
        engine = start(on_split(config, ranks=4, **sizes), root / "store", root / "alone")
        held, wanted = whole(engine), load_file(root / "alone" / "state" / "rank-00000-of-00001.safetensors")
        if held.keys() != wanted.keys() or not all(torch.equal(held[name], wanted[name]) for name in wanted):
            wrong.append(layout)
        engine.save(str(root / layout), False)
        engine.saved()
        dist.barrier()
    return wrong


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path, list[str]]:
    """A state with critic, reference and moments, saved by one rank and, in every layout, by four."""
    root = tmp_path_factory.mktemp("layouts")
    splits.make_models(root)
    config = engine_config(root / "moe", **SECTIONS)
    world()
    engine = start(config, root / "store", None)
    train(engine, [random_groups(1, [[1, 1], [2, 1]])])
    save_engine(engine, root / "alone")
    return config, root, on_ranks(4, load_and_save, config, root)[0]


def test_every_split_takes_up_what_one_rank_saved(layouts: Any) -> None:
    assert layouts[2] == []


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_one_rank_takes_up_what_every_split_saved(layout: str, layouts: Any) -> None:
    config, root, _ = layouts
    wanted = load_file(root / "alone" / "state" / "rank-00000-of-00001.safetensors")
    held = whole(start(config, root / "store", root / layout))
    assert held.keys() == wanted.keys() and all(torch.equal(held[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_rank_writes_and_no_value_twice(layout: str, layouts: Any) -> None:
    _, root, _ = layouts
    wanted = load_file(root / "alone" / "state" / "rank-00000-of-00001.safetensors")
    held = {f.name: sum(t.numel() for t in load_file(f).values()) for f in (root / layout / "state").iterdir()}
    assert sum(held.values()) == sum(tensor.numel() for tensor in wanted.values())
    assert all(held[f"rank-{rank:05d}-of-00004.safetensors"] > 0 for rank in range(4))


# An engine on other ranks


def steps_of(
    rank: int, config: Config, store: Path, batches: Sequence[Groups], saved: Path | None, target: Path | None
) -> tuple[list[dict[str, float]], State]:
    """Takes a step a batch, from ``saved`` on and into ``target``; the metrics, and the whole state at the end."""
    engine = start(config, store, saved)
    metrics = train(engine, batches)
    if target:
        engine.save(str(target), False)
        engine.saved()
    return metrics, whole(engine)


RESUMES: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    "an adapter": ("untied", {"ranks": 2}, {"ranks": 2, "tensor_parallel": 2}),
    "one to two": ("tied", {"ranks": 1}, {"ranks": 2}),
    "two to four": ("moe", {"ranks": 2}, {"ranks": 4, "tensor_parallel": 2}),
    "four to one": ("untied", {"ranks": 4, "replicas": 2}, {"ranks": 1}),
    "the same": ("untied", {"ranks": 2}, {"ranks": 2}),
}


@pytest.mark.parametrize("case", list(RESUMES))
def test_a_run_resumed_on_other_ranks_goes_on_as_if_never_stopped(case: str, tmp_path: Path) -> None:
    """Against one that took all four steps on the first split."""
    kind, before, after = RESUMES[case]
    splits.make_models(tmp_path)
    sections = SECTIONS | ({"lora": {"rank": 3}} if case == "an adapter" else {})
    config = engine_config(tmp_path / kind, trainer={"schedule": "cosine", "warmup_steps": 1}, **sections)
    batches = [random_groups(seed, [[1, 1], [2, 1]], first=10 * seed) for seed in range(4)]
    first, other = on_split(config, **before), on_split(config, **after)
    store, saved = tmp_path / "store", tmp_path / "saved"
    saved.mkdir()
    metrics, state = on_ranks(before["ranks"], steps_of, first, store, batches, None, None)[0]
    begun, _ = on_ranks(before["ranks"], steps_of, first, store, batches[:2], None, saved)[0]
    resumed, final = on_ranks(after["ranks"], steps_of, other, store, batches[2:], saved, None)[0]
    bound = 0.0 if before == after else 1e-5
    for one, two in zip(metrics, [*begun, *resumed], strict=True):
        for name in one.keys() - {*MEASURED, "train/packed_tokens"}:  # these are of the split
            assert two[name] == pytest.approx(one[name], abs=bound, rel=bound), name
    assert distance(final, state) <= bound


# In the background


@pytest.fixture
def engine(tmp_path: Path) -> TorchEngine:
    config = engine_config(save_model(tmp_path / "model"))
    return load_engine(config, SharedMemoryStore(tmp_path / "store"))


def take_step(engine: TorchEngine, seed: int = 1) -> None:
    engine.train(plan_each(engine.config, [put(engine.store, random_groups(seed, [[1, 1, 1]]))]), 10)


def test_the_next_step_runs_while_the_state_is_written_and_does_not_touch_it(
    engine: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def slow(*arguments: Any) -> None:
        assert go_on.wait(60)
        save_file(*arguments)

    monkeypatch.setattr(shards, "save_file", slow)
    take_step(engine)
    kept = {name: tensor.clone() for name, tensor in engine.policy.state().items()}
    (tmp_path / "saved").mkdir()
    engine.save(str(tmp_path / "saved"), True)
    take_step(engine, 2)
    assert not list(tmp_path.glob("saved/state/*.safetensors"))
    go_on.set()
    engine.saved()
    state = engine.policy.state()
    assert any(not torch.equal(full(state[name]), full(kept[name])) for name in kept)
    Saved(tmp_path / "saved" / "state").load(state)
    assert all(torch.equal(full(state[name]), full(kept[name])) for name in kept)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "model")
    assert torch.equal(model.lm_head.weight, full(kept["policy.weight.lm_head.weight"]))


def test_a_save_that_cannot_be_written_is_told_and_the_next_works(engine: TorchEngine, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state").write_text("in the way")
    engine.save(str(tmp_path / "broken"), False)
    with pytest.raises(EngineError, match="checkpoint could not be written: rank 0: FileExistsError: .*broken/state"):
        engine.saved()
    save_engine(engine, tmp_path / "saved")
    assert Saved(tmp_path / "saved" / "state").names


@pytest.mark.parametrize("kind", ["llama", "qwen3", "moe"])
def test_the_hugging_face_folder_is_what_transformers_expects(kind: str, tmp_path: Path) -> None:
    """Tied weights once, experts one by one, float32 whatever the engine computes in."""
    model = make_model(tmp_path / "model", "moe") if kind == "moe" else save_model(tmp_path / "model", 1, kind)
    config = engine_config(model)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    engine = load_engine(config, SharedMemoryStore(tmp_path / "store"))
    saved = save_engine(engine, tmp_path / "saved", model=True) / "model"
    with safe_open(saved / "model.safetensors", "pt") as mine, safe_open(model / "model.safetensors", "pt") as first:
        assert {*mine.keys()} == {*first.keys()}
    assert json.loads((saved / "config.json").read_text())["dtype"] == "float32"
    found: Any = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    read, loading = found
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert distance(dict(read.named_parameters()), weights(engine.policy.module)) == 0


# Refused


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def to_nan(file: Path) -> None:
    rewrite(file, "policy.weight.model.norm.weight", lambda tensor: tensor.fill_(torch.nan), 0)


def without_first_rows(file: Path) -> None:
    rewrite(file, "policy.weight.lm_head.weight", lambda tensor: tensor[4:].contiguous(), 4)


def rewrite(file: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], offset: int) -> None:
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        header = opened.metadata()
    places = json.loads(header["DCP_SHARDING_INFO"])
    places[name]["saved_offsets"][0] = offset
    tensors[name] = change(tensors[name])
    save_file(tensors, file, header | {"DCP_SHARDING_INFO": json.dumps(places)})


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a missing shard": (
        lambda file: file.rename(file.with_name("rank-00000-of-00002.safetensors")),
        "rank-00001-of-00002.safetensors is missing; remove .*saved and --resume takes the checkpoint before it",
    ),
    "a cut shard": (cut, "rank-00000-of-00001.safetensors is damaged .* --resume takes"),
    "no shards": (Path.unlink, "another version of vime wrote this checkpoint; .* --model.path .*saved/model"),
    "a value that is not finite": (to_nan, "policy.weight.model.norm.weight holds values that are not finite"),
    "a part of a tensor": (without_first_rows, "the shards of policy.weight.lm_head.weight are not the whole of it"),
}


@pytest.mark.parametrize("case", list(DAMAGE))
def test_a_damaged_checkpoint_is_refused_by_file_and_next_step(case: str, engine: TorchEngine, tmp_path: Path) -> None:
    damage, message = DAMAGE[case]
    saved = save_engine(engine, tmp_path / "saved")
    damage(saved / "state" / "rank-00000-of-00001.safetensors")
    with pytest.raises(EngineError, match=message):
        load_engine(engine.config, engine.store, saved)


OTHERS: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "more layers": (
        partial(save_model, layers=2),
        {},
        "lacks policy.weight.model.layers.1.* resume with the model.path",
    ),
    "a vocabulary": (
        partial(save_model, vocabulary=VOCABULARY + 8),
        {},
        r"policy.weight.model.embed_tokens.weight has the shape \[24, 32\] and the model's \[32, 32\]",
    ),
    "tied embeddings": (
        partial(save_model, kind="llama"),
        {},
        "holds, which the model lacks, policy.weight.lm_head.weight",
    ),
    "a critic": (save_model, {"algorithm": {"advantage": "gae"}}, "holds no critic: the run had another algorithm.adv"),
}


@pytest.mark.parametrize("case", list(OTHERS))
def test_a_checkpoint_of_another_model_or_algorithm_is_refused(case: str, engine: TorchEngine, tmp_path: Path) -> None:
    make, sections, message = OTHERS[case]
    saved = save_engine(engine, tmp_path / "saved")
    config = engine_config(make(tmp_path / "other"), **sections)
    with pytest.raises(EngineError, match=message):
        load_engine(config, engine.store, saved)
