"""Experts are forced, noted and balanced: against transformers alone, however tokens are packed, split or recomputed."""

from __future__ import annotations

import base64
import io
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from tests.engines import (
    MEASURED,
    SHAPE,
    SIZES,
    Gradients,
    distance,
    engine_config,
    load_engine,
    make_sample,
    note_gradients,
    plain_model,
    plan_each,
    put,
    random_groups,
    routed,
    save_engine,
    save_model,
    weights,
)
from vime.config.sections import Config
from vime.inference.client import GENERATE, Completion, Server
from vime.inference.commands import server_command
from vime.loop import plan_updates
from vime.sample import Sample
from vime.store.shared_memory import SharedMemoryStore
from vime.training.engine import DTYPES
from vime.training.packed import pack
from vime.training.routing import Routing, RoutingError, install

BOUND = 1e-5
EXPERTS, TOP_K, ROUTED = 6, 2, [0, 2]  # of the "moe" model with three layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("moe") / "model", 3, "moe", layers=3)


# What routers make of experts that are given, by the formula of each: scores of chosen experts [T, k] from logits [T, E]


def normalised(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    chosen = torch.softmax(logits, -1).gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True)


def softmax_of_chosen(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits.gather(-1, experts), -1)


def sigmoids(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    chosen = torch.sigmoid(logits).gather(-1, experts)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * 2.5


COMMON = {**SHAPE, "vocab_size": 24, "num_hidden_layers": 2, "initializer_range": 0.3, "num_experts_per_tok": TOP_K}
OWN = {"moe_intermediate_size": 16, "norm_topk_prob": True}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3-moe": (Qwen3MoeConfig(**COMMON, **OWN, num_experts=EXPERTS), normalised),
    "mixtral": (MixtralConfig(**COMMON, num_local_experts=EXPERTS), normalised),
    "gpt-oss": (GptOssConfig(**COMMON, num_local_experts=EXPERTS), softmax_of_chosen),
    "granite": (GraniteMoeConfig(**COMMON, num_local_experts=EXPERTS), softmax_of_chosen),
    "deepseek-v3": (  # chooses groups of experts first, and by other scores than it weighs them with
        DeepseekV3Config(
            **{**COMMON, "num_key_value_heads": 4}, **OWN, **LATENT, n_routed_experts=EXPERTS, n_group=2, topk_group=1,
            first_k_dense_replace=0,
        ),
        sigmoids,
    ),
}  # fmt: skip


def by_formula(model: Any, experts: torch.Tensor, formula: Any) -> None:
    """Replaces the forward of every router by the formula over the given experts [T, layers, k]."""
    names = ("gate", "router")
    for number, layer in enumerate(model.model.layers):
        block = next(m for m in layer.modules() if any(hasattr(m, name) for name in names) and hasattr(m, "experts"))
        router = next(getattr(block, name) for name in names if hasattr(block, name))
        reversed_output = type(router).__name__.startswith("Granite")

        def forward(
            hidden: torch.Tensor, router: Any = router, number: int = number, turned: bool = reversed_output
        ) -> Any:
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, getattr(router, "bias", None))
            scores = formula(logits, experts[:, number])
            return (experts[:, number], scores, logits) if turned else (logits, scores, experts[:, number])

        router.forward = forward


def logits_and_gradients(model: Any, ids: torch.Tensor, **extra: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False, **extra).logits
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_weighs_the_experts_it_is_given_as_its_own_formula_does(family: str) -> None:
    config, formula = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
    model.set_experts_implementation("eager")  # others know no float64
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    ids = torch.randint(24, (1, 11))
    plain, gradients = logits_and_gradients(model, ids)
    routers = install(model)
    assert (routers.layers, routers.depth, routers.top_k, routers.experts) == ([0, 1], 2, TOP_K, EXPERTS)

    noted = Routing()
    assert torch.equal(logits_and_gradients(model, ids, routing=noted)[0], plain)
    assert torch.equal(logits_and_gradients(model, ids)[0], plain)
    again, same = logits_and_gradients(model, ids, routing=Routing(noted.experts()))
    assert torch.allclose(again, plain, atol=1e-12) and distance(same, gradients) < 1e-10

    forced = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(22)]).view(11, 2, TOP_K)
    found, its = logits_and_gradients(model, ids, routing=Routing(forced))
    by_formula(model, forced, formula)
    wanted, wanted_gradients = logits_and_gradients(model, ids)
    assert torch.allclose(found, wanted, atol=1e-5) and not torch.allclose(found, plain, atol=1e-2)
    assert distance(its, wanted_gradients) < 1e-5  # some routers round to float32 between


def test_a_model_without_routers_is_refused(tmp_path: Path) -> None:
    config = engine_config(save_model(tmp_path / "dense"), algorithm={"router_aux_coef": 0.1})
    with pytest.raises(RoutingError, match="Qwen3ForCausalLM declares no router: set algorithm.router_aux_coef = 0"):
        load_engine(config, SharedMemoryStore(tmp_path / "store"))


# The engine


class Plain:
    """Cross-entropy and load balance in float64: transformers alone, one sequence at a time, its own router logits."""

    def __init__(self, config: Config) -> None:
        self.coef, self.replay = config.algorithm.router_aux_coef, config.algorithm.router_replay
        self.rate, self.eps, self.clip = config.trainer.learning_rate, config.trainer.eps, config.trainer.max_grad_norm
        self.model = plain_model(Path(config.model.path), torch.float64)
        self.model.set_experts_implementation("eager")  # others know no float64
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), self.rate, config.trainer.betas, self.eps, weight_decay=0.0
        )
        self.routers = [self.model.model.layers[layer].mlp.gate for layer in ROUTED]
        self.forced: list[torch.Tensor] | None = None
        for number, router in enumerate(self.routers):
            own = router.forward

            def forward(hidden: torch.Tensor, router: Any = router, number: int = number, own: Any = own) -> Any:
                if self.forced is None:
                    return own(hidden)
                logits = F.linear(hidden, router.weight)
                return logits, normalised(logits, self.forced[number]), self.forced[number]

            router.forward = forward

    def run(self, sample: Sample, forced: Any) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Log-probabilities [n], and by router probabilities [n, E] and choices [n, k], where trained tokens are predicted."""
        self.forced = forced
        ids = torch.tensor([sample.prompt_ids + sample.response_ids[:-1]])
        output = self.model(input_ids=ids, output_router_logits=True)
        first, trained = len(sample.prompt_ids) - 1, torch.tensor(sample.loss_mask).bool()
        logprobs = torch.log_softmax(output.logits[0, first:], -1)[range(len(trained)), sample.response_ids]
        every = [torch.softmax(logits, -1) for logits in output.router_logits]
        chosen = forced or [p.topk(TOP_K).indices for p in every]
        self.noted = chosen
        return logprobs[trained], [p[first:][trained] for p in every], [c[first:][trained] for c in chosen]

    def experts_of(self, group: list[Sample], sample: Sample) -> Any:
        """Experts the sample is trained with: a prompt's are those of its group's first sample."""
        if self.replay == "none":
            return None
        own = torch.from_numpy(sample.experts[:, ROUTED].astype(np.int64))
        prompt = len(sample.prompt_ids)
        shared = torch.from_numpy(group[0].experts[:prompt, ROUTED].astype(np.int64))
        return list(torch.cat([shared, own[prompt:]]).unbind(1))

    def train(self, updates: list[list[list[Sample]]]) -> tuple[list[float], list[torch.Tensor], Gradients]:
        """Load-balancing loss and shares [R, E] of each update, and its gradients."""
        shares = []
        with torch.no_grad():
            if self.replay == "trainer":
                for sample in chain(*chain(*updates)):
                    self.run(sample, None)
                    every = [np.zeros((len(self.noted[0]), TOP_K), dtype=np.uint8)] * 3
                    for layer, noted in zip(ROUTED, self.noted, strict=True):
                        every[layer] = noted.numpy().astype(np.uint8)
                    sample.experts = np.stack(every, axis=1)
            for update in updates:
                chosen = [self.run(s, self.experts_of(group, s))[2] for group in update for s in group]
                counts = [torch.cat([c[r] for c in chosen]).flatten().bincount(minlength=EXPERTS) for r in range(2)]
                shares.append(torch.stack([count / count.sum() for count in counts]))
        losses, gradients = [], []
        for update, share in zip(updates, shares, strict=True):
            outputs = [self.run(s, self.experts_of(group, s)) for group in update for s in group]
            logprobs = torch.cat([output[0] for output in outputs])
            means = torch.stack([torch.cat([o[1][r] for o in outputs]).mean(0) for r in range(2)])
            balance = EXPERTS * (share * means).sum(-1).mean()
            self.optimizer.zero_grad()
            (-logprobs.mean() + self.coef * balance).backward()
            gradients.append({n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None})
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            losses.append(balance.item())
        return losses, shares, gradients


def setting(folder: Path, replay: str, coef: float, **trainer: Any) -> Config:
    algorithm = {
        "objective": "sft",
        "advantage": "constant",
        "router_aux_coef": coef,
        "router_replay": replay,
    }
    return engine_config(folder, algorithm=algorithm, trainer=trainer)


WAYS: dict[str, dict[str, Any]] = {
    "packed": {},
    "a row each": {"tokens_per_micro_batch": 1},
    "recomputed": {"tokens_per_micro_batch": 25, "activation_checkpointing": "full"},
    "recomputed selectively": {"tokens_per_micro_batch": 25, "activation_checkpointing": "selective"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("replay", "coef"), [("none", 0.5), ("server", 0.5), ("server", 0.0), ("trainer", 0.5)])
def test_two_steps_are_those_of_plain_transformers(
    replay: str, coef: float, way: str, folder: Path, tmp_path: Path
) -> None:
    config = setting(folder, replay, coef, **WAYS[way])
    store = SharedMemoryStore(tmp_path / "store")
    parts = [random_groups(7 + i, sizes, first=10 * i) for i, sizes in enumerate(SIZES)]
    if replay == "server":
        parts = [routed(part, i, 3, EXPERTS) for i, part in enumerate(parts)]
    updates = plan_each(config, [put(store, part) for part in parts])
    engine, plain = load_engine(config, store), Plain(config)
    noted = note_gradients(engine.policy)
    metrics = engine.train(updates, 10)["metrics"]
    losses, shares, gradients = plain.train([list(part.values()) for part in parts])
    assert max(distance(*both) for both in zip(noted, gradients, strict=True)) < BOUND
    assert metrics["train/router_aux_loss"] == pytest.approx(sum(losses) / 2, rel=BOUND)
    loads = [share * EXPERTS for share in shares]
    assert metrics["train/router_load_max"] == pytest.approx(sum(x.amax(1).mean().item() for x in loads) / 2)
    assert metrics["train/router_load_min"] == pytest.approx(sum(x.amin(1).mean().item() for x in loads) / 2)
    assert distance(weights(engine.policy.module), dict(plain.model.named_parameters())) < BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_agrees_with_plain_transformers_in_a_check(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family][0], dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "model")
    algorithm = {"objective": "policy_gradient", "router_aux_coef": 0.5, "router_replay": "server"}
    config = engine_config(tmp_path / "model", algorithm=algorithm, trainer={"activation_checkpointing": "full"})
    store = SharedMemoryStore(tmp_path / "store")
    outcomes = put(store, routed(random_groups(7, SIZES[0]), 0, 2, EXPERTS))
    found = load_engine(config, store).compare(plan_updates(outcomes, config), str(tmp_path / "weights"))
    assert found["logprob_max"] < 1e-4 and found["gradient"] < 5e-5 and found["split_gradient"] < 5e-5
    assert found["unreplayed_mean"] != pytest.approx(found["server_mean"], rel=1e-3)


def test_a_resumed_engine_goes_on_as_if_never_stopped(folder: Path, tmp_path: Path) -> None:
    """Moments of fused experts are saved fused, weights one expert at a time; both come back."""
    config, store = setting(folder, "none", 0.5), SharedMemoryStore(tmp_path / "store")
    batches = [plan_each(config, [put(store, random_groups(i, SIZES[0], first=10 * i))]) for i in range(2)]
    engine = load_engine(config, store)
    engine.train(batches[0], 10)
    save_engine(engine, tmp_path / "saved")
    resumed = load_engine(config, store, tmp_path / "saved")
    one, other = (e.train(batches[1], 10)["metrics"] for e in (engine, resumed))
    for name in one.keys() - MEASURED:
        assert other[name] == one[name], name
    found, wanted = weights(resumed.policy.module), weights(engine.policy.module)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_has_every_expert_by_itself_and_comes_back_bit_for_bit(
    dtype: str, folder: Path, tmp_path: Path
) -> None:
    engine = load_engine(setting(folder, "none", 0.5), SharedMemoryStore(tmp_path / "store"))
    engine.export(str(tmp_path / "out"), dtype)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    held = {name: tensor.to(DTYPES[dtype]) for name, tensor in weights(engine.policy.module).items()}
    for layer in ROUTED:
        mlp = f"model.layers.{layer}.mlp"
        fused = held[f"{mlp}.experts.gate_up_proj"]
        for expert in range(EXPERTS):
            gate, up = fused[expert].chunk(2)
            assert torch.equal(saved[f"{mlp}.experts.{expert}.gate_proj.weight"], gate)
            assert torch.equal(saved[f"{mlp}.experts.{expert}.up_proj.weight"], up)
            down = held[f"{mlp}.experts.down_proj"][expert]
            assert torch.equal(saved[f"{mlp}.experts.{expert}.down_proj.weight"], down)
    assert not any("gate_up_proj" in name for name in saved)
    assert all(tensor.dtype == DTYPES[dtype] for tensor in saved.values())
    again = dict(plain_model(tmp_path / "out", DTYPES[dtype]).named_parameters())
    assert again.keys() == held.keys() and all(torch.equal(again[name], held[name]) for name in held)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_comes_back_bit_for_bit_with_what_is_not_learned(
    family: str, checkpointing: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family][0], dtype=torch.float32)
    state = model.state_dict()
    for name, tensor in state.items():
        if "bias" in name:
            tensor.uniform_()
    model.save_pretrained(tmp_path / "model")
    config = setting(tmp_path / "model", "none", 0.5, activation_checkpointing=checkpointing)
    engine = load_engine(config, SharedMemoryStore(tmp_path / "store"))
    engine.export(str(tmp_path / "out"), "float32")
    found = plain_model(tmp_path / "out").state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def test_a_server_that_shall_tell_its_experts_is_started_so(folder: Path) -> None:
    for replay in ("none", "server", "trainer"):
        words = server_command(setting(folder, replay, 0.0), 8000, 0, [])
        assert ("--enable-return-routed-experts" in words) == (replay == "server")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda experts: None, "sample g0/0 was stored with routed experts: none; the policy has 3 layers, 2 a token"),
        (lambda experts: experts[:, :2], "experts: 2 layers, 2 a token; the policy has 3 layers"),
        (lambda experts: experts[:, :, :1], "experts: 3 layers, 1 a token"),
        (lambda experts: experts + 200, r"sample g0/0 was routed to expert 20\d; the policy has 6"),
    ],
)
def test_a_sample_that_cannot_be_replayed_is_named(spoil: Any, message: str, folder: Path, tmp_path: Path) -> None:
    config, store = setting(folder, "server", 0.0), SharedMemoryStore(tmp_path / "store")
    groups = routed(random_groups(7, SIZES[0]), 0, 3, EXPERTS)
    groups[0][0].experts = spoil(groups[0][0].experts)
    engine = load_engine(config, store)
    with pytest.raises(RoutingError, match=message):
        engine.train(plan_each(config, [put(store, groups)]), 10)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_what_the_trainer_noted_is_replayed_from_a_servers_answer(
    kind: Any, folder: Path, run: Any, session: Any, tmp_path: Path
) -> None:
    """Over HTTP as vLLM writes it: the trainer's experts, told by a server, give the trainer's own log-probabilities; other
    experts do not. A stand-in serves: vLLM tells experts on GPUs only."""
    config, store = setting(folder, "server", 0.0), SharedMemoryStore(tmp_path / "store")
    engine = load_engine(config, store)
    prompt, response = [3, 1, 4, 1, 5], [9, 2, 6]
    noted = Routing()
    with torch.no_grad():
        packed = pack([(prompt, [response])])
        own = engine.forward(engine.policy.module, packed, noted)[0]
    told = np.zeros((7, 3, TOP_K), dtype=kind)
    told[:, ROUTED] = noted.experts().numpy()

    async def answer(_: web.Request) -> web.Response:
        buffer = io.BytesIO()
        np.save(buffer, told)
        content = [{"logprob": value, "token_id": token} for value, token in zip(own.tolist(), response, strict=True)]
        choice = {"token_ids": response, "finish_reason": "stop", "logprobs": {"content": content}}
        return web.json_response(
            {"choices": [{**choice, "routed_experts": base64.b64encode(buffer.getvalue()).decode()}]}
        )

    async def ask() -> Completion:
        application = web.Application()
        application.router.add_post(GENERATE, answer)
        async with TestServer(application) as server:
            return await Server(str(server.make_url("/")), session, 10).generate(prompt, {}, 10, routed=True)

    for wanted in (True, False):
        completion = run(ask())
        assert completion.experts is not None and completion.experts.dtype == kind
        sample = make_sample(prompt, response, completion.logprobs, 1.0)
        sample.experts = completion.experts
        found = engine.train(plan_each(config, [put(store, {0: [sample]})]), 10)["metrics"]
        assert (found["train/logprob_abs_diff_max"] < 1e-6) == wanted
        told = (told + 1) % EXPERTS
        engine = load_engine(config, store)
