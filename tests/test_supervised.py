"""``vime sft`` and ``vime reward-model`` as commands, with the trainer's processes: files, resume, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.test_supervised_engine import CHATS, PAIRS, adamw, batches, make_job, plain_pair_loss, plain_sft_loss
from vime.cli import main

CONFIG = """
[run]
dir = "{folder}/run"
epochs = 3
[model]
path = "{model}"
dtype = "float32"
[data]
source = "{folder}/data.jsonl"
[batch]
size = 3
[trainer]
learning_rate = 1e-3
weight_decay = 0.01
device = "cpu"
threads = 1
[eval]
every = 2
[eval.sets.test]
source = "{folder}/test.jsonl"
[checkpoint]
every = 2
"""


@pytest.fixture
def command(tmp_path: Path, models: Any, capfd: Any) -> Any:
    """Runs a vime command on data in the test's folder; what it printed."""

    def run(name: str, *words: str, code: int = 0) -> str:
        rows: list[Any] = PAIRS
        if name == "sft":
            rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS]
        held_out = json.loads(json.dumps(rows).replace("2+2", "3+3"))[-1:]
        for file, held in (("data", rows), ("test", held_out)):
            (tmp_path / f"{file}.jsonl").write_text("\n".join(map(json.dumps, held)))
        (tmp_path / "config.toml").write_text(CONFIG.format(folder=tmp_path, model=models("tied")))
        ended = main([name, str(tmp_path / "config.toml"), *words])
        out, err = capfd.readouterr()
        assert ended == code, out + err
        return err if code else out

    return run


def plain_loop(job: Any, model: Any, loss_of: Callable[[list[Any]], torch.Tensor]) -> list[float]:
    """Trains the plain model as the job would; the losses of its steps."""
    optimizer, losses = adamw(model, job.config.trainer), []
    for rows in batches(job):
        loss = loss_of(rows)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.config.trainer.max_grad_norm)
        optimizer.step()
    return losses


def apart(one: Any, other: Any) -> float:
    """The largest absolute difference of two models' weights."""
    return max((one.get_parameter(name) - wanted).abs().max().item() for name, wanted in other.named_parameters())


def records(folder: Path, kind: str) -> list[tuple[int, dict[str, float]]]:
    entries = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [(entry["step"], entry["metrics"]) for entry in entries if entry["kind"] == kind]


def test_a_run_that_is_resumed_on_two_ranks_ends_where_a_plain_loop_does(
    command: Any, tmp_path: Path, models: Any
) -> None:
    command("sft", "--run.steps", "2", "--trainer.ranks", "2")
    out = command("sft", "--resume", "--run.steps", "5", "--trainer.ranks", "2")
    assert f"model       {tmp_path}/run/checkpoints/step-000005/model" in out
    (tmp_path / "plain").mkdir()
    (tmp_path / "job").mkdir()
    job = make_job(tmp_path / "job", models("tied"), False, data={"source": str(tmp_path / "data.jsonl")})
    model = AutoModelForCausalLM.from_pretrained(models("tied"), dtype=torch.float32)
    losses = plain_loop(job, model, lambda rows: plain_sft_loss(model, job, rows, "token"))
    steps = records(tmp_path, "step")
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5]
    assert [metrics["train/loss"] for _, metrics in steps] == pytest.approx(losses, abs=1e-5)
    assert steps[-1][1]["train/epoch"] == 3.0 and "train/kl" not in steps[0][1]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-000005/model", dtype=torch.float32)
    assert apart(trained, model) < 1e-5
    assert [step for step, _ in records(tmp_path, "eval")] == [0, 2, 4, 5]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval_loss_after"] < summary["eval_loss_before"] and summary["dropped"] == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "run/checkpoints/step-000005/model").chat_template
    assert (tmp_path / "run" / "report.html").exists()
    error = command("reward-model", "--resume", "--run.steps", "9", code=2)
    assert "was made by vime sft; resume it with that command" in error


def test_a_reward_model_on_tensor_ranks_ends_where_a_plain_loop_does(command: Any, tmp_path: Path, models: Any) -> None:
    command("reward-model", "--trainer.ranks", "2", "--trainer.tensor_parallel", "2")
    (_, first), *_, (last, after) = records(tmp_path, "eval")
    assert first["eval/test/loss"] == pytest.approx(0.6931, abs=1e-4)  # log 2: the head is zero
    assert (
        after["eval/test/loss"] < first["eval/test/loss"] and {"eval/test/accuracy", "eval/test/margin"} < after.keys()
    )
    (tmp_path / "job").mkdir()
    job = make_job(tmp_path / "job", models("tied"), True, data={"source": str(tmp_path / "data.jsonl")})
    plain = AutoModelForSequenceClassification.from_pretrained(models("tied"), num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(plain.score.weight)
    losses = plain_loop(job, plain, lambda rows: plain_pair_loss(plain, job, rows))
    assert [metrics["train/loss"] for _, metrics in records(tmp_path, "step")] == pytest.approx(losses, abs=1e-5)
    folder = tmp_path / "run" / "checkpoints" / f"step-{last:06d}" / "model"
    trained, loading = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values())
    assert apart(trained, plain) < 1e-5


def test_a_dry_run_shows_what_is_learned_and_starts_nothing(command: Any, tmp_path: Path) -> None:
    out = command("sft", "--dry-run")
    assert "# data: 5 sequences\n# eval.sets.test: 1 sequences\n# 5 steps\n" in out
    assert out.endswith("<|user|>1+1<|end|><|assistant|>»2<|end|>«\n")
    assert not (tmp_path / "run").exists()


def test_responses_at_whose_end_no_server_stops_are_warned_of(command: Any, models: Any, tmp_path: Path) -> None:
    assert "responses end with" not in command("sft", "--dry-run")
    other = shutil.copytree(models("tied"), tmp_path / "other")
    (other / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    out = command("sft", "--dry-run", "--model.path", str(other))
    assert "responses end with token 256 ('<|end|>') and a server of this model stops at [7, 9]" in out


REFUSED = [
    (["--rollout.groups", "3"], "rollout is not an option"),
    (["--batch.sise", "3"], "batch.sise is not an option; did you mean size?"),
    (["--model.path", "/nowhere"], "'/nowhere' holds no config.json"),
    (["--batch.max_length", "3"], "all 5 sequences are over batch.max_length = 3 tokens; raise it"),
]


@pytest.mark.parametrize(("words", "why"), REFUSED)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    command: Any, words: list[str], why: str, tmp_path: Path
) -> None:
    assert why in command("sft", *words, code=2)
    assert not (tmp_path / "run").exists()


def test_a_reward_model_has_no_other_mean_and_no_adapter(command: Any) -> None:
    error = command("reward-model", "--batch.reduction", "sequence", "--lora.rank", "4", code=2)
    assert "a reward model's loss is the mean over pairs" in error and "a reward model is trained whole" in error
