"""PPO's estimates for `heed plan`: memory per rank, and time per iteration."""

import math
from collections.abc import Mapping
from dataclasses import replace

from lm.config import ModelConfig
from lm.lora import LoRAConfig
from ppo.config import PPOConfig
from pretrain.stage import STAGE as PRETRAIN
from reward.external import ModelReward
from reward.stage import STAGE as REWARD
from stages.planner import RANK, Planner, StagePlan, rows_and_passes, scoring_rows
from stages.planning.memory import Memory, count, forward_pass
from stages.planning.ppo import PPOModels, PPOWork, generator, keeps_passes, kept_passes, learner, ppo_memory, scorer
from stages.sizes import Lengths
from training.config import OptimizerConfig

MOST_GENERATOR_RANKS = 64
FROZEN = OptimizerConfig(learning_rate=1.0)  # for counting parameters that no optimizer trains


def plan(planner: Planner, config: PPOConfig) -> StagePlan:
    """Estimate an iteration: sampling, the passes before the updates, and the updates."""
    layout, batch, models = planner.layout, config.minibatch, _models(planner, config)
    lengths = planner.answered(
        config.prompts, config.max_new_tokens, config.on_overlong, lambda run: run.tokenizer_of("sft")
    )
    planner.sizes.assume("assumes that every response is max_new_tokens long")
    work, mean = _work(planner, config, models, lengths), round(lengths.mean)
    memory, missing = _memory(planner, config, models, work)
    numbers = {
        "rollout_batch_size": config.rollout_batch_size,
        "samples per prompt": config.advantage.samples_per_prompt,
        "batch_size": batch.batch_size,
        **batch.given_size,
        "ranks": layout.ranks,
        "micro-batches per rank and update": work.num_micro_batches,
        "updates per iteration": config.updates_per_iteration,
        "iterations": config.num_iterations,
        "updates": config.num_iterations * config.updates_per_iteration,
        "responses": config.num_iterations * config.rollout_batch_size,
        "tokens per iteration": config.rollout_batch_size * mean,
    }
    learning = planner.times.compute_seconds(_flops(planner, config, models, work, mean))
    if not config.placement.roles_share_ranks:
        planner.sizes.assume("the scorers' time is counted with the learners'")
    sampling = planner.times.sampling_seconds(
        models.policy_counts.total, work.rollout_rows, mean, config.max_new_tokens
    )
    seconds = max(learning, sampling) if config.placement.max_staleness else learning + sampling
    return planner.planned("responses", numbers, memory, config.num_iterations, seconds, missing)


def _models(planner: Planner, config: PPOConfig) -> PPOModels:
    """Returns the models' sizes. The reward model's shape is that of `reward.model`, or of the model that the reward
    stage starts from.
    """
    critic, shared = _critic(planner, config), _adapter_of_reward(planner, config)
    num_objectives = max(1, len(config.reward.objective_weights))
    value, lora = config.value_optimizer, shared or config.lora
    return PPOModels(
        planner.model,
        critic,
        count(planner.model, config.policy_optimizer, lora=config.lora),
        None if value is None else count(critic, value, num_scores=1, lora=lora),
        None if config.external_reward else count(critic, FROZEN, num_scores=num_objectives, lora=shared),
    )


def _adapter_of_reward(planner: Planner, config: PPOConfig) -> LoRAConfig | None:
    """Returns the reward model's adapter on a shared body; None if the reward model has its own body."""
    reward = planner.job.section(REWARD)
    if not config.shared_body:
        return None
    if reward is None or _named_reward(config) or reward.lora is None:
        planner.sizes.assume("assumes that the reward model's adapter is as large as the policy's")
        return config.lora
    return reward.lora


def _critic(planner: Planner, config: PPOConfig) -> ModelConfig:
    if config.external_reward:
        return planner.model
    reward = planner.job.section(REWARD)
    return planner.shape(_named_reward(config) or (reward.init_from if reward is not None else ""))


def _named_reward(config: PPOConfig) -> str:
    """Returns the reward model that the section names; "" if it is the reward stage's, or the reward is no model."""
    return config.reward.model if isinstance(config.reward, ModelReward) else ""


def _work(planner: Planner, config: PPOConfig, models: PPOModels, lengths: Lengths) -> PPOWork:
    """Returns the work of each rank. Every micro-batch of responses also has its share of the pretraining rows.

    A pass has as many tokens as `micro_batch_size` of the longest prompts with responses. If prompts are shorter, it
    holds more responses, and so more logits.
    """
    layout, batch, seq_len = planner.layout, config.minibatch, lengths.longest
    # A reward model reads a truncated response with an end token added.
    width, scored_width = (planner.packed_width(tokens) for tokens in (seq_len, seq_len + 1))
    rows, micro_batches = rows_and_passes(batch, layout.ranks, width)
    responses = min(batch.batch_size // layout.ranks, rows * seq_len // lengths.shortest)
    ptx, ptx_tokens = math.ceil(config.ptx_rows / layout.ranks / micro_batches), _ptx_tokens(planner, config)
    num_generators = config.placement.num_generators or layout.ranks
    can_keep = keeps_passes(layout, config.memory, has_ptx=config.ptx_rows > 0, shares_body=config.shared_body)
    keeps = ["policy"] if can_keep else []
    if can_keep and config.value_optimizer is not None and not batch.forward_tokens:
        keeps.append("value")
    return PPOWork(
        forward_pass(layout, rows + ptx, max(width, ptx_tokens)),
        forward_pass(layout, rows, width),
        forward_pass(layout, scoring_rows(batch, scored_width), scored_width),
        (max(rows, responses) * config.max_new_tokens + ptx * ptx_tokens) * models.policy.vocab_size,
        config.sampled_batch_size // num_generators,
        seq_len - config.max_new_tokens,
        config.max_new_tokens,
        micro_batches,
        config.memory,
        has_average=config.ema.decay > 0,
        shares_body=config.shared_body,
        gpu_bytes=planner.times.hardware.memory_bytes if layout.is_gpu else 0,
        keeps=tuple(keeps),
    )


def _memory(
    planner: Planner, config: PPOConfig, models: PPOModels, work: PPOWork
) -> tuple[Mapping[str, Memory], tuple[str, ...]]:
    """Returns the memory per kind of rank, and what Heed lacks: a policy too large for one GPU would need a generator
    over several.
    """
    available = planner.times.hardware.memory_bytes
    weights, ranks = planner.layout.compute_bytes * models.policy_counts.total, 1
    while planner.layout.is_gpu and weights / ranks > available / 2 and ranks < MOST_GENERATOR_RANKS:
        ranks *= 2
    missing: tuple[str, ...] = ()
    if weights > available:
        work = replace(work, generator_ranks=ranks)
        missing = (f"a generator over {ranks} GPUs (tensor parallel), since the policy's weights do not fit on one",)
    if config.placement.roles_share_ranks:
        return {RANK: ppo_memory(models, planner.layout, work)}, missing
    roles = {"learner": learner, "generator": generator, "scorer": scorer}
    return {name: role(models, planner.layout, work).memory() for name, role in roles.items()}, missing


def _ptx_tokens(planner: Planner, config: PPOConfig) -> int:
    pretraining = planner.job.section(PRETRAIN)
    return pretraining.seq_len if config.ptx_rows and pretraining is not None else 0


def _flops(planner: Planner, config: PPOConfig, models: PPOModels, work: PPOWork, seq_len: int) -> float:
    """Returns the FLOPs of an iteration without sampling.

    They are one pass each of policy and reference, and of value function and reward model if there are any; then the
    epochs' updates of policy and value function, without the kept passes that the first update reuses; and the
    pretraining rows. Heads read only the responses.
    """
    tokens = config.rollout_batch_size * seq_len
    times, critic = planner.times, replace(planner.times, model=models.critic)
    with_head = times.forward_flops(seq_len, config.max_new_tokens / seq_len)
    body = critic.forward_flops(seq_len, 0.0)
    num_critics = (models.value_counts is not None) + config.advantage.oversample * (models.reward_counts is not None)
    looking = 2 * with_head + num_critics * body
    updates = times.passes(models.policy_counts) * with_head
    if models.value_counts is not None:
        updates += critic.passes(models.value_counts) * body
    cost = {"policy": with_head, "value": body}
    for name, kept in kept_passes(models, planner.layout, work).items():
        looking -= cost[name] * kept.num_kept / kept.num_passes / config.num_minibatches
    ptx_tokens = _ptx_tokens(planner, config)
    ptx_flops = times.passes(models.policy_counts) * times.forward_flops(ptx_tokens or 1, 1.0)
    ptx = config.ptx_rows * config.updates_per_iteration * ptx_tokens * ptx_flops
    return tokens * (looking + config.num_epochs * updates) + ptx
