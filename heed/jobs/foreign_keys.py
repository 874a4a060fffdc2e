"""Maps other projects' keys to Heed's, for the error message about an unknown key.

Sources: TRL's PPOConfig and SFTConfig (old and new) and transformers' TrainingArguments; OpenRLHF's train_*.py; verl's
docs/examples/config.rst; and a Hugging Face config.json. Only keys with a true counterpart are listed. Heed's name is
relative to the section in which the key was found, or a path from the top of the job.
"""

from collections.abc import Callable

_TRL, _OPENRLHF, _VERL, _HF = "TRL", "OpenRLHF", "verl", "config.json"

COUNTERPARTS: dict[str, dict[str, tuple[str, ...]]] = {
    _TRL: {
        "adam_epsilon": ("eps",),
        "bf16": ("engine.precision",),
        "dtype": ("engine.precision",),
        "torch_dtype": ("engine.precision",),
        "cliprange": ("loss.clip_range",),
        "cliprange_value": ("advantage.value_clip_range",),
        "ddp_timeout": ("engine.collective_timeout_seconds",),
        "epsilon": ("loss.clip_range",),
        "epsilon_high": ("loss.clip_range_high",),
        "eval_steps": ("evaluate_every_steps",),
        "full_determinism": ("engine.deterministic",),
        "gamma": ("advantage.gamma",),
        "gradient_checkpointing": ("engine.checkpoint_activations",),
        "horizon": ("kl.target.horizon",),
        "importance_sampling_level": ("loss.kind",),
        "init_kl_coef": ("kl.coef",),
        "kl_coef": ("kl.coef",),
        "lam": ("advantage.gae_lambda",),
        "lr_scheduler_type": ("schedule", "optimizer.schedule", "policy_optimizer.schedule"),
        "learning_rate": ("optimizer.learning_rate", "policy_optimizer.learning_rate"),
        "max_grad_norm": ("optimizer.max_grad_norm", "policy_optimizer.max_grad_norm"),
        "max_length": ("seq_len",),
        "max_seq_length": ("seq_len",),
        "max_steps": ("num_steps",),
        "mini_batch_size": ("minibatch.batch_size",),
        "model_name_or_path": ("init_from",),
        "num_generations": ("advantage.samples_per_prompt",),
        "num_ppo_epochs": ("num_epochs",),
        "num_train_epochs": ("num_epochs",),
        "ppo_epochs": ("num_epochs",),
        "report_to": ("engine.trackers",),
        "response_length": ("max_new_tokens",),
        "scale_rewards": ("advantage.scale",),
        "reward_model_path": ("reward.model", "reward_from"),
        "save_steps": ("save_every_steps", "save_every_iterations"),
        "save_total_limit": ("engine.keep_checkpoints",),
        "sft_model_path": ("init_from",),
        "torch_compile": ("engine.compile_blocks",),
        "vllm_tensor_parallel_size": ("sampler.tensor_parallel_size",),
        "weight_decay": ("optimizer.weight_decay", "policy_optimizer.weight_decay"),
        "warmup_steps": ("optimizer.warmup_steps", "policy_optimizer.warmup_steps"),
    },
    _OPENRLHF: {
        "actor_learning_rate": ("policy_optimizer.learning_rate",),
        "advantage_estimator": ("advantage.kind",),
        "adam_betas": ("betas", "optimizer.betas", "policy_optimizer.betas"),
        "critic_learning_rate": ("advantage.value_optimizer.learning_rate",),
        "ema_beta": ("ema.decay",),
        "eps_clip": ("loss.clip_range",),
        "gamma": ("advantage.gamma",),
        "generate_max_len": ("max_new_tokens",),
        "init_kl_coef": ("kl.coef",),
        "kl_target": ("kl.target.nats",),
        "l2": ("weight_decay", "optimizer.weight_decay", "policy_optimizer.weight_decay"),
        "lambd": ("advantage.gae_lambda",),
        "lr_scheduler": ("schedule", "optimizer.schedule", "policy_optimizer.schedule"),
        "max_ckpt_num": ("engine.keep_checkpoints",),
        "max_epochs": ("num_epochs",),
        "max_len": ("seq_len",),
        "max_norm": ("max_grad_norm", "optimizer.max_grad_norm", "policy_optimizer.max_grad_norm"),
        "n_samples_per_prompt": ("advantage.samples_per_prompt",),
        "micro_train_batch_size": ("minibatch.micro_batch_size", "batch.micro_batch_size"),
        "pretrain": ("init_from",),
        "prompt_data": ("prompts.source",),
        "prompt_split": ("prompts.split",),
        "remote_rm_url": ("reward.url",),
        "reward_pretrain": ("reward.model", "reward_from"),
        "train_batch_size": ("minibatch.batch_size", "batch.batch_size"),
        "value_clip": ("advantage.value_clip_range",),
        "vllm_tensor_parallel_size": ("sampler.tensor_parallel_size",),
        "zero_stage": ("engine.zero_stage",),
    },
    _VERL: {
        "adv_estimator": ("advantage.kind",),
        "clip_ratio": ("loss.clip_range",),
        "clip_ratio_high": ("loss.clip_range_high",),
        "cliprange_value": ("advantage.value_clip_range",),
        "enable_gradient_checkpointing": ("engine.checkpoint_activations",),
        "grad_clip": ("max_grad_norm", "optimizer.max_grad_norm", "policy_optimizer.max_grad_norm"),
        "gamma": ("advantage.gamma",),
        "horizon": ("kl.target.horizon",),
        "kl_coef": ("kl.coef",),
        "lam": ("advantage.gae_lambda",),
        "lr": ("learning_rate", "optimizer.learning_rate", "policy_optimizer.learning_rate"),
        "lr_warmup_steps": ("warmup_steps", "optimizer.warmup_steps", "policy_optimizer.warmup_steps"),
        "max_response_length": ("max_new_tokens",),
        "ppo_epochs": ("num_epochs",),
        "loss_agg_mode": ("loss.token_weight",),
        "norm_adv_by_std_in_grpo": ("advantage.scale",),
        "log_prob_max_token_len_per_gpu": ("minibatch.forward_tokens",),
        "ppo_micro_batch_size_per_gpu": ("minibatch.micro_batch_size",),
        "ppo_max_token_len_per_gpu": ("minibatch.micro_batch_tokens",),
        "ppo_mini_batch_size": ("minibatch.batch_size",),
        "target_kl": ("kl.target.nats",),
        "tensor_model_parallel_size": ("sampler.tensor_parallel_size",),
        "save_freq": ("save_every_iterations", "save_every_steps"),
        "test_freq": ("evaluate_every_steps",),
        "total_training_steps": ("num_iterations", "num_steps"),
        "train_batch_size": ("rollout_batch_size",),
        "train_files": ("prompts.source",),
        "ulysses_sequence_parallel_size": ("engine.sequence_parallel_size",),
        "warmup_style": ("schedule", "optimizer.schedule", "policy_optimizer.schedule"),
    },
    _HF: {
        "layer_norm_eps": ("norm_eps",),
        "layer_norm_epsilon": ("norm_eps",),
        "n_embd": ("hidden_size",),
        "n_head": ("num_attention_heads",),
        "n_inner": ("intermediate_size",),
        "n_layer": ("num_hidden_layers",),
        "n_positions": ("max_position_embeddings",),
        "num_heads": ("num_attention_heads",),
        "num_layers": ("num_hidden_layers",),
        "num_local_experts": ("num_experts",),
        "rms_norm_eps": ("norm_eps",),
    },
}

# Values of `kind` in other projects, and Heed's.
KINDS = {
    "grpo": "group_mean",
    "ppo": "gae",
    "rloo": "leave_one_out",
    "reinforce": "none",
    "reinforce_plus_plus": "none",
}

_GLOBAL_BATCHES = (
    "batch_size is global in Heed: set it in `batch` or `minibatch`, with micro_batch_size for one rank's pass"
)
_PASTE = "paste a whole config.json into [model], including model_type"

_KL = (
    'set `kl.kind`: "reward" subtracts the log ratio (k1) from rewards, "loss" adds half the square of a response\'s'
    " (k2) to the loss. As a loss, k1 has a mean gradient of 0, and k3 that of another divergence (docs/algorithms.md)"
)

# Keys without a counterpart, and what to do instead.
ADVICE = {
    "adam_beta1": "set both as `betas = [beta1, beta2]` in the optimizer",
    "adam_beta2": "set both as `betas = [beta1, beta2]` in the optimizer",
    "adam_offload": 'set `offload = ["optimizer"]` in [engine]',
    "adap_kl_ctrl": "set `kl.target = { nats = 6.0, horizon = 10000 }`",
    "deepspeed": "set `zero_stage` in [engine]; DeepSpeed's configuration is derived from the job",
    "enable_ema": "set `ema.decay`; 0 = no moving average",
    "gradient_accumulation_steps": f"it is derived: batch_size / (ranks x micro_batch_size). {_GLOBAL_BATCHES}",
    "hidden_act": f"set `mlp`, or {_PASTE}",
    "kl_estimator": _KL,
    "kl_loss_type": _KL,
    "lr_warmup_ratio": "warm-up is counted in steps: set `warmup_steps` in the optimizer",
    "lr_warmup_steps_ratio": "warm-up is counted in steps: set `warmup_steps` in the optimizer",
    "model_type": _PASTE,
    "num_episodes": "set `num_iterations`; an iteration samples `rollout_batch_size` responses",
    "num_mini_batches": "set `minibatch.batch_size`; the number follows from `rollout_batch_size`",
    "output_dir": "runs are written to the folder given by `heed run --runs`, under the job's name",
    "pad_token": "leave it out: Heed masks by length and needs no padding token",
    "per_device_eval_batch_size": _GLOBAL_BATCHES,
    "per_device_train_batch_size": _GLOBAL_BATCHES,
    "save_path": "runs are written to the folder given by `heed run --runs`, under the job's name",
    "total_episodes": "set `num_iterations`; an iteration samples `rollout_batch_size` responses",
    "total_epochs": "set `num_iterations`; an iteration samples `rollout_batch_size` responses",
    "use_kl_in_reward": _KL,
    "use_kl_loss": _KL,
    "vf_coef": "the value function has its own optimizer: set `advantage.value_optimizer`",
    "warmup_ratio": "warm-up is counted in steps: set `warmup_steps` in the optimizer",
}


def counterpart(key: str, is_key: Callable[[str], bool]) -> str:
    """Says in words what Heed calls another project's key; "" if that is unknown.

    `is_key` tells whether a dotted name is a key of the section that the key was found in, or a path from the top of
    the job.
    """
    projects_by_name: dict[str, list[str]] = {}
    for project, table in COUNTERPARTS.items():
        for name in table.get(key, ()):
            last = name.rsplit(".", 1)[-1]  # where the key was found in that very table
            if match := next(filter(is_key, (name, last)), ""):
                projects_by_name.setdefault(match, []).append(project)
                break
    if len(projects_by_name) == 1:
        return f"Heed calls it `{next(iter(projects_by_name))}`"
    if projects_by_name:
        return "; ".join(
            f"{' and '.join(projects)}'s key is called `{name}` here" for name, projects in projects_by_name.items()
        )
    return ADVICE.get(key, "")
