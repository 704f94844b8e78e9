"""Small inputs, as a run would give them: a tokenizer, a task, samples, a server that answers, tensors of a micro-batch."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vime.config.sections import Config
from vime.inference.client import Completion
from vime.inference.gate import Gate
from vime.inference.requests import Requests
from vime.rewards.scoring import Scored
from vime.rollout.generate import Context
from vime.sample import Group, Sample, Task, VersionSpan
from vime.store.shared_memory import SharedMemoryStore
from vime.training.batch import Batch
from vime.training.losses import Tokens
from vime.training.packed import pack
from vime.training.plan import Row, weigh

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REPLY = "It is 4."
TASK = Task(
    "contract/0", ({"role": "user", "content": "What is 2 + 2?"},), "4", {"kind": "sum", "rm_type": "math", "level": 1}
)
SAMPLES = 4  # of a group


@cache
def tokenizer() -> Any:
    return make_tokenizer()


def make_tokenizer() -> Any:
    """Of bytes and a few special tokens, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", pad_token="<|end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]})
    made.chat_template = TEMPLATE
    return made


def config(**slime: Any) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": "contract"},
        "data": {"source": "contract.jsonl"},
        "rollout": {"groups": 2, "samples_per_group": SAMPLES, "max_tokens": 64},
        "run": {"dir": str(Path(tempfile.gettempdir(), "vime-contract"))},
        "slime": slime,
    }
    return Config.model_validate(tree)


class Front:
    """A server that says REPLY, whatever it is asked, cut to what it may say."""

    url, version = "http://127.0.0.1:1", 3

    async def generate(self, prompt_ids: list[int], sampling: dict[str, Any], *_: Any, **__: Any) -> Completion:
        said = tokenizer().encode(REPLY + "<|end|>", add_special_tokens=False)
        ids = said[: sampling["max_tokens"]]
        reason = "stop" if len(ids) == len(said) else "length"
        return Completion(ids, [-0.5] * len(ids), (VersionSpan(self.version, 0, len(ids)),), reason)


async def right(context: Context, task: Task, sample: Sample) -> Scored:
    """A reward for runs of which another thing is looked at."""
    return float(task.answer is not None and task.answer in sample.text), {}


def context(given: Config, slime: Any = None) -> Context:
    front: Any = Front()
    sampling = {"temperature": 1.0, "max_tokens": given.rollout.max_tokens, "stop_token_ids": []}
    requests = Requests(front, Gate(usable=True), given.rollout)
    made = Context(requests, tokenizer(), right, sampling, session_id="g0", group=0, slime=slime)
    if slime is None or not slime.scores:
        return made
    return replace(made, score=slime.score, group_score=slime.group_score)


def response(number: int, reward: float | None, prompt: list[int]) -> Sample:
    """Responses of several lengths; one of two turns, with what a tool said masked, one that was cut."""
    text = [REPLY, "4", "I think that it is 5, or so it seems to me", ""][number % 4]
    ids = tokenizer().encode((text or " ") + "<|end|>", add_special_tokens=False)
    mask = [int(number != 1 or i != len(ids) // 2) for i in range(len(ids))]
    spans = (VersionSpan(3, 0, len(ids)),)
    reason = "length" if number == 2 else "stop"
    return Sample(prompt, ids, [-0.25] * len(ids), spans, reason, text, mask, reward, rollout=number)


def group(number: int, rewards: list[float | None]) -> Group:
    prompt = tokenizer().apply_chat_template(
        list(TASK.messages), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    samples = [response(i, reward, list(prompt)) for i, reward in enumerate(rewards)]
    return Group(number, TASK, samples)


def batch(store: SharedMemoryStore) -> Batch:
    """A micro-batch of two groups, its payloads in the store."""
    rows, groups, samples = [], [], []
    for number in range(2):
        made = group(number, [1.0, 0.0, 0.5, 0.0])
        store.put(f"g{number}", made.samples)
        groups.append((made.samples[0].prompt_ids, [one.response_ids for one in made.samples]))
        for index, one in enumerate(made.samples):
            rows.append(
                Row(
                    f"g{number}",
                    index,
                    index,
                    len(one.prompt_ids),
                    len(one.response_ids),
                    sum(one.loss_mask),
                    one.reward or 0.0,
                )
            )
            samples.append(one)
    rows = weigh(rows, "token")

    def tokens(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(value, dtype=float) for value in values])).to(dtype)

    def spread(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return tokens([[value] * row.response_tokens for value, row in zip(values, rows, strict=True)], dtype)

    mask = tokens([one.loss_mask for one in samples], torch.bool)
    behaviour = tokens([one.logprobs for one in samples], torch.float32)
    noise = torch.randn(len(behaviour), generator=torch.Generator().manual_seed(0)) * 0.1
    return Batch(
        rows,
        pack(groups),
        behaviour=behaviour,
        mask=mask,
        weights=spread([row.weight for row in rows], torch.float32) * mask,
        sequence=spread([float(i) for i in range(len(rows))], torch.long),
        group=spread([float(row.key == "g1") for row in rows], torch.long),
        advantages=spread([row.reward - 0.375 for row in rows], torch.float32),
        proximal=behaviour + noise,
        reference=behaviour - noise,
        of_update={"samples": len(rows), "tokens": int(mask.sum())},
    )


def seen(made: Batch) -> Tokens:
    """What an objective sees of it, with gradients."""
    assert made.proximal is not None
    logprobs = (made.proximal + 0.05).requires_grad_()
    return made.seen(logprobs, torch.full_like(made.behaviour, 0.7), "proximal")
