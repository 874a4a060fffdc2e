"""What PPO configures."""

from typing import Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from lm.config import exact_div
from reward.external import ExternalReward, RemoteReward, RewardFunction
from training.config import BatchConfig, Config, OptimizerConfig
from training.data import DataConfig


class PPOConfig(Config):
    """Each iteration samples `rollout_batch_size` responses and learns from them in minibatches (arXiv 1707.06347).

    The reward comes from one source: the reward stage, `reward_from`, `reward_function` or `reward_url`. Scores are in
    standard deviations of the initial policy's scores; KL is in nats per response.
    """

    init_from: str = Field(
        default="", description="Model directory or hub id of the initial policy; empty = the SFT stage's model."
    )
    reward_from: str = Field(
        default="", description="Model directory or hub id of a reward model; empty = the reward stage's model."
    )
    reward_function: str = Field(
        default="",
        pattern=r"^(|[^:]+:[^:]+)$",
        description='Python function that scores responses, "MODULE:FUNCTION" or "FILE.py:FUNCTION".',
    )
    reward_url: str = Field(default="", pattern=r"^(|https?://.+)$", description="HTTP endpoint that scores responses.")
    reward_timeout_seconds: float = Field(
        default=30.0, gt=0, description="How long `reward_url` may be silent before a request fails, in seconds."
    )
    reward_retries: int = Field(default=3, ge=0, description="How often a failed request to `reward_url` is repeated.")
    reward_parallel: int = Field(
        default=4, ge=1, description="How many requests each rank sends to `reward_url` at once."
    )
    objective_weights: dict[str, FiniteFloat] = Field(
        default_factory=dict,
        description="Weight of each objective's score in the reward, for a reward model of several; none for one.",
    )
    placement: Literal["colocated", "disaggregated"] = Field(
        default="colocated",
        description="`colocated`: every worker has all roles. `disaggregated`: the job's workers learn, and other ranks"
        " sample and score.",
    )
    num_generators: int = Field(default=1, ge=1, description="Ranks that sample; disaggregated only.")
    num_scorers: int = Field(
        default=1, ge=1, description="Ranks that hold the reward model and the reference policy; disaggregated only."
    )
    weight_transport: Literal["auto", "broadcast", "object_store"] = Field(
        default="auto",
        description="How weights reach the generators: a broadcast (NCCL or gloo) or Ray's object store; `auto`"
        " broadcasts between GPUs unless `max_staleness` is set. Disaggregated only.",
    )
    memory: Literal["fast", "balanced", "small"] = Field(
        default="fast",
        description="What leaves the device while it is not needed. `fast`: nothing. `balanced`: reference and reward"
        " model, which are sharded over the scorers' CPU memory and gathered to score, a colocated generator's weights"
        " while others work, and the moving average. `small`: reference and reward model are gathered layer by layer,"
        " and the optimizer states of colocated learners are in CPU memory while others work. The results are the same"
        " bits.",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="How many iterations N the generators are ahead: iteration i learns from responses sampled with the"
        " weights that iteration max(0, i - N) started with. 0 = on-policy; disaggregated only.",
    )
    importance_cap: float = Field(
        default=2.0, ge=1, description="Upper limit of a token's importance weight π / π_behave in stale rollouts."
    )
    prompts: DataConfig = Field(description="Prompts to sample responses to.")
    num_iterations: int = Field(ge=1, description="Iterations of sampling and learning.")
    rollout_batch_size: int = Field(ge=1, description="Prompts per iteration, with one response each.")
    num_epochs: int = Field(default=1, ge=1, description="Passes over each iteration's responses.")
    minibatch: BatchConfig = Field(
        description="Responses per update; `micro_batch_size` also bounds the passes without gradients."
    )
    max_new_tokens: int = Field(ge=1, description="Length limit of a response, in tokens.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature of rollouts.")
    policy_optimizer: OptimizerConfig = Field(description="Optimizer of the policy.")
    value_optimizer: OptimizerConfig = Field(description="Optimizer of the value function.")
    kl_coef: float = Field(
        default=0.05, ge=0, description="Weight of the KL penalty in the reward, per nat; its first value if adaptive."
    )
    kl_control: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="Whether `kl_coef` is adapted to reach `target_kl` (arXiv 1909.08593)."
    )
    target_kl: float = Field(default=6.0, gt=0, description="KL to aim for, in nats per response; adaptive only.")
    kl_horizon: int = Field(
        default=10_000, ge=1, description="How slowly `kl_coef` adapts, in responses; adaptive only."
    )
    missing_eos_penalty: float = Field(
        default=0.0,
        ge=0,
        description="Subtracted from the score of a response without an end token, in standard deviations; 0 = none.",
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount factor per token.")
    gae_lambda: float = Field(
        default=0.95, ge=0, le=1, description="λ of generalised advantage estimation (arXiv 1506.02438)."
    )
    clip_range: float = Field(
        default=0.2,
        gt=0,
        description="The policy's probability ratio is clipped to 1 ± this (arXiv 1707.06347, eq. 7).",
    )
    value_clip_range: float = Field(
        default=0.2, gt=0, description="Values are clipped to within this of the values at sampling time."
    )
    ptx_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the pretraining loss, a mean per token like the policy loss (PPO-ptx, arXiv 2203.02155);"
        " 0 = none.",
    )
    ptx_rows: int = Field(default=0, ge=0, description="Pretraining rows per minibatch; 0 = none.")
    ema_decay: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Decay per iteration of the policy's moving average; 0 = the average is the last policy.",
    )
    final_weights: Literal["last", "ema"] = Field(
        default="last", description="Which weights the stage hands on: the last ones or their moving average."
    )
    max_failed_share: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="The run stops when a larger fraction of an iteration's responses gets no score.",
    )
    save_every_iterations: int = Field(
        default=10, ge=1, description="Iterations between checkpoints; the last iteration always writes one."
    )
    keep_policies_every: int = Field(
        default=0, ge=0, description="Iterations between policies that are kept in policies/; 0 = none."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        exact_div(self.rollout_batch_size, self.minibatch.batch_size, "rollout_batch_size over minibatch.batch_size")
        if self.placement == "disaggregated":
            for name in ("num_generators", "num_scorers"):
                exact_div(self.rollout_batch_size, getattr(self, name), f"rollout_batch_size over {name}")
        if self.max_staleness and self.placement == "colocated":
            raise ValueError(
                f'max_staleness {self.max_staleness} with placement "colocated": a worker that samples cannot learn'
                ' meanwhile; 0 or placement "disaggregated" was expected'
            )
        if self.max_staleness and self.weight_transport == "broadcast":
            raise ValueError(
                f'max_staleness {self.max_staleness} with weight_transport "broadcast": learners would wait for'
                ' generators that still sample; "object_store" or "auto" was expected'
            )
        if self.max_staleness >= self.num_iterations:
            raise ValueError(
                f"max_staleness {self.max_staleness} with num_iterations {self.num_iterations}: no rollout would be"
                " sampled by trained weights; less than num_iterations was expected"
            )
        given = [name for name in ("reward_from", "reward_function", "reward_url") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; one source of the reward was expected")
        if self.objective_weights and self.external_reward is not None:
            raise ValueError(
                f"objective_weights of {', '.join(self.objective_weights)} with {given[0]}, which gives one score; no"
                " weights were expected"
            )
        if (self.ptx_coef > 0) != (self.ptx_rows > 0):
            raise ValueError(f"ptx_coef {self.ptx_coef} with ptx_rows {self.ptx_rows}: both or neither must be 0")
        return self

    @property
    def external_reward(self) -> ExternalReward | None:
        """Where rewards come from, if it is no model."""
        if self.reward_function:
            return RewardFunction(self.reward_function)
        if self.reward_url:
            return RemoteReward(self.reward_url, self.reward_timeout_seconds, self.reward_retries, self.reward_parallel)
        return None

    @property
    def num_minibatches(self) -> int:
        return self.rollout_batch_size // self.minibatch.batch_size

    @property
    def updates_per_iteration(self) -> int:
        return self.num_epochs * self.num_minibatches
