"""How far every split of the trainer over ranks lies from one rank: python benchmarks/splits.py [MOST_RANKS [KIND ...]]

Prints a Markdown table of relative deviations |a - b| / |b|: of the gradients of the first of five AdamW steps / of the weights
after the last; then the largest of the losses. On a machine with that many GPUs the ranks run on them, else on the CPU.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from safetensors.torch import load_file

from tests.engines import distance
from tests.splits import KINDS, LIKE, SPLITS, make_models


def deviations(folder: Path, kind: str, split: str) -> list[float]:
    """Of the losses, the gradients and the weights."""
    sides = [load_file(folder / f"{name}.safetensors") for name in (f"{kind}-{split}", f"{LIKE.get(kind, kind)}-one")]
    parts = ("losses", "gradient", "weight")
    return [distance(*({k: v for k, v in side.items() if k.startswith(part)} for side in sides)) for part in parts]


def print_table(folder: Path, kinds: list[str], most: int) -> None:
    splits = [split for split, sizes in SPLITS.items() if 1 < sizes["ranks"] <= most]
    print("| | " + " | ".join(splits) + " |")
    print("|---|" + "---|" * len(splits))
    worst = 0.0
    for kind in kinds:
        found = [deviations(folder, kind, split) for split in splits]
        worst = max(worst, *(loss for loss, _, _ in found))
        print(f"| {kind} | " + " | ".join(f"{gradient:.0e} / {weight:.0e}" for _, gradient, weight in found) + " |")
    print(f"losses: at most {worst:.1e}")


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    kinds = sys.argv[2:] or list(KINDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder)
        for ranks in (1, 2, 4):
            if ranks <= most:
                subprocess.run([sys.executable, "-m", "tests.splits", str(ranks), name, *kinds], check=True)
        print_table(folder, kinds, most)


if __name__ == "__main__":
    main()
