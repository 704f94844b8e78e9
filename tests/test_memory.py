"""Memory of the trainer: checkpointing and dtypes keep the mathematics, the predicted peak is what the allocator counts, and
running out of it is said with numbers and settings."""

from __future__ import annotations

import functools
import random
import resource
import runpy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from tests.engines import (
    SHAPE,
    distance,
    load_engine,
    load_policy,
    make_sample,
    note_gradients,
    plan_each,
    put,
    save_model,
    world,
)
from tests.tiny import make_config
from vime.cli import main
from vime.config.load import dump, impossible
from vime.config.sections import Config
from vime.sample import Sample
from vime.store.shared_memory import SharedMemoryStore
from vime.training import flash, memory, packed
from vime.training.checkpointing import checkpointed
from vime.training.kernels import compile_layers
from vime.training.learner import EngineError
from vime.training.memory import Prediction, predict, row_of, table
from vime.training.mesh import Mesh
from vime.training.out_of_memory import advice, explanation, summary
from vime.training.packed import Packed, pack
from vime.training.parallel import decoder_layers, parallelize
from vime.training.plan import PlanJson
from vime.training.policy import Policy, load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, tied, with a vocabulary that is not small beside them."""
    world()
    torch.manual_seed(0)
    shape = {**SHAPE, "hidden_size": 64, "intermediate_size": 160, "head_dim": 16, "max_position_embeddings": 4096}
    config = Qwen3Config(**shape, vocab_size=1024, num_hidden_layers=4, tie_word_embeddings=True)
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def config_of(model: Path, budget: int, length: int, dtype: str = "float32", **sections: dict[str, Any]) -> Config:
    trainer = {"tokens_per_micro_batch": budget, "logprob_chunk": 256, **sections.pop("trainer", {})}
    config = make_config(model, trainer=trainer, rollout={"max_tokens": length}, **sections)
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def updates_of(config: Config, store: SharedMemoryStore, micro_batches: int = 2) -> list[PlanJson]:
    """One update of full micro-batches of responses of rollout.max_tokens tokens."""
    draw, length = random.Random(0), config.rollout.max_tokens
    count = micro_batches * config.trainer.tokens_per_micro_batch // length

    def sample() -> Sample:
        return make_sample([1], [draw.randrange(1000) for _ in range(length)], [-6.0] * length, draw.random())

    updates = plan_each(config, [put(store, {group: [sample()] for group in range(count)})])
    assert len(updates[0][0]) == micro_batches
    return updates


# Activation checkpointing


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_changes_no_gradient(mode: str, kind: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", kind=kind, layers=3)
    found = {}
    for setting in ("none", mode):
        config = make_config(folder, trainer={"activation_checkpointing": setting}, rollout={"max_tokens": 6})
        store = SharedMemoryStore(tmp_path / f"store-{setting}")
        draw = random.Random(1)
        groups = {
            g: [make_sample([1, 2], [draw.randrange(24) for _ in range(6)], [-3.0] * 6, draw.random()) for _ in "ab"]
            for g in range(3)
        }
        engine = load_engine(config, store)
        noted = note_gradients(engine.policy)
        engine.train(plan_each(config, [put(store, groups)]), 10)
        (found[setting],) = noted
    assert distance(found[mode], found["none"]) <= 1e-6


class Operators(TorchDispatchMode):
    """Counts the operators that are really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[operator._schema.name] += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "products", "attentions"), [("none", 0, 0), ("full", 6, 1), ("selective", 3, 0)])
def test_a_layer_computes_again_what_its_mode_says(mode: str, products: int, attentions: int, model: Path) -> None:
    """Of a Qwen3 layer's seven matrix products, whose last one nobody needs again, and its one attention."""
    policy = load_policy(model).train()
    policy.decoder.layers[2] = checkpointed(policy.decoder.layers[2], mode)
    row = pack([(list(range(9)), [[1]])])
    logprobs, _ = policy(row, 1.0, 64)
    with Operators() as computed:
        logprobs.sum().backward()
    layers = len(policy.decoder.layers)
    output_head = 3  # its logits again and two gradients
    assert computed.counts["aten::mm"] == 2 * 7 * layers + products + output_head
    assert computed.counts["aten::_scaled_dot_product_flash_attention_for_cpu"] == attentions


# The predicted peak


def counted(command: Callable[[], Any]) -> int:
    """The most bytes that the allocator had given out at once meanwhile, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        command()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    now = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top


CASES: dict[str, dict[str, Any]] = {
    "float32": {"budget": 512, "length": 128},
    "bfloat16": {"budget": 2048, "length": 512, "dtype": "bfloat16"},
    "full": {"budget": 1024, "length": 1024, "trainer": {"activation_checkpointing": "full"}},
    "selective": {
        "budget": 512,
        "length": 64,
        "dtype": "bfloat16",
        "trainer": {"activation_checkpointing": "selective"},
    },
    "a small micro-batch": {"budget": 64, "length": 64, "trainer": {"activation_checkpointing": "full"}},
    "bfloat16 weights": {"budget": 256, "length": 256, "dtype": "bfloat16", "trainer": {"master_dtype": "bfloat16"}},
    "an adapter": {"budget": 512, "length": 128, "dtype": "bfloat16", "lora": {"rank": 4}},
    "entropy bonus": {"budget": 512, "length": 128, "algorithm": {"entropy_coef": 0.1}},
}


@pytest.mark.parametrize("case", list(CASES))
def test_the_predicted_peak_is_what_the_allocator_counts(case: str, model: Path, tmp_path: Path) -> None:
    options = dict(CASES[case])
    config = config_of(model, options.pop("budget"), options.pop("length"), **options)
    store = SharedMemoryStore(tmp_path / "store")
    updates = updates_of(config, store)
    engine = load_engine(config, store)
    engine.train(updates, 10)  # makes the moments
    learning = [p for p in engine.policy.module.parameters() if p.requires_grad]
    held = [*engine.policy.module.parameters(), *learning, *learning]  # and the moments
    measured = sum(p.numel() * p.element_size() for p in held) + counted(lambda: engine.train(updates, 10))
    bound = 0.2 if config.lora.rank else 0.1  # the adapter is not counted
    assert predict(config, CPU).total == pytest.approx(measured, rel=bound)


def kept_by_compiled(config: Any, row: Packed, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that a forward pass keeps for the backward pass, beside parameters. Graphs are cut as Inductor cuts them."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition"))
    policy = Policy(AutoModelForCausalLM.from_config(config, attn_implementation=packed.FLASH, dtype=torch.bfloat16))
    compile_layers(decoder_layers(policy.decoder))
    kept: dict[int, torch.UntypedStorage] = {}
    given = {parameter.untyped_storage()._cdata for parameter in policy.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy(row, 1.0, 64)
    return sum(storage.nbytes() for key, storage in kept.items() if key not in given)


@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig])
def test_a_compiled_layer_is_taken_to_keep_what_the_compiler_keeps(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world()

    def attend(query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return query.clone(), query.new_zeros((query.shape[1], len(query)), dtype=torch.float32), None, None, None

    torch._dynamo.reset()
    row = pack([([1], [[2] * 42]), ([1], [[2] * 42])])
    found, predicted = [], []
    for layers in (2, 4):
        shape = {**SHAPE, "hidden_size": 256, "intermediate_size": 768, "head_dim": 128}
        config = kind(**shape, vocab_size=97, num_hidden_layers=layers)
        with monkeypatch.context() as patched:
            patched.setattr(flash, "forward_kernel", torch.compiler.disable(attend))
            found.append(kept_by_compiled(config, row, patched))
        with FakeTensorMode():
            policy = Policy(
                AutoModelForCausalLM.from_config(config, attn_implementation=packed.FLASH, dtype=torch.bfloat16)
            )
            given = memory.moved(row, CPU, data=False)
            predicted.append(memory.measured_pass(policy, given, 1.0, 64, False, fused=True).activations)
    assert predicted[1] - predicted[0] == pytest.approx(found[1] - found[0], rel=0.02)


def test_the_benchmark_finds_its_rows_within_fifteen_per_cent() -> None:
    world()
    benchmark = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "memory.py"))
    for setting in benchmark["settings"]("tiny"):
        prediction, measured = benchmark["measure"]("tiny", setting, CPU)
        assert prediction.total == pytest.approx(measured, rel=0.15), setting.label


def test_more_ranks_have_less_each_and_the_next_layer_on_its_way(model: Path) -> None:
    full = {"activation_checkpointing": "full"}
    one, four = (predict(config_of(model, 64, 64, trainer=full | {"ranks": ranks}), CPU) for ranks in (1, 4))
    for name in ("parameters", "gradients", "optimizer state"):
        assert four.parts[name] == one.parts[name] // 4
    assert four.parts["activations"] == one.parts["activations"]
    layer = load_policy(model).decoder.layers[0]
    whole = "unsharded parameters and gradients"
    assert four.parts[whole] - one.parts[whole] == 4 * sum(p.numel() for p in layer.parameters())


def test_context_ranks_shard_and_replicas_do_not(model: Path) -> None:
    found = [
        predict(config_of(model, 64, 64, trainer={"ranks": 2, split: 2}), CPU).parts["parameters"]
        for split in ("context_parallel", "replicas")
    ]
    assert found[1] == 2 * found[0]


def test_tensor_ranks_split_layers_and_the_positions_of_the_head(model: Path) -> None:
    trainer = {"logprob_chunk": 4096}
    one = predict(config_of(model, 1024, 1024, trainer=trainer), CPU)
    two = predict(config_of(model, 1024, 1024, trainer=trainer | {"ranks": 2, "tensor_parallel": 2}), CPU)
    embedding = 4 * 1024 * 64
    assert two.parts["parameters"] - embedding == pytest.approx((one.parts["parameters"] - embedding) / 2, rel=0.01)
    assert one.parts["activations"] / 2 < two.parts["activations"] < 0.8 * one.parts["activations"]
    assert two.parts["logits chunk"] == pytest.approx(one.parts["logits chunk"] / 2, rel=0.1)


def test_offloaded_parts_are_not_on_the_device(model: Path) -> None:
    parts = {
        offload: predict(config_of(model, 512, 128, trainer={"cpu_offload": offload}), CPU).parts
        for offload in ("none", "optimizer", "all")
    }
    assert parts["none"]["optimizer state"] and parts["none"]["parameters"]
    assert not parts["optimizer"]["optimizer state"] and parts["optimizer"]["parameters"]
    assert not parts["all"]["optimizer state"] and not parts["all"]["parameters"]


def test_other_models_count(model: Path, tmp_path: Path) -> None:
    """A reference in the dtype of the passes; a critic with gradients and moments, without an output head."""
    untied = save_model(tmp_path / "untied", vocabulary=1000)
    plain = predict(config_of(untied, 64, 64), CPU).parts["other models, workspaces"]
    both = config_of(untied, 64, 64, algorithm={"kl_coef": 0.1, "advantage": "gae"})
    found = predict(both, CPU).parts["other models, workspaces"]
    policy = load_policy(untied)
    everything = sum(p.numel() for p in policy.parameters())
    head, norm = policy.model.lm_head.weight.numel(), 32
    reference = 4 * everything + 4 * (2 * head + norm)  # its embeddings, head and norm are whole after a forward pass
    critic = 16 * (everything - head) + 4 * (head + norm)
    assert plain == 0 and found == reference + critic


def test_the_table_has_all_parts_and_the_device(model: Path) -> None:
    text = table(config_of(model, 512, 128), CPU)
    assert text.startswith("predicted memory of each of 1 trainer ranks at its peak, in the backward pass:")
    for name in ("parameters", "optimizer state", "activations", "logits chunk", "total", "the device has"):
        assert f"  {name} " in text


def test_a_model_that_cannot_be_predicted_is_said_and_stops_nothing(model: Path, tmp_path: Path) -> None:
    config = config_of(model, 512, 128)
    text = table(config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path)})}), CPU)
    assert text.startswith("memory cannot be predicted for this model: ")


def test_a_prediction_is_of_a_dry_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.toml"
    file.write_text(dump(make_config(model)))
    assert main(["train", str(file), "--memory"]) == 2
    assert "--memory is for --dry-run" in capsys.readouterr().err


def test_the_measured_peak_is_a_metric(model: Path, tmp_path: Path) -> None:
    config = config_of(model, 64, 64)
    store = SharedMemoryStore(tmp_path / "store")
    peak = load_engine(config, store).train(updates_of(config, store), 10)["metrics"]["train/memory_peak_gib"]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    assert 0.1 < peak <= resident + 0.01


# Out of memory


@contextmanager
def address_space(headroom: int) -> Iterator[None]:
    """This process may map ``headroom`` bytes more than it has."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmSize:"))
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(line.split()[1]) * 1024 + headroom, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_out_of_memory_says_phase_numbers_and_settings(model: Path, tmp_path: Path) -> None:
    config = config_of(model, 8192, 4096, trainer={"logprob_chunk": 1 << 20})
    store = SharedMemoryStore(tmp_path / "store")
    engine = load_engine(config, store)
    updates = updates_of(config, store, 1)
    with address_space(48 << 20), pytest.raises(EngineError) as raised:
        engine.train(updates, 10)
    text = str(raised.value)
    assert text.startswith("out of memory in the forward pass: ")
    assert "GiB more were asked for" in text and "GiB were in use" in text
    assert "Predicted at the peak, with rollout.max_tokens in a response: " in text
    assert "of which activations" in text
    assert (
        'Set trainer.activation_checkpointing = "full" (now "none"), or trainer.tokens_per_micro_batch = 4096' in text
    )


@pytest.mark.parametrize(
    ("objective", "option"),
    [("ppo", "rollout.max_tokens in a response"), ("sft", "batch.max_length in a sequence")],
)
def test_the_option_that_out_of_memory_names_is_the_users(objective: str, option: str, model: Path) -> None:
    config = make_config(model, algorithm={"objective": objective})
    prediction = Prediction("the backward pass", {"activations": 1 << 30})
    assert summary(prediction, config).startswith(f"Predicted at the peak, with {option}: 1.000 GiB")


def test_a_reward_model_without_memory_is_told_nothing_of_logits(model: Path) -> None:
    trainer = {"activation_checkpointing": "full"}
    config = make_config(model, trainer=trainer, algorithm={"objective": "bradley_terry"})
    text = explanation(SimpleNamespace(config=config, device=CPU, phase="training"), 0, "can't allocate memory")
    assert text.startswith("out of memory in training: ") and "Predicted" not in text
    assert text.endswith("GiB were in use. Set trainer.tokens_per_micro_batch = 2048 (now 4096)")


def test_other_errors_pass_unchanged(model: Path, tmp_path: Path) -> None:
    engine = load_engine(config_of(model, 64, 64), SharedMemoryStore(tmp_path / "store"))
    with pytest.raises(RuntimeError, match="shape|size") as raised:
        engine.forward = lambda *_: torch.ones(2) + torch.ones(3)  # type: ignore[method-assign]
        engine.logprobs([{"prompt_ids": [1], "response_ids": [2]}])
    assert not isinstance(raised.value, EngineError)


@pytest.mark.parametrize(
    ("largest", "device", "trainer", "settings"),
    [
        ("activations", "cpu", {}, ["activation_checkpointing", "tokens_per_micro_batch"]),
        (
            "activations",
            "cpu",
            {"activation_checkpointing": "full"},
            ["tokens_per_micro_batch", "logprob_chunk"],
        ),
        ("logits chunk", "cuda", {}, ["logprob_chunk", "tokens_per_micro_batch"]),
        ("optimizer state", "cuda", {}, ["cpu_offload", "ranks"]),
        ("optimizer state", "cuda", {"cpu_offload": "all"}, ["ranks", "master_dtype"]),
        ("parameters", "cpu", {}, ["master_dtype", "activation_checkpointing"]),
    ],
)
def test_the_advice_is_two_settings_for_what_is_largest(
    largest: str, device: str, trainer: dict[str, Any], settings: list[str], model: Path
) -> None:
    text = advice(make_config(model, trainer=trainer), largest, torch.device(device))
    assert [part.split(" ")[0] for part in text.split("trainer.")[1:]] == settings


# Offload and settings


def test_offloaded_parameters_give_the_same_gradients(model: Path) -> None:
    """On a CPU the host's memory is the device's: only the way is another."""
    found = []
    for offload in (False, True):
        mesh = Mesh(make_config(model).trainer, "cpu")
        policy = parallelize(Policy(load_model(model)), mesh, CPU, torch.float32, offload=offload)
        policy(row_of(64, 16), 1.0, 64)[0].sum().backward()
        found.append({name: p.grad.full_tensor() for name, p in policy.named_parameters()})  # type: ignore[union-attr]
    assert distance(found[1], found[0]) == 0


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"cpu_offload": "all", "device": "cpu"}, "trainer.cpu_offload = 'all' with trainer.device = 'cpu'"),
        ({"optimizer": "adamw_8bit", "master_dtype": "bfloat16"}, "it takes float32 weights on the device"),
        ({"optimizer": "adamw_8bit"}, "pip install --no-deps torchao"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    trainer: dict[str, Any], said: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vime.config.memory.find_spec", lambda name: None)
    assert any(said in fault for fault in impossible(make_config(model, trainer=trainer)))


def test_offload_without_a_gpu_is_refused_by_the_engine(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="there is no GPU"):
        load_engine(make_config(model, trainer={"cpu_offload": "optimizer"}), SharedMemoryStore(tmp_path / "store"))
