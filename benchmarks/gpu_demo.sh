#!/usr/bin/env bash
# The demo's job on one NVIDIA GPU: the same configuration, its prompts from JSONL files (train.jsonl, test.jsonl in DATA).
#   benchmarks/gpu_demo.sh MODEL DATA OUT [--section.key value ...]
set -euo pipefail
model=$1 data=$2 out=$3
shift 3
python3 -m vime.cli train examples/demo/config.toml --run.dir "$out/run" --model.path "$model" \
    --data.source "$data/train.jsonl" --data.options '{}' --data.template '{prompt}' --eval.sets.test.source "$data/test.jsonl" \
    --eval.sets.test.options '{}' --eval.sets.test.template '{prompt}' --vllm.enforce-eager true "$@"
python3 - "$out/run" <<'PY'
import json, statistics, sys
from pathlib import Path
import torch, transformers, vllm
run = Path(sys.argv[1])
steps = [e["metrics"] for e in map(json.loads, (run / "metrics.jsonl").open()) if e["kind"] == "step"]
print(torch.cuda.get_device_name(), "torch", torch.__version__, "transformers", transformers.__version__, "vllm", vllm.__version__)
for name in sorted({k for s in steps for k in s if k.startswith("time/")}):
    values = [s[name] for s in steps[2:] if name in s]
    if values:
        print(f"{name:20} median {statistics.median(values):.3f} s")
for name in ("rollout/tokens_per_s", "train/tokens_per_s", "train/logprob_abs_diff_mean", "train/logprob_abs_diff_max"):
    print(f"{name:30} median {statistics.median(s[name] for s in steps if name in s):.5g}  max {max(s[name] for s in steps if name in s):.5g}")
print("reward", " ".join(f"{s['reward/mean']:.2f}" for s in steps))
print((run / "summary.json").read_text())
PY
