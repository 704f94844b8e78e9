"""Half a run at a time: batches that were dumped are trained again to the last bit; groups are made without a trainer."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engines import MEASURED
from tests.stand_in_runs import QuickReplay, Server, configuration, quiet_view, replay, whole_run
from tests.tiny import make_config
from vime.checkpoint import CheckpointError
from vime.cli import main
from vime.config.sections import Config
from vime.debug import ReplayJob, RolloutJob, dumps_for, for_rollout
from vime.rollout.dumps import DumpError, Head, find_dumps, read_dump, remove_later, write_dump
from vime.rollout.outcome import Outcome
from vime.sample import Group, Sample, Task, VersionSpan
from vime.store.shared_memory import SharedMemoryStore


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def elsewhere(config: Config, run_dir: Path) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run_dir)})})


def learned(run_dir: Path) -> dict[int, dict[str, float]]:
    """What each step measured of its batch and its training."""
    steps = [entry for entry in lines(run_dir / "metrics.jsonl") if entry["kind"] == "step"]
    return {
        entry["step"]: {
            name: value
            for name, value in entry["metrics"].items()
            if name.startswith(("train/", "reward/")) and name not in {*MEASURED, "reward/worker_restarts"}
        }
        for entry in steps
    }


def state_of(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    (file,) = (run_dir / "checkpoints" / f"step-{step:06d}" / "state").iterdir()
    return load_file(file)


def assert_same_state(one: Path, other: Path, step: int) -> None:
    first, second = state_of(one, step), state_of(other, step)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.fixture(scope="module")
def dumped(models: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a run of three steps with all its dumps, and its configuration."""
    folder = tmp_path_factory.mktemp("dumped")
    config = configuration(folder, models("tied"), checkpoint={"every": 1, "keep": 5})
    asyncio.run(whole_run(config, Server()))
    return folder / "run", config


@pytest.fixture(scope="module")
def replayed(dumped: tuple[Path, Any]) -> Path:
    run_dir, config = dumped
    asyncio.run(replay(config, run_dir))
    return Path(f"{run_dir}-replay")


def test_a_replay_measures_what_the_run_measured_to_the_last_bit(dumped: tuple[Path, Any], replayed: Path) -> None:
    original = learned(dumped[0])
    assert list(original) == [1, 2, 3] and len({step["train/grad_norm"] for step in original.values()}) == 3
    assert original[1]["train/lr"] > original[2]["train/lr"], "the schedule is that of the whole run"
    assert learned(replayed) == original


def test_a_replay_ends_with_the_weights_and_moments_of_the_run(dumped: tuple[Path, Any], replayed: Path) -> None:
    assert_same_state(dumped[0], replayed, 3)
    assert not torch.equal(*(next(iter(state_of(dumped[0], step).values())) for step in (1, 3)))


def test_a_replay_logs_the_samples_and_starts_no_server(dumped: tuple[Path, Any], replayed: Path) -> None:
    assert lines(replayed / "samples.jsonl") == lines(dumped[0] / "samples.jsonl")
    assert [path.name for path in (replayed / "logs").iterdir()] == ["trainer-0.log"]
    assert not (replayed / "dumps").exists() and not (replayed / "journal.jsonl").exists()
    summary = json.loads((replayed / "summary.json").read_text())
    assert summary["steps"] == 3 and "weight_syncs" not in summary and "eval_before" not in summary


def test_one_step_is_trained_again_from_the_checkpoint_before_it(dumped: tuple[Path, Any], tmp_path: Path) -> None:
    run_dir, config = dumped
    config = elsewhere(config, tmp_path / "third")
    _, said = asyncio.run(replay(config, run_dir / "dumps" / "step-000003", run_dir / "checkpoints" / "step-000002"))
    assert "note: the first dump" not in said
    assert learned(tmp_path / "third-replay") == {3: learned(run_dir)[3]}
    assert_same_state(run_dir, tmp_path / "third-replay", 3)


def test_a_replay_is_resumed_from_its_own_checkpoint(dumped: tuple[Path, Any], tmp_path: Path) -> None:
    run_dir, config = dumped
    config = elsewhere(config, tmp_path / "half")
    whole, _ = asyncio.run(replay(config, run_dir, kind=QuickReplay))
    half = tmp_path / "half-replay"
    measured, checkpoints = learned(half), half / "checkpoints"
    shutil.rmtree(checkpoints / "step-000003")
    resumed, _ = asyncio.run(replay(config, run_dir, resume=True, kind=QuickReplay))
    assert (whole.trainer.steps, whole.trainer.began) == (3, None)  # type: ignore[attr-defined]
    assert (resumed.trainer.steps, resumed.trainer.began) == (1, checkpoints / "step-000002")  # type: ignore[attr-defined]
    assert list(measured) == [1, 2, 3] and learned(half) == measured


def test_what_is_different_from_the_run_that_dumped_is_told(dumped: tuple[Path, Any], tmp_path: Path) -> None:
    run_dir, config = dumped
    trainer = config.trainer.model_copy(update={"learning_rate": 1e-2})
    view, out = quiet_view()
    other = elsewhere(config, tmp_path / "other").model_copy(update={"trainer": trainer})
    job = ReplayJob(other, view, find_dumps(run_dir / "dumps" / "step-000002"))
    job.store = SharedMemoryStore(tmp_path / "store")
    with view:
        job.begin_at(None)
        job.check_dumps()
    assert "note: trainer.learning_rate was 0.001 in the run that dumped, is 0.01" in out.getvalue()
    assert "--from CHECKPOINT takes up what step 1 left" in out.getvalue()
    assert not any(job.store.folder.iterdir()), "what was read for the checks is not left in the store"
    with pytest.raises(
        CheckpointError, match="is of step 2 and the first dump of step 2; name the checkpoint of step 1"
    ):
        job.begin_at(run_dir / "checkpoints" / "step-000002")
    with pytest.raises(CheckpointError, match="is no checkpoint; name RUN/checkpoints/step-000001"):
        job.begin_at(tmp_path)


def test_dumps_of_another_family_are_refused_before_the_trainer_starts(
    dumped: tuple[Path, Any], tmp_path: Path
) -> None:
    run_dir, config = dumped
    shutil.copytree(config.model.path, tmp_path / "small")
    shape = json.loads((tmp_path / "small" / "config.json").read_text()) | {"vocab_size": 100}
    (tmp_path / "small" / "config.json").write_text(json.dumps(shape))
    other = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "small")})})
    with pytest.raises(DumpError, match="knows 100 tokens; set model.path to a model of the family"):
        asyncio.run(replay(elsewhere(other, tmp_path / "x"), run_dir))
    assert not (tmp_path / "x-replay" / "logs").exists()


def test_rollout_only_makes_groups_and_keeps_them_without_a_trainer(dumped: tuple[Path, Any], tmp_path: Path) -> None:
    _, config = dumped
    config = for_rollout(elsewhere(config, tmp_path / "half"))
    job, said = asyncio.run(whole_run(config, Server(), RolloutJob))
    run_dir = tmp_path / "half-rollout"
    steps = learned(run_dir)
    assert list(steps) == [1, 2, 3] and all("train/loss" not in step for step in steps.values())
    assert all(0 < step["reward/mean"] < 1 for step in steps.values())
    assert "rollout only" in said and "train …" not in said
    assert len(lines(run_dir / "samples.jsonl")) == 24 and job.summary()["rollout_tokens_per_s"] > 0
    assert not any(path.name.startswith("trainer") for path in (run_dir / "logs").iterdir())
    assert not (run_dir / "checkpoints").exists() and len(find_dumps(run_dir)) == 3


# Dumps


def make_batch(store: SharedMemoryStore) -> list[Outcome]:
    def group(number: int, filtered: str | None) -> Outcome:
        samples = [
            Sample([1, 2], [3, 4, 5], [-0.5] * 3, (VersionSpan(6, 0, 3),), "stop", "text", reward=float(i))
            for i in range(2)
        ]
        made = Group(number, Task(f"t{number}", ({"role": "user", "content": "?"},)), samples)
        if not filtered:
            store.put(f"g{number}", samples)
        return Outcome.of(made, filtered)

    return [group(0, None), group(1, "zero_variance")]


def dumped_step(run_dir: Path, step: int, store: SharedMemoryStore) -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.toml").write_text("[run]\n")
    return write_dump(run_dir, Head(step, step - 1, 1.5), make_batch(store), store)


def test_a_dump_holds_rows_rewards_versions_and_the_payloads_of_what_is_trained(tmp_path: Path) -> None:
    store, other = SharedMemoryStore(tmp_path / "store"), SharedMemoryStore(tmp_path / "other")
    written = dumped_step(tmp_path / "run", 7, store)
    assert {path.name for path in written.iterdir()} == {"batch.json", "groups.json", "config.toml", "g0.safetensors"}
    assert read_dump(written, other) == make_batch(store)
    assert other.get("g0", 1).response_ids.tolist() == [3, 4, 5]


def test_a_half_written_dump_is_never_found_and_a_step_taken_again_replaces_its_dump(tmp_path: Path) -> None:
    store, run_dir = SharedMemoryStore(tmp_path / "store"), tmp_path / "run"
    for step in (10, 9, 9):
        dumped_step(run_dir, step, store)
    (run_dir / "dumps" / "step-000011.tmp").mkdir()
    (run_dir / "dumps" / "step-000012").mkdir()
    assert [dump.path.name for dump in find_dumps(run_dir)] == ["step-000009", "step-000010"]
    assert find_dumps(run_dir / "dumps") == find_dumps(run_dir)
    assert [dump.path.name for dump in find_dumps(run_dir / "dumps" / "step-000010")] == ["step-000010"]


def test_a_resume_removes_the_dumps_of_steps_that_are_taken_again(tmp_path: Path) -> None:
    store = SharedMemoryStore(tmp_path / "store")
    for step in (1, 2, 3):
        dumped_step(tmp_path / "run", step, store)
    remove_later(tmp_path / "run", 2)
    assert [dump.path.name for dump in find_dumps(tmp_path / "run")] == ["step-000001", "step-000002"]


def test_a_dump_that_is_not_there_is_named_with_what_would_be(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="nowhere does not exist; name RUN/dumps"):
        find_dumps(tmp_path / "nowhere")
    with pytest.raises(DumpError, match="holds no dump; .* log.dump_every over 0"):
        find_dumps(tmp_path)
    dumped_step(tmp_path / "run", 7, SharedMemoryStore(tmp_path / "store"))
    with pytest.raises(DumpError, match="after run.steps = 5; raise it"):
        dumps_for(make_config(tmp_path, run={"steps": 5}), tmp_path / "run")


def test_a_damaged_dump_is_named(tmp_path: Path) -> None:
    written = dumped_step(tmp_path / "run", 1, store := SharedMemoryStore(tmp_path / "store"))
    (written / "groups.json").write_text("[{")
    with pytest.raises(DumpError, match="step-000001 cannot be read"):
        read_dump(written, store)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--debug", "train"], "--debug train needs the batches to train: --replay RUN/dumps"),
        (["--replay", "x"], "--replay x is for --debug train; add that, or remove it"),
        (["--debug", "rollout", "--from", "y"], "--from y is for --debug train"),
        (["--debug", "rollout", "--resume"], "--resume with --debug rollout: it keeps no checkpoint"),
        (["--debug", "train", "--replay", "nowhere"], "nowhere does not exist; name RUN/dumps"),
        (["--debug", "train", "--replay", "x", "--resume", "--from", "y"], "remove one of the two"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    dumped: tuple[Path, Any], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["train", str(dumped[0] / "config.toml"), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("half", "there", "missing"), [("rollout", "server at", "rank 0"), ("train", "rank 0", "server at")]
)
def test_a_dry_run_names_the_processes_of_the_half(
    dumped: tuple[Path, Any], capsys: pytest.CaptureFixture[str], half: str, there: str, missing: str
) -> None:
    words = ["train", str(dumped[0] / "config.toml"), "--dry-run", "--debug", half]
    assert main([*words, *(["--replay", str(dumped[0])] if half == "train" else [])]) == 0
    processes = capsys.readouterr().out.partition("# processes")[2]
    assert there in processes and missing not in processes
