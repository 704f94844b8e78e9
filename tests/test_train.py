"""The whole job through the command line, with real vLLM: two servers behind the router, kill -9, resume, and clear refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vime.data.journal import account

VIME = [sys.executable, "-m", "vime.cli"]
ROOT = Path(__file__).parents[1]
CONFIG = """
[run]
steps = {steps}
[model]
path = "{model}"
dtype = "float32"
[data]
source = "{data}"
[reward]
function = "{reward}"
[rollout]
groups = 4
samples_per_group = 4
max_tokens = 8
[inference]
servers = 2
[vllm]
max-model-len = 256
max-num-seqs = 16
[trainer]
learning_rate = 1e-3
ranks = 2
threads = 1
[eval]
every = 2
[eval.sets.held_out]
source = "{held_out}"
samples = 2
temperature = 1.0
[checkpoint]
every = 1
keep = 2
"""


def write_job(folder: Path, model: Path, steps: int) -> list[str]:
    """A job on a small data set whose reward is the share of lower-case letters: learnable from random weights."""
    for name, count in (("train", 6), ("held_out", 3)):
        rows = [{"prompt": f"{name} {i}", "answer": "x"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reward = folder / "lower.py"
    reward.write_text("def share(task, response):\n    return sum('a' <= c <= 'z' for c in response) / 8\n")
    (folder / "config.toml").write_text(
        CONFIG.format(
            steps=steps,
            model=model,
            data=folder / "train.jsonl",
            held_out=folder / "held_out.jsonl",
            reward=f"{reward}:share",
        )
    )
    return [*VIME, "train", str(folder / "config.toml"), "--run.dir", str(folder / "run")]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.1)


def processes_with(text: str) -> list[str]:
    """Command lines of living processes that contain ``text``, and of everything they started."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if (
            folder.name.isdigit()
            and int(folder.name) != os.getpid()
            and (text in command or f"MARK={text}" in environment)
        ):
            found.append(command)
    return found


@pytest.fixture(scope="module")
def killed_and_resumed(models: Any, tmp_path_factory: Any) -> Path:
    """A run, one version ahead, whose driver was killed with SIGKILL after its second step and that was then resumed."""
    folder = tmp_path_factory.mktemp("job")
    command = write_job(folder, models("tied"), steps=5)
    command += ["--rollout.max_staleness=1", "--algorithm.corrections.tis.high=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MARK": str(folder)}
    with (folder / "first.log").open("w") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        metrics = folder / "run" / "metrics.jsonl"
        try:
            wait_for(
                lambda: driver.poll() is not None or (metrics.exists() and metrics.read_text().count('"step", ') >= 3),
                300,
                "three steps",
            )
            assert driver.poll() is None, (folder / "first.log").read_text()
        finally:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
    wait_for(lambda: not processes_with(str(folder)), 60, "servers, router and trainer to end")
    (folder / "journal-when-killed.jsonl").write_text((folder / "run" / "journal.jsonl").read_text())
    done = subprocess.run(
        [*command, "--resume"], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "second.log").write_text(done.stdout)
    return folder


def test_a_killed_and_resumed_run_has_every_step_once(killed_and_resumed: Path) -> None:
    steps = [entry["step"] for entry in lines(killed_and_resumed / "run" / "metrics.jsonl") if entry["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 5]


def test_no_prompt_is_lost_or_trained_twice(killed_and_resumed: Path) -> None:
    counts = account(killed_and_resumed / "run" / "journal.jsonl")
    assert (counts["open"], counts["twice"]) == ([], [])
    assert counts["taken"] == counts["trained"] + sum(counts["filtered"].values()) == 20
    taken = [e["task"] for e in lines(killed_and_resumed / "run" / "journal.jsonl") if e["event"] == "taken"]
    assert sorted(Counter(taken).values()) == [3, 3, 3, 3, 4, 4]  # 20 draws of 6 prompts: three epochs and two more


def test_every_sync_was_proved_and_no_token_was_older_than_it_may_be(killed_and_resumed: Path) -> None:
    steps = [e["metrics"] for e in lines(killed_and_resumed / "run" / "metrics.jsonl") if e["kind"] == "step"]
    assert [step["weights/version"] for step in steps] == [1, 2, 3, 4, 5]
    assert all(step["weights/probe_abs_diff_max"] < 1e-4 for step in steps)
    assert all(step["rollout/staleness_max"] <= 1 for step in steps) and steps[0]["rollout/staleness_max"] == 0
    assert steps[0]["train/logprob_abs_diff_max"] < 1e-4


def test_both_servers_took_requests_through_the_router(killed_and_resumed: Path) -> None:
    assert (killed_and_resumed / "run" / "logs" / "router.log").exists()
    assert "vllm-1.log" in {path.name for path in (killed_and_resumed / "run" / "logs").iterdir()}


def test_the_run_leaves_summary_report_and_the_newest_checkpoints(killed_and_resumed: Path) -> None:
    folder = killed_and_resumed / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 5 and summary["weight_probe_failures"] == 0
    assert summary["weight_syncs"] >= 7  # one at each of the two starts, one a step
    assert {"eval_before", "eval_after", "reward_first", "reward_last", "seconds_total"} <= summary.keys()
    assert "<svg" in (folder / "report.html").read_text()
    assert {"step-000004", "step-000005"} <= {path.name for path in (folder / "checkpoints").iterdir()}
    assert any((folder / "tensorboard").iterdir())
    assert {row["split"] for row in lines(folder / "samples.jsonl")} == {"train", "eval"}


def test_the_checkpoint_holds_a_folder_that_transformers_loads(killed_and_resumed: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = killed_and_resumed / "run" / "checkpoints" / "step-000005" / "model"
    _, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_an_existing_run_is_not_overwritten(killed_and_resumed: Path) -> None:
    folder = killed_and_resumed
    command = [*VIME, "train", str(folder / "config.toml"), "--run.dir", str(folder / "run")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert refused.returncode == 2 and "go on with it by --resume" in refused.stderr


def test_the_checkpoint_alone_can_be_evaluated(killed_and_resumed: Path) -> None:
    folder = killed_and_resumed
    model = folder / "run" / "checkpoints" / "step-000005" / "model"
    command = [*VIME, "eval", str(folder / "config.toml"), "--model", str(model), "--inference.servers", "1"]
    command += ["--run.dir", str(folder / "alone")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "eval/held_out/pass@1" in done.stdout and "eval/held_out/pass@2" in done.stdout


def test_a_dry_run_names_configuration_and_processes_and_starts_nothing(models: Any, tmp_path: Path) -> None:
    command = write_job(tmp_path, models("tied"), steps=1)
    command += ["--dry-run", "--memory"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "# predicted memory of each of 2 trainer ranks at its peak" in done.stdout
    assert "vLLM server 1" in done.stdout and "vllm-router" in done.stdout and "trainer rank 1 of 2" in done.stdout
    assert "# worker of plain rewards 1" in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--vllm.max-modl-len=5", "vllm.max-modl-len is no flag of this program; did you mean max-model-len?"),
        ("--vllm.port=5", "vllm.port is set by vime"),
        ("--router.polcy=random", "router.polcy is no flag of this program; did you mean policy?"),
        ("--reward.function=exat", "no reward is called 'exat'; did you mean exact?"),
        ("--reward.function=tests/tiny.py:make_modle", "has no 'make_modle'; did you mean make_model?"),
    ],
)
def test_a_wrong_flag_or_reward_is_refused_before_anything_starts(
    models: Any, tmp_path: Path, flag: str, message: str
) -> None:
    command = [*write_job(tmp_path, models("tied"), steps=1), flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    assert done.returncode == 2 and message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_cannot_start_shows_the_end_of_its_log(models: Any, tmp_path: Path) -> None:
    command = [*write_job(tmp_path, models("tied"), steps=1), "--vllm.max-model-len=100000", "--inference.servers=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "vLLM server 0 ended with exit code" in done.stderr and "max_model_len" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_is_not_ready_in_time_is_named_with_the_option(models: Any, tmp_path: Path) -> None:
    command = [*write_job(tmp_path, models("tied"), steps=1), "--inference.start_timeout_s=1", "--inference.servers=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "was not ready in 1 s (inference.start_timeout_s); the end of" in done.stderr
    assert "Traceback" not in done.stderr
    wait_for(lambda: not processes_with(str(tmp_path)), 60, "the server and the trainer to end")
