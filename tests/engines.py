"""The torch engine in this process, one rank of one, on tiny random models; the gradients its learners step with are noted."""

from __future__ import annotations

import atexit
import functools
import random
import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig
from transformers.utils import logging

from tests.tiny import make_config
from vime.config.sections import Config
from vime.loop import plan_updates
from vime.rollout.outcome import Outcome, store_key
from vime.sample import Sample, VersionSpan
from vime.store.shared_memory import SharedMemoryStore
from vime.training.engine import TorchEngine
from vime.training.learner import Learner, full_state
from vime.training.pieces import average_whole, full, sharded_parameters
from vime.training.plan import PlanJson, Row
from vime.training.policy import Policy, load_model
from vime.training.stored import Stored, replace

VOCABULARY = 24
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SIZES = ([[1, 1, 1], [2, 1]], [[1, 2, 1, 1], [1, 1]])  # samples of each rollout of each group of each of two updates
MEASURED = {"train/tokens_per_s", "train/memory_peak_gib"}  # metrics that are of the machine, not of the mathematics
Gradients = list[dict[str, torch.Tensor]]  # an entry a step, by plain parameter name


@functools.cache
def world() -> None:
    """Makes this process a process group of one, for the rest of the session; such small sums are slower on several threads."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)


def save_model(
    folder: Path, seed: int = 0, kind: str = "qwen3", spread: float = 0.2, layers: int = 1, vocabulary: int = VOCABULARY
) -> Path:
    """A random model of ``kind`` "qwen3" (untied), "llama" (tied) or "moe" (Qwen3-MoE; layer 1 of several has no experts);
    ``spread`` is the standard deviation of its weights."""
    world()
    options = {**SHAPE, "vocab_size": vocabulary, "num_hidden_layers": layers, "initializer_range": spread}
    config: Any
    if kind == "qwen3":
        config = Qwen3Config(**options, tie_word_embeddings=False)
    elif kind == "llama":
        config = LlamaConfig(**options, tie_word_embeddings=True)
    else:
        experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
        config = Qwen3MoeConfig(**options, **experts, mlp_only_layers=[1], tie_word_embeddings=False)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms too, which would all be one
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same model as transformers itself runs it."""
    world()
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    ).eval()


def load_policy(folder: Path, dtype: torch.dtype = torch.float32) -> Policy:
    """The folder's model as the engine has it, read whole and not split."""
    world()
    policy = Policy(load_model(folder, dtype))
    replace(policy, Stored.read)
    return policy


def engine_config(model: Path, **sections: dict[str, Any]) -> Config:
    """Steps of gradient descent nearly: under a large eps AdamW does not blow the rounding of a small gradient up."""
    trainer = {"learning_rate": 0.3, "eps": 1.0, "max_grad_norm": 2.0, **sections.pop("trainer", {})}
    return make_config(model, trainer=trainer, **sections)


def load_engine(config: Config, store: SharedMemoryStore, state: Path | None = None) -> TorchEngine:
    world()
    engine = TorchEngine(config, store, torch.device("cpu"))
    engine.load(config.model.path, str(state) if state else None)
    return engine


def save_engine(engine: TorchEngine, folder: Path, model: bool = False) -> Path:
    """A folder that holds the engine's state, written to its end."""
    folder.mkdir()
    engine.save(str(folder), model)
    engine.saved()
    return folder


def weights(module: Any) -> dict[str, torch.Tensor]:
    """A copy of the module's whole parameters by plain name."""
    return full_state(module, torch.float32, True)


def note_gradients(learner: Learner[Any]) -> Gradients:
    """A list to which every step of the learner adds the gradients it is taken with."""
    noted: Gradients = []
    step = learner.step

    def noting(total_steps: int) -> torch.Tensor:
        parameters = list(sharded_parameters(learner.module))
        average_whole([parameter for _, parameter in parameters], learner.mesh)
        held = {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}
        noted.append({name: full(gradient).clone() for name, gradient in held.items()})
        return step(total_steps)

    learner.step = noting  # type: ignore[method-assign]
    return noted


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """|found - wanted| / |wanted| over all tensors."""
    assert found.keys() == wanted.keys()
    apart = sum((found[name].double() - wanted[name].double()).square().sum().item() for name in wanted)
    return (apart / max(sum(tensor.double().square().sum().item() for tensor in wanted.values()), 1e-30)) ** 0.5


def make_sample(
    prompt: list[int],
    response: list[int],
    logprobs: Sequence[float],
    reward: float,
    rollout: int = 0,
    mask: Sequence[int] = (),
) -> Sample:
    span = VersionSpan(0, 0, len(response))
    return Sample(
        prompt, response, list(logprobs), (span,), "stop", "", list(mask) or [1] * len(response), reward, {}, rollout
    )


def put(store: SharedMemoryStore, groups: dict[int, list[Sample]]) -> list[Outcome]:
    """Stores the groups and gives what the collector would."""
    outcomes = []
    for group, samples in groups.items():
        key = store_key(group)
        store.put(key, samples)
        rows = [
            Row(key, i, s.rollout, len(s.prompt_ids), len(s.response_ids), sum(s.loss_mask), s.reward or 0.0)
            for i, s in enumerate(samples)
        ]
        outcomes.append(Outcome(group, None, rows, [row.reward for row in rows], 0, [], [], [], []))
    return outcomes


def plan_each(config: Config, parts: Sequence[list[Outcome]]) -> list[PlanJson]:
    """One update a part."""
    return [update for part in parts for update in plan_updates(part, config)]


def random_groups(
    seed: int, sizes: Sequence[Sequence[int]], longest: int = 6, first: int = 0, masked: bool = True
) -> dict[int, list[Sample]]:
    """Random token ids, rewards in (0, 1) and log-probabilities near -3.

    ``sizes`` has, for each group, how many samples each of its rollouts makes. Prompts and responses have up to ``longest``
    tokens, of which some, but not all, are not trained.
    """
    draw = random.Random(seed)
    groups: dict[int, list[Sample]] = {}
    for group, rollouts in enumerate(sizes, first):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, longest))]
        groups[group] = []
        for rollout, count in enumerate(rollouts):
            for _ in range(count):
                length = draw.randint(1, longest)
                mask = [int(not masked or draw.random() < 0.7) for _ in range(length)]
                mask[draw.randrange(length)] = 1
                response = [draw.randrange(VOCABULARY) for _ in range(length)]
                logprobs = [draw.gauss(-3, 0.7) for _ in range(length)]
                groups[group].append(make_sample(prompt, response, logprobs, draw.random(), rollout, mask))
    return groups


def routed(groups: dict[int, list[Sample]], seed: int, layers: int, experts: int) -> dict[int, list[Sample]]:
    """The samples with two random experts a token and layer, as a server would tell them."""
    draw = np.random.default_rng(seed)
    for sample in chain(*groups.values()):
        tokens = len(sample.prompt_ids) + len(sample.response_ids) - 1
        every = [[draw.permutation(experts)[:2] for _ in range(layers)] for _ in range(tokens)]
        sample.experts = np.array(every).astype(np.uint8)
    return groups
