"""The engine against the same algorithm by plain means: losses, gradients and weights of two batches of two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import (
    SIZES,
    Gradients,
    distance,
    engine_config,
    load_engine,
    note_gradients,
    plain_model,
    plan_each,
    put,
    random_groups,
    save_model,
    weights,
)
from vime.config.sections import Config
from vime.sample import Sample
from vime.store.shared_memory import SharedMemoryStore

BOUND = 1e-5


class Plain:
    """PPO as one would write it: transformers' own attention, one sequence at a time, loops over tokens, all in float64."""

    def __init__(self, config: Config) -> None:
        self.config, self.algorithm = config, config.algorithm
        self.policy = plain_model(Path(config.model.path), torch.float64)
        self.reference = plain_model(Path(config.reference.path or config.model.path), torch.float64)
        self.decoder = plain_model(Path(config.model.path), torch.float64).get_decoder()
        self.head = torch.nn.Linear(self.policy.config.hidden_size, 1, bias=False).double()
        torch.nn.init.zeros_(self.head.weight)
        head = {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}
        self.parameters = [dict(self.policy.named_parameters()), dict(self.decoder.named_parameters()) | head]
        rates = config.trainer.learning_rate, config.critic.learning_rate
        self.optimizers = [self.adam(list(p.values()), rate) for p, rate in zip(self.parameters, rates, strict=True)]

    def adam(self, parameters: list[torch.Tensor], learning_rate: float) -> torch.optim.Optimizer:
        section = self.config.trainer
        matrices = [p for p in parameters if p.ndim > 1]
        vectors = [p for p in parameters if p.ndim == 1]
        decays = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(decays, lr=learning_rate, betas=section.betas, eps=section.eps)

    def step(self, number: int, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """One step of the policy (0) or the critic (1); the gradients before clipping."""
        parameters = self.parameters[number]
        self.optimizers[number].zero_grad()
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in parameters.items()}
        torch.nn.utils.clip_grad_norm_(parameters.values(), self.config.trainer.max_grad_norm)
        self.optimizers[number].step()
        return gradients

    def output(self, model: Any, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each trained token."""
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1] / self.config.rollout.temperature
        log_p = torch.log_softmax(logits, dim=-1)
        trained = torch.tensor(sample.loss_mask).bool()
        chosen = log_p[range(len(log_p)), sample.response_ids]
        return chosen[trained], -(log_p.exp() * log_p).sum(-1)[trained]

    def values(self, sample: Sample) -> torch.Tensor:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        hidden = self.decoder(input_ids=ids).last_hidden_state[0, len(sample.prompt_ids) - 1 : -1]
        return self.head(hidden)[:, 0][torch.tensor(sample.loss_mask).bool()]

    def rollout_advantages(self, groups: list[list[Sample]]) -> dict[int, torch.Tensor]:
        """GRPO: the reward of a rollout is the mean over its samples."""
        found = {}
        for samples in groups:
            rollouts = {s.rollout: [o.reward or 0.0 for o in samples if o.rollout == s.rollout] for s in samples}
            means = {rollout: sum(r) / len(r) for rollout, r in rollouts.items()}
            all_means = torch.tensor(list(means.values()), dtype=torch.float64)
            for sample in samples:
                advantage = (means[sample.rollout] - all_means.mean()) / (all_means.std() + 1e-6)
                found[id(sample)] = advantage.repeat(sum(sample.loss_mask))
        return found

    def token_advantages(
        self, samples: list[Sample], penalties: dict[int, torch.Tensor], values: dict[int, torch.Tensor]
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """GAE, then whitened; and the returns."""
        advantages, returns = {}, {}
        for sample in samples:
            rewards, v = -penalties[id(sample)], values[id(sample)]
            rewards[-1] += sample.reward or 0.0
            deltas = rewards + self.algorithm.gamma * torch.cat([v[1:], torch.zeros(1)]) - v
            decay = self.algorithm.gamma * self.algorithm.gae_lambda
            powers = [sum(decay**k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
            advantages[id(sample)] = torch.stack(powers)
            returns[id(sample)] = advantages[id(sample)] + v
        every = torch.cat(list(advantages.values()))
        spread = every.std(correction=0)
        return {key: (a - every.mean()) / (spread**2 + 1e-8).sqrt() for key, a in advantages.items()}, returns

    def train(self, updates: list[list[list[Sample]]]) -> tuple[list[float], Gradients, Gradients]:
        """``updates`` are lists of groups. Losses and gradients of each step, the policy's and the critic's."""
        options = self.algorithm
        samples = [sample for update in updates for group in update for sample in group]
        with torch.no_grad():
            before = {id(s): self.output(self.policy, s)[0] for s in samples}
            others = {id(s): self.output(self.reference, s)[0] for s in samples}
            values = {id(s): self.values(s) for s in samples}
        if options.advantage == "gae":
            penalties = {key: options.kl_coef * (before[key] - others[key]) for key in before}  # k1
            advantages, returns = self.token_advantages(samples, penalties, values)
        else:
            advantages, returns = self.rollout_advantages([group for update in updates for group in update]), {}
        losses, policy, critic = [], [], []
        for update in updates:
            rows = [sample for group in update for sample in group]
            count = sum(sum(sample.loss_mask) for sample in rows)
            loss, value_loss = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
            for sample in rows:
                logprobs, entropy = self.output(self.policy, sample)
                ratio, a = torch.exp(logprobs - before[id(sample)]), advantages[id(sample)]
                bounded = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
                terms = -torch.minimum(ratio * a, bounded * a) - options.entropy_coef * entropy
                if options.kl_in == "loss":
                    d = others[id(sample)] - logprobs
                    terms = terms + options.kl_coef * (torch.exp(d) - d - 1)
                loss = loss + (terms.sum() / count if options.reduction == "token" else terms.mean() / len(rows))
                if returns:
                    v, old, target = self.values(sample), values[id(sample)], returns[id(sample)]
                    clip = self.config.critic.value_clip
                    near = torch.minimum(torch.maximum(v, old - clip), old + clip)
                    value_loss = value_loss + torch.maximum((v - target) ** 2, (near - target) ** 2).sum() / 2 / count
            losses.append(loss.item())
            policy.append(self.step(0, loss))
            if returns:
                critic.append(self.step(1, value_loss))
        return losses, policy, critic


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": "grpo", "reduction": "token", "kl_coef": 0.2, "entropy_coef": 0.05},
        {"advantage": "grpo", "reduction": "sequence", "kl_coef": 0.2, "entropy_coef": 0.05},
        {
            "advantage": "gae",
            "gamma": 0.9,
            "gae_lambda": 0.8,
            "kl_coef": 0.2,
            "kl_in": "reward",
            "kl_estimator": "k1",
            "entropy_coef": 0.05,
        },
    ],
    ids=["grpo over tokens", "grpo over sequences", "gae"],
)
def test_two_batches_of_two_steps_are_those_of_plain_pytorch(
    kind: str, algorithm: dict[str, Any], tmp_path: Path
) -> None:
    config = engine_config(
        save_model(tmp_path / "policy", 0, kind, layers=2),
        algorithm=algorithm,
        reference={"path": str(save_model(tmp_path / "reference", 1, kind, layers=2))},
        rollout={"temperature": 0.8},
        trainer={"tokens_per_micro_batch": 30, "weight_decay": 0.1},
        critic={"learning_rate": 0.5, "value_clip": 0.02},
    )
    store = SharedMemoryStore(tmp_path / "store")
    groups = [random_groups(7 + i, sizes, first=10 * i) for i, sizes in enumerate(SIZES)]
    updates = plan_each(config, [put(store, part) for part in groups])
    engine, plain = load_engine(config, store), Plain(config)
    policy, critic = note_gradients(engine.policy), note_gradients(engine.critic) if engine.critic else []
    for _ in range(2):
        losses, *wanted = plain.train([list(part.values()) for part in groups])
        found = engine.train(updates, 10)["metrics"]["train/loss"]
        assert found == pytest.approx(sum(losses) / len(losses), abs=BOUND, rel=BOUND)
        for noted, gradients in zip((policy, critic), wanted, strict=True):
            assert len(noted) == len(gradients)
            assert max((distance(*both) for both in zip(noted, gradients, strict=True)), default=0.0) < BOUND
            noted.clear()
    for learner, parameters in zip((engine.policy, engine.critic), plain.parameters, strict=True):
        if learner:
            assert distance(weights(learner.module), parameters) < BOUND
