"""Architectures most unlike Llama on real servers: sinks and fused experts, alternating windows and two rotary bases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.architectures import make_architecture
from tests.test_weights import Setting
from tests.tiny import make_config, make_tokenizer
from vime.inference.fleet import Fleet


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_a_sync_makes_the_server_serve_the_trainers_weights(name: str, run: Any, session: Any, tmp_path: Path) -> None:
    served, other = (make_architecture(tmp_path / str(seed), name, seed) for seed in (0, 1))
    make_tokenizer().save_pretrained(served)
    fleet = Fleet(make_config(served), session, tmp_path)
    try:
        run(fleet.start())
        setting = Setting(run, session, fleet, served, other, tmp_path)
        try:
            for version in (1, 2):  # the second load meets what the first left
                assert run(setting.sync.send(version))["weights/probe_abs_diff_max"] < 1e-4
        finally:
            run(setting.trainer.stop())
    finally:
        run(fleet.stop())
