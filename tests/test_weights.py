"""Weights reach real vLLM servers and are proved; one that does not fit leaves the server paused, a good one recovers it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_config
from vime.inference.client import Completion, InferenceError
from vime.training.client import Trainer
from vime.weights.channel import SharedMemoryChannel
from vime.weights.probe import Probe, ProbeError
from vime.weights.sync import Sync

KINDS = ("tied", "untied", "moe")
PROMPTS = [[10, 20, 30, 40, 50], [7, 8, 9], list(range(60, 90))]


class Setting:
    """A server that serves one model, and a trainer that holds another of the same shape."""

    def __init__(
        self,
        run: Any,
        session: Any,
        fleet: Any,
        served: Path,
        other: Path,
        folder: Path,
        in_flight: str = "recompute",
    ) -> None:
        self.run, self.folder, self.fleet, self.server = run, folder, fleet, fleet.servers[0]
        self.config = make_config(served, weights={"probe_tokens": 8}, rollout={"in_flight": in_flight})
        self.trainer = Trainer(self.config, session, folder, folder / "store")
        run(self.trainer.start(other))
        self.probe = Probe(self.config, self.trainer, PROMPTS)
        channel = SharedMemoryChannel(self.config, self.trainer, fleet, folder / "weights")
        self.sync = Sync(self.config, fleet, channel, self.probe)

    def paused(self) -> bool:
        return self.run(self.server.is_paused())

    async def serve(self, model: Path, version: int = 0) -> None:
        """Whatever the server held before."""
        await self.server.pause()
        await self.server.update_weights({"path": str(model)}, version)
        await self.server.resume()
        self.fleet.front.version = version


@pytest.fixture(scope="module", params=KINDS)
def setting(request: Any, run: Any, session: Any, fleets: Any, models: Any, tmp_path_factory: Any) -> Iterator[Setting]:
    kind = request.param
    made = Setting(run, session, fleets(kind), models(kind), models(kind, 1), tmp_path_factory.mktemp(kind))
    run(made.serve(models(kind)))
    yield made
    run(made.server.resume())
    run(made.trainer.stop())


def test_other_weights_on_the_server_are_found_and_leave_it_paused(setting: Setting) -> None:
    with pytest.raises(ProbeError, match=r"version 0 .* -?\d+\.\d+ on the server, -?\d+\.\d+ in the trainer"):
        setting.run(setting.probe.prove(0, [setting.server]))
    assert setting.paused()
    assert setting.probe.failures == 1


def test_a_sync_makes_the_server_serve_the_trainers_weights(setting: Setting) -> None:
    proof = setting.run(setting.sync.send(1))
    assert not setting.paused()
    assert setting.run(setting.server.weight_version()) == "1"
    assert proof["weights/probe_abs_diff_max"] < 1e-4


def test_no_request_is_sent_between_an_update_and_its_proof(setting: Setting, monkeypatch: Any) -> None:
    prove, closed = setting.probe.prove, []

    async def noting(version: int, servers: Any) -> Any:
        closed.append(not setting.fleet.gate.is_open)
        return await prove(version, servers)

    monkeypatch.setattr(setting.probe, "prove", noting)
    setting.run(setting.sync.send(6))
    assert closed == [True] and setting.fleet.gate.is_open


def test_tokens_carry_the_version_of_the_weights_that_made_them(setting: Setting) -> None:
    setting.run(setting.sync.send(7))
    sampling = {"max_tokens": 6, "ignore_eos": True}
    completion = setting.run(setting.server.generate(PROMPTS[0], sampling, 60))
    assert [(s.version, s.start, s.end) for s in completion.versions] == [(7, 0, 6)]


def truncate(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1000])


def change_shape(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.zeros(63)
    save_file(tensors, file)


def leave_one_out(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, file)


@pytest.mark.parametrize("spoil", [truncate, change_shape, leave_one_out])
def test_a_spoilt_update_fails_stays_paused_and_a_good_one_recovers(setting: Setting, spoil: Any) -> None:
    setting.run(setting.sync.send(20))
    good = setting.folder / "weights" / "v000020"
    bad = setting.folder / f"bad-{spoil.__name__}"
    shutil.copytree(good, bad)
    spoil(bad)

    async def update(folder: Path, version: int) -> None:
        await setting.server.pause()
        await setting.server.update_weights({"path": str(folder)}, version)

    with pytest.raises(InferenceError, match="/update_weights answered 500"):
        setting.run(update(bad, 21))
    assert setting.paused()
    assert setting.run(setting.sync.send(22))["weights/probe_abs_diff_max"] < 1e-4
    assert not setting.paused()


@pytest.mark.parametrize("in_flight", ["recompute", "keep_cache", "abort", "finish"])
def test_what_becomes_of_responses_under_way_is_the_named_option(
    in_flight: str, run: Any, session: Any, fleets: Any, models: Any, tmp_path: Path
) -> None:
    """Three waves of responses; in the second the weights change from one model's to another's."""
    setting = Setting(run, session, fleets("tied"), models("tied"), models("tied", 1), tmp_path, in_flight)
    server, prompt = (
        setting.server,
        list(range(100, 180)),
    )  # longer than a block of the cache, where prompts are found again
    for one in (server, setting.fleet.front):
        one.salt = "run" if in_flight == "keep_cache" else None

    async def scenario() -> None:
        await setting.serve(models("tied"), 40)
        sampling = {"max_tokens": 150, "ignore_eos": True, "temperature": 1.0}
        asked = [asyncio.create_task(setting.fleet.front.generate(prompt, sampling, 120)) for _ in range(48)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        await setting.sync.send(41)
        responses = await asyncio.gather(*asked)
        both = [one for one in responses if [span.version for span in one.versions] == [40, 41]]
        stopped = [one for one in responses if one.finish_reason == "abort"]
        assert bool(both) == (in_flight in ("recompute", "keep_cache")) and bool(stopped) == (in_flight == "abort")
        assert all([span.version for span in one.versions] in ([], [40]) for one in stopped)
        if both:
            worst = await apart(both)
            assert worst < 1e-4 if in_flight == "recompute" else worst > 1e-2
        later = await setting.fleet.front.generate(prompt, sampling, 120)
        assert [span.version for span in later.versions] == [41] and await apart([later]) < 1e-4

    async def apart(responses: list[Completion]) -> float:
        """The largest difference between server and trainer in the log-probabilities of the last version's tokens."""
        rows = [{"prompt_ids": prompt, "response_ids": one.token_ids} for one in responses]
        return max(
            abs(theirs - ours)
            for one, mine in zip(responses, await setting.trainer.logprobs(rows), strict=True)
            for theirs, ours in list(zip(one.logprobs, mine, strict=True))[one.versions[-1].start :]
        )

    try:
        run(scenario())
    finally:
        server.salt = setting.fleet.front.salt = None
        run(server.resume())
        run(setting.trainer.stop())
