"""What an engine keeps from step to step: saved and loaded it goes on as if never stopped; a refused update leaves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines import (
    MEASURED,
    distance,
    engine_config,
    load_engine,
    plan_each,
    put,
    random_groups,
    save_engine,
    save_model,
    weights,
)
from vime.store.shared_memory import SharedMemoryStore
from vime.training.learner import EngineError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(root / name, seed) for seed, name in enumerate(("policy", "reference"))}


SAVED: dict[str, dict[str, Any]] = {
    "a critic": {"algorithm": {"advantage": "gae"}, "critic": {"learning_rate": 0.5, "warmup_steps": 3}},
    "an adaptive entropy bonus": {
        "algorithm": {"entropy_target": 9.0, "entropy_delta": 0.05, "entropy_coef_max": 0.5, "entropy_coef": 0.1}
    },
    "a refreshed reference": {"algorithm": {"kl_coef": 0.3}, "reference": {"refresh_every": 2}},
    "drawn tokens": {"algorithm": {"objective": "clip_cov", "cov_fraction": 0.2, "cov_low": 0.0}},
}


@pytest.mark.parametrize("asked", [False, True], ids=["at once", "after the probe"])
@pytest.mark.parametrize("case", list(SAVED))
def test_a_resumed_engine_goes_on_as_if_never_stopped(
    case: str, asked: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Three batches of two steps, a save, two more; saved at once, or, as in the loop, after the probe's question."""
    sections = SAVED[case]
    if "reference" in sections:
        sections = {**sections, "reference": {**sections["reference"], "path": str(folders["reference"])}}
    config = engine_config(folders["policy"], trainer={"schedule": "cosine", "warmup_steps": 2}, **sections)
    store = SharedMemoryStore(tmp_path / "store")
    batches = [
        plan_each(
            config, [put(store, random_groups(2 * b + i, [[1, 1], [2, 1]], first=20 * b + 10 * i)) for i in range(2)]
        )
        for b in range(5)
    ]
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"updates": 2})})
    engine = load_engine(config, store)
    for batch in batches[:3]:
        engine.train(batch, 10)
    if asked:
        engine.logprobs([{"prompt_ids": [1, 2], "response_ids": [3, 4]}])
    resumed = load_engine(config, store, save_engine(engine, tmp_path / "saved"))
    for batch in batches[3:]:
        one, other = (trained.train(batch, 10)["metrics"] for trained in (engine, resumed))
        for name in one.keys() - MEASURED:
            assert other[name] == pytest.approx(one[name], abs=1e-7, rel=1e-7), name
    for name in ("policy", "critic"):
        held = getattr(engine, name)
        if held:
            states = (weights(one.module) for one in (getattr(resumed, name), held))
            assert distance(*states) < 1e-7
    if engine.reference:
        assert distance(*(weights(e.reference) for e in (resumed, engine))) < 1e-7


def test_the_policy_becomes_the_reference_on_its_interval(folders: dict[str, Path], tmp_path: Path) -> None:
    config = engine_config(
        folders["policy"],
        algorithm={"kl_coef": 0.1},
        reference={"path": str(folders["reference"]), "refresh_every": 2},
    )
    store = SharedMemoryStore(tmp_path / "store")
    engine = load_engine(config, store)
    updates = plan_each(config, [put(store, random_groups(1, [[1, 1, 1]]))])
    first = weights(engine.reference)
    engine.train(updates, 10)
    assert distance(weights(engine.reference), first) == 0
    engine.train(updates, 10)
    assert distance(weights(engine.reference), weights(engine.policy.module)) == 0
    metrics = engine.train(updates, 10)["metrics"]
    assert metrics["train/reference_kl"] == pytest.approx(0, abs=1e-6)


def test_a_critics_warm_up_changes_neither_policy_nor_reference(folders: dict[str, Path], tmp_path: Path) -> None:
    config = engine_config(
        folders["policy"],
        algorithm={"advantage": "gae", "kl_coef": 0.1},
        reference={"path": str(folders["reference"]), "refresh_every": 100},
        critic={"warmup_steps": 2, "learning_rate": 0.5},
    )
    store = SharedMemoryStore(tmp_path / "store")
    engine = load_engine(config, store)
    modules = engine.policy.module, engine.reference
    before = [weights(module) for module in modules]
    updates = plan_each(config, [put(store, random_groups(1, [[1, 1, 1]]))])
    for _ in range(2):
        engine.train(updates, 10)
    after = [weights(module) for module in modules]
    assert [distance(*both) for both in zip(after, before, strict=True)] == [0, 0]
    engine.train(updates, 10)
    assert distance(weights(engine.policy.module), before[0]) > 0


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_a_refused_update_leaves_nothing_behind(advantage: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """The next one is as if it had never been."""
    config = engine_config(
        folders["policy"],
        algorithm={"advantage": advantage, "max_mismatch_kl": 5.0},
        **({"critic": {"learning_rate": 0.5}} if advantage == "gae" else {}),
    )
    store = SharedMemoryStore(tmp_path / "store")
    bad = random_groups(1, [[1, 1, 1]], first=5)
    for sample in bad[5]:
        sample.logprobs = [-30.0] * len(sample.logprobs)
    refused = plan_each(config, [put(store, bad)])
    good = plan_each(config, [put(store, random_groups(2, [[1, 1, 1]]))])
    tried, fresh = load_engine(config, store), load_engine(config, store)
    with pytest.raises(EngineError, match="max_mismatch_kl"):
        tried.train(refused, 10)
    one, other = (engine.train(good, 10)["metrics"] for engine in (tried, fresh))
    for name in one.keys() - MEASURED:
        assert one[name] == pytest.approx(other[name], abs=1e-7, rel=1e-7), name


def test_the_reference_is_refreshed_also_after_a_step_of_fewer_updates(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Filtered groups can leave fewer groups than updates; steps of the run are counted, not optimizer steps."""
    config = engine_config(
        folders["policy"],
        algorithm={"kl_coef": 0.1, "updates": 2},
        reference={"path": str(folders["reference"]), "refresh_every": 1},
    )
    store = SharedMemoryStore(tmp_path / "store")
    engine = load_engine(config, store)
    for number, sizes in enumerate(([[1, 1, 1]], [[1, 1], [1, 1]])):
        engine.train(plan_each(config, [put(store, random_groups(number, sizes))]), 10)
        states = (weights(module) for module in (engine.reference, engine.policy.module))
        assert distance(*states) == 0, f"step {number}"
