"""SFT and reward models on the engine against plain loops: transformers' own model, one sequence at a time, float32, AdamW."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.engines import distance, load_engine, make_config, put, random_groups, weights, world
from vime.config.supervised import Supervised
from vime.loop import plan_updates
from vime.observe.live import LiveView
from vime.store.shared_memory import SharedMemoryStore
from vime.supervised.data import Data
from vime.supervised.job import SupervisedJob
from vime.training.policy import ModelRefused, load_critic
from vime.training.reward import RewardEngine

CHATS = [
    [("user", "1+1"), ("assistant", "2")],
    [
        ("system", "be brief"),
        ("user", "a longer question"),
        ("assistant", "yes"),
        ("user", "sure?"),
        ("assistant", "no"),
    ],
    [("user", "?"), ("assistant", "a rather longer answer than the others")],
    [("user", "x"), ("assistant", ""), ("user", "y"), ("assistant", "z"), ("user", "unanswered")],
    [("user", "2+2"), ("assistant", "4")],
]
PAIRS = [
    {"prompt": "1+1", "chosen": "2", "rejected": "it may be 3"},
    {"prompt": "a longer question", "chosen": "a good answer", "rejected": "a"},
    {"prompt": "?", "chosen": "!", "rejected": "!!"},
    {"prompt": "x", "chosen": "y", "rejected": "z"},
    {"prompt": "2+2", "chosen": "four", "rejected": "for"},
]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def make_job(folder: Path, model: Path, pairs: bool, **sections: dict[str, Any]) -> SupervisedJob:
    """A job whose store and data are there, without a trainer's processes; batches of 3 of 5 examples."""
    world()
    chats = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS]
    tree: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "epochs": 3},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"source": write(folder / "data.jsonl", PAIRS if pairs else chats)},
        "batch": {"size": 3},
        "trainer": {"learning_rate": 1e-3, "weight_decay": 0.01, "device": "cpu", "threads": 1},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    config = Supervised.model_validate(tree)
    job = SupervisedJob(config, Data(config, AutoTokenizer.from_pretrained(model), pairs), LiveView("test", 1))
    job.store = SharedMemoryStore(folder / "store")
    return job


def make_engine(job: SupervisedJob, state: Path | None = None) -> Any:
    if not job.data.pairs:
        return load_engine(job.engine, job.store, state)
    engine = RewardEngine(job.engine, job.store, torch.device("cpu"))
    engine.load(job.config.model.path, str(state) if state else None)
    return engine


def batches(job: SupervisedJob) -> Iterator[list[Any]]:
    """The rows of every step of the run, in the store while they are asked for."""
    for _ in range(job.steps):
        rows = job.take()
        yield rows
        job.trained(rows, {})


def tokens_of(job: SupervisedJob, row: Any) -> tuple[torch.Tensor, torch.Tensor]:
    payload = job.store.get(row.key, row.index)
    ids = torch.tensor([*payload.prompt_ids.tolist(), *payload.response_ids.tolist()])
    return ids, torch.tensor([False] * len(payload.prompt_ids) + payload.loss_mask.astype(bool).tolist())


def adamw(model: Any, section: Any) -> torch.optim.Optimizer:
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == large] for large in (True, False))
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=section.learning_rate, betas=section.betas, eps=section.eps)


def plain_sft_loss(model: Any, job: SupervisedJob, rows: list[Any], reduction: str) -> torch.Tensor:
    """Mean over all learned tokens, or over sequences of their means; one sequence at a time."""
    losses = []
    for row in rows:
        ids, learned = tokens_of(job, row)
        logits = model(input_ids=ids[None]).logits[0]
        every = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
        losses.append(every[learned[1:]])
    return torch.cat(losses).mean() if reduction == "token" else torch.stack([one.mean() for one in losses]).mean()


def plain_pair_loss(model: Any, job: SupervisedJob, rows: list[Any]) -> torch.Tensor:
    model.config.pad_token_id = None
    scores = torch.stack([model(input_ids=tokens_of(job, row)[0][None, :-1]).logits[0, 0] for row in rows])
    return -torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2]).mean()


def worst(module: Any, model: Any, names: dict[str, str]) -> float:
    mine, plain = weights(module), dict(model.named_parameters())
    return max((mine[names.get(name, name)] - wanted.detach()).abs().max().item() for name, wanted in plain.items())


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize(("reduction", "budget"), [("token", 4096), ("token", 1), ("token", 60), ("sequence", 100)])
def test_sft_is_a_plain_loop(kind: str, reduction: str, budget: int, models: Any, tmp_path: Path) -> None:
    job = make_job(
        tmp_path, models(kind), False, batch={"reduction": reduction}, trainer={"tokens_per_micro_batch": budget}
    )
    engine = make_engine(job)
    model = AutoModelForCausalLM.from_pretrained(models(kind), dtype=torch.float32)
    optimizer = adamw(model, job.config.trainer)
    steps = 0
    for rows in batches(job):
        loss = plain_sft_loss(model, job, rows, reduction)
        planned = job.planned(rows)
        assert engine.evaluate(planned)["loss"] == pytest.approx(loss.item(), abs=1e-5)
        metrics = engine.train([planned], job.optimizer_steps)["metrics"]
        assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.config.trainer.max_grad_norm)
        optimizer.step()
        steps += 1
    assert steps == 5  # 3 epochs of 5 sequences in batches of 3
    assert worst(engine.policy.module, model, {}) < 1e-5


@pytest.mark.parametrize("budget", [4096, 1, 60])
def test_a_reward_model_is_a_plain_loop(budget: int, models: Any, tmp_path: Path) -> None:
    job = make_job(tmp_path, models("tied"), True, trainer={"tokens_per_micro_batch": budget})
    engine = make_engine(job)
    model = AutoModelForSequenceClassification.from_pretrained(models("tied"), num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(model.score.weight)
    optimizer = adamw(model, job.config.trainer)
    for rows in batches(job):
        loss = plain_pair_loss(model, job, rows)
        planned = job.planned(rows)
        assert engine.evaluate(planned)["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert engine.train([planned], job.optimizer_steps)["metrics"]["train/loss"] == pytest.approx(
            loss.item(), abs=1e-5
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.config.trainer.max_grad_norm)
        optimizer.step()
    names = {name: name.removeprefix("model.") for name, _ in model.named_parameters()} | {
        "score.weight": "head.weight"
    }
    assert worst(engine.model.module, model, names) < 1e-5


@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
def test_transformers_loads_an_exported_reward_model_and_scores_as_the_engine_does(
    kind: str, models: Any, tmp_path: Path
) -> None:
    """Also in padded batches: the tokenizer's padding is a token with which no conversation ends."""
    job = make_job(tmp_path, models(kind), True, trainer={"learning_rate": 1e-2})
    engine = make_engine(job)
    for rows in batches(job):
        engine.train([job.planned(rows)], job.optimizer_steps)
    (tmp_path / "saved").mkdir()
    engine.save(str(tmp_path / "saved"), True)
    engine.saved()
    job.complete(tmp_path / "saved" / "model")
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "saved" / "model", output_loading_info=True, dtype=torch.float32
    )
    assert not any(loading.values())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved" / "model")
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    for pair in PAIRS:
        chats = [[{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair[key]}]
                 for key in ("chosen", "rejected")]  # fmt: skip
        given = tokenizer.apply_chat_template(chats, padding=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            scores = model(**given).logits[:, 0]
        one = next(e for e in job.data.train if e.id.endswith(f"/{PAIRS.index(pair)}"))
        rows = one.put(job.store, "one")
        with torch.no_grad():
            batch = engine.batch(job.planned(rows)[0][0])
            mine = engine.model.module(batch.packed)[batch.mask]
        assert mine.tolist() == pytest.approx(scores.tolist(), abs=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-3


@pytest.mark.parametrize("pairs", [False, True], ids=["sft", "reward model"])
def test_a_resumed_run_goes_on_as_if_never_stopped(pairs: bool, models: Any, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    sections = {"trainer": {"schedule": "cosine", "warmup_steps": 2}}
    straight, resumed = (make_job(tmp_path, models("tied"), pairs, **sections) for _ in range(2))
    engine = make_engine(straight)

    def step(job: SupervisedJob, engine: Any) -> tuple[set[str], dict[str, float]]:
        rows = job.take()
        metrics = engine.train([job.planned(rows)], job.optimizer_steps)["metrics"]
        job.trained(rows, {})
        return {row.key for row in rows}, {
            name: metrics[name] for name in ("train/loss", "train/lr", "train/grad_norm")
        }

    for _ in range(2):
        step(straight, engine)
    engine.save(str(tmp_path / "saved"), True)
    engine.saved()
    resumed.cursor.load(json.loads(json.dumps(straight.cursor.state())))
    again = make_engine(resumed, tmp_path / "saved")
    for _ in range(3):
        assert step(resumed, again) == step(straight, engine)
    mine, other = ((e.model if pairs else e.policy).module for e in (engine, again))
    assert distance(weights(other), weights(mine)) == 0


def test_an_adapter_alone_is_fine_tuned(models: Any, tmp_path: Path) -> None:
    job = make_job(tmp_path, models("tied"), False, lora={"rank": 4}, trainer={"learning_rate": 1e-2})
    engine = make_engine(job)
    losses = [engine.train([job.planned(rows)], job.optimizer_steps)["metrics"]["train/loss"] for rows in batches(job)]
    assert losses[-1] < losses[0] - 0.5
    plain = AutoModelForCausalLM.from_pretrained(models("tied"), dtype=torch.float32)
    held = weights(engine.policy.module)
    frozen = [name for name, _ in plain.named_parameters() if name in held]
    assert len(frozen) > 3 and all(torch.equal(held[name], plain.get_parameter(name)) for name in frozen)


def test_a_critic_starts_with_a_reward_models_head(models: Any, tmp_path: Path) -> None:
    job = make_job(tmp_path, models("tied"), True, trainer={"learning_rate": 1e-2})
    engine = make_engine(job)
    for rows in batches(job):
        engine.train([job.planned(rows)], job.optimizer_steps)
    engine.export(str(tmp_path / "rm"), "float32")
    config = make_config(
        models("untied"), algorithm={"advantage": "gae"}, critic={"path": str(tmp_path / "rm"), "value_clip": 9.0}
    )
    ppo = load_engine(config, job.store)
    assert distance(weights(ppo.critic.module), weights(engine.model.module)) == 0
    assert weights(ppo.critic.module)["head.weight"].abs().max() > 0
    groups = random_groups(0, [[1, 1], [1, 1]])
    metrics = ppo.train(plan_updates(put(job.store, groups), config), 1)["metrics"]
    assert metrics["train/value_loss"] > 0


def test_a_classifier_of_several_labels_is_no_reward_model(models: Any, tmp_path: Path) -> None:
    world()
    AutoModelForSequenceClassification.from_pretrained(models("tied"), num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="tells 3 labels apart"):
        load_critic(tmp_path)
