"""When which set is evaluated, and evaluation beside training: by the weights of its step, its result at its step, none lost."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.stand_in_runs import QuickJob, Server, configuration, whole_run
from tests.test_checkpoint import Writing, job_at
from tests.tiny import make_config
from vime.checkpoint import read_state
from vime.config.load import ConfigError, load
from vime.config.sections import Config
from vime.config.supervised import Supervised
from vime.inference.client import Adapter
from vime.inference.commands import server_command
from vime.inference.gate import Gate
from vime.inference.requests import Requests
from vime.job import Job
from vime.rollout.evaluate import version_metrics
from vime.run import Run
from vime.sample import Sample, VersionSpan
from vime.weights.adapters import AdapterChannel


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def evaluations(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    return [(e["step"], e["metrics"]) for e in lines(run_dir / "metrics.jsonl") if e["kind"] == "eval"]


def config_of(folder: Path, model: Path, steps: int, background: bool, **sections: Any) -> Config:
    held_out = {"source": str(folder / "held_out.jsonl"), "max_tokens": 24, "every": 1}
    other = {"source": str(folder / "other.jsonl"), "max_tokens": 24}
    evaluation = {"background": background, "sets": {"held_out": held_out, "other": other}}
    return configuration(
        folder,
        model,
        run={"dir": str(folder / "run"), "steps": steps},
        eval=evaluation,
        log={"dump_every": 0},
        **sections,
    )


@pytest.fixture(scope="module", params=[False, True], ids=["blocking", "background"])
def evaluated(request: Any, models: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool, list[bool]]:
    """The folder of a run of four steps whose weights are good at step 2 only; whether it was evaluated in the background; and
    for each step whether its batch was made while an evaluation was under way."""
    folder = tmp_path_factory.mktemp("evaluated")
    config = config_of(folder, models("tied"), 4, request.param, checkpoint={"every": 1, "keep": 1})
    together: list[bool] = []

    def watch(job: Job) -> None:
        collect = job.scheduler.collect

        async def noting(*args: Any) -> Any:
            together.append(job.evaluation is not None)
            return await collect(*args)

        job.scheduler.collect = noting  # type: ignore[method-assign]

    asyncio.run(whole_run(config, Server(ms_per_token=4.0, good=["2"]), QuickJob, meanwhile=watch))
    return folder / "run", request.param, together


def test_each_set_is_evaluated_on_its_own_interval_and_all_at_both_ends(evaluated: Any) -> None:
    measured = [(step, {name.split("/")[1] for name in metrics}) for step, metrics in evaluations(evaluated[0])]
    both = {"held_out", "other"}
    assert measured == [(0, both), (1, {"held_out"}), (2, {"held_out"}), (3, {"held_out"}), (4, both)]


def test_training_goes_on_meanwhile_only_in_the_background(evaluated: Any) -> None:
    _, background, together = evaluated
    assert together == [background] * 4


def test_every_response_is_by_the_weights_of_its_step(evaluated: Any) -> None:
    run_dir, background, _ = evaluated
    rows = [row for row in lines(run_dir / "samples.jsonl") if row["split"] == "eval"]
    assert len(rows) == 5 * 3 + 2 * 2 and all(row["version"] == row["step"] for row in rows)
    for step, metrics in evaluations(run_dir):
        assert metrics["eval/held_out/pass@1"] == float(step == 2)
        told = [metrics.get(f"eval/held_out/{name}") for name in ("mixed_fraction", "version_min", "version_max")]
        assert told == ([0.0, step, step] if background else [None] * 3)


def test_the_best_checkpoint_is_the_one_of_the_step_that_was_evaluated(evaluated: Any) -> None:
    checkpoints = evaluated[0] / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000002", "step-000004"]
    state = read_state(checkpoints / "step-000004")
    assert (state["best"], state["best_step"], state["owed"]) == ([1.0, 2], 2, [])
    assert [step for step, _ in state["evals"]] == [0, 1, 2, 3, 4]


def test_an_evaluation_that_a_killed_run_did_not_come_to_is_made_after_the_resume(models: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path, models("tied"), 3, True, checkpoint={"every": 1, "keep": 9})
    asyncio.run(whole_run(config, Server(good=["2"]), QuickJob))
    before = evaluations(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    assert read_state(tmp_path / "run" / "checkpoints" / "step-000002")["owed"] == ["held_out"]
    job, _ = asyncio.run(whole_run(config, Server(good=["2"]), QuickJob, resume=True))
    after = evaluations(tmp_path / "run")
    assert [step for step, _ in after] == [0, 1, 2, 3] and after[:3] == before[:3]
    assert job.best == (1.0, 2)


# Parts


def test_the_evaluation_before_the_first_step_can_be_left_out(models: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path, models("tied"), 2, background=False)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"at_start": False})})
    asyncio.run(whole_run(config, Server(ms_per_token=1.0), QuickJob))
    assert [step for step, _ in evaluations(tmp_path / "run")] == [1, 2]


def test_sets_of_supervised_runs_have_intervals_of_their_own_too() -> None:
    sets = {"a": {"source": "a"}, "b": {"source": "b", "every": 3}, "c": {"source": "c", "every": 0}}
    tree = {"model": {"path": "m"}, "data": {"source": "d"}, "eval": {"every": 2, "sets": sets}}
    job: Any = SimpleNamespace(settings=Supervised.model_validate(tree), step=0)
    job.due = lambda every: Run.due(job, every)

    def due(step: int, last: bool = False) -> list[str]:
        job.step = step
        return Run.due_sets(job, last)

    assert [due(step) for step in (1, 2, 3, 6)] == [[], ["a"], ["b"], ["a", "b"]]
    assert due(5, last=True) == ["a", "b", "c"]


def test_responses_of_other_weights_or_of_several_are_counted() -> None:
    def sample(*versions: int) -> Sample:
        spans = tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions))
        return Sample([1], [2] * len(spans), [-1.0] * len(spans), spans, "stop", "")

    found = version_metrics("x", [sample(5), sample(5, 6), sample(6), sample(5, 5)], 5)
    assert found == {"eval/x/mixed_fraction": 0.5, "eval/x/version_min": 5, "eval/x/version_max": 6}


def job_with_evaluation(folder: Path, trainer: Any = None, **sections: Any) -> tuple[Any, asyncio.Event]:
    """A job at step 2, whose evaluation of step 1 ends when the event is set."""
    end = asyncio.Event()
    job: Any = job_at(folder, 2, trainer)
    job.config = make_config(folder, run={"dir": str(folder)}, **sections)
    job.view.update = lambda *_: None
    job.recorder = SimpleNamespace(offsets=dict, samples=lambda *_: None, log=lambda *_: None)
    job.fleet, job.context = SimpleNamespace(gate=Gate(usable=True)), SimpleNamespace(slime=None)

    async def evaluation() -> Any:
        await end.wait()
        return {"eval//pass@1": 0.5}, []

    job.evaluation = 1, asyncio.create_task(evaluation())
    return job, end


def test_servers_get_other_weights_only_when_the_evaluation_has_ended(tmp_path: Path) -> None:
    async def run() -> None:
        job, end = job_with_evaluation(tmp_path)
        waiting = asyncio.create_task(job.let_evaluation_end())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        end.set()
        await waiting
        assert job.evals == [(1, {"eval//pass@1": 0.5})] and job.best == (0.5, 1) and job.evaluation is None

    asyncio.run(run())


def test_it_is_not_waited_for_while_no_server_serves_nor_where_it_names_its_adapter(tmp_path: Path) -> None:
    async def run() -> None:
        job, _ = job_with_evaluation(tmp_path)
        job.fleet.gate.usable(False)
        await job.let_evaluation_end()
        adapted, end = job_with_evaluation(tmp_path, lora={"rank": 4})
        await adapted.let_evaluation_end()
        assert job.evaluation and adapted.evaluation
        end.set()
        await asyncio.sleep(0)
        await adapted.let_evaluation_end()
        assert adapted.evals, "one that has ended is noted at the next sync"

    asyncio.run(run())


def test_a_checkpoint_waits_for_the_evaluation_of_an_earlier_step(tmp_path: Path) -> None:
    async def run() -> None:
        trainer = Writing()
        trainer.go_on.set()
        job, end = job_with_evaluation(tmp_path, trainer, lora={"rank": 4})
        saving = asyncio.create_task(job.save(last=False))
        await asyncio.sleep(0.05)
        assert not saving.done()
        end.set()
        await saving
        await job.checkpoints.written()
        state = read_state(job.checkpoints.path(2))
        assert state["best_step"] == 1 and state["evals"] == [[1, {"eval//pass@1": 0.5}]]

    asyncio.run(run())


class Loaded:
    """A server that notes the adapters it holds."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.adapter: Adapter | None = None
        self.in_flight: dict[str, int] = {}

    async def adapters(self) -> list[str]:
        return list(self.held)

    async def load_adapter(self, adapter: Adapter) -> None:
        self.held.append(adapter.name)

    async def unload_adapter(self, name: str) -> None:
        self.held.remove(name)


class Exporting:
    async def export_adapter(self, folder: Path, dtype: str) -> None:
        folder.mkdir()


def test_the_adapter_under_evaluation_stays_and_comes_to_servers_that_join(tmp_path: Path) -> None:
    server, late = Loaded(), Loaded()
    fleet: Any = SimpleNamespace(servers=[server], front=Loaded())
    channel = AdapterChannel(make_config(tmp_path, lora={"rank": 4}), Exporting(), fleet, tmp_path / "weights")  # type: ignore[arg-type]

    async def published(version: int) -> str:
        await channel.publish(version)
        await channel.take(server)  # type: ignore[arg-type]
        await channel.tidy()
        assert channel.adapter
        return channel.adapter.name

    async def run() -> None:
        first = await published(1)
        assert channel.adapter
        with channel.keeping(channel.adapter):
            await published(2)
            third = await published(3)
            assert set(server.held) == {first, third} and (tmp_path / "weights" / first).exists()
            await channel.take(late)  # type: ignore[arg-type]
            assert set(late.held) == {first, third} and late.adapter and late.adapter.name == third
        fourth = await published(4)
        assert server.held == [fourth]

    asyncio.run(run())


def test_requests_name_the_adapter_they_are_told_to_whatever_is_served(tmp_path: Path) -> None:
    asked: list[Adapter | None] = []

    class Front:
        version = 9

        async def generate(self, *arguments: Any) -> None:
            asked.append(arguments[-1])

    requests: Any = Requests(Front(), Gate(usable=True), make_config(tmp_path).rollout)  # type: ignore[arg-type]
    old = Adapter("old", "", 7)

    async def run() -> None:
        await requests.naming(old).generate([1], {})
        await requests.generate([1], {})

    asyncio.run(run())
    assert asked == [old, None] and requests.naming(old).version == 7 and requests.version == 9
    assert requests.naming(old).limiter is requests.limiter


def test_servers_have_room_for_the_adapter_that_is_evaluated(tmp_path: Path) -> None:
    def room(background: bool, max_staleness: int = 0) -> str:
        rollout = {"max_staleness": max_staleness}
        config = make_config(tmp_path, lora={"rank": 4}, eval={"background": background}, rollout=rollout)
        command = server_command(config, 0, 0, [])
        return command[command.index("--max-loras") + 1]

    assert (room(False), room(True)) == ("2", "3")
    assert (room(False, 1), room(False, 4), room(True, 4)) == ("2", "5", "6"), "as many versions are sampled at once"


def test_a_deterministic_run_refuses_it(models: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'[model]\npath = "{models("tied")}"\n[data]\nsource = "reasoning-gym:chain_sum"\nsize = 9\n')
    with pytest.raises(ConfigError, match="run.deterministic with eval.background = true: set it to false"):
        load(file, ["--run.deterministic", "true", "--eval.background", "true"])


def test_a_set_that_is_not_due_is_no_fault_of_the_best_metric_but_one_that_is_never_measured_is(tmp_path: Path) -> None:
    async def run() -> None:
        job, _ = job_with_evaluation(tmp_path)
        job.settings = job.settings.model_copy(
            update={"checkpoint": job.settings.checkpoint.model_copy(update={"best_metric": "eval/a/pass@1"})}
        )
        assert job.note_evaluation(1, {"eval/a/pass@1": 0.5})
        assert not job.note_evaluation(2, {"eval/b/pass@1": 0.9})
        job.evals = []
        with pytest.raises(ConfigError, match="best_metric = 'eval/a/pass@1' is not measured; measured: eval/b/pass@1"):
            job.note_evaluation(3, {"eval/b/pass@1": 0.9})

    asyncio.run(run())
