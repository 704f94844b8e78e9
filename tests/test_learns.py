"""It learns: every algorithm, driven as the loop drives it, reaches the known optimum of a small problem.

The problem: a prompt names a token; a response is worth the fraction of its tokens that are this one. Vocabulary and
responses are so small that expected rewards, divergences and the best policies are computed exactly, over all responses.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import load_engine, make_sample, plain_model, put, save_model, weights
from tests.tiny import make_config
from vime.loop import plan_updates
from vime.sample import Sample
from vime.store.shared_memory import SharedMemoryStore
from vime.training.advantages import ESTIMATORS, TOKEN_LEVEL
from vime.training.lora import merged
from vime.training.losses import OBJECTIVES

TOKENS = 8
TARGETS = (3, 5)  # of the two prompts
GOAL = 0.95


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy that starts out near uniform, and one with preferences."""
    root = tmp_path_factory.mktemp("models")
    return {
        "policy": save_model(root / "policy", 0, spread=0.05, vocabulary=TOKENS),
        "other": save_model(root / "other", 1, spread=0.3, vocabulary=TOKENS),
    }


def prompt_of(target: int) -> list[int]:
    return [0, target]


def fraction_right(target: int, response: Sequence[int]) -> float:
    return list(response).count(target) / len(response)


@functools.cache
def responses(length: int) -> torch.Tensor:
    """Every response, [TOKENS ** length, length]."""
    return torch.tensor(list(itertools.product(range(TOKENS), repeat=length)))


class Learning:
    """An engine, and the policy it has made so far as transformers runs it.

    ``samples`` are those of a group; a batch has two groups of each prompt. ``sampler`` is the policy that responses come
    from.
    """

    def __init__(
        self,
        folders: dict[str, Path],
        folder: Path,
        samples: int = 16,
        length: int = 2,
        reward: Callable[[int, Sequence[int]], float] = fraction_right,
        **sections: dict[str, Any],
    ) -> None:
        trainer = {"learning_rate": 0.01, **sections.pop("trainer", {})}
        self.config = make_config(folders["policy"], trainer=trainer, rollout={"max_tokens": length}, **sections)
        self.samples, self.length, self.reward = samples, length, reward
        self.store = SharedMemoryStore(folder / "store")
        self.engine = load_engine(self.config, self.store)
        self.present, self.sampler, self.start = (plain_model(folders["policy"]) for _ in range(3))
        self.other = plain_model(folders["other"])
        self.generator = torch.Generator().manual_seed(0)
        self.metrics: dict[str, float] = {}
        self.groups = 0

    @torch.no_grad()
    def sample(self, target: int) -> list[list[Sample]]:
        """Two groups of responses of the sampler's, with its log-probabilities."""
        count = 2 * self.samples
        ids, logprobs = torch.tensor([prompt_of(target)] * count), torch.zeros(count, 0)
        for position in range(self.length):
            log_p = torch.log_softmax(self.sampler(input_ids=ids).logits[:, -1], dim=-1)
            draws = torch.rand(count, generator=self.generator)
            if not position:  # every token as often as its probability says, to within one: less noise, no bias
                draws = (torch.arange(count) + draws[0]) / count
            token = torch.searchsorted(log_p.exp().cumsum(-1), draws[:, None]).clamp(max=TOKENS - 1)
            ids = torch.cat([ids, token], dim=1)
            logprobs = torch.cat([logprobs, log_p.gather(1, token)], dim=1)
        made = list(zip(ids[:, 2:].tolist(), logprobs.tolist(), strict=True))
        return [
            [
                make_sample(prompt_of(target), response, behaviour, self.reward(target, response), rollout)
                for rollout, (response, behaviour) in enumerate(made[group::2])
            ]
            for group in range(2)
        ]

    def train(self, groups: list[list[Sample]], total_steps: int = 1000) -> None:
        batch = put(self.store, {self.groups + i: group for i, group in enumerate(groups)})
        self.groups += len(groups)
        if updates := plan_updates(batch, self.config):  # none where no group has a pair
            self.metrics = self.engine.train(updates, total_steps)["metrics"]
        policy = self.engine.policy.module
        self.present.load_state_dict(merged(weights(policy), policy.model))

    def learn(self, steps: int, fresh_every: int = 1) -> None:
        """Steps on sampled batches; the sampler takes the policy's weights every so many of them (0: never)."""
        for step in range(steps):
            if fresh_every and step % fresh_every == 0:
                self.sampler.load_state_dict(self.present.state_dict())
            self.train([group for target in TARGETS for group in self.sample(target)], steps)

    @torch.no_grad()
    def log_p(self, target: int, model: Any = None) -> torch.Tensor:
        """Log-probability of every response under ``model``, the present policy unless another is given."""
        every = responses(self.length)
        ids = torch.cat([torch.tensor(prompt_of(target)).expand(len(every), -1), every], dim=1)
        logits = (model or self.present)(input_ids=ids).logits[:, 1:-1].double()
        return torch.log_softmax(logits, dim=-1).gather(-1, every[:, :, None]).sum((1, 2))

    def rewards(self, target: int) -> torch.Tensor:
        every = responses(self.length).tolist()
        return torch.tensor([self.reward(target, one) for one in every], dtype=torch.float64)

    def expected_reward(self) -> float:
        """Of fraction_right, over both prompts."""
        every = responses(self.length).tolist()
        right = {target: torch.tensor([fraction_right(target, one) for one in every]) for target in TARGETS}
        return sum((self.log_p(target).exp() * right[target]).sum().item() for target in TARGETS) / len(TARGETS)

    def divergence(self, model: Any) -> float:
        """KL(policy || model) of responses, mean over the prompts."""
        pairs = [(self.log_p(target), self.log_p(target, model)) for target in TARGETS]
        return sum((mine.exp() * (mine - other)).sum().item() for mine, other in pairs) / len(TARGETS)

    def distance_to(self, best: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        """Largest total variation, over prompts, between the policy and ``best(start policy, rewards)``."""
        return max(
            (self.log_p(target).exp() - best(self.log_p(target, self.start).exp(), self.rewards(target)))
            .abs()
            .sum()
            .item()
            / 2
            for target in TARGETS
        )


# Advantages and objectives


CRITIC: dict[str, Any] = {"critic": {"learning_rate": 5e-3, "warmup_steps": 3}}
NOT_OF_REWARDS = ("pair", "constant", "reverse_kl")  # they have tests of their own


@pytest.mark.parametrize("advantage", [name for name in (*ESTIMATORS, *TOKEN_LEVEL) if name not in NOT_OF_REWARDS])
def test_every_advantage_leads_to_the_best_response(advantage: str, folders: dict[str, Path], tmp_path: Path) -> None:
    sections = CRITIC if advantage == "gae" else {}
    learning = Learning(folders, tmp_path, algorithm={"advantage": advantage}, **sections)
    assert learning.expected_reward() < 0.2
    learning.learn(24)
    assert learning.expected_reward() > GOAL


@pytest.mark.parametrize("targets", ["all-linear", ["v_proj", "o_proj"]], ids=["all linear", "two modules"])
def test_an_adapter_alone_leads_there_too(targets: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """From a policy with preferences: a head near zero, which an adapter leaves as it is, could say nothing for certain."""
    lora = {"rank": 4, "alpha": 8, "target_modules": targets}
    learning = Learning(folders | {"policy": folders["other"]}, tmp_path, lora=lora, algorithm={"kl_coef": 1e-3})
    assert learning.expected_reward() < 0.3
    learning.learn(60)
    assert learning.expected_reward() > GOAL
    assert learning.metrics["train/reference_kl"] == pytest.approx(learning.divergence(learning.start) / 2, rel=0.3)


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name not in ("sft", "dpo")])
def test_every_objective_leads_to_the_best_response(objective: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Two steps a batch: the second with ratios that are not 1."""
    learning = Learning(folders, tmp_path, algorithm={"objective": objective, "updates": 2})
    learning.learn(16)
    assert learning.expected_reward() > GOAL


ADVANTAGE = '''
def against_best(rollouts):
    """r less the mean of the best and the worst of its group."""
    rewards = {}
    for one in rollouts:
        rewards.setdefault(one.group, []).append(one.reward)
    return [one.reward - (max(rewards[one.group]) + min(rewards[one.group])) / 2 for one in rollouts]
'''
OBJECTIVE = '''
def ppo_in_log_space(tokens, options):
    """-A clip(log rho, -low, high)."""
    bounded = tokens.log_ratio.clamp(-options.clip_low, options.clip_high)
    return -tokens.advantages * bounded, {"clip_fraction": bounded != tokens.log_ratio}
'''


@pytest.mark.parametrize(
    ("option", "code", "name"),
    [("advantage", ADVANTAGE, "against_best"), ("objective", OBJECTIVE, "ppo_in_log_space")],
)
def test_the_users_own_function_leads_there_too(
    option: str, code: str, name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(code)
    algorithm = {option: f"{tmp_path / 'mine.py'}:{name}", "updates": 2}
    learning = Learning(folders, tmp_path, algorithm=algorithm)
    learning.learn(16)
    assert learning.expected_reward() > GOAL


def test_the_critic_comes_to_know_what_a_prompt_is_worth(folders: dict[str, Path], tmp_path: Path) -> None:
    """While it alone learns."""
    learning = Learning(
        folders,
        tmp_path,
        algorithm={"advantage": "gae"},
        critic={"learning_rate": 0.02, "warmup_steps": 99, "value_clip": 10.0},
        reward=lambda target, response: float(target == TARGETS[0]),
    )
    learning.learn(1)
    first = learning.metrics["train/value_loss"]
    learning.learn(25)
    assert learning.metrics["train/value_loss"] < 0.02 * first
    assert learning.metrics["train/explained_variance"] > GOAL
    assert learning.divergence(learning.start) == 0


# Given responses


def given(target: int, response: list[int], reward: float, rollout: int = 0) -> Sample:
    """No server sampled it."""
    return make_sample(prompt_of(target), response, [math.nan] * len(response), reward, rollout)


def place(response: Sequence[int]) -> int:
    """In the list of all responses of two tokens."""
    return response[0] * TOKENS + response[1]


def test_sft_makes_the_given_responses_certain(folders: dict[str, Path], tmp_path: Path) -> None:
    learning = Learning(folders, tmp_path, algorithm={"objective": "sft", "advantage": "constant"})
    wanted = {target: [target, (target + 1) % TOKENS] for target in TARGETS}
    for _ in range(40):
        learning.train([[given(target, response, 1.0)] for target, response in wanted.items()])
    assert min(learning.log_p(target)[place(response)].item() for target, response in wanted.items()) > -0.05
    assert 0 < learning.metrics["train/loss"] < 0.03


DPO = {"objective": "dpo", "advantage": "pair", "reduction": "sequence"}


def test_dpo_makes_the_chosen_likelier_than_the_rejected_compared_with_the_reference(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    learning = Learning(folders, tmp_path, algorithm=DPO)
    pairs = {target: ([target, 1], [2, target]) for target in TARGETS}
    for _ in range(25):
        learning.train([[given(t, good, 1.0, 0), given(t, bad, 0.0, 1)] for t, (good, bad) in pairs.items()])
    assert learning.metrics["train/dpo_accuracy"] == 1.0
    for target, (good, bad) in pairs.items():
        gained = learning.log_p(target) - learning.log_p(target, learning.start)
        assert gained[place(good)] - gained[place(bad)] > 3


def test_dpo_on_the_best_and_worst_of_sampled_groups_leads_to_the_best_response(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    learning = Learning(folders, tmp_path, algorithm={**DPO, "dpo_beta": 0.3})
    learning.learn(30)
    assert learning.expected_reward() > GOAL


# Other models


def test_distillation_takes_the_policy_to_its_teacher(folders: dict[str, Path], tmp_path: Path) -> None:
    learning = Learning(
        folders,
        tmp_path,
        algorithm={"advantage": "reverse_kl", "objective": "policy_gradient"},
        teacher={"path": str(folders["other"])},
        trainer={"schedule": "cosine"},
    )
    before = learning.divergence(learning.other)
    learning.learn(40)
    assert learning.divergence(learning.other) < 0.1 * before


BETA = 0.4


def tilted(start: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """The maximum of E r - beta KL(policy || start): start exp(r / beta), normalised. DPO (arXiv 2305.18290), equation 4."""
    weighted = start * torch.exp(rewards / BETA)
    return weighted / weighted.sum()


def covering(start: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """The maximum of E r - beta KL(start || policy): beta start / (c - r), with c such that they sum to 1."""
    low, high = rewards.max().item() + 1e-9, rewards.max().item() + BETA + 1
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (BETA * start / (middle - rewards)).sum() > 1 else (low, middle)
    return BETA * start / (low - rewards)


def graded(target: int, response: Sequence[int]) -> float:
    """Every token is worth something, the target most."""
    return sum(1.0 if token == target else token / 16 for token in response) / len(response)


REGULARISED: dict[str, tuple[dict[str, Any], int, Any]] = {
    "in the reward": ({"kl_in": "reward", "kl_estimator": "k1"}, 2, tilted),
    "k2 in the loss": ({"kl_estimator": "k2"}, 1, tilted),
    "unbiased in the loss": ({"kl_estimator": "unbiased"}, 1, tilted),
    "k3 in the loss": ({"kl_estimator": "k3"}, 1, covering),  # its gradient on policy is that of the other direction
}


@pytest.mark.parametrize("case", list(REGULARISED))
def test_kl_regularisation_leads_to_the_policy_that_is_best_under_it(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    options, length, best = REGULARISED[case]
    learning = Learning(
        folders,
        tmp_path,
        samples=16,
        length=length,
        reward=graded,
        algorithm={"advantage": "rloo", "objective": "policy_gradient", "kl_coef": BETA, **options},
        trainer={"schedule": "cosine"},
    )
    assert learning.distance_to(best) > 0.2
    learning.learn(50)
    assert learning.distance_to(best) < 0.05


def test_a_reference_that_is_refreshed_does_not_hold_the_policy_back(folders: dict[str, Path], tmp_path: Path) -> None:
    options = {**REGULARISED["in the reward"][0], "advantage": "rloo", "objective": "policy_gradient", "kl_coef": BETA}
    held = Learning(folders, tmp_path / "held", algorithm=options)
    free = Learning(folders, tmp_path / "free", algorithm=options, reference={"refresh_every": 2})
    for learning in (held, free):
        learning.learn(25)
    assert held.expected_reward() < 0.4
    assert free.expected_reward() > GOAL


# Entropy and other policies' data


def test_the_adaptive_bonus_keeps_the_entropy_near_its_target(folders: dict[str, Path], tmp_path: Path) -> None:
    target = 1.0  # of log 8 = 2.08 at the start
    learning = Learning(
        folders,
        tmp_path,
        algorithm={
            "advantage": "dr_grpo",
            "entropy_target": target,
            "entropy_coef": 0.2,
            "entropy_delta": 0.02,
            "entropy_coef_max": 1.0,
        },
    )
    learning.learn(25)
    seen = []
    for _ in range(40):
        learning.learn(1)
        seen.append(learning.metrics["train/entropy"])
    assert sum(seen) / len(seen) == pytest.approx(target, abs=0.2)
    assert learning.metrics["train/entropy_coef"] > 0


@pytest.mark.parametrize("correction", ["tis", "tis_sequence", "mis", "icepop"])
def test_stale_responses_under_a_correction_lead_to_the_best_response(
    correction: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    learning = Learning(folders, tmp_path, algorithm={"corrections": {correction: {}}})
    learning.learn(30, fresh_every=3)
    assert learning.expected_reward() > GOAL


ALPHA = 0.3


def softened(start: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """The maximum of E r + alpha H: exp(r / alpha), normalised."""
    return torch.softmax(rewards / ALPHA, dim=-1)


@pytest.mark.parametrize("corrections", [{"tis": {"high": 1e6}}, {}], ids=["corrected", "not corrected"])
def test_another_policys_responses_lead_to_the_optimum_exactly_when_they_are_corrected(
    corrections: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """The other policy's probabilities are twentieths, and every token is there as often as it says: no noise."""
    counts = [1, 2, 3, 4, 4, 3, 2, 1]
    learning = Learning(
        folders,
        tmp_path,
        length=1,
        reward=graded,
        algorithm={
            "advantage": "dr_grpo",
            "objective": "policy_gradient",
            "entropy_coef": ALPHA,
            "corrections": corrections,
        },
    )
    drawn = [token for token, count in enumerate(counts) for _ in range(count)]
    for _ in range(60):
        learning.train(
            [
                [
                    make_sample(
                        prompt_of(target), [token], [math.log(counts[token] / 20)], graded(target, [token]), rollout
                    )
                    for rollout, token in enumerate(drawn)
                ]
                for target in TARGETS
            ]
        )
    assert (learning.distance_to(softened) < 0.01) == bool(corrections)
