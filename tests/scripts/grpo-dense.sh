#!/bin/bash
# A dense model, trainer and servers on the same eight devices.
pkill -9 python
set -ex

LINKS=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9]*' | wc -l)
if [ "$LINKS" -gt 0 ]; then
    NVLS=1
else
    NVLS=0
fi

HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/shapes/small-dense.sh"
BASE_FOLDER=${BASE_FOLDER:-/data}
PROMPTS=64
SAMPLES=8

CKPT_ARGS=(
   --hf-checkpoint ${BASE_FOLDER}/small-dense
   #--hf-checkpoint ${BASE_FOLDER}/another
   --ref-load "${BASE_FOLDER}/small-dense-dist"
   --load ${BASE_FOLDER}/ckpt/
   --save ${BASE_FOLDER}/ckpt/dense-run/
   --save-interval 25
)

ROLLOUT_ARGS=(
   --prompt-data ${BASE_FOLDER}/math.jsonl
   --input-key question
   --label-key solution
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 400
   --rollout-batch-size ${PROMPTS}
   --n-samples-per-prompt $SAMPLES
   --rollout-max-response-len $((4 * 1024))
   --rollout-temperature 0.9
   --global-batch-size $((PROMPTS * SAMPLES / 4))   # four updates
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 10
   --eval-prompt-data aime ${BASE_FOLDER}/aime.jsonl hard ${BASE_FOLDER}/hard.jsonl
   --n-samples-per-eval-prompt 4
   --eval-max-response-len 8192
   --eval-top-p 1
)

PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1

   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   # --micro-batch-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.001
   --kl-loss-type low_var_kl
   --entropy-coef 0.0
   --eps-clip 0.2
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 2e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)

WANDB_ARGS=(
   # --use-wandb
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
   --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 16 64)
   --sglang-server-concurrency 128
)

MISC_ARGS=(
   --attention-dropout 0.0
   --attention-backend flash
   --accumulate-allreduce-grads-in-fp32
)

ray start --head --num-gpus 8
ENV_JSON="{
  \"env_vars\": {\"NCCL_NVLS_ENABLE\": \"${NVLS}\"}
}"

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   ${OPTIMIZER_ARGS[@]} \
   ${GRPO_ARGS[@]} \
   ${WANDB_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${EVAL_ARGS[@]+"${EVAL_ARGS[@]}"} \
   ${SGLANG_ARGS[@]} \
   ${MISC_ARGS[@]} 2>&1 | tee train.log
