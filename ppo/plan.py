"""What `heed plan` counts of PPO: memory of a rank with all roles, and the time of an iteration."""

import math

from planning.memory import Counts, count, forward_pass, ppo_memory
from ppo.config import PPOConfig
from pretrain.stage import STAGE as PRETRAIN
from stages.planner import Planner, StagePlan


def plan(planner: Planner, config: PPOConfig) -> StagePlan:
    """Estimate an iteration: sampling, the passes that measure, and the updates."""
    layout, batch = planner.layout, config.minibatch
    if config.reward_from:
        planner.sizes.assume(f"{config.reward_from} is taken to have the policy's shape")
    if config.external_reward:
        planner.sizes.assume(
            "the reward comes from a function or an endpoint; a reward model's time and memory are counted anyway"
        )
    seq_len = planner.sizes.conversation_tokens(config.max_new_tokens)
    planner.sizes.assume("every response is as long as it may be")
    policy = count(planner.model, config.policy_optimizer)
    value = count(planner.model, config.value_optimizer, num_scores=1)
    reward = count(planner.model, config.value_optimizer, num_scores=max(1, len(config.objective_weights)))
    rollout_rows = config.rollout_batch_size // layout.ranks
    micro_batches = batch.num_micro_batches(layout.ranks)
    # Pretraining rows ride along with each micro-batch of responses.
    ptx, ptx_tokens = math.ceil(config.ptx_rows / layout.ranks / micro_batches), _ptx_tokens(planner, config)
    of = forward_pass(planner.model, layout, batch.micro_batch_size + ptx, max(seq_len, ptx_tokens))
    counted = batch.micro_batch_size * config.max_new_tokens + ptx * ptx_tokens
    logits = counted * planner.model.vocab_size
    memory = ppo_memory(planner.model, policy, value, reward, layout, of, logits, rollout_rows, micro_batches)
    numbers = {
        "rollout_batch_size": config.rollout_batch_size,
        "batch_size": batch.batch_size,
        "micro_batch_size": batch.micro_batch_size,
        "ranks": layout.ranks,
        "micro-batches per rank and update": micro_batches,
        "updates per iteration": config.updates_per_iteration,
        "iterations": config.num_iterations,
        "updates": config.num_iterations * config.updates_per_iteration,
        "responses": config.num_iterations * config.rollout_batch_size,
        "tokens per iteration": config.rollout_batch_size * seq_len,
    }
    learning = planner.times.compute_seconds(_flops(planner, config, policy, value, seq_len))
    if config.placement == "disaggregated":
        planner.sizes.assume("memory is that of a rank with all roles; the scorers' work is counted as the learners'")
        rollout_rows = config.rollout_batch_size // config.num_generators
    sampling = planner.times.sampling_seconds(policy.total, rollout_rows, seq_len, config.max_new_tokens)
    seconds = max(learning, sampling) if config.max_staleness else learning + sampling
    return planner.planned("responses", numbers, memory, config.num_iterations, seconds)


def _ptx_tokens(planner: Planner, config: PPOConfig) -> int:
    pretraining = planner.job.section(PRETRAIN)
    return pretraining.seq_len if config.ptx_rows and pretraining is not None else 0


def _flops(planner: Planner, config: PPOConfig, policy: Counts, value: Counts, seq_len: int) -> float:
    """An iteration without sampling: one pass each of policy, reference, value function and reward model, then the
    epochs' updates of policy and value function, and the pretraining rows. Heads read the responses alone.
    """
    tokens = config.rollout_batch_size * seq_len
    share = config.max_new_tokens / seq_len
    body, with_head = planner.times.forward_flops(seq_len, 0.0), planner.times.forward_flops(seq_len, share)
    looking = 2 * with_head + 2 * body
    learning = config.num_epochs * (planner.times.passes(policy) * with_head + planner.times.passes(value) * body)
    ptx_tokens = _ptx_tokens(planner, config)
    ptx_flops = planner.times.passes(policy) * planner.times.forward_flops(ptx_tokens or 1, 1.0)
    return tokens * (looking + learning) + config.ptx_rows * config.updates_per_iteration * ptx_tokens * ptx_flops
