"""The metrics of a training step, from the sums over its trained tokens on all ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def step_metrics(total: Mapping[str, float], updates: int, packed_tokens: float, seconds: float) -> dict[str, float]:
    """``total`` holds sums over the step's updates, by the names under which the engine adds them up; what only some
    algorithms have (``log/``, ``router_``, the critic's) is given where it is there."""
    count = max(total["tokens"], 1.0)
    metrics = {
        "train/loss": total["loss"] / updates,
        "train/entropy": total["entropy"] / count,
        "train/kl": total["kl"] / count,
        "train/grad_norm": total["policy_norm"],
        "train/logprob_abs_diff_mean": total["difference"] / count,
        "train/logprob_abs_diff_max": total["difference_max"],
        "train/mismatch_kl": total["mismatch_kl"] / count,
        # (sum w)^2 / (N sum w^2): the fraction of the tokens that the importance ratios leave effective
        "train/effective_sample_size": total["ratio"] ** 2 / max(count * total["ratio_squared"], 1e-300),
        "train/packed_tokens": packed_tokens,
        "train/tokens": total["tokens"],
        "train/tokens_per_s": packed_tokens / seconds,
    }
    metrics |= {f"train/{name[4:]}": value / count for name, value in total.items() if name.startswith("log/")}
    metrics |= {f"train/{name}": value / updates for name, value in total.items() if name.startswith("router_")}
    if "returns" in total:
        variance = total["returns_squared"] / count - (total["returns"] / count) ** 2
        metrics |= {
            "train/value_loss": total["value_loss"] / count,
            "train/value_clip_fraction": total["value_clipped"] / count,
            "train/value_grad_norm": total["critic_norm"] / updates,
            "train/explained_variance": 1 - total["value_residual"] / count / variance if variance > 1e-9 else 0.0,
        }
    return metrics
