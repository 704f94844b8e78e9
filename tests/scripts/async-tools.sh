#!/usr/bin/env bash
# Turns with a tool, made one batch ahead; servers of their own devices.
set -euo pipefail
ROOT="$(cd "$(dirname "$0")/.." && pwd)"
export PYTHONPATH="${ROOT}:${PYTHONPATH:-}"
MODE="${MODE:-tools}"

GENERATE_ARGS=(
  --custom-generate-function-path my_agent.turns.generate
  --custom-rm-path my_agent.judge.score
  --reward-key score
  --rollout-sample-hook-path my_agent.hooks.trim my_agent.hooks.tag
  --custom-config-path "${ROOT}/scripts/agent.yaml"
  --dynamic-sampling-filter-path my_agent.filters.hard_enough
)
if [[ "${MODE}" == "tools" ]]; then
  GENERATE_ARGS+=(--tool-key tools)
fi

python "${ROOT}/train_async.py" \
  --actor-num-nodes 1 \
  --actor-num-gpus-per-node 4 \
  --rollout-num-gpus 4 \
  --rollout-num-gpus-per-engine 1 \
  --hf-checkpoint /models/agent-base \
  --prompt-data "${TRAIN_FILE}" \
  --metadata-key metadata \
  "${GENERATE_ARGS[@]}" \
  --num-rollout=200 \
  --rollout-batch-size 16 --n-samples-per-prompt 4 \
  --num-steps-per-rollout 2 \
  --rollout-max-response-len 2048 \
  --rollout-max-context-len 16384 \
  --rollout-stop-token-ids 151645 151643 \
  --advantage-estimator reinforce_plus_plus_baseline \
  --normalize-advantages \
  --kl-coef 0.01 \
  --use-tis --tis-clip 2.5 --tis-clip-low 0.1 \
  --lr 1e-6 --lr-decay-style cosine --min-lr 1e-7 --lr-warmup-fraction 0.1 \
  --update-weights-interval 2 \
  --vllm-gpu-memory-utilization 0.8 \
  --vllm-enforce-eager \
  --vllm-dtype bfloat16 \
  --router-policy consistent_hash \
  --use-wandb --wandb-key ${WANDB_KEY} \
  --lr 5e-7 \
  --rollout-temprature 1.0
