"""slime's flags that are options of ours: the same value under another name. Data: read by ``args`` and by ``vime migrate``."""

from __future__ import annotations

OPTIONS: dict[str, str] = {
    "hf_checkpoint": "model.path",
    "save_interval": "checkpoint.every",
    "ref_update_interval": "reference.refresh_every",
    # data
    "prompt_data": "data.source",
    "input_key": "data.prompt_key",
    "label_key": "data.answer_key",
    "tool_key": "data.tools_key",
    # rollout
    "num_rollout": "run.steps",
    "rollout_batch_size": "rollout.groups",
    "n_samples_per_prompt": "rollout.samples_per_group",
    "num_steps_per_rollout": "algorithm.updates",
    "rollout_max_response_len": "rollout.max_tokens",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_p": "rollout.top_p",
    "rollout_top_k": "rollout.top_k",
    "rollout_stop_token_ids": "rollout.stop_token_ids",
    "rollout_seed": "run.seed",
    "eval_interval": "eval.every",
    # algorithm
    "advantage_estimator": "algorithm.advantage",
    "entropy_coef": "algorithm.entropy_coef",
    "gamma": "algorithm.gamma",
    "lambd": "algorithm.gae_lambda",
    "eps_clip": "algorithm.clip_low",
    "eps_clip_high": "algorithm.clip_high",
    "eps_clip_c": "algorithm.dual_clip",
    "value_clip": "critic.value_clip",
    "num_critic_only_steps": "critic.warmup_steps",
    "critic_lr": "critic.learning_rate",
    # trainer
    "lr": "trainer.learning_rate",
    "min_lr": "trainer.min_learning_rate",
    "weight_decay": "trainer.weight_decay",
    "adam_eps": "trainer.eps",
    "clip_grad": "trainer.max_grad_norm",
    "lr_warmup_iters": "trainer.warmup_steps",
    "max_tokens_per_gpu": "trainer.tokens_per_micro_batch",
    "context_parallel_size": "trainer.context_parallel",
    "tensor_model_parallel_size": "trainer.tensor_parallel",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "rollout_num_gpus_per_engine": "inference.gpus_per_server",
    "rollout_external_engine_addrs": "inference.urls",
}
