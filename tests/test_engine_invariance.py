"""One update is one sum over its tokens: how the rows are ordered, packed, split or spread over ranks changes nothing.

Loss, metrics, advantages and gradients of two steps, the second with ratios that are not 1, for every algorithm.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests.engines import (
    MEASURED,
    SIZES,
    VOCABULARY,
    Gradients,
    distance,
    engine_config,
    load_engine,
    make_sample,
    note_gradients,
    plan_each,
    put,
    random_groups,
    save_model,
)
from vime.config.sections import Config
from vime.rollout.outcome import Outcome
from vime.sample import Sample
from vime.store.shared_memory import SharedMemoryStore
from vime.training.advantages import ESTIMATORS, TOKEN_LEVEL
from vime.training.client import Trainer
from vime.training.corrections import CORRECTIONS
from vime.training.engine import TorchEngine
from vime.training.losses import KL, OBJECTIVES
from vime.training.pieces import full
from vime.training.plan import PlanJson

BOUND = 1e-5
REDUCTIONS = ("token", "sequence", "rollout", "group", "fixed")
NOT_COMPARED = {*MEASURED, "train/packed_tokens"}
PACKING = 4096


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(root / name, seed) for seed, name in enumerate(("policy", "reference", "teacher"))}


# What is trained


@dataclass
class Batch:
    """The outcomes of each of two updates, and more that have no trained token."""

    parts: list[list[Outcome]]
    idle: list[Outcome]


def make_batch(store: SharedMemoryStore, seed: int, scorer: TorchEngine, untrained: float | None = None) -> Batch:
    """Log-probabilities are the policy's own, give or take a quarter; ``untrained`` those of tokens that are not trained."""
    draw = random.Random(seed)
    parts = []
    for number, sizes in enumerate(SIZES):
        groups = random_groups(seed + number, sizes, first=10 * number)
        for sample in chain(*groups.values()):
            (own,) = scorer.logprobs([{"prompt_ids": sample.prompt_ids, "response_ids": sample.response_ids}])
            near = [value + draw.gauss(0, 0.25) for value in own]
            said = near if untrained is None else [untrained] * len(near)
            sample.logprobs = [n if m else s for n, s, m in zip(near, said, sample.loss_mask, strict=True)]
        parts.append(put(store, groups))
    idle = random_groups(seed + 2, [[1, 1]], longest=20, first=99)
    for sample in idle[99]:
        sample.loss_mask = [0] * len(sample.loss_mask)
    return Batch(parts, put(store, idle))


@pytest.fixture(scope="module")
def scorer(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    return load_engine(config_of({}, folders), SharedMemoryStore(tmp_path_factory.mktemp("scorer")))


@dataclass
class Seen:
    """What a training command gave, and the gradients of its steps."""

    metrics: dict[str, float]
    advantages: dict[tuple[str, int], float]
    policy: Gradients
    critic: Gradients


def observe(config: Config, store: SharedMemoryStore, updates: list[PlanJson]) -> Seen:
    """Two training commands on the same updates by a fresh engine: in the second the critic's values are not all 0."""
    engine = load_engine(config, store)
    policy = note_gradients(engine.policy)
    critic = note_gradients(engine.critic) if engine.critic else []
    commands = 2 if engine.critic else 1
    answers = [engine.train(updates, 10) for _ in range(commands)]
    metrics = {
        f"{number} {name}": value
        for number, answer in enumerate(answers)
        for name, value in answer["metrics"].items()
        if name not in NOT_COMPARED
    }
    return Seen(metrics, {(key, i): value for key, i, value in answers[-1]["advantages"]}, policy, critic)


def assert_same(found: Seen, wanted: Seen, what: str, bound: float = BOUND) -> None:
    assert found.metrics.keys() == wanted.metrics.keys(), what
    for name, value in wanted.metrics.items():
        assert found.metrics[name] == pytest.approx(value, abs=bound, rel=bound), (what, name)
    for row, value in wanted.advantages.items():
        assert found.advantages[row] == pytest.approx(value, abs=bound, rel=bound), (what, row)
    for mine, others in ((found.policy, wanted.policy), (found.critic, wanted.critic)):
        assert len(mine) == len(others)
        for step, (one, other) in enumerate(zip(mine, others, strict=True)):
            assert distance(one, other) <= bound, (what, f"gradients of step {step}")


# The ways to train it


def shuffled(batch: Batch) -> list[list[Outcome]]:
    draw = random.Random(1)

    def mixed(values: list[Any]) -> list[Any]:
        return draw.sample(values, len(values))

    return [mixed([replace(outcome, rows=mixed(outcome.rows)) for outcome in part]) for part in batch.parts]


def singly(updates: list[PlanJson], compares: bool) -> list[PlanJson]:
    """A micro-batch a row, or, where rows are compared, a group."""

    def units(rank: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        held: dict[Any, list[dict[str, Any]]] = {}
        for row in (row for micro in rank for row in micro):
            held.setdefault((row["key"], None if compares else row["index"]), []).append(row)
        return list(held.values())

    return [[units(rank) for rank in update] for update in updates]


def with_trainer(config: Config, **trainer: Any) -> Config:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=trainer)})


Way = Callable[[Config, Batch], tuple[Config, list[PlanJson]]]


def in_another_order(config: Config, batch: Batch) -> tuple[Config, list[PlanJson]]:
    """Groups and their rows shuffled, in micro-batches that hold one or two of them."""
    return config, plan_each(with_trainer(config, tokens_per_micro_batch=25), shuffled(batch))


def one_by_one(config: Config, batch: Batch) -> tuple[Config, list[PlanJson]]:
    """Each row not packed with others, its logits made in chunks."""
    updates = singly(plan_each(config, batch.parts), config.algorithm.objective == "dpo")
    return with_trainer(config, logprob_chunk=3), updates


def beside_untrained_sequences(config: Config, batch: Batch) -> tuple[Config, list[PlanJson]]:
    """With longer sequences without a trained token, in micro-batches of two or three rows."""
    parts = [batch.parts[0] + batch.idle, *batch.parts[1:]]
    return config, plan_each(with_trainer(config, tokens_per_micro_batch=40), parts)


WAYS: tuple[Way, ...] = (in_another_order, one_by_one, beside_untrained_sequences)


def with_empty_micro_batches(config: Config, batch: Batch) -> tuple[Config, list[PlanJson]]:
    return config, [[[*rank, []] for rank in update] for update in plan_each(config, batch.parts)]


OVER_ALL_REWARDS = ("batch_norm", "grpo_batch_std")  # a response without trained tokens counts in their statistics


# What it is trained by


def algorithm_for(objective: str, reduction: str) -> dict[str, Any]:
    options: dict[str, Any] = {"objective": objective, "reduction": reduction}
    options |= {"sft": {"advantage": "constant"}, "dpo": {"advantage": "pair"}}.get(objective, {})
    return options | {"cov_fraction": 0.2, "cov_low": 0.0} if objective in ("clip_cov", "kl_cov") else options


CASES: dict[str, dict[str, Any]] = {
    **{
        f"{objective}, mean over {reduction}": algorithm_for(objective, reduction)
        for objective in OBJECTIVES
        for reduction in REDUCTIONS
        if objective != "dpo" or reduction == "sequence"
    },
    **{f"advantage {name}": {"advantage": name} for name in (*ESTIMATORS, *TOKEN_LEVEL)},
    **{f"KL {name} in the loss": {"kl_coef": 0.1, "kl_estimator": name} for name in (*KL, "unbiased")},
    **{
        f"KL in the reward of {name}": {"advantage": name, "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
        for name in ("grpo", "rloo", "reinforce_pp", "gae")
    },
    **{f"correction {name}": {"corrections": {name: {}}} for name in CORRECTIONS},
    "masks and weights": {"corrections": {"tis": {"high": 1.5}, "mask_geometric": {"low": 0.5, "high": 2.0}}},
    "entropy bonus": {"entropy_coef": 0.05},
    "adaptive entropy bonus": {"entropy_target": 9.0, "entropy_delta": 0.05, "entropy_coef_max": 0.5},
    "ratios to the server's": {"old_logprobs": "behaviour", "dual_clip": 3.0},
    "gspo, ratios to the server's": {"objective": "gspo", "old_logprobs": "behaviour"},
    "discounted gae": {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.8},
    "discounted reinforce_pp": {"advantage": "reinforce_pp", "gamma": 0.9},
}
BOUNDS = {"mis": (0.1, 8.0), "icepop": (0.5, 2.0), "mask_geometric": (0.8, 1.25), "mask_worst": (0.3, 3.0)}


def config_of(algorithm: dict[str, Any], folders: dict[str, Path]) -> Config:
    corrections = {
        name: dict(zip(("low", "high"), BOUNDS[name], strict=True)) if name in BOUNDS and not bounds else bounds
        for name, bounds in algorithm.get("corrections", {}).items()
    }
    sections: dict[str, Any] = {"critic": {"learning_rate": 0.5, "value_clip": 0.05}}
    if algorithm.get("kl_coef") or algorithm.get("objective") == "dpo":
        sections["reference"] = {"path": str(folders["reference"])}
    if algorithm.get("advantage") == "reverse_kl":
        sections["teacher"] = {"path": str(folders["teacher"])}
    return engine_config(
        folders["policy"],
        algorithm={**algorithm, "corrections": corrections},
        rollout={"temperature": 0.8, "max_tokens": 8},
        trainer={"tokens_per_micro_batch": PACKING},
        **sections,
    )


def check(case: str, ways: tuple[Way, ...], folders: dict[str, Path], scorer: TorchEngine, folder: Path) -> None:
    config = config_of(CASES[case], folders)
    store = SharedMemoryStore(folder / "store")
    batch = make_batch(store, crc32(case.encode()), scorer)
    wanted = observe(config, store, plan_each(config, batch.parts))
    assert all(any(gradient.any() for gradient in gradients.values()) for gradients in wanted.policy)
    for way in ways:
        if way is beside_untrained_sequences and config.algorithm.advantage in OVER_ALL_REWARDS:
            continue
        other_config, updates = way(config, batch)
        assert_same(observe(other_config, store, updates), wanted, way.__name__)


@pytest.mark.parametrize("case", list(CASES))
def test_the_way_a_batch_is_laid_out_changes_neither_loss_nor_metrics_nor_gradients(
    case: str, folders: dict[str, Path], scorer: TorchEngine, tmp_path: Path
) -> None:
    check(case, WAYS, folders, scorer, tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        "ppo, mean over token",
        "dpo, mean over sequence",
        "clip_cov, mean over token",
        "advantage reverse_kl",
        "KL in the reward of reinforce_pp",
        "KL in the reward of gae",
    ],
)
def test_an_empty_micro_batch_changes_nothing(
    case: str, folders: dict[str, Path], scorer: TorchEngine, tmp_path: Path
) -> None:
    """Ranks need equally many: where rows are too few, one has none."""
    check(case, (with_empty_micro_batches,), folders, scorer, tmp_path)


@pytest.mark.parametrize("said", [0.0, math.nan, -9999.0])
@pytest.mark.parametrize(
    "case",
    [
        "ppo, mean over token",
        "ratios to the server's",
        "gspo, ratios to the server's",
        *(f"correction {name}" for name in CORRECTIONS),
    ],
)
def test_the_log_probabilities_of_untrained_tokens_do_not_matter(
    case: str, said: float, folders: dict[str, Path], scorer: TorchEngine, tmp_path: Path
) -> None:
    """What a tool wrote, no policy sampled."""
    config = config_of(CASES[case], folders)
    store = SharedMemoryStore(tmp_path / "store")
    wanted, found = (
        observe(config, store, plan_each(config, make_batch(store, 5, scorer, value).parts)) for value in (None, said)
    )
    assert_same(found, wanted, case)


# Two ranks


def three_groups() -> dict[int, list[Sample]]:
    """Of ten tokens each."""
    draw = random.Random(5)

    def ids(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(count)]

    prompts = {group: ids(2) for group in range(3)}
    return {
        group: [make_sample(prompt, ids(5), [-3.0] * 5, draw.random(), rollout) for rollout in range(2)]
        for group, prompt in prompts.items()
    }


TWO_RANKS: dict[str, tuple[dict[str, Any], int]] = {
    "kl_cov, KL in the reward of reinforce_pp": (
        {
            **algorithm_for("kl_cov", "rollout"),
            "advantage": "reinforce_pp",
            "kl_coef": 0.1,
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
        40,
    ),
    "gae, clip_cov, adaptive entropy": (
        {
            **algorithm_for("clip_cov", "group"),
            "advantage": "gae",
            "gamma": 0.9,
            "entropy_target": 9.0,
            "entropy_delta": 0.05,
            "entropy_coef_max": 0.5,
            "corrections": {"tis": {"high": 1.5}},
        },
        40,
    ),
    "one rank's last micro-batch empty": ({}, 12),
}


@pytest.mark.parametrize("case", list(TWO_RANKS))
def test_two_ranks_give_the_metrics_advantages_and_weights_of_one(
    case: str, folders: dict[str, Path], tmp_path: Path, run: Any, session: Any
) -> None:
    algorithm, budget = TWO_RANKS[case]
    config = with_trainer(config_of(algorithm, folders), tokens_per_micro_batch=budget, step_timeout_s=60)
    store = SharedMemoryStore(tmp_path / "store")
    if budget == 12:
        parts = [put(store, three_groups())]
    else:
        parts = [put(store, random_groups(3 + i, sizes, first=10 * i)) for i, sizes in enumerate(SIZES)]
    two = with_trainer(config, ranks=2)
    spread = plan_each(two, parts)
    assert any([] in rank for update in spread for rank in update) == (budget == 12)
    trainer = Trainer(two, session, tmp_path, store.folder)

    async def train_and_save() -> list[dict[str, Any]]:
        try:
            await trainer.start(folders["policy"])
            answers = [await trainer.train(spread, 10) for _ in range(2)]
            await trainer.save(tmp_path / "two")
            await trainer.saved()
            return answers
        finally:
            await trainer.stop()

    (tmp_path / "two").mkdir()
    engine = load_engine(config, store)
    alone = [engine.train(plan_each(config, parts), 10) for _ in range(2)]
    together = run(train_and_save())
    resumed = load_engine(config, store, tmp_path / "two")
    for one, two_s in zip(alone, together, strict=True):
        assert one["metrics"].keys() == two_s["metrics"].keys()
        for name in one["metrics"].keys() - NOT_COMPARED:
            assert two_s["metrics"][name] == pytest.approx(one["metrics"][name], abs=BOUND, rel=BOUND), name
        assert [row[:2] for row in one["advantages"]] == [row[:2] for row in two_s["advantages"]]
        assert [row[2] for row in two_s["advantages"]] == pytest.approx(
            [row[2] for row in one["advantages"]], abs=BOUND
        )
    states = (engine.policy.state(), resumed.policy.state())
    if engine.critic and resumed.critic:
        states = (states[0] | engine.critic.state(), states[1] | resumed.critic.state())
    alone_s, resumed_s = ({name: full(tensor) for name, tensor in state.items()} for state in states)
    assert distance(resumed_s, alone_s) < BOUND
