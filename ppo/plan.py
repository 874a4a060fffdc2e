"""What `heed plan` estimates an iteration of PPO from: the shapes of all models, and the lengths of the responses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lm.config import ModelConfig
from lm.lora import LoRAConfig
from lm.tokenizer import Tokenizer
from ppo.config import PPOConfig
from reward.external import ModelReward
from stages.plan import Planner, Work
from stages.run import JobView, StageRun
from stages.sizes import Lengths, ResponseTokens, mixed
from training.data import DataConfig


class RewardSection(Protocol):
    """What PPO reads of [reward]. The whole section can name any format of labels, which PPO does not need."""

    @property
    def labels(self) -> Sequence[str]: ...

    @property
    def init_from(self) -> str: ...

    @property
    def lora(self) -> LoRAConfig | None: ...

    def reshaped(self, shape: ModelConfig) -> ModelConfig: ...


@dataclass(frozen=True)
class PPOIteration(Work):
    """An iteration. The reference has the policy's shape, the value function the reward model's.

    `lengths` are those of prompts with responses, and `responses` those of responses alone. `shared_adapter` is the
    reward model's adapter on a shared body; None if it has a body of its own. Each pretraining row has `ptx_tokens`.
    """

    config: PPOConfig
    lengths: Lengths
    responses: ResponseTokens
    policy: ModelConfig
    critic: ModelConfig
    shared_adapter: LoRAConfig | None
    teachers: tuple[ModelConfig, ...]
    judges: tuple[ModelConfig, ...]
    ptx_tokens: int


def plan(planner: Planner, config: PPOConfig) -> PPOIteration:
    """Describe an iteration: sampling, the passes before the updates, and the updates."""
    lengths, responses = _lengths(planner, config), planner.sizes.response_tokens
    if responses is None:
        responses = ResponseTokens({config.max_new_tokens: 1.0})
        planner.sizes.assume("assumes that every response is max_new_tokens long (--response-tokens)")
    elif max(responses.weights) > config.max_new_tokens:
        raise ValueError(
            f"--response-tokens: a response of {max(responses.weights)} tokens, with ppo.max_new_tokens"
            f" {config.max_new_tokens}; at most that was expected"
        )
    if config.environment is not None:
        planner.sizes.assume("counts a conversation as one turn of the policy, without its environment's time")
    work = PPOIteration(
        config,
        replace(lengths, mean=lengths.mean - config.max_new_tokens + responses.mean),
        responses,
        planner.model,
        _critic(planner, config),
        _shared_adapter(planner, config),
        tuple(planner.shape(teacher.model) for teacher in config.teachers),
        tuple(planner.shape(judge.model) for judge in config.local_judges),
        _ptx_tokens(planner, config),
    )
    if not config.placement.roles_share_ranks:
        planner.sizes.assume("the scorers' time is counted with the learners'")
    if config.local_judges:
        planner.sizes.assume("assumes that a judge's question is as long as the prompt and the response")
    return work


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


def reward_section(job: JobView) -> RewardSection | None:
    """Returns [reward]; None if the job does not have it."""
    section: RewardSection | None = job.section(job.stage("reward"))
    return section


def _shared_adapter(planner: Planner, config: PPOConfig) -> LoRAConfig | None:
    reward = reward_section(planner.job)
    if not config.shared_body:
        return None
    if reward is None or _named_reward(config) or reward.lora is None:
        planner.sizes.assume("assumes that the reward model's adapter is as large as the policy's")
        return config.lora
    return reward.lora


def _critic(planner: Planner, config: PPOConfig) -> ModelConfig:
    """Returns the reward model's shape: that of `reward.model`, or of the model that the reward stage starts from."""
    if config.external_reward:
        return planner.model
    reward, named = reward_section(planner.job), _named_reward(config)
    return planner.shape(named) if named or reward is None else reward.reshaped(planner.shape(reward.init_from))


def _named_reward(config: PPOConfig) -> str:
    """Returns the reward model that the section names; "" if it is the reward stage's, or the reward is no model."""
    return config.reward.model if isinstance(config.reward, ModelReward) else ""


def _ptx_tokens(planner: Planner, config: PPOConfig) -> int:
    pretraining = planner.job.section(planner.job.stage("pretrain"))
    return int(pretraining.seq_len) if config.ptx_rows and pretraining is not None else 0
