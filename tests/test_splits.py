"""Every split of the model and the batch over ranks learns what one rank learns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engines import distance
from tests.splits import KINDS, LIKE, cases, make_models

# Sums in another order: float32 rounding, 1e-6 of the gradient. AdamW divides a gradient by its own size, and so blows the
# rounding of the smallest entries up.
BOUNDS = {"losses": 1e-5, "gradient": 5e-6, "weight": 1e-5}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("splits")
    make_models(folder)
    for ranks in (1, 2, 4):
        subprocess.run([sys.executable, "-m", "tests.splits", str(ranks), str(folder)], check=True, timeout=900)
    return folder


def read(folder: Path, kind: str, split: str, what: str) -> dict[str, torch.Tensor]:
    found = load_file(folder / f"{kind}-{split}.safetensors")
    return {name: tensor for name, tensor in found.items() if name.startswith(what)}


@pytest.mark.parametrize(("kind", "split"), [case for case in cases() if case[1] != "one"])
def test_a_split_gives_the_losses_gradients_and_weights_of_one_rank(results: Path, kind: str, split: str) -> None:
    like = LIKE.get(kind, kind)
    found = {what: distance(read(results, kind, split, what), read(results, like, "one", what)) for what in BOUNDS}
    assert all(found[what] < bound for what, bound in BOUNDS.items()), found


@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
def test_the_steps_move_the_weights_far_beyond_the_bound(results: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(results / KINDS[kind][0], dtype=torch.float32).state_dict()
    after = read(results, kind, "one", "weight.")
    assert distance({name: before[name.removeprefix("weight.")] for name in after}, after) > 1e-3
