"""Whether this processor has instructions for bfloat16; ``python -m vime.cluster.cpu`` prints the dtype that is fast on it."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}  # of x86, the first two; of Arm
SLOW = "this CPU has no instructions for bfloat16 and computes in it many times slower than in float32"
FIX = "set model.dtype to float32"


def computes_bfloat16() -> bool:
    """True also where that cannot be read."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    features = [set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return not features or bool(features[0] & INSTRUCTIONS)


if __name__ == "__main__":
    print("bfloat16" if computes_bfloat16() else "float32")
