#!/bin/bash
# A mixture of experts with the parts of DAPO.
LAYERS=48
freq=()
for ((i=0; i<LAYERS; i++)); do
  if (( i < 1 )); then freq+=(0); else freq+=(1); fi
done
printf -v FREQ "[%s]" "$(IFS=', '; echo "${freq[*]}")"
NODES="${NODES:-2}"
MODEL_ARGS=(--num-layers ${LAYERS} --num-experts 128 --moe-layer-freq "$FREQ" --moe-router-topk 8 --moe-aux-loss-coeff 1e-3)
if [ ${NODES} -gt 1 ]; then EP=8; else EP=1; fi

ALGO_ARGS=(
  --advantage-estimator gspo --disable-grpo-std-normalization --calculate-per-token-loss
  --eps-clip 3e-4 --eps-clip-high 4e-4 --eps-clip-c 3
  --use-rollout-routing-replay
  --use-tis --custom-tis-function-path slime.utils.ppo_utils.icepop_function --tis-clip 5 --tis-clip-low 0.5
  --use-opsm --opsm-delta 0.05
)
cat <<EOF > /dev/null
python train.py --num-rollout 7
EOF
ray job submit --address="$RAY" -- python3 /root/slime/train.py \
  --actor-num-nodes ${NODES} --actor-num-gpus-per-node 8 --colocate \
  "${MODEL_ARGS[@]}" "${ALGO_ARGS[@]}" \
  --hf-checkpoint /models/moe --prompt-data /data/dapo.jsonl --input-key prompt --apply-chat-template \
  --rm-type dapo --group-rm \
  --num-epoch 2 --rollout-batch-size 32 --n-samples-per-prompt 16 --global-batch-size 512 \
  --over-sampling-batch-size 48 --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std \
  --partial-rollout --mask-offpolicy-in-partial-rollout \
  --expert-model-parallel-size ${EP} --optimizer-cpu-offload --fp8-format e4m3 \
  --rollout-num-gpus-per-engine 8 --sglang-enable-ep-moe --sglang-disable-radix-cache --rollout-top-p 0.95
