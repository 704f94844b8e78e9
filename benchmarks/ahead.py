"""The demo's job synchronously and with generation ahead of training, one after the other on one machine.

    python -m benchmarks.ahead [--steps N] [--staleness K ...] [OVERRIDE ...]

Prints for each bound on staleness: the median step and its phases (rollout is what the loop waits for its batch), groups trained
in a step, response tokens a second of the whole step, the share of time in which the loop waits for a batch, the share of looks,
one a second, that find the servers with nothing to do, the reward of the last steps and held-out accuracy.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median

BUILD = Path(__file__).resolve().parents[1] / "build/ahead"
CONFIG = "examples/demo/config.toml"
SKIPPED = 2  # first steps, in which all is warmed up and nothing can have been made ahead
PHASES = ("step", "rollout", "train", "publish", "sync", "probe")
LAST = 4  # steps whose reward is told


def train(staleness: int, steps: int, overrides: list[str]) -> list[dict[str, float]]:
    """The steps' metrics of one whole run; the evaluation's of its end are the last."""
    folder = BUILD / f"staleness-{staleness}"
    shutil.rmtree(folder, ignore_errors=True)
    options = [f"--run.dir={folder}", f"--run.steps={steps}", f"--rollout.max_staleness={staleness}", "--eval.every=0"]
    options += ["--algorithm.corrections.tis.high=2", "--checkpoint.every=0", *overrides]
    log = BUILD / f"staleness-{staleness}.log"
    with log.open("w") as output:
        subprocess.run([sys.executable, "-m", "vime.cli", "train", CONFIG, *options], check=True, stdout=output)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line["metrics"] for line in lines if line["kind"] == "eval"]
    return [*(line["metrics"] for line in lines if line["kind"] == "step"), evaluations[-1]]


def row(staleness: int, found: list[dict[str, float]]) -> str:
    *steps, evaluation = found
    timed = steps[SKIPPED:-1]  # the last waits for nothing that comes after it, and evaluates

    def middle(name: str) -> float:
        return median(step.get(name, 0.0) for step in timed)

    seconds = sum(step["time/step"] for step in timed)
    cells = [
        str(staleness),
        *(f"{middle(f'time/{phase}'):.2f}" for phase in PHASES),
        f"{fmean(step['rollout/groups'] - step['rollout/filtered'] for step in timed):.1f}",
        f"{sum(step['rollout/response_tokens'] for step in timed) / seconds:.0f}",
        f"{sum(step['time/rollout'] for step in timed) / seconds:.0%}",
        f"{fmean(step['servers/idle_fraction'] for step in timed if 'servers/idle_fraction' in step):.0%}",
        f"{fmean(step['rollout/staleness_mean'] for step in timed):.2f}",
        f"{max(step['rollout/staleness_max'] for step in timed):.0f}",
        f"{fmean(step['reward/mean'] for step in steps[-LAST:]):.2f}",
        f"{evaluation['eval/test/pass@1']:.1%}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    given, overrides = parser.parse_known_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    found = {staleness: train(staleness, given.steps, overrides) for staleness in given.staleness}
    names = [
        "max_staleness",
        *(f"{phase}, s" for phase in PHASES),
        "groups trained",
        "tokens/s",
        "loop waits",
        "servers idle",
    ]
    names += ["staleness", "largest", "last rewards", "held-out"]
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for staleness, steps in found.items():
        print(row(staleness, steps))


if __name__ == "__main__":
    main()
