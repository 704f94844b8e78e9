"""Random worlds: a few in every run of the tests, hundreds by ``python -m tests.forksync.synthetic``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forksync.synthetic import run_world


@pytest.mark.parametrize(("seed", "kills"), [(3, True), (1001, False), (1020, True)])
def test_a_random_sync_lands_with_both_gates_true_or_stops_with_everything_intact(
    tmp_path: Path, seed: int, kills: bool
) -> None:
    assert sum(run_world(tmp_path / "world", seed, 3, kills).values()) == 3
