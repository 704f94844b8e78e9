"""The reference that still is the policy, and the teacher that is the reference, cost no pass of their own; results are those
of separate passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines import (
    MEASURED,
    SIZES,
    distance,
    engine_config,
    load_engine,
    plan_each,
    put,
    random_groups,
    save_model,
    weights,
)
from vime.store.shared_memory import SharedMemoryStore
from vime.training.engine import TorchEngine

KL = {"kl_coef": 0.3}


def made(tmp_path: Path, algorithm: dict[str, Any], **sections: Any) -> tuple[TorchEngine, Any]:
    """An engine and the plans of two batches of one update each (two with updates = 2)."""
    model = save_model(tmp_path / "model")
    config = engine_config(model, algorithm=algorithm, **sections)
    store = SharedMemoryStore(tmp_path / "store")
    outcomes = put(store, random_groups(1, SIZES[0])), put(store, random_groups(2, SIZES[1], first=9))
    return load_engine(config, store), plan_each(config, outcomes)


def passes(engine: TorchEngine) -> list[Any]:
    """The models of all forward passes from now on."""
    asked: list[Any] = []
    forward = engine.forward

    def noting(model: Any, *given: Any) -> Any:
        asked.append(model)
        return forward(model, *given)

    engine.forward = noting  # type: ignore[method-assign]
    return asked


CASES = [
    KL,
    {**KL, "kl_in": "reward", "kl_estimator": "k1"},
    {**KL, "kl_estimator": "unbiased", "old_logprobs": "behaviour"},
]


@pytest.mark.parametrize("algorithm", CASES)
@pytest.mark.parametrize("together", [False, True], ids=["one update a batch", "two updates"])
def test_results_are_those_of_a_pass_of_its_own(tmp_path: Path, algorithm: dict[str, Any], together: bool) -> None:
    results = []
    for name in ("saved", "asked"):
        (tmp_path / name).mkdir()
        engine, plans = made(tmp_path / name, algorithm)
        if name == "asked":
            engine.same_at = None
        asked = passes(engine)
        steps = [plans] if together else [[plan] for plan in plans]
        metrics = [engine.train(step, 10)["metrics"] for step in steps]
        results.append((metrics, weights(engine.policy.module), sum(model is engine.reference for model in asked)))
    (mine, theirs), micro = results, 2
    assert (mine[2], theirs[2]) == ((0, micro) if together else (micro - 1, micro))
    assert distance(mine[1], theirs[1]) < 1e-6
    for one, other in zip(mine[0], theirs[0], strict=True):
        for key in one.keys() - MEASURED:
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-6), key


def test_a_reference_just_refreshed_is_the_policy_again(tmp_path: Path) -> None:
    engine, plans = made(tmp_path, KL, reference={"refresh_every": 1})
    asked = passes(engine)
    for plan in plans:
        engine.train([plan], 10)
    assert engine.reference not in asked
    assert engine.same_at == engine.policy.steps == 2


def test_another_reference_is_asked(tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=5)
    engine, plans = made(tmp_path, KL, reference={"path": str(other)})
    asked = passes(engine)
    engine.train([plans[0]], 10)
    assert engine.reference in asked


def test_reference_and_teacher_of_one_folder_are_one_model(tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", seed=5)
    distil = {**KL, "advantage": "reverse_kl", "objective": "policy_gradient"}
    engine, plans = made(tmp_path, distil, reference={"path": str(other)}, teacher={"path": str(other)})
    assert engine.teacher is engine.reference
    asked = passes(engine)
    engine.train([plans[0]], 10)
    assert sum(model is engine.reference for model in asked) == 1
