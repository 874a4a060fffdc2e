"""PPO's estimates for `heed plan`: memory per rank, and time per iteration."""

import math
from collections.abc import Mapping
from dataclasses import replace

from lm.config import ModelConfig
from lm.lora import LoRAConfig
from lm.samplers.vllm_engine import GPU_MEMORY_SHARE, GPU_MEMORY_SHARE_OF_GUEST
from lm.sequence_parallel import check_sequence_split
from lm.tokenizer import Tokenizer
from ppo.config import PPOConfig
from pretrain.stage import STAGE as PRETRAIN
from reward.external import ModelReward
from reward.stage import STAGE as REWARD
from stages.planner import RANK, Planner, StagePlan, rows_and_passes, scoring_rows
from stages.planning.memory import Counts, Memory, count, forward_pass
from stages.planning.ppo import PPOModels, PPOWork, generator, keeps_passes, kept_passes, learner, ppo_memory, scorer
from stages.run import StageRun
from stages.sizes import Lengths, mixed
from training.config import OptimizerConfig
from training.data import DataConfig

FP32_BYTES = 4  # per number of an adapter that is sent alone: generators merge it before they round
FROZEN = OptimizerConfig(learning_rate=1.0)  # for counting parameters that no optimizer trains


def plan(planner: Planner, config: PPOConfig) -> StagePlan:
    """Estimate an iteration: sampling, the passes before the updates, and the updates."""
    layout, batch, models = planner.layout, config.minibatch, _models(planner, config)
    lengths = _lengths(planner, config)
    planner.sizes.assume("assumes that every response is max_new_tokens long")
    if config.environment is not None:
        planner.sizes.assume("counts an environment's tokens as the policy's, and not the time that it takes")
    work, mean = _work(planner, config, models, lengths), round(lengths.mean)
    numbers = {
        "rollout_batch_size": config.rollout_batch_size,
        "samples per prompt": config.advantage.samples_per_prompt,
        "batch_size": batch.batch_size,
        **batch.given_size,
        "ranks": layout.ranks,
        **layout.numbers,
        "micro-batches per rank and update": work.num_micro_batches,
        "updates per iteration": config.updates_per_iteration,
        "iterations": config.num_iterations,
        "updates": config.num_iterations * config.updates_per_iteration,
        "responses": config.num_iterations * config.rollout_batch_size,
        "tokens per iteration": config.rollout_batch_size * mean,
    }
    times, size = planner.times, models.policy_counts.total
    learning = _learning_seconds(planner, config, models, work, mean)
    adapter_sent = config.lora is not None and config.lora.sends == "adapter"
    sent = FP32_BYTES * models.policy_counts.trained if adapter_sent else layout.compute_bytes * size
    learning += times.sync_seconds(sent, is_apart=not config.placement.roles_share_ranks)
    if adapter_sent:
        planner.sizes.assume('lora.sends "adapter": the time to read the initial policy again is not counted')
    if not config.placement.roles_share_ranks:
        planner.sizes.assume("the scorers' time is counted with the learners'")
    sampling = times.sampling_seconds(size, work.rollout_rows, mean, config.max_new_tokens, work.team_size)
    seconds = max(learning, sampling) if config.placement.max_staleness else learning + sampling
    memory = _memory(planner, config, models, work)
    return planner.planned("responses", numbers, memory, config.num_iterations, seconds)


def policy_tokenizer(run: StageRun, config: PPOConfig) -> Tokenizer:
    """Returns the policy's tokenizer, known before the model that it starts from is trained."""
    return run.tokenizer_of("sft").with_template(config.chat_template)


def _lengths(planner: Planner, config: PPOConfig) -> Lengths:
    """Returns the lengths of prompts with their responses, from each source in its share."""

    def of(source: DataConfig) -> Lengths:
        limits = config.max_new_tokens, config.on_overlong
        return planner.answered(source, *limits, lambda run: policy_tokenizer(run, config))

    parts = [of(source) for source in config.prompt_sources]
    shares = config.prompt_weights or [planner.sizes.num_rows(source) for source in config.prompt_sources]
    return parts[0] if len(parts) == 1 else mixed(parts, shares)


def _models(planner: Planner, config: PPOConfig) -> PPOModels:
    """Returns the models' sizes. The reward model's shape is that of `reward.model`, or of the model that the reward
    stage starts from.
    """
    critic, shared = _critic(planner, config), _adapter_of_reward(planner, config)
    num_objectives = max(1, len(config.reward.objective_weights))
    value, lora = config.value_optimizer, shared or config.lora
    for trained in (planner.model, critic if value is not None else planner.model):
        check_sequence_split(trained, planner.layout.sequence_ranks)
    return PPOModels(
        planner.model,
        critic,
        count(planner.model, config.policy_optimizer, lora=config.lora),
        None if value is None else count(critic, value, num_scores=1, lora=lora),
        None if config.external_reward else count(critic, FROZEN, num_scores=num_objectives, lora=shared),
        tuple((shape, count(shape, FROZEN)) for shape in (planner.shape(of.model) for of in config.teachers)),
        tuple((shape, count(shape, FROZEN)) for shape in (planner.shape(of.model) for of in config.local_judges)),
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
    reward, named = planner.job.section(REWARD), _named_reward(config)
    return planner.shape(named) if named or reward is None else reward.reshaped(planner.shape(reward.init_from))


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
    rows, micro_batches = rows_and_passes(batch, layout.shares, width)
    responses = min(batch.batch_size // layout.shares, rows * seq_len // lengths.shortest)
    ptx, ptx_tokens = math.ceil(config.ptx_rows / layout.shares / micro_batches), _ptx_tokens(planner, config)
    num_generators = config.placement.num_generators or layout.ranks
    can_keep = keeps_passes(layout, config.memory, has_ptx=config.ptx_rows > 0, shares_body=config.shared_body)
    keeps = ["policy"] if can_keep else []
    if can_keep and config.value_optimizer is not None and not batch.forward_tokens:
        keeps.append("value")
    return PPOWork(
        forward_pass(layout, rows + ptx, max(width, ptx_tokens), is_trained=True),
        forward_pass(layout, rows, width, is_trained=True),
        forward_pass(layout, scoring_rows(batch, scored_width), scored_width, is_trained=True),
        (max(rows, responses) * config.max_new_tokens + ptx * ptx_tokens) * models.policy.vocab_size,
        config.sampled_batch_size // num_generators,
        seq_len - config.max_new_tokens,
        config.max_new_tokens,
        micro_batches,
        config.memory,
        team_size=config.sampler.tensor_parallel_size,
        has_average=config.ema.decay > 0,
        shares_body=config.shared_body,
        gpu_bytes=planner.gpu_bytes,
        engine_bytes=_engine_bytes(planner, config),
        keeps=tuple(keeps),
    )


def _engine_bytes(planner: Planner, config: PPOConfig) -> int:
    """Returns what vLLM takes of a GPU; 0 if Heed's sampler samples, or on CPUs."""
    if not (planner.layout.is_gpu and config.sampler.has_own_process):
        return 0
    share = GPU_MEMORY_SHARE_OF_GUEST if config.placement.roles_share_ranks else GPU_MEMORY_SHARE
    return round(share * planner.times.hardware.memory_bytes)


def _memory(planner: Planner, config: PPOConfig, models: PPOModels, work: PPOWork) -> Mapping[str, Memory]:
    """Returns the memory per kind of rank."""
    if config.placement.roles_share_ranks:
        return {RANK: ppo_memory(models, planner.layout, work)}
    roles = {"learner": learner, "generator": generator, "scorer": scorer}
    return {name: role(models, planner.layout, work).memory() for name, role in roles.items()}


def _ptx_tokens(planner: Planner, config: PPOConfig) -> int:
    pretraining = planner.job.section(PRETRAIN)
    return pretraining.seq_len if config.ptx_rows and pretraining is not None else 0


def _learning_seconds(planner: Planner, config: PPOConfig, models: PPOModels, work: PPOWork, seq_len: int) -> float:
    """Returns the seconds of an iteration without sampling.

    They are one pass each of policy and reference, and of teachers, value function and reward model if there are any;
    then the epochs' updates of policy and value function, without the kept passes that the first update reuses; and
    the pretraining rows. Heads read only the responses. Passes hold as many tokens as those of the updates, or for
    scores and values as many as `forward_tokens` says.
    """
    policy, critic, ranks = planner.times, replace(planner.times, model=models.critic), planner.layout.ranks
    tokens, head_share = config.rollout_batch_size * seq_len / ranks, config.max_new_tokens / seq_len
    pass_tokens, scored_tokens = work.critic_pass.num_tokens, work.scoring_pass.num_tokens
    num_passes = config.num_minibatches * math.ceil(tokens / config.num_minibatches / pass_tokens)
    num_scored = math.ceil(tokens / scored_tokens)
    one_pass = policy.forward_seconds(tokens / num_passes, seq_len, head_share)
    one_score = critic.forward_seconds(tokens / num_scored, seq_len, 0.0)
    looks = {"policy": policy.scoring_seconds(models.policy_counts, num_passes, one_pass)}
    if models.policy_counts.ranks:  # the policy without its adapters
        looks["reference"] = looks["policy"]
    else:
        looks["reference"] = _frozen_seconds(planner, work, models.policy_counts, num_passes, one_pass)
    for number, (shape, counts) in enumerate(models.teachers):
        times = replace(planner.times, model=shape)
        one_teacher = times.forward_seconds(tokens / num_passes, seq_len, head_share)
        looks[f"teacher {number}"] = _frozen_seconds(planner, work, counts, num_passes, one_teacher)
    for number, (shape, judge) in enumerate(
        zip((shape for shape, _ in models.judges), config.local_judges, strict=True)
    ):
        graded = config.advantage.oversample * tokens * judge.num_questions
        one_grade = replace(planner.times, model=shape).forward_seconds(graded, seq_len, 0.0)
        looks[f"judge {number}"] = one_grade
        planner.sizes.assume("assumes that a judge's question is as long as the prompt and the response")
    if models.reward_counts is not None:
        num_rewards = math.ceil(config.advantage.oversample * num_scored)
        looks["reward"] = _frozen_seconds(planner, work, models.reward_counts, num_rewards, one_score)
    step_tokens = tokens / config.num_minibatches
    update = policy.step_seconds(models.policy_counts, step_tokens, pass_tokens, seq_len, head_share)
    if models.value_counts is not None:
        looks["value"] = critic.scoring_seconds(models.value_counts, num_scored, one_score)
        update += critic.step_seconds(models.value_counts, step_tokens, pass_tokens, seq_len, 0.0)
    for name, kept in kept_passes(models, planner.layout, work).items():
        looks[name] -= looks[name] * kept.num_kept / kept.num_passes / config.num_minibatches
    if ptx_tokens := _ptx_tokens(planner, config):
        ptx = config.ptx_rows * ptx_tokens / ranks, ptx_tokens, 1.0
        update += policy.forward_seconds(*ptx) + policy.backward_seconds(models.policy_counts, *ptx)
    return sum(looks.values()) + config.updates_per_iteration * update


def _frozen_seconds(planner: Planner, work: PPOWork, counts: Counts, num_passes: int, one_pass: float) -> float:
    """Returns the seconds of passes through a frozen model, which `ppo.memory` may gather once or in each pass."""
    num_gathers = {"fast": 0, "balanced": 1, "small": num_passes}[work.mode]
    if work.shares_body:
        num_gathers = 0
    weights = planner.layout.compute_bytes * counts.total
    return num_passes * one_pass + num_gathers * planner.times.gather_seconds(weights)
