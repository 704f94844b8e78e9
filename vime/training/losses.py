"""Objectives on token level.

An objective takes the tokens of a micro-batch and the [algorithm] section and returns one loss a token, and what it
logs. The weights that average token losses are global (``plan.weigh``), so nothing here divides by a count. All tensors are
[N], one entry a response token; sequences stand whole, one after the other. A user's objective is a function of the same
kind. Ratios are against ``old``: the trainer's own log-probabilities before the step, or the server's
(``algorithm.old_logprobs``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vime.config.sections import Algorithm


def sequence_sums(values: torch.Tensor, mask: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Sum of ``values`` over the trained tokens of sequence s at place s of [N]; S of them mean something. Asking the device
    for S would make the host wait."""
    sums = torch.zeros_like(values)
    return sums.index_add(0, sequence, torch.where(mask, values, 0.0))


@dataclass(frozen=True)
class Tokens:
    """The response tokens of whole sequences.

    ``logprobs`` and ``entropy`` are the policy's and carry gradients; ``proximal`` is the trainer's before the step,
    ``behaviour`` the server's, ``reference`` and ``teacher`` other models' log-probabilities of the same tokens, or None;
    ``mask`` is true where a token is trained; ``sequence`` and ``group`` number a token's sequence and group from 0;
    ``chosen`` is true where a covariance objective has chosen the token (see ``covariance``), or None.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    old: torch.Tensor
    proximal: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    sequence: torch.Tensor
    group: torch.Tensor
    reference: torch.Tensor | None = None
    teacher: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    @property
    def log_ratio(self) -> torch.Tensor:
        return self.logprobs - self.old

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        return sequence_sums(values, self.mask, self.sequence)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of ``values`` over the trained tokens of a token's sequence, [N]."""
        count = self.per_sequence(torch.ones_like(values)).clamp(min=1.0)
        return (self.per_sequence(values) / count)[self.sequence]


Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]
Objective = Callable[[Tokens, Algorithm], Loss]


def clipped_surrogate(log_ratio: torch.Tensor, advantages: torch.Tensor, options: Algorithm) -> Loss:
    ratio = torch.exp(log_ratio)
    plain = ratio * advantages
    bounded = ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * advantages
    clipped = bounded < plain
    surrogate = torch.minimum(plain, bounded)
    if options.dual_clip is not None:
        floor = options.dual_clip * advantages
        dual = (advantages < 0) & (surrogate < floor)
        surrogate, clipped = torch.where(dual, floor, surrogate), clipped | dual
    return -surrogate, {"clip_fraction": clipped}


def ppo(tokens: Tokens, options: Algorithm) -> Loss:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A), rho = exp(logprobs - old).

    PPO (arXiv 1707.06347), equation 7, with the two bounds apart as in DAPO (arXiv 2503.14476), equation 10. With
    ``dual_clip`` = c the surrogate of a negative advantage is at least c A: Dual-clip PPO (arXiv 1912.09729), equation 5.
    """
    return clipped_surrogate(tokens.log_ratio, tokens.advantages, options)


def gspo(tokens: Tokens, options: Algorithm) -> Loss:
    """ppo with the sequence's ratio s = exp(mean over its tokens of logprobs - old). GSPO (arXiv 2507.18071), equation 5."""
    return clipped_surrogate(tokens.sequence_mean(tokens.log_ratio), tokens.advantages, options)


def cispo(tokens: Tokens, options: Algorithm) -> Loss:
    """-stop_gradient(clip(rho, 1 - low, 1 + high)) A log pi: every token keeps a gradient. CISPO (arXiv 2506.13585)."""
    ratio = torch.exp(tokens.log_ratio.detach())
    bounded = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return -bounded * tokens.advantages * tokens.logprobs, {"clip_fraction": bounded != ratio}


def sapo(tokens: Tokens, options: Algorithm) -> Loss:
    """-(4 / tau) sigmoid(tau (rho - 1)) A, tau by the advantage's sign: a soft gate. SAPO (arXiv 2511.20347), equation 6."""
    positive = tokens.advantages > 0
    tau = torch.full_like(tokens.logprobs, options.sapo_tau_negative).masked_fill(positive, options.sapo_tau_positive)
    gate = torch.sigmoid(tau * (torch.exp(tokens.log_ratio) - 1)) * 4 / tau
    return -gate * tokens.advantages, {}


def policy_gradient(tokens: Tokens, options: Algorithm) -> Loss:
    """-A log pi: no ratio, no clip. REINFORCE (Williams 1992)."""
    return -tokens.advantages * tokens.logprobs, {}


def masked_surrogate(tokens: Tokens, divergence: torch.Tensor, options: Algorithm) -> Loss:
    """-rho A, 0 where the policy already lies further than delta on the side to which the advantage pushes."""
    ratio = torch.exp(tokens.log_ratio)
    outward = torch.where(tokens.advantages > 0, ratio > 1, ratio < 1)
    masked = outward & (divergence > options.dppo_delta) & (tokens.advantages != 0)
    return torch.where(masked, 0.0, -ratio * tokens.advantages), {"clip_fraction": masked}


def dppo_tv(tokens: Tokens, options: Algorithm) -> Loss:
    """Masked by the binary total variation |pi - old| of the token's probability. DPPO (arXiv 2602.04879)."""
    divergence = (torch.exp(tokens.logprobs.detach()) - torch.exp(tokens.old)).abs()
    return masked_surrogate(tokens, divergence, options)


def dppo_kl(tokens: Tokens, options: Algorithm) -> Loss:
    """Masked by the KL(old || pi) of the two events "this token" and "any other". DPPO (arXiv 2602.04879)."""
    new, old = tokens.logprobs.detach(), tokens.old
    tiny = torch.finfo(new.dtype).eps
    rest_new, rest_old = (torch.log1p(-torch.exp(x).clamp(max=1 - tiny)) for x in (new, old))
    divergence = torch.exp(old) * (old - new) + torch.exp(rest_old) * (rest_old - rest_new)
    return masked_surrogate(tokens, divergence, options)


def clip_cov(tokens: Tokens, options: Algorithm) -> Loss:
    """ppo without the gradient of randomly chosen tokens of high covariance. Clip-Cov (arXiv 2505.22617), section 4.2."""
    assert tokens.chosen is not None
    loss, logs = ppo(tokens, options)
    return torch.where(tokens.chosen, loss.detach(), loss), {**logs, "cov_fraction": tokens.chosen}


def kl_cov(tokens: Tokens, options: Algorithm) -> Loss:
    """-rho A, plus coef |log rho| on the tokens of highest covariance. KL-Cov (arXiv 2505.22617), section 4.3; |log rho|
    stands for the KL divergence as in the authors' code."""
    assert tokens.chosen is not None
    penalty = torch.where(tokens.chosen, options.cov_coef * tokens.log_ratio.abs(), 0.0)
    return penalty - torch.exp(tokens.log_ratio) * tokens.advantages, {"cov_fraction": tokens.chosen}


def sft(tokens: Tokens, options: Algorithm) -> Loss:
    """-log pi: cross-entropy of the responses, whatever their advantages."""
    return -tokens.logprobs, {}


def dpo(tokens: Tokens, options: Algorithm) -> Loss:
    """-log sigmoid(beta (m_chosen - m_rejected)), m the sum over a response of log pi - log reference. DPO (arXiv 2305.18290),
    equation 7.

    The advantages are +1 (chosen) and -1 (rejected), a group one pair. Each token carries its pair's loss: under weights
    1 / (S n_s) ("sequence") that is the mean over pairs.
    """
    assert tokens.reference is not None
    margins = torch.zeros_like(tokens.logprobs)  # of group g at place g
    signed = torch.where(tokens.mask, tokens.advantages * (tokens.logprobs - tokens.reference), 0.0)
    margins = margins.index_add(0, tokens.group, signed)[tokens.group]
    return -F.logsigmoid(options.dpo_beta * margins), {"dpo_accuracy": margins > 0, "dpo_margin": margins}


OBJECTIVES: dict[str, Objective] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "policy_gradient": policy_gradient,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "sft": sft,
    "dpo": dpo,
}


def k1(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """log pi - log other: unbiased, of either sign. As a loss its gradient has mean zero. joschu.net/blog/kl-approx.html"""
    return logprobs - other


def k2(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """(log pi - log other)^2 / 2: biased; its gradient is the KL divergence's on policy. joschu.net/blog/kl-approx.html"""
    return (logprobs - other).square() / 2


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 >= 0, d = other - log pi: unbiased, of low variance. joschu.net/blog/kl-approx.html"""
    difference = other - logprobs
    return torch.expm1(difference) - difference


def low_variance(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """k3 with d within +-20 and the result within +-10: no overflow, at the price of no gradient out there."""
    difference = (other - logprobs).clamp(-20.0, 20.0)
    return (torch.expm1(difference) - difference).clamp(-10.0, 10.0)


KL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_variance": low_variance,
}


def kl_loss(tokens: Tokens, options: Algorithm) -> torch.Tensor:
    """KL(policy || reference) a token, with gradient; "unbiased" is k3 times the ratio of policy to ``old``, whose gradient
    is the divergence's own also off policy: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1."""
    assert tokens.reference is not None
    if options.kl_estimator == "unbiased":
        return torch.exp(tokens.log_ratio) * k3(tokens.logprobs, tokens.reference)
    return KL[options.kl_estimator](tokens.logprobs, tokens.reference)


def adapt_entropy(coef: float, entropy: float, options: Algorithm) -> tuple[float, bool]:
    """The weight of the entropy bonus after a step of this mean ``entropy`` (nats), and whether it acts in the next one.

    Skywork-OR1 (arXiv 2505.22312), section 4.2: up by entropy_delta at or under the target, down over it.
    """
    assert options.entropy_target is not None
    low = entropy <= options.entropy_target
    coef += options.entropy_delta if low else -options.entropy_delta
    return min(max(coef, 0.0), options.entropy_coef_max), low
