"""The diffs of the contribution guide apply to the code as it is, and what they add works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTIONS = re.findall(r"### (an? [a-z ]+)\n(.*?)(?=\n##|\Z)", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
DIFFS = {title: re.findall(r"```diff\n(.*?)```", text, re.DOTALL) for title, text in SECTIONS}
USES = {
    "an estimator": """
from vime.training.advantages import ESTIMATORS, Scored
made = ESTIMATORS["best_of_group"]([Scored("g", 1.0), Scored("g", 0.0), Scored("h", 0.0)])
assert made == [1.0, 0.0, 1.0]
""",
    "a loss": """
import torch
from vime.config.algorithms import OBJECTIVES as NAMES
from vime.config.sections import Algorithm
from vime.training.losses import OBJECTIVES, Tokens
value, one = torch.tensor([-1.0, -1.0]), torch.ones(2)
mask, place = one.bool(), torch.zeros(2).long()
tokens = Tokens(value, one, value - torch.tensor([0.0, 1.0]), value, value, one, mask, place, place)
loss, logs = OBJECTIVES["capped"](tokens, Algorithm())
assert torch.allclose(loss, torch.tensor([-1.0, -1.2])) and logs["clip_fraction"].tolist() == [False, True]
assert "capped" in NAMES
""",
    "a reward": """
from vime.rewards.load import load_reward
from vime.sample import Task
assert load_reward("contains")(Task("t", (), "4"), "It is 42") == 1.0
""",
    "a filter": """
from vime.rollout.filters import FILTERS
from vime.sample import Group, Sample, Task
sample = Sample([1], [2], [-1.0], (), "length", "")
assert FILTERS["all_truncated"](Group(0, Task("t", ()), [sample]), None)
""",
    "a metric sink": """
from pathlib import Path
from vime.observe.metrics import SINKS
sink = SINKS["csv"](Path(), "run", {}, False)
sink.log({"loss": 0.5}, 3)
sink.finish()
assert Path("metrics.csv").read_text() == "3,loss,0.5\\n"
""",
    "a channel": """
from pathlib import Path
from types import SimpleNamespace as Namespace
from vime.weights.channel import CHANNELS
config = Namespace(run=Namespace(dir="run"), model=Namespace(dtype="float32"))
assert CHANNELS["disk"](config, None, None, Path("/nowhere")).folder == Path("run/weights").absolute()
""",
    "a store": """
from pathlib import Path
from vime.sample import Sample
from vime.store import STORES
store = STORES["disk"](Path("memory").absolute())
store.put("g0", [Sample([1], [2], [-1.0], (), "stop", "")])
assert str(store.folder).startswith("/var/tmp/") and store.get("g0", 0).response_ids.tolist() == [2]
store.close()
""",
}


def test_every_part_has_a_diff_and_a_use() -> None:
    assert set(DIFFS) == set(USES) and all(DIFFS.values())


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code with all diffs applied, one after the other."""
    copy = tmp_path_factory.mktemp("contributed")
    shutil.copytree(ROOT / "vime", copy / "vime", ignore=shutil.ignore_patterns("__pycache__"))
    for title, diffs in DIFFS.items():
        for diff in diffs:
            command = ["git", "apply", "-"]
            done = subprocess.run(command, input=diff, text=True, capture_output=True, cwd=copy, check=False)
            assert done.returncode == 0, f"{title}: {done.stderr}"
    return copy


@pytest.mark.parametrize("title", USES)
def test_what_a_diff_adds_works(title: str, changed: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(changed)!r})\n" + USES[title]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=tmp_path)
