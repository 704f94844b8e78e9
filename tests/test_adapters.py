"""Adapters on a real vLLM server: proved, known by their tokens, beside those of other runs, equal to merged weights."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.engines import load_engine
from tests.test_train import ROOT, VIME, wait_for, write_job
from tests.tiny import make_config
from vime.config.sections import Config
from vime.inference.client import Adapter, Generated, InferenceError, RequestRefused, Server, decode
from vime.inference.commands import server_command, server_env
from vime.inference.fleet import Fleet
from vime.store.shared_memory import SharedMemoryStore
from vime.training import adapter as adapters
from vime.weights.adapters import AdapterChannel, prefix_of
from vime.weights.channel import SharedMemoryChannel
from vime.weights.probe import Probe, ProbeError
from vime.weights.sync import Sync

PROMPTS = [[10, 20, 30, 40, 50], [7, 8, 9], list(range(60, 90))]
SAMPLING = {"max_tokens": 6, "ignore_eos": True, "temperature": 1.0}


class HereTrainer:
    """An engine in this process under the driver's calls."""

    def __init__(self, config: Config, folder: Path, seed: int) -> None:
        self.engine = load_engine(config, SharedMemoryStore(folder / "store"))
        self.generator = torch.Generator().manual_seed(seed)
        self.learn()

    def learn(self) -> None:
        """As a step of training would, the adapter changes, both its matrices."""
        policy = self.engine.policy.module
        state = {
            name: p.detach() + 0.1 * torch.randn(p.shape, generator=self.generator).reshape(p.shape)
            for name, p in ((name, p.to_local()) for name, p in adapters.parameters(policy))
        }
        parameters: Any = adapters.parameters(policy)
        adapters.copy_into(
            policy, {n: DTensor.from_local(state[n], p.device_mesh, p.placements) for n, p in parameters}
        )

    async def export(self, folder: Path, dtype: str) -> None:
        self.engine.export(str(folder), dtype)

    async def export_adapter(self, folder: Path, dtype: str) -> None:
        self.engine.export_adapter(str(folder), dtype)

    async def logprobs(self, rows: Any) -> list[list[float]]:
        return self.engine.logprobs(rows)


class Run:
    """Trainer, channel and probe of one run on the server."""

    def __init__(self, fleet: Fleet, model: Path, folder: Path, number: int, sync: str = "adapter") -> None:
        self.config = make_config(
            model,
            run={"dir": str(folder / f"run{number}")},
            lora={"rank": 3 + number, "alpha": 8, "seed": number, "sync": sync},
        )
        self.trainer: Any = HereTrainer(self.config, folder / f"run{number}", number)
        channel = AdapterChannel if sync == "adapter" else SharedMemoryChannel
        self.channel: Any = channel(self.config, self.trainer, fleet, folder / f"weights{number}")
        self.probe, self.fleet = Probe(self.config, self.trainer, PROMPTS), fleet
        self.sync = Sync(self.config, fleet, self.channel, self.probe)

    async def send(self, version: int) -> None:
        """Published, synced, proved."""
        assert (await self.sync.send(version))["weights/probe_abs_diff_max"] < 1e-4

    async def prove(self, version: int) -> float:
        (result,) = await self.probe.prove(version, self.fleet.servers)
        assert not isinstance(result, InferenceError)
        return result.max


def beside(fleet: Fleet, session: Any) -> Fleet:
    """Another driver's handle on the same server."""
    config = fleet.config.model_copy(
        update={"inference": fleet.config.inference.model_copy(update={"urls": [fleet.servers[0].url]}), "vllm": {}}
    )
    return Fleet(config, session, Path("unused"))


@pytest.fixture(scope="module")
def fleet(run: Any, session: Any, models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = make_config(models("tied"), lora={"rank": 5})
    started = Fleet(config, session, tmp_path_factory.mktemp("logs-lora"))
    try:
        run(started.start())
        yield started
    finally:
        run(started.stop())


@pytest.fixture
def one(fleet: Fleet, models: Any, tmp_path: Path, run: Any) -> Iterator[Run]:
    made = Run(fleet, models("tied"), tmp_path, 1)
    yield made
    run(made.channel.close())
    assert run(fleet.servers[0].adapters()) == []
    fleet.servers[0].adapter = None


def test_the_servers_flags_are_those_of_the_adapter(models: Any) -> None:
    config = make_config(models("tied"), lora={"rank": 5})
    command = server_command(config, 1, 0, [])
    assert command[command.index("--max-lora-rank") + 1] == "8" and "--enable-lora" in command
    assert server_env(config, 0)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    merged = make_config(models("tied"), lora={"rank": 5, "sync": "merged"})
    assert "--enable-lora" not in server_command(merged, 1, 0, [])
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in server_env(merged, 0)


def test_every_version_is_proved_and_its_tokens_say_so(run: Any, fleet: Fleet, one: Run) -> None:
    server = fleet.servers[0]

    async def rounds() -> None:
        before: list[list[float]] = []
        for version in range(3):
            await one.send(version)
            assert not await server.is_paused()
            completion = await server.generate(PROMPTS[0], SAMPLING, 60)
            assert [(s.version, s.start, s.end) for s in completion.versions] == [(version, 0, 6)]
            assert await server.adapters() == [server.served]
            scores = await server.score(PROMPTS[0], PROMPTS[1], 60)
            assert scores not in before  # nothing cached of an earlier version
            before.append(scores)
            one.trainer.learn()

    run(rounds())


def test_a_response_on_its_way_ends_with_the_weights_it_began_with(run: Any, fleet: Fleet, one: Run) -> None:
    server = fleet.servers[0]

    async def overlapping() -> None:
        await one.send(4)
        old = server.served
        long = asyncio.create_task(server.generate(PROMPTS[0], SAMPLING | {"max_tokens": 200}, 60))
        while not server.in_flight[old]:
            await asyncio.sleep(0.01)
        (before,) = await one.trainer.logprobs([{"prompt_ids": PROMPTS[0], "response_ids": PROMPTS[2]}])
        one.trainer.learn()
        await one.send(5)
        assert set(await server.adapters()) == {old, server.served}
        completion = await long
        assert [(s.version, s.end) for s in completion.versions] == [(4, 200)]
        (after,) = await one.trainer.logprobs([{"prompt_ids": PROMPTS[0], "response_ids": completion.token_ids}])
        assert max(abs(x - y) for x, y in zip(after, completion.logprobs, strict=True)) > 1e-2
        assert before != after
        await one.send(6)
        assert await server.adapters() == [server.served]

    run(overlapping())


def test_two_runs_share_a_server_and_neither_touches_the_other(
    run: Any, fleet: Fleet, one: Run, session: Any, models: Any, tmp_path: Path
) -> None:
    async def rounds(here: Run, server: Any) -> None:
        for version in range(4):
            await here.send(version)
            calls = [server.generate(prompt, SAMPLING, 60) for prompt in PROMPTS * 3]
            completions = await asyncio.gather(*calls)
            pairs = zip(PROMPTS * 3, completions, strict=True)
            rows = [{"prompt_ids": prompt, "response_ids": c.token_ids} for prompt, c in pairs]
            for completion, mine in zip(completions, await here.trainer.logprobs(rows), strict=True):
                assert completion.logprobs == pytest.approx(mine, abs=1e-4)
                assert {span.version for span in completion.versions} == {version}
            here.trainer.learn()

    async def both() -> None:
        other_fleet = beside(fleet, session)
        await other_fleet.start()
        other = Run(other_fleet, models("tied"), tmp_path, 2)
        await asyncio.gather(rounds(one, fleet.servers[0]), rounds(other, other_fleet.servers[0]))
        # What a killed run left is taken away by its successor; the other run's stays.
        left = Adapter(f"{one.channel.prefix}v000009-left", str(next(one.channel.folder.iterdir())), 9)
        await fleet.servers[0].load_adapter(left)
        await one.send(5)
        assert set(await fleet.servers[0].adapters()) == {fleet.servers[0].served, other_fleet.servers[0].served}
        # One run's unproved adapter is withheld; the other goes on.
        one.trainer.learn()
        with pytest.raises(ProbeError, match="The adapter is unloaded"):
            await one.prove(5)
        with pytest.raises(RequestRefused, match="404"):
            await fleet.servers[0].generate(PROMPTS[0], SAMPLING, 60)
        await other.send(7)
        await other.channel.close()

    run(both())


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_goes_on(run: Any, fleet: Fleet, one: Run) -> None:
    server = fleet.servers[0]

    async def refused() -> None:
        await one.send(0)
        served = server.served
        with pytest.raises(InferenceError, match="are started with --enable-lora, --max-lora-rank of lora.rank"):
            await server.load_adapter(Adapter("none", "/does/not/exist", 1))
        assert server.served == served
        assert await one.prove(0) < 1e-4

    run(refused())


def test_served_adapter_and_merged_weights_give_the_same_log_probabilities(
    run: Any, fleet: Fleet, one: Run, models: Any, tmp_path: Path, fleets: Any
) -> None:
    async def scores(server: Any) -> list[float]:
        return [value for prompt in PROMPTS for value in await server.score(prompt, PROMPTS[2], 60)]

    run(one.send(0))
    by_adapter = run(scores(fleet.servers[0]))
    whole = fleets("tied")
    merged = Run(whole, models("tied"), tmp_path, 1, "merged")
    merged.trainer = merged.channel.trainer = merged.probe.trainer = one.trainer
    try:
        run(merged.send(0))
        assert run(scores(whole.servers[0])) == pytest.approx(by_adapter, abs=1e-4)
    finally:
        run(whole.servers[0].resume())


def test_a_server_without_adapters_is_refused_with_the_fix(run: Any, fleets: Any, session: Any, models: Any) -> None:
    url = fleets("tied").servers[0].url
    config = make_config(models("tied"), lora={"rank": 5}, inference={"urls": [url]})
    config = config.model_copy(update={"vllm": {}})
    with pytest.raises(InferenceError, match="lacks /v1/load_lora_adapter: start the server with --enable-lora"):
        run(Fleet(config, session, Path("unused")).start())


def count_steps(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_text().count('"step", ') if file.exists() else 0


def test_two_jobs_on_one_server_one_of_them_killed_and_resumed_leave_it_as_it_was(
    run: Any, fleet: Fleet, models: Any, tmp_path: Path
) -> None:
    """Whole runs through the command line; the killed one's adapter, still loaded, is unloaded by its successor."""
    train = write_job(tmp_path, models("tied"), 5)[:-2]
    train += ["--inference.servers=1", "--inference.urls", json.dumps([fleet.servers[0].url]), "--trainer.ranks=1"]
    config = tmp_path / "config.toml"
    config.write_text(re.sub(r"\[vllm\]\n(.+\n)+?(?=\[)", "[lora]\nrank = 4\n", config.read_text()))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(name: str, *words: str) -> subprocess.Popen[str]:
        command = [*train, "--run.dir", str(tmp_path / name), *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)

    one, other = start("one"), start("other", "--lora.rank=7", "--lora.seed=1")
    try:
        wait_for(lambda: other.poll() is not None or count_steps(tmp_path / "other") >= 3, 300, "three steps")
        assert other.poll() is None, other.communicate()[0]
    finally:
        other.kill()
        other.wait()
    left = [name for name in run(fleet.servers[0].adapters()) if name.startswith("other-")]
    assert left
    resumed = start("other", "--lora.rank=7", "--lora.seed=1", "--resume")
    for process in (one, resumed):
        said, _ = process.communicate(timeout=400)
        assert process.returncode == 0, said
    assert run(fleet.servers[0].adapters()) == []
    for name in ("one", "other"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        steps = [row["metrics"] for row in rows if row["kind"] == "step"]
        assert [step["weights/version"] for step in steps] == [1, 2, 3, 4, 5]
        assert all(step["weights/probe_abs_diff_max"] < 1e-4 for step in steps)
        assert all(step["train/logprob_abs_diff_max"] < 1e-4 and step["rollout/staleness_max"] == 0 for step in steps)
        newest, before = (tmp_path / name / "checkpoints" / f"step-00000{step}" for step in (5, 4))
        assert (newest / "model").exists() and (newest / "adapter").exists() and not (before / "model").exists()
    refused = start("one", "--lora.rank=0", "--resume", "--run.steps=9")
    assert "holds an adapter and lora.rank is 0" in refused.communicate(timeout=120)[0] and refused.returncode == 2


def test_an_adapter_alone_can_be_evaluated(models: Any, tmp_path: Path) -> None:
    command = write_job(tmp_path, models("tied"), steps=1)
    config = make_config(models("tied"), lora={"rank": 5})
    HereTrainer(config, tmp_path, 3).engine.export_adapter(str(tmp_path / "adapter"), "float32")
    command = [*VIME, "eval", *command[4:], "--model", str(tmp_path / "adapter"), "--inference.servers=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "eval/held_out/pass@1" in done.stdout
    assert "load_lora_adapter" in (tmp_path / "run" / "logs-eval" / "vllm-0.log").read_text()


def test_tokens_are_refused_when_the_model_under_the_adapter_changed_or_another_answered() -> None:
    server = Server("http://none", session=None, control_timeout_s=1)  # type: ignore[arg-type]
    asked = Adapter("mine", "/folder", 7)

    def answer(version: str, model: str = "mine") -> Generated:
        content = [{"token_id": token, "logprob": -1.0} for token in (5, 6)]
        spans = [{"version": version, "start": 0, "end": 2}]
        choice = {
            "token_ids": [5, 6],
            "logprobs": {"content": content},
            "finish_reason": "stop",
            "weight_versions": spans,
        }
        return decode(json.dumps({"model": model, "choices": [choice]}).encode())

    completion = server.of_adapter(asked, answer("default"))
    assert [(s.version, s.start, s.end) for s in completion.versions] == [(7, 0, 2)]
    with pytest.raises(InferenceError, match="asked of adapter mine, answered by 'policy'"):
        server.of_adapter(asked, answer("default", "policy"))
    with pytest.raises(InferenceError, match=r"model under the adapter changed .weight versions \[0, 3\]"):
        server.of_adapter(asked, answer("3"))


def test_names_start_alike_for_one_folder_and_differ_between_folders(tmp_path: Path) -> None:
    assert prefix_of(f"{tmp_path}/a") == prefix_of(f"{tmp_path}/a")
    assert len({prefix_of(f"{tmp_path}/{folder}") for folder in ("a", "b", "c/a")}) == 3
