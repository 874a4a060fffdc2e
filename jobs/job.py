"""A job: the sections of its stages, checked as a whole before anything runs."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from cluster.config import ClusterConfig
from collect.stage import CollectConfig
from compare.stage import CompareConfig
from lm.config import ModelConfig
from playground.reviews import ReviewsConfig, ReviewsWorld
from playground.world import PlaygroundConfig, PlaygroundWorld
from ppo.config import PPOConfig
from preferences.records import OVERALL
from pretrain.stage import PretrainConfig
from reward.scoring import weights_by_label
from reward.stage import RewardConfig
from sft.stage import SFTConfig
from stages.world import World
from training.config import Config, EngineConfig, OptimizerConfig

STAGES = ("pretrain", "sft", "collect", "reward", "ppo", "compare")
PARENTS = {
    "pretrain": ("tokenizer",),
    "sft": ("pretrain",),
    "collect": ("sft",),
    "reward": ("sft",),
    "ppo": ("sft", "reward"),
    "compare": ("sft", "reward", "ppo"),
}
# The fields of a stage's section that name a model, or what stands for one, in place of a parent's; one is used.
SUBSTITUTES = {
    ("sft", "pretrain"): ("init_from",),
    ("reward", "sft"): ("init_from",),
    ("ppo", "sft"): ("init_from",),
    ("ppo", "reward"): ("reward_from", "reward_function", "reward_url"),
}


class PlaygroundSection(PlaygroundConfig):
    """[world] kind = "playground"."""

    kind: Literal["playground"]


class ReviewsSection(ReviewsConfig):
    """[world] kind = "reviews"."""

    kind: Literal["reviews"]


class JobConfig(Config):
    """A job: the sections of the stages that it has, and what they share. What spans sections is checked here.

    A source "world:NAME" is the file NAME.jsonl that the world writes; "collect:rankings" is what labelers gave.
    `model` is the policy's shape; where the first stage has `init_from`, it is that model's.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    note: str = ""  # a caution that the report shows
    seed: int = Field(ge=0)
    workers: int = Field(ge=1)
    min_workers: int = Field(default=0, ge=0)  # with how few it may go on after a loss; 0 = no fewer than `workers`
    engine: EngineConfig
    cluster: ClusterConfig = ClusterConfig()
    world: Annotated[PlaygroundSection | ReviewsSection, Field(discriminator="kind")] | None = None
    model: ModelConfig | None = None
    pretrain: PretrainConfig | None = None
    sft: SFTConfig | None = None
    collect: CollectConfig | None = None
    reward: RewardConfig | None = None
    ppo: PPOConfig | None = None
    compare: CompareConfig | None = None

    @field_validator("name")
    @classmethod
    def _no_hidden_name(cls, name: str) -> str:
        if ".." in name:
            raise ValueError("a folder name without '..' was expected")
        return name

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.stages:
            raise ValueError(f"the job has no stage; a section of {', '.join(STAGES)} was expected")
        for stage in self.stages:
            self._check_parents(stage)
        self._check_world()
        self._check_kind()
        self._check_room()
        self._check_batches()
        self._check_optimizers()
        self._check_objectives()
        return self

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that this job has, in order."""
        return tuple(stage for stage in STAGES if getattr(self, stage) is not None)

    def parents(self, stage: str) -> tuple[str, ...]:
        """The stages whose outputs it reads, in order; the tokenizer is made before all."""
        section = getattr(self, stage)
        found = {parent for parent in PARENTS[stage] if not self.substitute(stage, parent)}
        if stage == "reward" and section.rankings.source == "collect:rankings":
            found.add("collect")
        if (stage == "ppo" and section.ptx_rows) or (stage == "compare" and self.pretrain is not None):
            found.add("pretrain")
        return tuple(name for name in ("tokenizer", *STAGES) if name in found)

    def substitute(self, stage: str, parent: str) -> str:
        """The model that a stage's section names in place of a parent's; "" where it names none."""
        field = self._given(stage, parent)
        return getattr(getattr(self, stage), field) if field else ""

    def _given(self, stage: str, parent: str) -> str:
        """The field that names it; "" where none does."""
        section = getattr(self, stage)
        return next((field for field in SUBSTITUTES.get((stage, parent), ()) if getattr(section, field)), "")

    @property
    def reward_stage_scores_policy(self) -> bool:
        """Whether the rankings that the reward stage scores are samples of the policy that PPO starts from."""
        judged_here = "reward" in self.parents("ppo") and "collect" in self.parents("reward")
        return judged_here and "sft" in self.parents("ppo")

    def _check_parents(self, stage: str) -> None:
        """A stage starts from one place: the stage before it, or a model named in its section."""
        for parent in self.parents(stage):
            if parent not in ("tokenizer", *self.stages):
                fields = [f"{stage}.{field}" for field in SUBSTITUTES.get((stage, parent), ())]
                raise ValueError(f"{stage} needs {parent}: {' or '.join([f'[{parent}]', *fields])} was expected")
        for user, parent in SUBSTITUTES:
            # A reward model may well have another body than the policy; for the others it would be a slip.
            field = self._given(stage, parent)
            if stage == user != "reward" and field and parent in self.stages:
                raise ValueError(f"{stage}.{field} is given and so is [{parent}]; {stage} starts from one of them")

    def _check_world(self) -> None:
        if self.world is not None:
            return
        sections = {stage: getattr(self, stage) for stage in self.stages}
        needing: list[str] = [stage for stage in ("collect", "compare") if stage in sections]
        needing += [stage for stage, section in sections.items() if '"world:' in section.model_dump_json()]
        if needing:
            raise ValueError(f"world: missing; {needing[0]} needs it")

    def _check_kind(self) -> None:
        """Which stages a model of each kind goes through."""
        if self.model is None:
            if self.pretrain is not None:
                raise ValueError("model: missing; pretraining needs a shape, or pretrain.init_from")
            return
        allowed = {"encoder": ("pretrain",), "encoder-decoder": ("pretrain", "sft"), "decoder": STAGES}[self.model.kind]
        for stage in self.stages:
            apart = stage == "reward" and self.reward is not None and self.reward.init_from
            if stage not in allowed and not apart:
                raise ValueError(f"model.kind is {self.model.kind!r}, which has no stage {stage}")

    def _check_room(self) -> None:
        if self.model is None:
            return
        context, needed = self.model.max_position_embeddings, dict[str, int]()
        for stage in ("pretrain", "sft"):
            if stage in self.stages:
                needed[f"{stage}.seq_len"] = getattr(self, stage).seq_len
        for stage in ("collect", "ppo", "compare"):
            if stage in self.stages:
                needed[f"{stage}.max_new_tokens"] = getattr(self, stage).max_new_tokens + 1
        for field, tokens in needed.items():
            if tokens > context:
                raise ValueError(f"{field} does not fit model.max_position_embeddings = {context}")

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Numbers of workers that the job can go on with, the most first: those that divide its batches."""
        fewer = range(self.workers - 1, (self.min_workers or self.workers) - 1, -1)
        return (self.workers, *(size for size in fewer if not self._batch_problem(size)))

    @property
    def fewest_ranks(self) -> int:
        """How many processes a cluster must have room for, those beside the workers included."""
        return self.world_sizes[-1] + self.ranks_beside

    @property
    def num_ranks(self) -> int:
        """All processes of the job, those beside the workers included."""
        return self.workers + self.ranks_beside

    @property
    def ranks_beside(self) -> int:
        """PPO's generators and scorers, where they are no workers."""
        if self.ppo is None or self.ppo.placement == "colocated":
            return 0
        return self.ppo.num_generators + self.ppo.num_scorers

    def _check_batches(self) -> None:
        problem = self._batch_problem(self.workers)
        if problem:
            raise ValueError(problem)
        if self.min_workers > self.workers:
            raise ValueError(f"min_workers is {self.min_workers}; at most workers = {self.workers} was expected")

    def _batch_problem(self, num_workers: int) -> str:
        """Why the batches do not divide among so many workers; "" where they do."""
        for stage in self.stages:
            section = getattr(self, stage)
            for field in ("batch", "minibatch"):
                try:
                    if hasattr(section, field):
                        getattr(section, field).num_micro_batches(num_workers)
                except ValueError as error:
                    return f"{stage}.{field} with workers = {num_workers}: {error}"
        for field in ("rollout_batch_size", "ptx_rows"):
            rows = getattr(self.ppo, field, 0)
            if rows % num_workers:
                return f"ppo.{field} is {rows}; a multiple of workers = {num_workers} was expected"
        return ""

    def _check_optimizers(self) -> None:
        for stage in self.stages:
            section = getattr(self, stage)
            for field in ("optimizer", "policy_optimizer", "value_optimizer"):
                if not hasattr(section, field):
                    continue
                optimizer = getattr(section, field)
                try:
                    optimizer.check_sharding(self.engine)
                except ValueError as error:
                    raise ValueError(f"{stage}.{field}: {error}") from None
                self._check_trained_layers(f"{stage}.{field}", optimizer)

    def _check_trained_layers(self, name: str, optimizer: OptimizerConfig) -> None:
        if self.model is None or (name.startswith("reward.") and self.reward is not None and self.reward.init_from):
            return  # another model's; the engine checks it
        num_layers = self.model.num_hidden_layers + self.model.num_encoder_layers
        if (optimizer.trained_layers or 0) > num_layers:
            raise ValueError(f"{name}.trained_layers is {optimizer.trained_layers}; the model has {num_layers}")

    def _check_objectives(self) -> None:
        """The weights of PPO's reward are of what the reward model learns. Those of a model from elsewhere are seen in
        its directory, before anything runs.
        """
        if self.reward is None:
            return
        if self.reward.rankings.source == "collect:rankings" and not set(self.reward.objectives) <= {OVERALL}:
            raise ValueError(
                f"reward.objectives is {list(self.reward.objectives)}, and the labelers of [collect] judge by"
                f" {OVERALL!r} alone; rankings of those objectives were expected"
            )
        if self.ppo is not None and "reward" in self.parents("ppo"):
            weights_by_label("[reward]", self.reward.labels, self.ppo.objective_weights)

    def open_world(self) -> World | None:
        """The world that the job names, if it does. Errors: ValueError for files that are missing or malformed."""
        if self.world is None:
            return None
        if isinstance(self.world, PlaygroundSection):
            return PlaygroundWorld(self.world)
        return ReviewsWorld(self.world)
