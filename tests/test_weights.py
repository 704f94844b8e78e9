"""Weights reach real vLLM servers and are proved; one that does not fit leaves the server paused, a good one recovers it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_config
from vime.inference.client import InferenceError
from vime.training.client import Trainer
from vime.weights.channel import Probe, ProbeError, SharedMemoryChannel

KINDS = ("tied", "untied", "moe")
PROMPTS = [[10, 20, 30, 40, 50], [7, 8, 9], list(range(60, 90))]


class Setting:
    """A server that serves one model, and a trainer that holds another of the same shape."""

    def __init__(self, run: Any, session: Any, fleet: Any, served: Path, other: Path, folder: Path) -> None:
        self.run, self.folder, self.server = run, folder, fleet.servers[0]
        self.config = make_config(served, weights={"probe_tokens": 8})
        self.trainer = Trainer(self.config, session, folder, folder / "store")
        run(self.trainer.start(other))
        self.channel = SharedMemoryChannel(self.config, self.trainer, fleet.servers, folder / "weights")
        self.probe = Probe(self.config, self.trainer, fleet.servers, PROMPTS)

    def paused(self) -> bool:
        return self.run(self.server.is_paused())


@pytest.fixture(scope="module", params=KINDS)
def setting(request: Any, run: Any, session: Any, fleets: Any, models: Any, tmp_path_factory: Any) -> Iterator[Setting]:
    kind = request.param
    made = Setting(run, session, fleets(kind), models(kind), models(kind, 1), tmp_path_factory.mktemp(kind))
    yield made
    run(made.server.resume())
    run(made.trainer.stop())


def test_other_weights_on_the_server_are_found_and_leave_it_paused(setting: Setting) -> None:
    with pytest.raises(ProbeError, match=r"version 0 .* -?\d+\.\d+ on the server, -?\d+\.\d+ in the trainer"):
        setting.run(setting.probe.prove(0))
    assert setting.paused()
    assert setting.probe.failures == 1


def test_a_sync_makes_the_server_serve_the_trainers_weights(setting: Setting) -> None:
    setting.run(setting.channel.send(1))
    assert not setting.paused()
    assert setting.run(setting.server.weight_version()) == "1"
    proof = setting.run(setting.probe.prove(1))
    assert proof.max < 1e-4


def test_tokens_carry_the_version_of_the_weights_that_made_them(setting: Setting) -> None:
    setting.run(setting.channel.send(7))
    sampling = {"max_tokens": 6, "ignore_eos": True}
    completion = setting.run(setting.server.generate(PROMPTS[0], sampling, 60, 7))
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
    setting.run(setting.channel.send(20))
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
    setting.run(setting.channel.send(22))
    assert not setting.paused()
    assert setting.run(setting.probe.prove(22)).max < 1e-4
