"""Settings of PPO, and of policy gradients without a value function (docs/algorithms.md).

A choice between kinds is a table with a key `kind`: `advantage = { kind = "group_mean", samples_per_prompt = 8 }`. Each
kind is a class with the keys that it needs. Those of the algorithm are in `ppo.algorithm`, those of the reward in
`reward.external`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, FiniteFloat, Tag, field_validator, model_validator

from lm.config import exact_div
from lm.lora import LoRAConfig
from ppo.algorithm import GAE, Advantage, CutImportance, Importance, KLConfig, PolicyLoss, TeacherConfig, TokenLoss
from ppo.environments.kinds import AnyEnvironment
from ppo.placement import Colocated, Continuous, HeedSampler, Placement, Sampler
from ppo.prompts import Prompts, PromptSource, unmet_needs
from reward.external import ExternalReward, ModelReward, NoReward, RemoteReward, RewardFunction
from reward.judge import JudgeReward
from reward.sources import Reward, RewardSum, with_scored_by
from reward.verifiers.verifier import Verifier
from stages.world import OpenLabels
from training.config import BatchConfig, Config, OptimizerConfig, by_kind, check_lora, lora_field
from training.data import NO_FIELDS, DataConfig, OnOverlong, RowFields, overlong_field


class PPOLoRAConfig(LoRAConfig):
    """Adapters of the policy and the value function."""

    model_config = ConfigDict(title="LoRA of PPO")

    shared_body: bool = Field(
        default=False,
        description="Policy, reference, value function and reward model are adapters and heads on one frozen body, so"
        " PPO needs about as much memory as SFT. Needs a reward model trained with [reward] lora on the same initial"
        " model.",
    )
    sends: Literal["merged", "adapter"] = Field(
        default="merged",
        description="What generators receive after each iteration: merged weights, or the adapter alone. Then each"
        " generator reads the initial policy again and merges the adapter into it, which gives the same weights."
        " This saves most of the traffic where generators are on other machines.",
    )


class PTXConfig(Config):
    """Pretraining rows that are mixed into the updates (PPO-ptx, arXiv 2203.02155)."""

    model_config = ConfigDict(title="PTX")

    coef: float = Field(gt=0, description="Weight of the pretraining loss, which is a mean per token.")
    rows: int = Field(ge=1, description="Pretraining rows per minibatch.")


class EMAConfig(Config):
    """The moving average of the policy's trained weights. With `lora` these are A and B. Each is averaged, and the two
    averages are merged, which does not give the average of the merged models (docs/lora.md).
    """

    model_config = ConfigDict(title="EMA")

    decay: float = Field(
        default=0.0, ge=0, lt=1, description="Decay per iteration, of the weights in `model_ema`; 0 = no averaging."
    )


class PeopleSource(Config):
    """People who compare the policy's responses with the initial policy's on the label page (docs/alarm.md)."""

    model_config = ConfigDict(title="People")
    source_key: ClassVar[str] = "store"
    row_fields: ClassVar[RowFields] = NO_FIELDS  # labelers see prompts and responses

    kind: Literal["people"] = Field(default="people", description="The kind of this table.")
    store: str = Field(pattern=r"^.+$", description="The label store: a file path or a database URL. It must exist.")
    batch: str = Field(default="alarm", pattern=r"^.+$", description="The batch that the comparisons go to.")

    @field_validator("store")
    @classmethod
    def _has_no_password(cls, store: str) -> str:
        if "://" in store and urlsplit(store).password:
            raise ValueError(
                "a URL without a password was expected, since it is written into the run's folder (PostgreSQL reads the"
                " password from PGPASSWORD or ~/.pgpass)"
            )
        return store

    def check(self, open_labels: OpenLabels) -> None:
        """Check that the store can be opened and that its batch takes comparisons. Raises: ValueError."""
        from preferences.database import require_store  # needs SQLAlchemy, which a bare GPU machine lacks

        require_store(self.store, f"; `heed label serve --store {self.store} --new` creates one")
        with open_labels(self.store) as store:
            if self.batch in store.single_response_batches():
                raise ValueError(
                    f"label store {self.store!r}: batch {self.batch!r} has single responses, but people compare two;"
                    " another batch was expected"
                )

    @property
    def short_name(self) -> str:
        """The source as reports call it."""
        return f"people ({self.batch})"


# The kinds of rewards that score texts, and people, who only compare.
SpotChecker = Annotated[
    Annotated[Verifier, Tag("verifier")]
    | Annotated[RewardFunction, Tag("function")]
    | Annotated[RemoteReward, Tag("url")]
    | Annotated[JudgeReward, Tag("judge")]
    | Annotated[PeopleSource, Tag("people")],
    by_kind("verifier", "function", "url", "judge", "people"),
]


class AlarmConfig(Config):
    """Spot checks of the policy's responses, and what happens if they show that its gain in score is not real
    (docs/alarm.md).
    """

    source: SpotChecker = Field(
        description="Who checks: a table of a kind that scores texts, as for `reward`, but of another source;"
        " or of kind `people`, who compare responses on the label page while PPO continues."
    )
    lowest: FiniteFloat = Field(default=0.0, description="The lowest score that `source` can give.")
    highest: FiniteFloat = Field(default=1.0, description="The highest score that `source` can give.")
    initial_checks: int = Field(
        default=256,
        ge=16,
        description="Responses of the initial policy to check, each to another prompt. With people: the most that they"
        " compare in the whole run.",
    )
    checks_per_iteration: int = Field(
        default=16, ge=1, description="Responses per iteration to check, each to another prompt."
    )
    share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="The share of what the gain in score promises that must be real; 0 = the policy must only not"
        " become worse than the initial one.",
    )
    false_alarms: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="Upper bound on the probability that a run whose gain is real has an alarm.",
    )
    action: Literal["warn", "stop", "roll_back"] = Field(
        default="stop",
        description="What an alarm does. `warn`: it is logged and reported. `stop`: training ends with the policy of"
        " that iteration. `roll_back`: training ends, and the result is the last policy of `keep_policies_every` from"
        " before the fall, or the initial one.",
    )

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if not self.lowest < self.highest:
            raise ValueError(f"lowest {self.lowest:g} and highest {self.highest:g}; a lower `lowest` was expected")
        # Not by `model_fields_set`: a run writes its settings down with all defaults, and reads them again.
        fields = type(self).model_fields
        given = [name for name in ("share", "lowest", "highest") if getattr(self, name) != fields[name].default]
        if isinstance(self.source, PeopleSource) and given:
            raise ValueError(f"{given[0]} is set, but people give no scores; a table without it was expected")
        return self


class PPOConfig(Config):
    """Each iteration samples `rollout_batch_size` responses and learns from them in minibatches (arXiv 1707.06347).

    The reward comes from the reward stage, another reward model, a function, an endpoint or a verifier. Scores are in
    standard deviations of the initial policy's scores, and a verifier's are 0 and 1; KL is in nats per response.
    """

    init_from: str = Field(
        default="",
        description="Model directory, .gguf file or hub id of the initial policy; empty = the SFT stage's model.",
    )
    prompts: Prompts = Field(
        description="Prompts to sample responses to: one table, or a list of tables that are mixed by `weight`"
        " (docs/rewards.md)."
    )
    on_overlong: OnOverlong = overlong_field()
    chat_template: str = Field(
        default="",
        description="Chat template: `chat`, `plain`, a Jinja template, or `non-thinking`, the model's own with thoughts"
        " turned off; empty = the model's own.",
    )
    num_iterations: int = Field(ge=1, description="Iterations of sampling and learning.")
    rollout_batch_size: int = Field(
        ge=1, description="Responses per iteration; each of its prompts gets `advantage.samples_per_prompt` of them."
    )
    max_new_tokens: int = Field(
        ge=1, description="Length limit of a response, in tokens; in a conversation, of all turns and replies together."
    )
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature of rollouts.")
    router_replay: bool | None = Field(
        default=None,
        description="Whether policy and reference use the experts that the sampler recorded for each token, of prompts"
        " too, and weigh them by their own routers (docs/samplers.md); by default in every mixture of experts.",
    )
    sampler: Sampler = Field(default=HeedSampler(), description="The engine that samples responses.")
    placement: Placement = Field(default=Colocated(), description="Which ranks sample, score and learn.")
    memory: Literal["fast", "balanced", "small"] = Field(
        default="fast",
        description="What leaves the device while it is not needed; results do not depend on it. `fast`: nothing; CPU"
        " ranks without ZeRO also keep up to 4 GiB of activations of the log-prob pass for the first update."
        " `balanced`: the frozen models, which are reference, reward model and teachers (sharded over the scorers'"
        " CPU memory, gathered to score), the weights of a colocated generator, and the moving average. `small`: as"
        " `balanced`, but the frozen models are gathered layer by layer, and the optimizer states of colocated learners"
        " leave too.",
    )
    environment: AnyEnvironment | None = Field(
        default=None,
        description="What the policy converses with, turn by turn (docs/environments.md); none by default. Its rewards"
        " are added to the score that `reward` gives the last turn, and neither is standardized.",
    )
    reward: Reward = Field(default=ModelReward(), description="What scores responses.")
    score_coef: float = Field(
        default=1.0,
        ge=0,
        description="Weight of the score in the reward; 0 = the score is only logged, and the"
        " policy learns from `teachers` alone.",
    )
    teachers: tuple[TeacherConfig, ...] = Field(
        default=(),
        description="Models to learn from by on-policy distillation (docs/distillation.md); none by default.",
    )
    missing_eos_penalty: float = Field(
        default=0.0,
        ge=0,
        description="Penalty on the score of a response without an end token, in the score's unit; 0 = none.",
    )
    max_failed_share: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="The run stops if more than this fraction of an iteration's responses get no score.",
    )
    kl: KLConfig = Field(default=KLConfig(), description="The penalty on the KL from the initial policy.")
    advantage: Advantage = Field(description="How advantages are estimated: what a response's reward is compared with.")
    importance: Importance = Field(
        default=CutImportance(),
        description="How importance weights π / π_behave are limited if older weights or another engine sampled: with"
        " placement `asynchronous` or sampler `vllm`.",
    )
    loss: PolicyLoss = Field(
        default=TokenLoss(), description="The clipped loss: over probability ratios of tokens, or of whole responses."
    )
    minibatch: BatchConfig = Field(
        description="Responses per update; `micro_batch_size` also bounds the passes without gradients."
    )
    num_epochs: int = Field(default=1, ge=1, description="Passes over each iteration's responses.")
    policy_optimizer: OptimizerConfig = Field(description="Optimizer of the policy.")
    lora: PPOLoRAConfig | None = lora_field()
    ptx: PTXConfig | None = Field(default=None, description="Pretraining rows mixed into the updates; none by default.")
    ema: EMAConfig = Field(default=EMAConfig(), description="The moving average of the policy's weights.")
    alarm: AlarmConfig | None = Field(
        default=None, description="Spot checks that show whether the gain in score is real; none by default."
    )
    save_every_iterations: int = Field(
        default=10, ge=1, description="Iterations between checkpoints; the last iteration always writes one."
    )
    keep_policies_every: int = Field(
        default=0, ge=0, description="Iterations between copies of the policy that are kept in policies/; 0 = none."
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        exact_div(self.rollout_batch_size, self.minibatch.batch_size, "rollout_batch_size over minibatch.batch_size")
        samples, oversample = self.advantage.samples_per_prompt, self.advantage.oversample
        exact_div(self.rollout_batch_size, samples, "rollout_batch_size over advantage.samples_per_prompt")
        if not (oversample * self.num_prompts).is_integer():
            raise ValueError(
                f"advantage.oversample {oversample} x {self.num_prompts} prompts per iteration is"
                f" {oversample * self.num_prompts:g}; a whole number of prompts was expected"
            )
        if not self.placement.roles_share_ranks:
            num_together = self.sampler.tensor_parallel_size
            over = "placement.num_generators over sampler.tensor_parallel_size"
            num_teams = exact_div(self.placement.num_generators, num_together, over)
            generators = "placement.num_generators" if num_together == 1 else over
            times = "" if oversample == 1 else " x advantage.oversample"
            for name, parts in ((generators, num_teams), ("placement.num_scorers", self.placement.num_scorers)):
                exact_div(self.sampled_batch_size, parts, f"rollout_batch_size{times} over {name}")
        if isinstance(self.placement, Continuous):
            self._check_rounds(self.placement)
        if self.placement.max_staleness >= self.num_iterations:
            raise ValueError(
                f"placement.max_staleness {self.placement.max_staleness} with num_iterations {self.num_iterations}: no"
                " rollout would be sampled by trained weights; less than num_iterations was expected"
            )
        return self

    def _check_rounds(self, placement: Continuous) -> None:
        num_teams = placement.num_generators // self.sampler.tensor_parallel_size
        if self.rows_in_progress < num_teams:
            raise ValueError(
                f"placement.num_rows {self.rows_in_progress} with {num_teams} generators: some would have no row;"
                f" at least {num_teams} was expected"
            )
        if 0 < placement.max_age <= placement.max_staleness:
            raise ValueError(
                f"placement.max_age {placement.max_age} with placement.max_staleness {placement.max_staleness}: every"
                " response is that old; more than max_staleness was expected, or 0 for no limit"
            )
        if self.sampler.max_rows:
            raise ValueError(
                f"sampler.max_rows {self.sampler.max_rows} with placement.kind {placement.kind!r}, which samples"
                " placement.num_rows responses at once; 0 was expected"
            )

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        optimizers = {"policy_optimizer": self.policy_optimizer}
        if isinstance(self.advantage, GAE):
            optimizers["advantage.value_optimizer"] = self.advantage.value_optimizer
        check_lora(self.lora, optimizers)
        return self

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        """Check that each table has what it needs of the others. The rules read properties of kinds, and name none."""
        problem = next(self._unmet_needs(), "")
        if problem:
            raise ValueError(problem)
        return self

    def _unmet_needs(self) -> Iterator[str]:
        if not self.prompt_sources:
            yield "prompts is an empty list; at least one table was expected"
        yield from unmet_needs(self.named_sources, self.reward_sources)
        yield from self._unmet_needs_of_loss()
        yield from self._unmet_needs_of_body()
        yield from self._unmet_needs_of_teachers()
        yield from self._unmet_needs_of_alarm()
        if self.router_replay and self.sampler.has_own_process:
            yield f"router_replay is true, but sampler.kind {self.sampler.kind!r} records no routes; false was expected"
        if self.environment is not None and self.sampler.tensor_parallel_size > 1:
            yield (
                f"sampler.tensor_parallel_size {self.sampler.tensor_parallel_size} with environment.kind"
                f" {self.environment.kind!r}: the ranks of a team would each converse with an environment of their own;"
                " 1 was expected"
            )
        if self.placement.samples_rounds and self.sampler.has_own_process:
            yield (
                f"placement.kind {self.placement.kind!r} continues responses with new weights, which sampler.kind"
                f' {self.sampler.kind!r} cannot; "heed" was expected'
            )
        if self.local_judges and self.memory != "fast":
            yield (
                f"memory {self.memory!r} moves frozen models away from the device, but the judge"
                f' {self.local_judges[0].model} stays on it; "fast" was expected (or a judge that an endpoint serves)'
            )

    def _unmet_needs_of_loss(self) -> Iterator[str]:
        if self.placement.max_staleness and self.kl.kind == "loss":
            yield (
                'kl.kind "loss" has the KL\'s gradient only on samples of the current weights, but with'
                f" placement.max_staleness {self.placement.max_staleness} older weights sample;"
                ' "reward" was expected, which importance weights correct'
            )
        if self.loss.is_per_response and self.placement.max_staleness:
            yield (
                f"loss.kind {self.loss.kind!r} clips a ratio per response, but with placement.max_staleness"
                f' {self.placement.max_staleness} importance weights are per token; "token" was expected'
            )
        if self.loss.is_per_response and not self.advantage.is_per_response:
            yield (
                f"loss.kind {self.loss.kind!r} has one ratio per response, but with advantage.kind"
                f" {self.advantage.kind!r} advantages differ from token to token; a kind that compares the responses"
                " to a prompt was expected"
            )
        if self.loss.is_per_response and self.importance.drops == "tokens":
            yield (
                f"loss.kind {self.loss.kind!r} needs whole responses, but importance.kind {self.importance.kind!r}"
                ' drops some of their tokens; "drop_responses" was expected'
            )
        if self.importance.drops and not self.corrects_samples:
            yield (
                f"importance.kind {self.importance.kind!r} drops {self.importance.drops}, but here the current policy"
                ' samples, which needs no correction; "cut" was expected'
            )

    def _unmet_needs_of_body(self) -> Iterator[str]:
        if self.shared_body and self.external_reward is not None:
            yield (
                "lora.shared_body needs a reward model trained by Heed with [reward] lora; without one, leave"
                " shared_body out"
            )
        if self.shared_body and not self.placement.roles_share_ranks:
            yield (
                f"lora.shared_body needs all roles on the same ranks, but placement.kind {self.placement.kind!r}"
                ' separates them; "colocated" was expected'
            )

    def _unmet_needs_of_alarm(self) -> Iterator[str]:
        if self.alarm is None:
            return
        if isinstance(self.reward, NoReward):
            yield 'alarm asks whether the gain in score is real, but reward.kind "none" has none; another was expected'
        if self.alarm.source == self.reward:
            yield "alarm.source is the reward that the policy is trained on; another source was expected"
        if self.advantage.oversample > 1:
            yield (
                f"alarm compares an iteration's responses with the initial policy's, but advantage.oversample"
                f" {self.advantage.oversample:g} keeps only prompts whose responses' scores differ; 1 was expected"
            )
        if isinstance(self.alarm.source, PeopleSource) and self.environment is not None:
            yield "alarm.source: people compare single responses; a job without ppo.environment was expected"
        if self.alarm.action == "roll_back" and not self.keep_policies_every:
            yield 'alarm.action "roll_back" needs policies to return to; keep_policies_every above 0 was expected'

    def _unmet_needs_of_teachers(self) -> Iterator[str]:
        names = self.teacher_names
        if len(set(names)) < len(names):
            yield f"teachers are called {', '.join(names)}; a different `name` for each was expected"
        if not self.teachers and not self.has_score:
            others = (
                "`teachers`, or another kind,"
                if self.environment is None
                else "another kind, since tools do not score,"
            )
            yield f'reward.kind "none" leaves nothing to learn from; {others} was expected'
        if not self.teachers and not self.score_coef:
            yield "score_coef 0 leaves nothing to learn from; `teachers`, or more than 0, was expected"
        if self.score_coef not in (0, 1) and self.advantage.scale == "group":
            yield (
                f'score_coef {self.score_coef} with advantage.scale "group", which divides scores by their spread; 0 or'
                " 1 was expected (weights of teachers and kl.coef set the proportions)"
            )
        if self.advantage.oversample > 1 and not (self.has_score and self.score_coef):
            yield (
                f"advantage.oversample {self.advantage.oversample} keeps prompts whose responses' scores differ, but"
                " the score has no weight; 1 was expected"
            )
        if self.teachers and self.shared_body:
            yield "lora.shared_body holds one body, but teachers have bodies of their own; no `teachers` were expected"
        if self.loss.is_per_response and any(teacher.kind == "token" for teacher in self.teachers):
            yield (
                f'loss.kind {self.loss.kind!r} has one ratio per response, but a teacher of kind "token" gives each'
                ' token its own advantage; kind "reward" was expected'
            )

    @property
    def prompt_sources(self) -> tuple[DataConfig, ...]:
        """The sources of the prompts."""
        return (self.prompts,) if isinstance(self.prompts, DataConfig) else self.prompts

    @property
    def named_sources(self) -> tuple[PromptSource, ...]:
        """The sources of prompts if `prompts` is a list; () if it is a single table, which needs no name."""
        return () if isinstance(self.prompts, DataConfig) else self.prompts

    @property
    def samples_world(self) -> bool:
        """Whether all prompts are those of the job's world."""
        return all(source.source.startswith("world:") for source in self.prompt_sources)

    @property
    def prompt_weights(self) -> tuple[float, ...]:
        """The weights of the sources; () if they have none."""
        weights = tuple(source.weight for source in self.named_sources)
        return weights if any(weights) else ()

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """What metrics call the teachers."""
        return tuple(teacher.name or str(number) for number, teacher in enumerate(self.teachers, 1))

    @property
    def num_prompts(self) -> int:
        """Number of prompts whose responses an iteration learns from."""
        return self.rollout_batch_size // self.advantage.samples_per_prompt

    @property
    def sampled_batch_size(self) -> int:
        """Responses sampled per iteration; `rollout_batch_size` of them are kept."""
        return round(self.advantage.oversample * self.rollout_batch_size)

    @property
    def rows_in_progress(self) -> int:
        """Responses that placement `continuous` has in progress at once."""
        num_rows = self.placement.num_rows if isinstance(self.placement, Continuous) else 0
        return num_rows or self.sampled_batch_size

    @property
    def answer_rounds(self) -> int:
        """Rounds after which placement `continuous` takes an environment's answer; 0 = there is none."""
        rounds = self.placement.answer_rounds if isinstance(self.placement, Continuous) else 0
        return rounds if self.environment is not None else 0

    @property
    def lengthens_prompts(self) -> bool:
        """Whether episodes may make prompts longer while others are sampled, so that each has room for the longest."""
        return self.environment is not None and self.environment.begins and self.answer_rounds > 0

    @property
    def corrects_samples(self) -> bool:
        """Whether importance weights correct samples: they come from an older policy or from another engine."""
        return bool(self.placement.max_staleness) or self.sampler.has_own_process

    @property
    def samples_apart(self) -> bool:
        """Whether generators run in other processes than the learners."""
        return not self.placement.roles_share_ranks or self.sampler.has_own_process

    @property
    def shared_body(self) -> bool:
        """Whether all models are adapters and heads on one frozen body."""
        return self.lora is not None and self.lora.shared_body

    @property
    def value_optimizer(self) -> OptimizerConfig | None:
        """The optimizer of the value function, if the advantages are estimated with one."""
        return self.advantage.value_optimizer if isinstance(self.advantage, GAE) else None

    @property
    def ptx_rows(self) -> int:
        """Pretraining rows per minibatch; 0 = none."""
        return 0 if self.ptx is None else self.ptx.rows

    @property
    def has_score(self) -> bool:
        """Whether anything scores responses: a reward, or the environment."""
        return not isinstance(self.reward, NoReward) or (self.environment is not None and self.environment.scores)

    @property
    def external_reward(self) -> ExternalReward | None:
        """The source of rewards if it is not a model."""
        return self.reward if isinstance(self.reward, ExternalReward) else None

    @property
    def reward_sources(self) -> tuple[str, ...]:
        """The names of the rewards in a reward of kind "sum"; () for other kinds."""
        return tuple(self.reward.sources) if isinstance(self.reward, RewardSum) else ()

    @property
    def local_judges(self) -> tuple[JudgeReward, ...]:
        """The judges that grade on the scorers' devices."""
        sources = self.reward.sources.values() if isinstance(self.reward, RewardSum) else (self.reward,)
        return tuple(one for one in sources if isinstance(one, JudgeReward) and not one.is_remote)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools that the environment offers."""
        return () if self.environment is None else self.environment.tools

    @property
    def row_fields(self) -> RowFields:
        """The fields of their rows that prompts keep, for the reward, the environment and the spot checks."""
        kept = NO_FIELDS if self.external_reward is None else self.external_reward.row_fields
        if self.environment is not None:
            kept = kept.and_those(self.environment.row_fields)
        return kept if self.alarm is None else kept.and_those(self.alarm.source.row_fields)

    def row_fields_of(self, source: DataConfig) -> RowFields:
        """Returns the fields to keep from the rows of `source`, which is one of `prompt_sources`."""
        return with_scored_by(self.row_fields, source.scored_by if isinstance(source, PromptSource) else ())

    @property
    def num_minibatches(self) -> int:
        return self.rollout_batch_size // self.minibatch.batch_size

    @property
    def updates_per_iteration(self) -> int:
        return self.num_epochs * self.num_minibatches
