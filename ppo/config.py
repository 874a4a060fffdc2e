"""What PPO configures."""

from typing import Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from lm.config import exact_div
from reward.elsewhere import Elsewhere, FunctionReward, HTTPReward
from training.config import BatchConfig, Config, OptimizerConfig
from training.data import DataConfig


class PPOConfig(Config):
    """An iteration samples one response to each of `rollout_batch_size` prompts and learns from them in minibatches.

    `minibatch.batch_size` counts responses; `minibatch.micro_batch_size` also bounds the passes without gradients.
    KL is in nats a response, the sum over its tokens of log π - log π_ref. Scores are in standard deviations of the
    SFT policy's scores. Colocated, every worker has all roles; disaggregated, the job's workers learn and others sample
    and score. With `max_staleness` N the generators are N iterations ahead: what iteration i learns from was sampled
    with the weights that iteration max(0, i - N) began with. Weights go to the generators by a broadcast (NCCL, gloo)
    or through Ray's object store; "auto" broadcasts between GPUs, unless generators are ahead. `init_from` names a
    policy and `reward_from` a reward model (folders or hub ids) that stand in for what the stages before would give. A
    reward may also come from a Python function, `reward_function`, or an HTTP endpoint, `reward_url`
    (`reward.elsewhere`); there is one source of it. From a reward model of several objectives it is the sum of their
    scores, each times its `objective_weights`; they are {} for one of a single objective.
    """

    init_from: str = ""
    reward_from: str = ""
    reward_function: str = Field(default="", pattern=r"^(|[^:]+:[^:]+)$")  # "MODULE:FUNCTION" or "FILE.py:FUNCTION"
    reward_url: str = Field(default="", pattern=r"^(|https?://.+)$")
    reward_timeout_seconds: float = Field(default=30.0, gt=0)  # of silence; reward_url only
    reward_retries: int = Field(default=3, ge=0)  # of a request; reward_url only
    objective_weights: dict[str, FiniteFloat] = Field(default_factory=dict)
    placement: Literal["colocated", "disaggregated"] = "colocated"
    num_generators: int = Field(default=1, ge=1)  # ranks that sample; disaggregated only
    num_scorers: int = Field(default=1, ge=1)  # ranks that hold reward model and reference; disaggregated only
    weight_transport: Literal["auto", "broadcast", "object_store"] = "auto"  # to generators; disaggregated only
    max_staleness: int = Field(default=0, ge=0)  # in iterations; disaggregated only; 0 = on-policy
    importance_cap: float = Field(default=2.0, ge=1)  # of a token's weight π / π_behave, in stale rollouts
    prompts: DataConfig
    num_iterations: int = Field(ge=1)
    rollout_batch_size: int = Field(ge=1)
    num_epochs: int = Field(ge=1)
    minibatch: BatchConfig
    max_new_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, gt=0)
    policy_optimizer: OptimizerConfig
    value_optimizer: OptimizerConfig
    kl_coef: float = Field(ge=0)
    kl_control: Literal["fixed", "adaptive"] = "fixed"
    target_kl: float = Field(default=6.0, gt=0)  # adaptive only (Ziegler et al., arXiv 1909.08593)
    kl_horizon: int = Field(default=10_000, ge=1)  # adaptive only, in responses
    missing_eos_penalty: float = Field(ge=0)
    gamma: float = Field(default=1.0, gt=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    clip_range: float = Field(default=0.2, gt=0)
    value_clip_range: float = Field(default=0.2, gt=0)
    ptx_coef: float = Field(ge=0)  # weight of the pretraining loss, a mean a token as the policy loss is
    ptx_rows: int = Field(ge=0)  # pretraining rows a minibatch
    ema_decay: float = Field(ge=0, lt=1)  # an iteration
    final_weights: Literal["last", "ema"] = "last"
    max_failed_share: float = Field(default=0.1, ge=0, lt=1)  # responses without a score, before the run stops
    save_every_iterations: int = Field(ge=1)
    keep_policies_every: int = Field(default=0, ge=0)  # iterations; the policy then stays in policies/; 0 = never

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
        if self.objective_weights and self.elsewhere is not None:
            raise ValueError(
                f"objective_weights of {', '.join(self.objective_weights)} with {given[0]}, which gives one score; no"
                " weights were expected"
            )
        if (self.ptx_coef > 0) != (self.ptx_rows > 0):
            raise ValueError(f"ptx_coef {self.ptx_coef} with ptx_rows {self.ptx_rows}: both or neither must be 0")
        return self

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Where rewards come from, if it is no model."""
        if self.reward_function:
            return FunctionReward(self.reward_function)
        if self.reward_url:
            return HTTPReward(self.reward_url, self.reward_timeout_seconds, self.reward_retries)
        return None

    @property
    def num_minibatches(self) -> int:
        return self.rollout_batch_size // self.minibatch.batch_size

    @property
    def updates_per_iteration(self) -> int:
        return self.num_epochs * self.num_minibatches
