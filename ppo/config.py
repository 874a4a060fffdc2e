"""Settings of PPO, and of policy gradients without a value function (docs/algorithms.md)."""

from typing import Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from lm.config import exact_div
from lm.lora import LoRAConfig
from reward.external import ExternalReward, RemoteReward, RewardFunction
from training.config import BatchConfig, Config, OptimizerConfig, check_lora, lora_field
from training.data import DataConfig, OnOverlong, overlong_field

GAE_ONLY = ("value_optimizer", "value_clip_range", "gamma", "gae_lambda")


class PPOConfig(Config):
    """Each iteration samples `rollout_batch_size` responses and learns from them in minibatches (arXiv 1707.06347).

    The reward comes from one source: the reward stage, `reward_from`, `reward_function` or `reward_url`. Scores are in
    standard deviations of the initial policy's scores; KL is in nats per response.
    """

    init_from: str = Field(
        default="",
        description="Model directory, .gguf file or hub id of the initial policy; empty = the SFT stage's model.",
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
    generator: Literal["heed", "vllm"] = Field(
        default="heed",
        description="What samples. `heed`: the learner's own core, whose samples are the same bits after a resume."
        " `vllm`: vLLM, in processes of its own and under its own Python (docs/samplers.md).",
    )
    generator_python: str = Field(
        default="",
        description="Python interpreter with vLLM and Heed, on every machine; empty = the one that `make vllm` makes.",
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
        description="What leaves the device while it is not needed. `fast`: nothing; CPU ranks without ZeRO also keep"
        " up to 4 GiB of activations from measuring samples until the first update. `balanced`: reference and reward"
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
        default=2.0,
        ge=1,
        description="Upper limit of a token's importance weight π / π_behave, where another policy or engine sampled:"
        ' stale rollouts, and generator "vllm".',
    )
    importance_floor: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Lower limit of importance weights, with `importance_beyond` other than cut; 0 = none.",
    )
    importance_beyond: Literal["cut", "drop_tokens", "drop_responses"] = Field(
        default="cut",
        description="What happens beyond these limits. `cut`: a larger weight becomes `importance_cap` (truncated"
        " importance sampling). `drop_tokens`: the token gets weight 0 (IcePop, arXiv 2510.18855). `drop_responses`: a"
        " response's tokens get weight 0 if the geometric mean of their weights is beyond the limits; larger weights in"
        " other responses are cut.",
    )
    prompts: DataConfig = Field(description="Prompts to sample responses to.")
    on_overlong: OnOverlong = overlong_field()
    num_iterations: int = Field(ge=1, description="Iterations of sampling and learning.")
    rollout_batch_size: int = Field(
        ge=1, description="Responses per iteration, `samples_per_prompt` to each of its prompts."
    )
    samples_per_prompt: int = Field(default=1, ge=1, description="Responses sampled to each prompt.")
    oversample: float = Field(
        default=1.0,
        ge=1,
        description="How many times as many prompts are sampled and scored; the first whose responses' rewards differ"
        " are kept (DAPO's dynamic sampling, arXiv 2503.14476). Group baselines only; 1 = off.",
    )
    num_epochs: int = Field(default=1, ge=1, description="Passes over each iteration's responses.")
    minibatch: BatchConfig = Field(
        description="Responses per update; `micro_batch_size` also bounds the passes without gradients."
    )
    max_new_tokens: int = Field(ge=1, description="Length limit of a response, in tokens.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature of rollouts.")
    policy_optimizer: OptimizerConfig = Field(description="Optimizer of the policy.")
    value_optimizer: OptimizerConfig | None = Field(
        default=None, description='Optimizer of the value function, which only advantage "gae" has; it requires one.'
    )
    lora: LoRAConfig | None = lora_field()
    shared_body: bool = Field(
        default=False,
        description="Policy, reference, value function and reward model are adapters and heads on one frozen body, so"
        " PPO needs about as much memory as SFT. Needs `lora`, and a reward model trained with [reward] lora on the"
        " same initial model.",
    )
    kl_coef: float = Field(
        default=0.05, ge=0, description="Weight of the KL penalty, per nat; its first value if adaptive."
    )
    kl_in: Literal["reward", "loss"] = Field(
        default="reward",
        description="Where the KL penalty is. `reward`: -log(π/π_ref) at each token. `loss`: half the square of each"
        " response's log(π/π_ref), whose gradient is the KL's on samples of the policy itself (docs/algorithms.md).",
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
    advantage: Literal["gae", "leave_one_out", "group_mean", "none"] = Field(
        default="gae",
        description="What a response's reward is compared with. `gae`: a value function, token by token. Without one:"
        " `leave_one_out`: the mean reward of the other responses to the prompt (RLOO); `group_mean`: that of all of"
        " them (GRPO); `none`: nothing (REINFORCE).",
    )
    advantage_scale: Literal["group", "batch", "none"] = Field(
        default="batch",
        description="What advantages are divided by. `batch`: their standard deviation over the iteration's tokens,"
        " whose mean is subtracted too; `group`: that of the rewards of the prompt's responses; `none`: nothing.",
    )
    token_weight: Literal["per_token", "per_response", "constant"] = Field(
        default="per_token",
        description="How tokens weigh in the policy loss of a minibatch. `per_token`: 1 / its tokens; `per_response`:"
        " 1 / (its responses x the response's tokens); `constant`: 1 / (its responses x `max_new_tokens`).",
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount factor per token; `gae` only.")
    gae_lambda: float = Field(
        default=0.95, ge=0, le=1, description="λ of generalised advantage estimation (arXiv 1506.02438); `gae` only."
    )
    ratio: Literal["token", "response"] = Field(
        default="token",
        description="Whose probability ratio is clipped: each token's, or each response's, as the geometric mean of its"
        " tokens' (GSPO, arXiv 2507.18071).",
    )
    clip_range: float = Field(
        default=0.2,
        gt=0,
        description="The policy's probability ratio is clipped to 1 ± this (arXiv 1707.06347, eq. 7).",
    )
    clip_range_high: float = Field(
        default=0.0,
        ge=0,
        description="The ratio is clipped above 1 + this (DAPO, arXiv 2503.14476); 0 = the same as `clip_range`.",
    )
    value_clip_range: float = Field(
        default=0.2, gt=0, description="Values are clipped to within this of the values at sampling time; `gae` only."
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
    follow_every_iterations: int = Field(
        default=10,
        ge=0,
        description="Iterations between responses to the same few prompts in samples.jsonl, which show how the policy's"
        " answers change; the first and the last iteration always have them. 0 = none.",
    )
    keep_policies_every: int = Field(
        default=0, ge=0, description="Iterations between policies that are kept in policies/; 0 = none."
    )

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        exact_div(self.rollout_batch_size, self.minibatch.batch_size, "rollout_batch_size over minibatch.batch_size")
        if self.placement == "disaggregated":
            for name in ("num_generators", "num_scorers"):
                exact_div(self.sampled_batch_size, getattr(self, name), f"rollout_batch_size over {name}")
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
        if self.generator_python and self.generator == "heed":
            raise ValueError(
                f'generator_python {self.generator_python} with generator "heed", which runs under the Python of the'
                ' learner; generator "vllm" or no generator_python was expected'
            )
        if self.max_staleness >= self.num_iterations:
            raise ValueError(
                f"max_staleness {self.max_staleness} with num_iterations {self.num_iterations}: no rollout would be"
                " sampled by trained weights; less than num_iterations was expected"
            )
        return self

    @model_validator(mode="after")
    def _check_importance(self) -> Self:
        if self.importance_beyond != "cut" and not self.corrects_samples:
            raise ValueError(
                f'importance_beyond "{self.importance_beyond}" with max_staleness 0 and generator "heed", whose samples'
                ' need no correction; "cut", or one of the others, was expected'
            )
        if self.importance_beyond == "drop_tokens" and self.ratio == "response":
            raise ValueError(
                'importance_beyond "drop_tokens" with ratio "response": a response has one ratio and counts whole;'
                ' "drop_responses" was expected'
            )
        if self.importance_floor and self.importance_beyond == "cut":
            raise ValueError(
                f'importance_floor {self.importance_floor} with importance_beyond "cut", which has no lower limit;'
                ' importance_beyond "drop_tokens" or "drop_responses" was expected'
            )
        return self

    @model_validator(mode="after")
    def _check_reward(self) -> Self:
        given = [name for name in ("reward_from", "reward_function", "reward_url") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; one source of the reward was expected")
        if self.objective_weights and self.external_reward is not None:
            raise ValueError(
                f"objective_weights of {', '.join(self.objective_weights)} with {given[0]}, which gives one score; no"
                " weights were expected"
            )
        return self

    @model_validator(mode="after")
    def _check_ptx(self) -> Self:
        if (self.ptx_coef > 0) != (self.ptx_rows > 0):
            raise ValueError(f"ptx_coef {self.ptx_coef} with ptx_rows {self.ptx_rows}: both or neither must be 0")
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        optimizers = {"policy_optimizer": self.policy_optimizer, "value_optimizer": self.value_optimizer}
        check_lora(self.lora, {name: found for name, found in optimizers.items() if found is not None})
        if not self.shared_body:
            return self
        if self.lora is None:
            raise ValueError("shared_body without lora: the policy is an adapter; lora = {} was expected")
        if self.external_reward is not None:
            raise ValueError(
                "shared_body with a reward that is no model of Heed's; lora alone, or a reward model trained with"
                " [reward] lora, was expected"
            )
        if self.placement == "disaggregated":
            raise ValueError(
                'shared_body with placement "disaggregated", where roles are on ranks of their own; "colocated" was'
                " expected"
            )
        return self

    @model_validator(mode="after")
    def _check_advantage(self) -> Self:
        given = f'advantage "{self.advantage}"'
        exact_div(self.rollout_batch_size, self.samples_per_prompt, "rollout_batch_size over samples_per_prompt")
        if self.has_group_baseline and self.samples_per_prompt == 1:
            raise ValueError(
                f"{given} with samples_per_prompt 1: a response is compared with others to the same prompt; at least 2"
                " was expected"
            )
        if self.oversample > 1 and not self.has_group_baseline:
            raise ValueError(f"oversample {self.oversample} with {given}, which compares no groups; 1 was expected")
        if not (self.oversample * self.num_prompts).is_integer():
            raise ValueError(
                f"oversample {self.oversample} of {self.num_prompts} prompts per iteration is no whole number of"
                " prompts; a multiple of one prompt was expected"
            )
        if self.has_value_function and self.value_optimizer is None:
            raise ValueError(f"value_optimizer: missing; {given} trains a value function")
        needless = [name for name in GAE_ONLY if getattr(self, name) != type(self).model_fields[name].default]
        if needless and not self.has_value_function:
            raise ValueError(
                f'{" and ".join(needless)} with {given}, which has no value function; advantage "gae" or none of these'
                " keys was expected"
            )
        if self.advantage_scale == "group" and not self.has_group_baseline:
            raise ValueError(
                f'advantage_scale "group" with {given}, which compares no groups; advantage "group_mean" or'
                ' "leave_one_out" was expected'
            )
        if self.ratio == "response":
            self._check_response_ratio()
        if self.kl_in == "loss" and self.max_staleness:
            raise ValueError(
                f'kl_in "loss" with max_staleness {self.max_staleness}: its gradient is the KL\'s only on samples of'
                ' the policy itself; kl_in "reward", which importance weights correct, was expected'
            )
        return self

    def _check_response_ratio(self) -> None:
        if self.token_weight != "per_response":
            raise ValueError(
                f'ratio "response" with token_weight "{self.token_weight}": a response has one ratio and counts once;'
                ' token_weight "per_response" was expected'
            )
        if not self.has_group_baseline:
            raise ValueError(
                f'ratio "response" with advantage "{self.advantage}", which differs from token to token; "group_mean"'
                ' or "leave_one_out" was expected'
            )
        if self.max_staleness:
            raise ValueError(
                f'ratio "response" with max_staleness {self.max_staleness}: importance weights are per token; 0 was'
                " expected"
            )

    @property
    def num_prompts(self) -> int:
        """Number of prompts whose responses an iteration learns from."""
        return self.rollout_batch_size // self.samples_per_prompt

    @property
    def sampled_batch_size(self) -> int:
        """Responses sampled per iteration; `rollout_batch_size` of them are kept."""
        return round(self.oversample * self.rollout_batch_size)

    @property
    def corrects_samples(self) -> bool:
        """Whether importance weights correct samples: they come from an older policy or from another engine."""
        return bool(self.max_staleness) or self.generator != "heed"

    @property
    def samples_apart(self) -> bool:
        """Whether generators run in other processes than the learners."""
        return self.placement == "disaggregated" or self.generator != "heed"

    @property
    def has_value_function(self) -> bool:
        return self.advantage == "gae"

    @property
    def has_group_baseline(self) -> bool:
        """Whether a response's reward is compared with those of other responses to the same prompt."""
        return self.advantage in ("leave_one_out", "group_mean")

    @property
    def external_reward(self) -> ExternalReward | None:
        """The source of rewards if it is not a model: a Python function or an HTTP endpoint."""
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
