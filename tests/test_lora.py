"""LoRA in the engine: the steps of plain peft, a reference for nothing, folders that peft and transformers load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.engines import (
    MEASURED,
    SIZES,
    distance,
    engine_config,
    load_engine,
    note_gradients,
    plain_model,
    plan_each,
    put,
    random_groups,
    save_engine,
    save_model,
    weights,
)
from tests.test_engine_oracle import Plain
from tests.tiny import make_model
from vime.config.sections import Config
from vime.sample import Sample
from vime.store.shared_memory import SharedMemoryStore
from vime.training.client import Trainer
from vime.training.engine import TorchEngine
from vime.training.learner import EngineError
from vime.training.lora import is_adapter
from vime.training.pieces import full
from vime.training.selfcheck import ModelRefused
from vime.training.shards import Saved

BOUND = 1e-5
LORA: dict[str, Any] = {"rank": 3, "alpha": 6}
TRAINER = {"learning_rate": 0.02, "eps": 1e-3, "weight_decay": 0.1, "tokens_per_micro_batch": 30}
ROWS = [{"prompt_ids": [1, 2, 3], "response_ids": [4, 5, 6, 7]}, {"prompt_ids": [8], "response_ids": [9, 10]}]


def adapter_of(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights(engine.policy.module).items() if is_adapter(name)}


class PlainLora(Plain):
    """The same PPO with peft's own model as the policy, and the model without an adapter as the reference."""

    def __init__(self, config: Config, start: dict[str, torch.Tensor]) -> None:
        super().__init__(config)
        lora = config.lora
        options = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.use_rslora, target_modules=lora.target_modules,
            task_type="CAUSAL_LM",
        )  # fmt: skip
        self.policy: Any = get_peft_model(self.policy, options).double()
        trained = {name: p for name, p in self.policy.named_parameters() if p.requires_grad}
        self.parameters[0] = {name.removeprefix("base_model.model."): p for name, p in trained.items()}
        with torch.no_grad():
            for name, parameter in self.parameters[0].items():
                parameter.copy_(start[name])
        self.optimizers[0] = self.adam(list(trained.values()), config.trainer.learning_rate)


def batch(store: SharedMemoryStore, config: Config, seed: int = 7) -> tuple[list[dict[int, list[Sample]]], Any]:
    groups = [random_groups(seed + i, sizes, first=100 * seed + 10 * i) for i, sizes in enumerate(SIZES)]
    return groups, plan_each(config, [put(store, part) for part in groups])


@pytest.mark.parametrize(
    ("kind", "lora", "trainer"),
    [
        ("qwen3", LORA, {}),
        ("llama", {**LORA, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}, {}),
        ("qwen3", LORA, {"activation_checkpointing": "full"}),
    ],
    ids=["all linear", "two modules, rslora, tied", "activation checkpointing"],
)
def test_six_steps_are_those_of_plain_peft(
    kind: str, lora: dict[str, Any], trainer: dict[str, Any], tmp_path: Path
) -> None:
    config = engine_config(
        save_model(tmp_path / "policy", 0, kind, layers=2),
        algorithm={"kl_coef": 0.2, "entropy_coef": 0.05},
        rollout={"temperature": 0.8},
        trainer=TRAINER | trainer,
        lora=lora,
    )
    store = SharedMemoryStore(tmp_path / "store")
    groups, updates = batch(store, config)
    engine = load_engine(config, store)
    start = adapter_of(engine)
    assert all(tensor.abs().sum() > 0 for name, tensor in start.items() if ".lora_A." in name)
    plain, noted = PlainLora(config, start), note_gradients(engine.policy)
    for _ in range(3):
        losses, wanted, _ = plain.train([list(part.values()) for part in groups])
        answer = engine.train(updates, 10)["metrics"]
        assert answer["train/loss"] == pytest.approx(sum(losses) / len(losses), abs=BOUND, rel=BOUND)
        assert max(distance(*both) for both in zip(noted, wanted, strict=True)) < BOUND
        noted.clear()
    assert answer["train/reference_kl"] > 1e-3
    found, wanted_weights = adapter_of(engine), plain.parameters[0]
    assert found.keys() == wanted_weights.keys()
    assert max((found[name] - wanted_weights[name]).abs().max().item() for name in found) < BOUND
    assert distance(found, wanted_weights) < BOUND
    assert max((found[name] - start[name]).abs().max().item() for name in found) > 0.05


def test_two_ranks_train_the_adapter_of_one(tmp_path: Path, run: Any, session: Any) -> None:
    config = engine_config(
        save_model(tmp_path / "policy", 0, layers=2), algorithm={"kl_coef": 0.2}, trainer=TRAINER, lora=LORA
    )
    store = SharedMemoryStore(tmp_path / "store")
    _, updates = batch(store, config)
    engine = load_engine(config, store)
    for _ in range(3):
        engine.train(updates, 10)
    save_engine(engine, tmp_path / "one", model=True)
    two = config.model_copy(update={"trainer": config.trainer.model_copy(update={"ranks": 2})})
    _, spread = batch(store, two)
    trainer = Trainer(two, session, tmp_path, store.folder)

    async def train_and_save() -> None:
        try:
            await trainer.start(Path(config.model.path))
            for _ in range(3):
                await trainer.train(spread, 10)
            await trainer.save(tmp_path / "two")
            await trainer.saved()
        finally:
            await trainer.stop()

    (tmp_path / "two").mkdir()
    run(train_and_save())
    for file in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        one, other = (load_file(tmp_path / folder / file) for folder in ("one", "two"))
        assert distance(other, one) < BOUND, file
    resumed = load_engine(config, store, tmp_path / "two")
    one, other = ({name: full(tensor) for name, tensor in e.policy.state().items()} for e in (engine, resumed))
    assert distance(other, one) < BOUND


def trained_engine(config: Config, store: SharedMemoryStore, steps: int = 2) -> TorchEngine:
    engine = load_engine(config, store)
    for _ in range(steps):
        engine.train(batch(store, config)[1], 10)
    return engine


def plain_logprobs(model: Any) -> list[list[float]]:
    found = []
    for row in ROWS:
        prompt, response = row["prompt_ids"], row["response_ids"]
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        found.append(torch.log_softmax(logits, -1)[range(len(response)), response].tolist())
    return found


@pytest.mark.parametrize("kind", ["qwen3", "llama", "moe"])
@torch.no_grad()
def test_peft_loads_the_adapter_and_transformers_the_merged_model(kind: str, tmp_path: Path) -> None:
    made = (
        make_model(tmp_path / "policy", kind) if kind == "moe" else save_model(tmp_path / "policy", 0, kind, layers=2)
    )
    lora = LORA | ({"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]} if kind == "moe" else {})
    config = engine_config(made, trainer=TRAINER, lora=lora)
    with torch.enable_grad():
        engine = trained_engine(config, SharedMemoryStore(tmp_path / "store"))
    engine.export_adapter(str(tmp_path / "adapter"), "float32")
    engine.export(str(tmp_path / "merged"), "float32")
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (3, 6, config.model.path)
    base = plain_model(Path(config.model.path))
    before = plain_logprobs(base)
    wanted = engine.logprobs(ROWS)
    with_adapter = PeftModel.from_pretrained(base, tmp_path / "adapter")
    for found in (plain_logprobs(with_adapter), plain_logprobs(plain_model(tmp_path / "merged"))):
        for mine, other in zip(found, wanted, strict=True):
            assert mine == pytest.approx(other, abs=BOUND)
    assert max(abs(x - y) for b, w in zip(before, wanted, strict=True) for x, y in zip(b, w, strict=True)) > 1e-2
    merged, mine = with_adapter.merge_and_unload().state_dict(), plain_model(tmp_path / "merged").state_dict()
    assert distance(mine, merged) < 1e-6


@pytest.mark.parametrize("asked", [False, True], ids=["at once", "after the probe"])
@pytest.mark.parametrize("refresh", [0, 2])
def test_a_resumed_adapter_goes_on_as_if_never_stopped(asked: bool, refresh: int, tmp_path: Path) -> None:
    config = engine_config(
        save_model(tmp_path / "policy", 0, layers=2),
        algorithm={"kl_coef": 0.3},
        reference={"refresh_every": refresh},
        trainer=TRAINER | {"schedule": "cosine", "warmup_steps": 2},
        lora=LORA,
    )
    store = SharedMemoryStore(tmp_path / "store")
    batches = [batch(store, config, seed)[1] for seed in range(1, 6)]
    engine = load_engine(config, store)
    for one in batches[:3]:
        engine.train(one, 10)
    if asked:
        engine.logprobs(ROWS)
    saved = save_engine(engine, tmp_path / "saved")
    assert not (saved / "model").exists()
    names = [name.split(".", 2) for name in Saved(saved / "state").names]
    assert {name for part, _, name in names if part == "policy"} == adapter_of(engine).keys()
    assert any(part == "reference" for part, _, _ in names) == bool(refresh)
    resumed = load_engine(config, store, saved)
    for one in batches[3:]:
        here, there = (trained.train(one, 10)["metrics"] for trained in (engine, resumed))
        for name in here.keys() - MEASURED:
            assert there[name] == pytest.approx(here[name], abs=1e-7, rel=1e-7), name
    assert distance(adapter_of(resumed), adapter_of(engine)) < 1e-7


def test_the_reference_is_the_policy_without_its_adapter_then_with_the_refreshed_one(tmp_path: Path) -> None:
    config = engine_config(
        save_model(tmp_path / "policy", 0, layers=2),
        algorithm={"kl_coef": 0.1},
        reference={"refresh_every": 2},
        trainer=TRAINER,
        lora=LORA,
    )
    store = SharedMemoryStore(tmp_path / "store")
    engine = load_engine(config, store)
    _, updates = batch(store, config)
    base = plain_logprobs(plain_model(Path(config.model.path)))

    def reference() -> list[list[float]]:
        with engine.reference.instead():
            return engine.logprobs(ROWS)

    engine.train(updates, 10)
    held, mine = adapter_of(engine), engine.logprobs(ROWS)
    for found, wanted in zip(reference(), base, strict=True):
        assert found == pytest.approx(wanted, abs=BOUND)
    assert distance(adapter_of(engine), held) == 0 and engine.logprobs(ROWS) == mine
    engine.train(updates, 10)
    refreshed = engine.logprobs(ROWS)
    assert reference() == refreshed != mine
    engine.train(updates, 10)
    assert reference() == refreshed != engine.logprobs(ROWS)


def test_a_checkpoint_of_another_adapter_is_refused_by_name(tmp_path: Path) -> None:
    config = engine_config(save_model(tmp_path / "policy"), lora=LORA)
    store = SharedMemoryStore(tmp_path / "store")
    save_engine(load_engine(config, store), tmp_path / "saved")
    wider = config.model_copy(update={"lora": config.lora.model_copy(update={"rank": 4})})
    with pytest.raises(
        EngineError, match=r"q_proj.lora_A.default.weight has the shape \[3, 32\] .* model's \[4, 32\]; .*lora"
    ):
        load_engine(wider, store, tmp_path / "saved")


@pytest.mark.parametrize(
    ("kind", "targets", "message"),
    [
        ("tied", ["q_proj", "lm_head"], "lm_head is the output head"),
        ("tied", "model.embed_tokens", "embed_tokens is Embedding"),
        ("untied", ["q_prj"], "q_prj"),
        ("moe", ["q_proj", "experts"], "experts"),
        ("moe", ["gate_proj", "up_proj"], "experts is"),
        ("moe", "all-linear", "experts is .*name the others"),
    ],
)
def test_a_target_that_cannot_have_an_adapter_is_refused_by_name(
    kind: str, targets: Any, message: str, tmp_path: Path
) -> None:
    config = engine_config(make_model(tmp_path / "model", kind), lora={"rank": 2, "target_modules": targets})
    with pytest.raises(ModelRefused, match=message):
        load_engine(config, SharedMemoryStore(tmp_path / "store"))


def test_in_bfloat16_the_base_is_kept_in_it_and_the_adapter_in_float32(tmp_path: Path) -> None:
    model = save_model(tmp_path / "policy", 0, layers=2)
    config = engine_config(model, trainer=TRAINER, lora=LORA)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    engine = trained_engine(config, SharedMemoryStore(tmp_path / "store"))
    for name, parameter in engine.policy.module.named_parameters():
        assert parameter.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16), name
    moments = [state[key] for state in engine.policy.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * len(adapter_of(engine)) and {m.dtype for m in moments} == {torch.float32}
    engine.export_adapter(str(tmp_path / "adapter"), "float32")
    engine.export(str(tmp_path / "merged"), "bfloat16")
    base = plain_model(model, torch.bfloat16).float()
    wanted = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().bfloat16().state_dict()
    found = plain_model(tmp_path / "merged", torch.bfloat16).state_dict()
    assert found.keys() == wanted.keys()
    assert distance(found, wanted) < 1e-4  # rounded once, from float32


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_the_check_compares_with_plain_peft(kind: str, tmp_path: Path) -> None:
    config = engine_config(
        save_model(tmp_path / "policy", 0, kind, layers=2), algorithm={"kl_coef": 0.2}, trainer=TRAINER, lora=LORA
    )
    store = SharedMemoryStore(tmp_path / "store")
    engine = trained_engine(config, store)
    found = engine.compare(batch(store, config)[1], str(tmp_path / "weights"))
    assert max(found[name] for name in ("logprob_max", "loss", "gradient", "split_gradient")) < BOUND, found
