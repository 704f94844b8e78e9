"""What becomes of each flag of slime and vime (the fork of it). Data.

A flag that is an option of ours under another name stands in ``slime.flags``, a function in ``[slime]`` has its flag's name,
and where a value is to be computed ``rules`` do so. All others are here, with the reason why nothing is set.
"""

from __future__ import annotations

from typing import Any

MODEL_SHAPE = "the model's shape is read from model.path's config.json"
ALWAYS = "always so"
NO_MEGATRON = "there is no Megatron: the trainer is PyTorch's FSDP2 with transformers' own models"

REASONS: dict[str, tuple[str, ...]] = {  # reason -> flags that need nothing
    ALWAYS: (
        "apply_chat_template", "rollout_shuffle", "balance_data", "balance_by_flops", "use_dynamic_batch_size",
        "use_fault_tolerance", "use_tensorboard", "get_mismatch_metrics", "accumulate_allreduce_grads_in_fp32", "bf16",
        "attention_softmax_in_fp32", "rollout_skip_special_tokens",
        "use_distributed_optimizer", "calculate_per_sample_loss", "check_weight_update_equal", "log_passrate",
        "sglang_enable_metrics", "cross_entropy_loss_fusion", "ci_test",
    ),
    MODEL_SHAPE: (
        "disable_bias_linear", "add_qkv_bias", "qk_layernorm", "group_query_attention", "num_attention_heads",
        "num_query_groups", "kv_channels", "num_layers", "hidden_size", "ffn_hidden_size", "normalization",
        "position_embedding_type", "norm_epsilon", "rotary_percent", "rotary_base", "swiglu", "vocab_size",
        "untie_embeddings_and_output_weights", "use_rotary_position_embeddings", "make_vocab_size_divisible_by",
        "moe_ffn_hidden_size", "moe_router_score_function", "moe_router_topk", "moe_layer_freq", "num_experts",
        "moe_shared_expert_intermediate_size", "moe_router_dtype", "moe_router_enable_expert_bias",
        "moe_router_bias_update_rate", "moe_router_load_balancing_type", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_topk_scaling_factor", "moe_router_pre_softmax", "multi_latent_attention", "q_lora_rank",
        "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "apply_layernorm_1p", "rotary_scaling_factor",
        "max_position_embeddings", "seq_length", "spec", "attention_output_gate", "use_rope_scaling", "model_name",
        "post_self_attn_layernorm", "post_mlp_layernorm", "no_rope_fusion", "moe_first_k_dense_replace", "beta_fast",
        "rope_type", "mscale", "mscale_all_dim", "original_max_position_embeddings", "layernorm_epsilon",
    ),
    "micro-batches are packed by trainer.tokens_per_micro_batch": (
        "micro_batch_size", "log_probs_max_tokens_per_gpu", "data_pad_size_multiplier", "ref_micro_batch_size",
    ),
    NO_MEGATRON: (
        "sequence_parallel", "recompute_method", "recompute_num_layers", "attention_backend", "use_flash_attn",
        "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer", "moe_grouped_gemm", "moe_token_drop_policy",
        "moe_permute_fusion", "moe_token_dispatcher_type", "moe_enable_deepep", "train_backend", "megatron_to_hf_mode",
        "megatron_config_path", "distributed_backend", "distributed_timeout_minutes", "no_load_optim", "no_load_rng",
        "no_save_optim", "finetune", "use_cpu_initialization", "transformer_impl", "ckpt_format", "async_save",
        "no_gradient_accumulation_fusion", "recompute_loss_function", "train_memory_margin_bytes", "overlap_grad_reduce",
        "overlap_param_gather", "auto_detect_ckpt_format", "ref_ckpt_step", "ckpt_step", "no_bias_swiglu_fusion",
        "moe_router_fusion", "empty_unused_memory_level", "decoder_last_pipeline_num_layers", "moe_aux_loss_free",
        "decoder_first_pipeline_num_layers", "gradient_accumulation_fusion", "allgather_cp", "qwen_gdn_backend",
    ),
    "the servers are the trainer's neighbours, on devices of their own: nothing is put to sleep or moved away": (
        "offload", "offload_train", "offload_rollout", "sglang_enable_memory_saver", "vllm_enable_sleep_mode",
        "num_gpus_per_node", "release_train",
    ),
    "a response goes on where it was when new weights come; see rollout.in_flight": ("partial_rollout",),
    "a group that is dropped is replaced at once; see rollout.max_refills": ("over_sampling_batch_size",),
    "all columns but prompt and answer are the task's metadata": ("metadata_key",),
    "weights go through shared memory of the host (weights.channel)": (
        "update_weight_mode", "update_weight_transport", "update_weight_buffer_size", "update_weight_disk_dir",
        "update_weight_disk_keep_files", "update_weight_delta_encoding", "update_weight_delta_checksum",
        "update_weight_local_checkpoint_dir", "vllm_weight_sync_mode",
    ),
    "the reference is model.path; where it is another model, set reference.path to its Hugging Face folder": ("ref_load",),
    "a run goes on with `vime train CONFIG.toml --resume`": ("load",),
    "the project is vime, the run's name run.dir's": (
        "wandb_project", "wandb_group", "wandb_key", "wandb_team", "wandb_mode", "wandb_host", "wandb_dir",
        "wandb_run_id", "disable_wandb_random_suffix", "tb_project_name", "tb_experiment_name",
    ),
    "the only backend": ("rollout_backend", "rollout_data_transport"),
}  # fmt: skip
MISSING: dict[str, tuple[str, ...]] = {  # reason -> flags without a counterpart
    "prompts are not filtered by length; leave long ones out of the data": ("rollout_max_prompt_len", "eval_max_prompt_len"),
    "set rollout.stop_token_ids": ("rollout_stop",),
    "put the arguments into the model folder's chat_template.jinja": ("apply_chat_template_kwargs",),
    "there is no dropout in training": ("attention_dropout", "hidden_dropout"),
    "only text is trained": ("multimodal_keys",),
    "there is no pipeline or expert parallelism; trainer.ranks shard parameters and batch": (
        "pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
        "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage", "expert_parallel_size",
    ),
    "the schedule spans the run": ("lr_decay_iters", "lr_wsd_decay_style", "lr_wsd_decay_iters"),
    "every batch is followed by a sync": ("update_weights_interval",),
    "write its sets as [eval.sets.NAME]": ("eval_config",),
    "all parameters train; set [lora] for few": (
        "only_train_params_name_list", "freeze_params_name_list", "freeze_indexer",
    ),
    "name its model in [teacher], with algorithm.advantage = \"reverse_kl\"": (
        "use_opd", "opd_type", "opd_kl_coef", "opd_teacher_load", "opd_teacher_ckpt_step", "opd_teacher_model",
    ),
    "several models or kinds of servers are started by you; name them in inference.urls": (
        "vllm_config", "sglang_config", "prefill_num_servers",
    ),
    "start the run with --debug rollout": ("debug_rollout_only",),
    "start the run with --debug train --replay DUMPS": (
        "debug_train_only", "load_debug_rollout_data", "load_forge_rollout_data",
    ),
    "set log.dump_every = 1": ("save_debug_rollout_data", "save_debug_train_data", "dump_details"),
    "set reward.function = \"http\" with the option url; what is asked and answered is said in docs/rewards.md": ("rm_url",),
    "`vime train --dry-run --memory` predicts memory, `vime trace RUN` shows times": (
        "memory_snapshot_dir", "memory_recorder", "profile_target", "record_memory_history", "use_pytorch_profiler",
    ),
    "the model is trained as its folder says": (
        "custom_model_provider_path", "mtp_num_layers", "enable_mtp_training", "mtp_loss_scaling_factor",
        "fp8_format", "fp8_recipe", "fp8_param_gather", "fp16",
    ),
    "no counterpart": (
        "custom_update_weight_post_write_path", "train_env_vars", "http_proxy", "use_distributed_post", "keep_old_actor",
        "rollout_buffer_url", "reset_optimizer_states", "use_stateless_adam", "use_score_centering",
        "score_centering_top_k", "loss_mask_type", "log_multi_turn", "log_reward_category", "log_correct_samples",
        "start_rollout_id", "save_hf", "rollout_health_check_interval", "rollout_health_check_timeout",
        "rollout_health_check_first_wait", "critic_load", "critic_save", "rollout_function_arguments",
        "buffer_sort_by_staleness", "sglang_attention_backend", "sglang_log_level", "sglang_speculative_algorithm",
        "sglang_speculative_num_steps", "sglang_speculative_eagle_topk", "sglang_speculative_num_draft_tokens",
        "sglang_enable_deterministic_inference", "sglang_enable_dp_attention", "sglang_moe_a2a_backend",
        "sglang_enable_ep_moe", "sglang_router_ip", "sglang_router_port", "sglang_moe_runner_backend", "router_policy",
        "sglang_deepep_mode", "rollout_session_id", "rollout_cleanup_timeout",
    ),
}  # fmt: skip
SGLANG = {  # SGLang's server flags as vLLM's
    "sglang_mem_fraction_static": "gpu-memory-utilization",
    "sglang_context_length": "max-model-len",
    "sglang_max_running_requests": "max-num-seqs",
    "sglang_chunked_prefill_size": "max-num-batched-tokens",
    "sglang_dp_size": "data-parallel-size",
    "sglang_kv_cache_dtype": "kv-cache-dtype",
    "sglang_quantization": "quantization",
    "sglang_cuda_graph_bs": "cudagraph-capture-sizes",
    "sglang_cuda_graph_max_bs": "max-cudagraph-capture-size",
}
SGLANG_SWITCHES: dict[str, tuple[str, Any]] = {
    "sglang_disable_cuda_graph": ("enforce-eager", True),
    "sglang_disable_radix_cache": ("enable-prefix-caching", False),
    "sglang_trust_remote_code": ("trust-remote-code", True),
}
REWARDS = {"math": "math_verify", "dapo": "math_verify", "deepscaler": "math_verify"}
ADVANTAGES = {
    "grpo": ("grpo", "ppo"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "reinforce_plus_plus": ("reinforce_pp", "ppo"),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", "ppo"),
    "ppo": ("gae", "ppo"),
}
NATIVE_FUNCTIONS: dict[
    str, tuple[str, Any] | None
] = {  # functions of slime's own that need none here: the option they are, or why none
    "check_reward_nonzero_std": ("rollout.filter", "zero_variance"),
    "check_reward_nonzero_std_with_fallback": ("rollout.filter", "zero_variance"),
    "icepop_function": ("algorithm.corrections.icepop", {}),
    "generate_rollout_fully_async": ("rollout.max_staleness", 1),
    "generate_rollout": None,
    "pop_first": None,
    "RolloutDataSource": None,
    "RolloutDataSourceWithBuffer": None,
}
CRITIC_ONLY = ("value_clip", "num_critic_only_steps", "critic_lr")
NOTHING_AT = {  # flags with one value at which there is nothing to do
    "pipeline_model_parallel_size": "1",
    "expert_model_parallel_size": "1",
    "expert_tensor_parallel_size": "1",
    "attention_dropout": "0.0",
    "hidden_dropout": "0.0",
}
