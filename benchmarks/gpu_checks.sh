#!/usr/bin/env bash
# What only GPUs can show: `vime check` in both dtypes, algorithms that use every collective on two ranks (NCCL), and the demo's
# job with two servers behind the router. Two GPUs of one host; prompts from JSONL files (train.jsonl, test.jsonl in DATA).
#   benchmarks/gpu_checks.sh MODEL DATA OUT [check]     with "check": only that, on one GPU
set -uo pipefail
model=$1 data=$2 out=$3
job=(examples/demo/config.toml --model.path "$model" --data.source "$data/train.jsonl" --data.options '{}' --data.template '{prompt}'
    --eval.sets.test.source "$data/test.jsonl" --eval.sets.test.options '{}' --eval.sets.test.template '{prompt}' --vllm.enforce-eager true)
vime() { python3 -m vime.cli "$@"; }
for dtype in float32 bfloat16; do
    COLUMNS=120 vime check "${job[@]}" --model.dtype $dtype --run.dir "$out/run-$dtype" --json "$out/check-$dtype.json" 2>&1 | tail -22
done
if [ "${4:-}" = check ]; then exit; fi
short=(--run.steps 3 --eval.sets '{}' --trainer.ranks 2 --checkpoint.every 0)
vime train "${job[@]}" "${short[@]}" --run.dir "$out/run-gae" --algorithm.advantage gae --algorithm.kl_coef 0.01 --algorithm.kl_in reward \
    --algorithm.kl_estimator k1 --algorithm.updates 2 --rollout.filter none --algorithm.corrections.tis.high 2 2>&1 | tail -8
vime train "${job[@]}" "${short[@]}" --run.dir "$out/run-kl-cov" --algorithm.objective kl_cov --algorithm.kl_coef 0.01 \
    --reference.refresh_every 2 --algorithm.entropy_target 0.5 2>&1 | tail -8
vime train "${job[@]}" --run.dir "$out/run-two" --inference.servers 2 --trainer.ranks 2 2>&1 | tail -30
python3 - "$out" <<'PY'
import json, sys
from pathlib import Path
for name in ("gae", "kl-cov", "two"):
    file = Path(sys.argv[1], f"run-{name}", "metrics.jsonl")
    steps = [e["metrics"] for e in map(json.loads, file.open()) if e["kind"] == "step"] if file.exists() else []
    for step in steps[-1:]:
        print(name, len(steps), {k: round(v, 5) for k, v in step.items() if k.startswith(("train/", "time/", "reward/mean"))})
PY
