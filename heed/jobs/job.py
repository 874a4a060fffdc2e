"""A job: the sections of its stages, checked as a whole before anything runs."""

import math
import re
import sys
from functools import cached_property
from types import ModuleType
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator

from cluster.config import ClusterConfig
from evaluation.compare.judges import without_password
from files.importing import load_function
from heed.jobs.registry import BUILT_IN, WORLD, AnyStage, Registry, kind_in_words, section_of_round, with_rounds
from heed.loop.config import LoopConfig
from heed.worlds.world import PlaygroundConfig, PlaygroundWorld
from lm.config import ModelConfig
from lm.model import check_compiles
from lm.sequence_parallel import check_sequence_split
from preferences.records import MAX_RESPONSES
from preferences.task_selection import MAX_SETS
from stages.contract import POLICIES, Parent, Stage
from stages.run import sources_in
from stages.world import World
from training.config import BatchConfig, Config, EngineConfig, LayersConfig, OptimizerConfig, tables_in, value_at

AnyConfig = TypeVar("AnyConfig", bound=Config)


class PlaygroundSection(PlaygroundConfig):
    """A world of simple English with six kinds of instruction and scripted labelers."""

    kind: Literal["playground"] = Field(description="Selects this world.")


class _WorldSection(BaseModel):
    """The section of a world that a job names by its place."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = Field(description='The class, as "FILE.py:NAME" or "MODULE:NAME".')


def world_at(place: str) -> type[World]:
    """Returns the world "FILE.py:NAME" or "MODULE:NAME": a class that is made from its `config_type`.

    Raises: ValueError if there is no such class, or if it lacks a part of `stages.world.World`.
    """
    world = load_function(place, "world")
    if not isinstance(world, type) or not issubclass(getattr(world, "config_type", object), BaseModel):
        raise ValueError(
            f"{place} has no `config_type`; a class with the pydantic model that it is made from was expected"
        )
    missing = [name for name in vars(World) if not name.startswith("_") and not hasattr(world, name)]
    if missing:
        raise ValueError(f"{place} has no `{missing[0]}`, which stages.world.World lists")
    return world


class JobConfig(Config):
    """A job: what its stages share; `job_type` adds a section per stage. Checks that span sections are made here.

    A source "world:NAME" is the file NAME.jsonl that the world writes; "STAGE:NAME" is a file that a stage offers, such
    as "collect:rankings". `model` is the policy's shape; where the first stage has `init_from`, it is that model's.
    """

    known_stages: ClassVar[Registry] = Registry(())
    world_type: ClassVar[type[World]] = PlaygroundWorld

    name: str = Field(description="Name of the job, and of its folder below the runs folder.")
    note: str = Field(default="", description="A caution to show in the report.")
    custom_stages: tuple[str, ...] = Field(
        default=(),
        description='Stages of your own, as "FILE.py:NAME" or "MODULE:NAME" (CONTRIBUTING.md, "Adding a stage").',
    )
    rounds: int = Field(
        default=1,
        ge=1,
        description="Rounds of sampling and training; each starts from the policy of the last (docs/jobs.md). A job"
        " with [loop] has `loop.rounds` of them.",
    )
    loop: LoopConfig | None = Field(
        default=None, description="Rounds within a budget of labels, which `heed loop` runs (docs/loop.md)."
    )
    seed: int = Field(default=0, ge=0, description="Seed that all randomness is derived from.")
    workers: int = Field(default=1, ge=1, description="Worker processes, one per GPU where there are GPUs.")
    min_workers: int = Field(
        default=0, ge=0, description="Minimum number of workers to continue with after losing some; 0 = `workers`."
    )
    engine: EngineConfig = Field(default=EngineConfig(), description="Precision, sharding and checkpoints.")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="Timeouts and resources of the cluster.")
    world: PlaygroundSection | None = Field(
        default=None,
        description="What writes data, labels it and judges: the playground, or a class of your own with `kind ="
        ' "FILE.py:NAME"` and the keys of its config (CONTRIBUTING.md, "Adding a world"). None by default.',
    )
    model: ModelConfig | None = Field(
        default=None,
        description="The policy's shape: a table of fields, a pasted config.json, or the name of a file in"
        " configs/models. Not needed where the first stage has `init_from`.",
    )

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        if ".." in name or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                "letters, digits, '.', '_' and '-' were expected, with a letter or digit first and no '..'"
            )
        return name

    @model_validator(mode="before")
    @classmethod
    def _with_rounds_of_loop(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "rounds" in values or not isinstance(values.get("loop"), dict | LoopConfig):
            return values
        loop = values["loop"]
        rounds = loop.rounds if isinstance(loop, LoopConfig) else loop.get("rounds")
        return values if rounds is None else {**values, "rounds": rounds}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.loop is not None:
            self._check_loop(self.loop)
        if not self.stage_names:
            raise ValueError(
                f"the job has no stage; at least one section of {', '.join(self.registry.names)} was expected"
            )
        for stage in self.stages:
            self._check_parents(stage)
        self._check_world()
        self._check_kind()
        self._check_room()
        self._check_layers()
        self._check_shapes()
        self._check_batches()
        self._check_optimizers()
        for stage in self.stages:
            stage.check(self.section_of(stage), self)
        return self

    @cached_property
    def registry(self) -> Registry:
        """The stages that the job may have, including those of later rounds, in the order in which they run."""
        written = {stage.name: getattr(self, stage.name) for stage in self.known_stages}
        values = {name: section.model_dump() for name, section in written.items() if section is not None}
        return with_rounds(self.known_stages, self.rounds, values, self.loop)

    @cached_property
    def later_sections(self) -> dict[str, Config]:
        """The sections of later rounds' stages, and of the first round's stages that a loop changes."""
        later = [stage for stage in self.registry if stage.repeats]
        return {stage.name: section_of_round(stage, getattr(self, stage.repeats)) for stage in later}

    def part(self, name: str) -> Any:
        """Returns a section by name, also that of a later round's stage; None if the job does not have it."""
        return self.later_sections[name] if name in self.later_sections else getattr(self, name)

    @property
    def has_world(self) -> bool:
        return self.world is not None

    @cached_property
    def stages(self) -> tuple[AnyStage, ...]:
        """The stages that this job has, in order."""
        return tuple(stage for stage in self.registry if self.part(stage.name) is not None)

    @cached_property
    def stage_names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    def stage(self, name: str) -> AnyStage:
        """A stage by its name."""
        return self.registry[name]

    def section(self, stage: Stage[AnyConfig]) -> AnyConfig | None:
        """Returns the section of a stage; None if the job does not have that stage."""
        section = self.part(stage.name)
        assert section is None or isinstance(section, stage.config), f"[{stage.name}] is {type(section)}"
        return section

    def section_of(self, stage: Stage[AnyConfig]) -> AnyConfig:
        """The section of a stage that the job has."""
        section = self.section(stage)
        assert section is not None, f"the job has no [{stage.name}]"
        return section

    def parents(self, name: str) -> tuple[str, ...]:
        """Returns the stages and preparations whose outputs a stage reads, in the order in which they run."""
        stage = self.registry[name]
        section = self.section_of(stage)
        needed = {
            parent.stage
            for parent in stage.parents
            if parent.is_read(section, self.stage_names) and not self.substitute(name, parent.stage)
        }
        if POLICIES in needed:
            needed = needed - {POLICIES} | {other.name for other in self.stages if other.policy_from}
        sources = {source.partition(":")[0] for source in sources_in(section.model_dump()) if ":" in source}
        needed |= {source for source in sources if source in self.registry}
        if stage.preparation is not None:
            needed.add(stage.preparation.name)
        prepared = [other for other in self.registry.preparations if other in needed]
        stages = [other for other in needed if other in self.registry]
        return (*prepared, *sorted(stages, key=self.registry.places.__getitem__))

    def substitute(self, name: str, parent: str) -> str:
        """Returns the model that a stage's section names instead of a parent's; "" if it names none."""
        stage = self.registry[name]
        field = next((self._given(stage, known) for known in stage.parents if known.stage == parent), "")
        return value_at(self.section_of(stage), field) if field else ""

    def _given(self, stage: AnyStage, parent: Parent[Any]) -> str:
        """Returns the field that names a substitute for the parent; "" if none does."""
        section = self.section_of(stage)
        return next((field for field in parent.substitutes if value_at(section, field)), "")

    def _check_parents(self, stage: AnyStage) -> None:
        """Check that a stage starts from exactly one place: an earlier stage, or a model named in its section."""
        declared = {parent.stage: parent for parent in stage.parents}
        places = self.registry.places
        for name in self.parents(stage.name):
            is_earlier = name in places and places[name] < places[stage.name] and self.part(name) is not None
            if not is_earlier and name not in self.registry.preparations:
                fields = [f"{stage.name}.{field}" for field in declared[name].substitutes] if name in declared else []
                late = ", which runs after it" if name in self.stage_names else ""
                raise ValueError(f"{stage.name} needs {name}{late}: {' or '.join([f'[{name}]', *fields])} was expected")
        for parent in stage.parents:
            field = self._given(stage, parent)
            if field and parent.stage in self.stage_names and not parent.own_shape:
                raise ValueError(
                    f"{stage.name}.{field} and [{parent.stage}] are both set; only one of them was expected, since"
                    f" {stage.name} starts from one model"
                )

    def _check_loop(self, loop: LoopConfig) -> None:
        """Check that the loop can sample, label and compare in every round."""
        missing = [name for name in ("collect", "compare") if getattr(self, name, None) is None]
        if missing:
            why = "samples what is labeled" if missing[0] == "collect" else "says how a policy is judged"
            raise ValueError(f"loop: the job has no [{missing[0]}], which {why}; [{missing[0]}] was expected")
        if not loop.store and self.world is None:
            raise ValueError(
                "loop.store: missing; nobody labels. The label store of the people who label, or a [world] with its"
                " own labelers, was expected"
            )
        if loop.rule.num_models and getattr(self, "reward", None) is None:
            raise ValueError(
                f"loop.choose is {loop.choose!r}, which reads reward models, but the job has no [reward]; [reward] or"
                ' choose = "uniform" was expected'
            )
        if self.rounds > loop.rounds:
            raise ValueError(f"rounds is {self.rounds}; at most loop.rounds = {loop.rounds} was expected")
        responses, samples = self.part("collect").responses_per_prompt, loop.num_samples
        if samples < responses:
            raise ValueError(
                f"loop.num_samples is {samples}; at least collect.responses_per_prompt = {responses} was expected,"
                " since a task's responses are chosen among the samples"
            )
        if (num_sets := math.comb(samples, responses)) > MAX_SETS:
            raise ValueError(
                f"loop.num_samples is {samples}, which make {num_sets:,} sets of collect.responses_per_prompt ="
                f" {responses} for each prompt; at most {MAX_SETS:,} were expected"
            )
        num_ranked = loop.rounds + 2 + ("pretrain" in self.stage_names)  # SFT and best-of-n are two more
        if self.part("compare").judge_people and num_ranked > MAX_RESPONSES:
            raise ValueError(
                f"loop.rounds is {loop.rounds}; at most {loop.rounds + MAX_RESPONSES - num_ranked} was expected with"
                " compare.judge_people, since people rank the responses of all policies at once"
            )
        if without_password(loop.store) != loop.store:
            raise ValueError(
                "loop.store has a password, which would be written into the run's folder; a URL without one was"
                " expected (PostgreSQL reads it from PGPASSWORD or ~/.pgpass)"
            )

    def _check_world(self) -> None:
        needing = [stage.name for stage in self.stages if WORLD in stage.sections]
        needing += [stage.name for stage in self.stages if '"world:' in self.section_of(stage).model_dump_json()]
        if needing and self.world is None:
            raise ValueError(f"world: missing; {needing[0]} needs it")

    def _has_own_shape(self, stage: AnyStage) -> bool:
        """Whether a stage starts from a model that may have another shape than the policy."""
        return any(parent.own_shape and self._given(stage, parent) for parent in stage.parents)

    def _check_kind(self) -> None:
        """Check that each stage has a model, and that the stage can train a model of that kind."""
        for stage in self.stages:
            if self.model is None and "model" in stage.sections:
                raise ValueError(f"model: missing; {stage.name} needs [model] or {stage.name}.init_from")
            if self.model is not None and self.model.kind not in stage.model_kinds and not self._has_own_shape(stage):
                starts = [f"{of.name}.init_from" for of in self.stages if getattr(self.section_of(of), "init_from", "")]
                kinds = " or ".join(kind_in_words(kind, self.registry) for kind in stage.model_kinds)
                is_kind = kind_in_words(self.model.kind, self.registry)
                raise ValueError(
                    f"{starts[0] if starts else 'model.kind'} is {is_kind}, but [{stage.name}] takes {kinds}"
                )

    def _check_room(self) -> None:
        if self.model is None:
            return
        context = self.model.max_position_embeddings
        for stage in self.stages:
            for field, tokens in stage.context_tokens(self.section_of(stage)).items():
                if tokens > context:
                    raise ValueError(f"{stage.name}.{field} does not fit model.max_position_embeddings = {context}")

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Numbers of workers that the job can continue with, largest first: those that divide its batches."""
        fewer = range(self.workers - 1, (self.min_workers or self.workers) - 1, -1)
        return (self.workers, *(size for size in fewer if not self._batch_problem(size)))

    @property
    def fewest_ranks(self) -> int:
        """The fewest processes that the job can run with, including those in addition to its workers."""
        return self.world_sizes[-1] + self.extra_ranks

    @property
    def num_ranks(self) -> int:
        """The number of the job's processes, including those in addition to its workers."""
        return self.workers + self.extra_ranks

    @property
    def extra_ranks(self) -> int:
        """The number of processes that stages need in addition to the job's workers."""
        return sum(stage.extra_ranks(self.section_of(stage)) for stage in self.stages if stage.round == 1)

    def shape_before(self, stage: AnyStage) -> ModelConfig | None:
        """Returns the shape of the policy when a stage starts, if the job knows it: earlier stages may change its last
        blocks.
        """
        return self._shapes_before[stage.name]

    @cached_property
    def _shapes_before(self) -> dict[str, ModelConfig | None]:
        shape, found = self.model, dict[str, ModelConfig | None]()
        for stage in self.stages:
            found[stage.name] = shape
            section = self.section_of(stage)
            if shape is not None and isinstance(section, LayersConfig) and section.leaves_policy:
                try:
                    shape = section.reshaped(shape)
                except ValueError as error:
                    raise ValueError(f"{stage.name}.{error}") from None
        return found

    def _trained_shape(self, stage: AnyStage) -> ModelConfig | None:
        """Returns the shape of the model that a stage trains; None if the job does not know it."""
        section = self.section_of(stage)
        shape = None if self._has_own_shape(stage) else self.shape_before(stage)
        return section.reshaped(shape) if shape is not None and isinstance(section, LayersConfig) else shape

    def _check_layers(self) -> None:
        """Check that blocks are left in every model. A stage checks models of other shapes when it opens them."""
        _ = self._shapes_before  # names the stage that leaves no blocks in the policy
        for stage in self.stages:
            try:
                self._trained_shape(stage)
            except ValueError as error:
                raise ValueError(f"{stage.name}.{error}") from None

    def _check_batches(self) -> None:
        if problem := self._batch_problem(self.workers):
            raise ValueError(problem)
        if self.min_workers > self.workers:
            raise ValueError(f"min_workers is {self.min_workers}; at most workers = {self.workers} was expected")

    def _batch_problem(self, num_workers: int) -> str:
        """Says why the batches do not divide among this many workers; "" if they do."""
        try:
            num_shares = self.engine.data_parallel_size(num_workers)
        except ValueError as error:
            return str(error)
        for stage in self.stages:
            section = self.section_of(stage)
            for field, batch in tables_in(section, BatchConfig):
                try:
                    batch.num_micro_batches(num_shares)
                except ValueError as error:
                    groups = f" in groups of {num_workers // num_shares}" if num_shares < num_workers else ""
                    return f"{stage.name}.{field} with workers = {num_workers}{groups}: {error}"
            for field, rows in stage.split_rows(section).items():
                if rows % num_workers:
                    return f"{stage.name}.{field} is {rows}; a multiple of workers = {num_workers} was expected"
            for field, size in stage.worker_teams(section).items():
                if num_workers % size:
                    return f"{stage.name}.{field} is {size}; a divisor of workers = {num_workers} was expected"
        return ""

    def check_shape(self, shape: ModelConfig) -> None:
        """Check that the engine can train a model of this shape. Raises: ValueError naming its key if it cannot."""
        check_sequence_split(shape, self.engine.sequence_parallel_size)
        if self.engine.compile_blocks:
            check_compiles(shape)
        if self.engine.record_micro_batches and shape.num_experts:
            raise ValueError("engine.record_micro_batches is true, but a mixture of experts cannot be recorded")

    def _check_shapes(self) -> None:
        """Check the policy's shape; other shapes are checked when their files are read."""
        trained = [stage for stage in self.stages if any(tables_in(self.section_of(stage), OptimizerConfig))]
        if self.model is not None and not all(map(self._has_own_shape, trained)):
            self.check_shape(self.model)

    def _check_optimizers(self) -> None:
        self.engine.on_ranks(self.workers)  # refuses what needs another number of them
        for stage in self.stages:
            for field, optimizer in tables_in(self.section_of(stage), OptimizerConfig):
                try:
                    optimizer.check_sharding(self.engine)
                except ValueError as error:
                    raise ValueError(f"{stage.name}.{field}: {error}") from None
                self._check_trained_layers(f"{stage.name}.{field}", optimizer, self._trained_shape(stage))

    def _check_trained_layers(self, name: str, optimizer: OptimizerConfig, shape: ModelConfig | None) -> None:
        num_layers = shape.num_hidden_layers + shape.num_encoder_layers if shape else math.inf  # the engine checks it
        if (optimizer.trained_layers or 0) > num_layers:
            raise ValueError(f"{name}.trained_layers is {optimizer.trained_layers}; the model has {num_layers}")

    def open_world(self) -> World | None:
        """Opens the world that the job names, if any. Raises: ValueError for files that are missing or malformed."""
        return None if self.world is None else self.world_type(self.world)

    @property
    def world_module(self) -> ModuleType | None:
        """The module of a world that the job names by its place; its file's hash is part of the inputs."""
        return None if self.world_type is PlaygroundWorld else sys.modules[self.world_type.__module__]


def job_type(registry: Registry, world: type[World] = PlaygroundWorld) -> type[JobConfig]:
    """Returns the config of a job that may have these stages, with a section for each, and this world's section. It
    refuses unknown keys.
    """
    sections: dict[str, Any] = {stage.name: (stage.config | None, None) for stage in registry}
    if world is not PlaygroundWorld:
        section = create_model("WorldSection", __base__=(world.config_type, _WorldSection))
        sections["world"] = (section | None, JobConfig.model_fields["world"])
    made = create_model("JobConfig", __base__=JobConfig, **sections)
    made.known_stages = registry
    made.world_type = world
    return made


BUILT_IN_JOB = job_type(BUILT_IN)  # a job without stages of its own
