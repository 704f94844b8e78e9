"""What is added to a training reward for a response's length. Pure: imports neither torch nor a network.

Evaluation does not come here: it compares rewards as they were given with ``eval.pass_reward``.
"""

from __future__ import annotations

from collections.abc import Sequence

from vime.config.sections import Config
from vime.sample import Group


def overlong(tokens: int, limit: int, buffer: int) -> float:
    """0 up to ``limit - buffer`` tokens, -1 from ``limit`` on, a straight line between. DAPO (arXiv 2503.14476), equation 13."""
    return max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))


def length_terms(tokens: Sequence[int], passed: Sequence[bool]) -> list[float]:
    """One term a response of a group: lambda_i = 0.5 - (len_i - min len) / (max len - min len), min(0, lambda_i) for a
    response that did not pass, 0 where all lengths are equal. Kimi k1.5 (arXiv 2501.12599), section 2.3.3.
    """
    shortest, longest = min(tokens), max(tokens)
    if shortest == longest:
        return [0.0] * len(tokens)
    terms = [0.5 - (length - shortest) / (longest - shortest) for length in tokens]
    return [term if ok else min(0.0, term) for term, ok in zip(terms, passed, strict=True)]


def shape(group: Group, config: Config) -> None:
    """Adds the configured terms to the rewards of a finished group.

    Each term is kept as a reward part, "overlong" or "length", and the reward before them as "raw".
    """
    section = config.reward
    if not section.shaped or not group.samples:
        return
    tokens = [len(sample.response_ids) for sample in group.samples]
    raw = [sample.reward or 0.0 for sample in group.samples]
    by_length = length_terms(tokens, [reward >= config.eval.pass_reward for reward in raw])
    for sample, length, reward, term in zip(group.samples, tokens, raw, by_length, strict=True):
        terms = {}
        if section.overlong_buffer:
            too_long = overlong(length, config.rollout.max_tokens, section.overlong_buffer)
            terms["overlong"] = section.overlong_penalty * too_long
        if section.length_penalty:
            terms["length"] = section.length_penalty * term
        sample.reward_parts = {**sample.reward_parts, "raw": reward, **terms}
        sample.reward = reward + sum(terms.values())
