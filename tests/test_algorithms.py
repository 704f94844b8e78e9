"""Algorithms that need more than the loop's default, as whole jobs on real vLLM: a critic, a reference and a teacher behind
a URL, given pairs; and the check of a configuration. The servers run already and are shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from vime.cli import main

CONFIG = """
[run]
dir = "{folder}/run"
steps = {steps}
[model]
path = "{model}"
dtype = "float32"
[data]
source = "{folder}/data.jsonl"
[reward]
function = "{folder}/lower.py:share"
[rollout]
groups = 4
samples_per_group = 4
max_tokens = 6
[inference]
urls = ["{url}"]
[trainer]
learning_rate = 3e-3
threads = 1
device = "cpu"
[checkpoint]
every = 0
"""
REWARD = "def share(task, response):\n    return sum('a' <= c <= 'z' for c in response) / 6\n"


class Jobs:
    """Runs ``vime`` commands on the untied model's server; the tied model's stands for reference and teacher."""

    def __init__(self, folder: Path, models: Any, fleets: Any, capsys: Any) -> None:
        self.folder, self.models, self.capsys = folder, models, capsys
        self.url, self.other = fleets("untied").servers[0].url, fleets("tied").servers[0].url
        (folder / "lower.py").write_text(REWARD)

    def run(self, command: str, rows: list[dict[str, str]], *words: str, steps: int = 3, code: int = 0) -> str:
        (self.folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        file = self.folder / "config.toml"
        file.write_text(CONFIG.format(folder=self.folder, model=self.models("untied"), url=self.url, steps=steps))
        ended = main([command, str(file), *words])
        out, err = self.capsys.readouterr()
        assert ended == code, out + err
        return err if code == 2 else out

    def steps(self) -> list[dict[str, float]]:
        entries = map(json.loads, (self.folder / "run" / "metrics.jsonl").read_text().splitlines())
        return [entry["metrics"] for entry in entries if entry["kind"] == "step"]


PROMPTS = [{"prompt": f"say {i}"} for i in range(8)]


@pytest.fixture
def jobs(tmp_path: Path, models: Any, fleets: Any, capsys: Any) -> Jobs:
    return Jobs(tmp_path, models, fleets, capsys)


def test_a_server_scores_a_response_as_the_model_does(run: Any, fleets: Any, models: Any) -> None:
    prompt, response = [5, 9, 30], [7, 7, 100, 3]
    server = fleets("untied").servers[0]
    model = AutoModelForCausalLM.from_pretrained(models("untied"), dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
    assert run(server.score(prompt, response, 60)) == pytest.approx(expected.tolist(), abs=1e-4)


def test_ppo_with_a_critic_and_the_kl_to_a_reference_behind_a_url(jobs: Jobs) -> None:
    words = [
        *["--algorithm.advantage", "gae", "--algorithm.gae_lambda", "0.95", "--algorithm.updates", "2"],
        *["--critic.warmup_steps", "2", "--critic.learning_rate", "1e-2"],
        *["--algorithm.kl_coef", "0.05", "--algorithm.kl_in", "reward", "--algorithm.kl_estimator", "k1"],
        *["--reference.url", jobs.other, "--algorithm.corrections.tis.high", "2"],
    ]
    jobs.run("train", PROMPTS, *words)
    first, *_, last = jobs.steps()
    assert first["train/reference_kl"] > 0.1  # another model
    assert first["train/grad_norm"] == 0 < last["train/grad_norm"]  # at first the critic alone moves,
    assert min(step["train/value_grad_norm"] for step in jobs.steps()) > 0  # and how well is in test_learns
    assert last["train/tis_changed"] > 0  # rounding is a difference too
    assert last["train/effective_sample_size"] == pytest.approx(1, abs=1e-4)
    assert last["train/logprob_abs_diff_max"] < 1e-4


def test_distillation_brings_the_policy_nearer_to_a_teacher_behind_a_url(jobs: Jobs) -> None:
    words = ["--algorithm.advantage", "reverse_kl", "--algorithm.objective", "policy_gradient"]
    many = ["--rollout.groups", "8", "--rollout.samples_per_group", "16"]  # the distance is over what was sampled
    jobs.run("train", PROMPTS, *words, "--teacher.url", jobs.other, *many, steps=5)
    distances = [step["train/teacher_kl"] for step in jobs.steps()]
    assert distances[-1] < 0.8 * distances[0]


def test_given_pairs_are_learned_by_dpo_and_nothing_is_sampled(jobs: Jobs) -> None:
    pairs = [{"prompt": f"say {i}", "chosen": "yes", "rejected": "no!"} for i in range(8)]
    words = [
        *["--data.response_keys", '["chosen", "rejected"]', "--algorithm.objective", "dpo"],
        *["--algorithm.advantage", "pair", "--algorithm.reduction", "sequence"],
    ]
    jobs.run("train", pairs, *words, steps=4)
    steps = jobs.steps()
    assert steps[0]["train/loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: policy and reference are the same
    assert steps[-1]["train/dpo_accuracy"] == 1.0 and steps[-1]["train/loss"] < 0.4
    assert steps[0]["rollout/response_tokens"] == 4 * (4 + 4)  # bytes and the end token


def test_a_row_without_its_given_response_is_named_before_anything_starts(jobs: Jobs) -> None:
    words = ["--data.response_keys", '["chosen", "rejected"]', "--algorithm.objective", "dpo"]
    words += ["--algorithm.advantage", "pair", "--algorithm.reduction", "sequence"]
    error = jobs.run("train", [{"prompt": "a", "chosen": "b", "rejetced": "c"}], *words, code=2)
    assert "data.response_keys: task" in error and "has no text 'rejected'; did you mean rejetced?" in error


def test_a_check_compares_everything_and_writes_it_as_json(jobs: Jobs) -> None:
    words = ["--json", str(jobs.folder / "check.json"), "--rollout.temperature", "0.7"]
    out = jobs.run("check", PROMPTS, *words)
    found = json.loads((jobs.folder / "check.json").read_text())
    assert found["ok"] and len(found["comparisons"]) == 11
    assert all(row["ok"] == (row["value"] <= row["bound"]) for row in found["comparisons"])
    assert {row["name"] for row in found["comparisons"]} == {
        row["name"] for row in found["comparisons"] if row["name"] in out
    }
    assert max(row["value"] for row in found["comparisons"]) < 1e-4  # float32


def test_a_check_leaves_out_what_cannot_be_compared(jobs: Jobs) -> None:
    """Given responses were sampled by no server, and pairs cannot be taken apart."""
    pairs = [{"prompt": f"say {i}", "chosen": "yes", "rejected": "no!"} for i in range(8)]
    words = ["--data.response_keys", '["chosen", "rejected"]', "--algorithm.objective", "dpo"]
    words += ["--algorithm.advantage", "pair", "--algorithm.reduction", "sequence"]
    jobs.run("check", pairs, *words, "--json", str(jobs.folder / "check.json"))
    names = [row["name"] for row in json.loads((jobs.folder / "check.json").read_text())["comparisons"]]
    assert len(names) == 6 and not any("rollout" in name or "packed" in name for name in names)


def test_a_difference_over_its_bound_fails_the_check(jobs: Jobs) -> None:
    error = jobs.run("check", PROMPTS, "--weights.probe_max_mean_diff", "1e-12", code=2)
    assert "log-probabilities differ by" in error and "bound 1e-12" in error


def test_too_large_a_mismatch_stops_the_run_before_the_weights_change(jobs: Jobs) -> None:
    error = jobs.run("train", PROMPTS, "--algorithm.max_mismatch_kl", "1e-30", code=2)
    assert "algorithm.max_mismatch_kl = 1e-30" in error and "weights are unchanged" in error
    assert not jobs.steps()
