MODEL_ARGS=(
   --swiglu
   --num-layers 28
   --hidden-size 1024
   --num-attention-heads 16
   --group-query-attention
   --num-query-groups 8
   --normalization "RMSNorm"
   --rotary-base "${ROPE_BASE:-1000000}"
   --vocab-size 151936
)
