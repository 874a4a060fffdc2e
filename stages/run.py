"""What a stage gets on the driver: its folder, its parents' models, workers, the world, and its job's sections."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple, Unpack

from cluster.group import WorkerGroup
from files.atomic import write_json
from files.hashes import derive_seed
from files.records import as_json
from lm.config import ModelConfig
from lm.hub import model_directory, on_this_machine
from lm.tokenizer import Tokenizer
from stages.lineage import path_hash
from stages.progress import StageProgress
from stages.world import OpenLabels, World
from training.config import Config, EngineConfig
from training.engine import StageContext
from training.notices import say

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from stages.contract import Stage

AnyConfig = TypeVar("AnyConfig", bound=Config)
Args = TypeVarTuple("Args")
Result = TypeVar("Result")


class JobView(Protocol):
    """What a stage may see of its job."""

    @property
    def seed(self) -> int: ...

    @property
    def engine(self) -> EngineConfig: ...

    @property
    def model(self) -> ModelConfig | None:
        """The shape of the policy, if the job knows it."""

    @property
    def has_world(self) -> bool:
        """Whether the job names a world."""

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The stages of the job, in order."""

    def stage(self, name: str) -> "Stage[Any]":
        """A known stage by its name."""

    def section(self, stage: "Stage[AnyConfig]") -> AnyConfig | None:
        """A stage's section; None if the job does not have that stage."""

    def parents(self, name: str) -> tuple[str, ...]:
        """The stages and preparations whose outputs a stage of the job reads, in order."""

    def substitute(self, name: str, parent: str) -> str:
        """What a stage's section names in place of a parent; "" if it names nothing."""


class StageWorkers(Protocol):
    """The job's workers. They start when a stage first needs them, and again after a loss."""

    def __call__(self) -> WorkerGroup: ...

    def extra_group(self, name: str, size: int, python: str = "", *, on_workers: bool = False) -> WorkerGroup:
        """Start another group of workers, for roles that run in separate processes.

        `python` is an interpreter other than the driver's. With `on_workers`, each rank shares a worker's place.
        """


@dataclass(frozen=True)
class StageRun:
    """One stage of one run, on the driver."""

    name: str
    job: JobView
    run_folder: Path
    workers: StageWorkers
    opened_world: World | None
    open_labels: OpenLabels
    progress: StageProgress | None = None

    @property
    def folder(self) -> Path:
        """The stage's own folder."""
        return self.run_folder / self.name

    @property
    def seed(self) -> int:
        """The job's seed. Later rounds have their own seeds."""
        number = self.job.stage(self.name).round
        return self.job.seed if number == 1 else derive_seed(self.job.seed, "round", number)

    @property
    def engine(self) -> EngineConfig:
        return self.job.engine

    @property
    def model(self) -> ModelConfig:
        """The shape of the policy."""
        assert self.job.model is not None, "the job's own check lets no stage in that needs a shape it has not"
        return self.job.model

    @property
    def world(self) -> World:
        assert self.opened_world is not None, "the job's own check lets no stage in that needs a world it has not"
        return self.opened_world

    @property
    def parents(self) -> tuple[str, ...]:
        """The stages and preparations whose outputs this stage reads, under their names in the first round."""
        first = {own: name for name, own in self.job.stage(self.name).reads.items()}
        return tuple(first.get(parent, parent) for parent in self.job.parents(self.name))

    def own(self, stage: str) -> str:
        """Return the name of the stage that this one reads as `stage`; it differs from `stage` in a later round."""
        return self.job.stage(self.name).reads.get(stage, stage)

    def at(self, stage: str) -> "StageRun":
        """Return the same run from the view of another of its stages."""
        return replace(self, name=self.own(stage))

    def folder_of(self, stage: str) -> Path:
        return self.run_folder / self.own(stage)

    def model_of(self, stage: str) -> Path:
        """Return the model directory that a stage of this run leaves."""
        return self.folder_of(stage) / "model"

    def start(self, parent: str) -> Path:
        """Return the model that this stage takes from a parent, or that its section names instead."""
        named = self.job.substitute(self.name, self.own(parent))
        return model_directory(named) if named else self.model_of(parent)

    def tokenizer_of(self, parent: str, end_token: str = "") -> Tokenizer:
        """Return the tokenizer of the model that `start` returns, even before the parent has run.

        `end_token` is for a model that this stage's section names: see `Tokenizer.load`.
        """
        if self.job.substitute(self.name, self.own(parent)):
            return Tokenizer.load(self.start(parent), end=end_token)
        stage, run = self.job.stage(self.own(parent)), self.at(parent)
        config = self.job.section(stage)
        assert config is not None, f"{self.name} reads {parent}, which the job does not have"
        if stage.tokenizer is None:
            raise ValueError(f"stage {parent} does not say which tokenizer its model will have; {self.name} needs it")
        return stage.tokenizer(run, run.resolve(config))

    def context(self) -> StageContext:
        """Return what each rank knows about the stage."""
        return StageContext(self.folder, self.seed, self.workers().num_workers, self.engine)

    def on_ranks(self, work: Callable[[StageContext, Unpack[Args]], Result], *args: *Args) -> list[Result]:
        """Call `work(context, *args)` on all ranks in parallel. Returns the results by rank.

        If `args` contains a hub model's folder, each rank gets its own machine's copy of that model.
        """
        return self.workers().run(self.name, _with_own_folders, work, self.context(), args)

    def tell(self, line: str) -> None:
        """Report what was read from a source, unless the run itself wrote it. The line begins with the source."""
        if not line.startswith(f"{self.run_folder}/"):
            say(line)

    def show(self, done: int, total: int, what: str) -> None:
        """Show that `done` of `total` are done."""
        if self.progress is not None:
            self.progress.update(done, total, what)

    def enter(self, phase: str) -> None:
        """Show what the stage is doing now, such as "sampling"."""
        if self.progress is not None:
            self.progress.phase = phase

    def write_results(self, results: "DataclassInstance | Mapping[str, Any]") -> None:
        """Write results.json, the numbers that the report shows; `files.records.read_record` reads them back."""
        write_json(self.folder / "results.json", as_json(results))

    def resolve(self, config: AnyConfig) -> AnyConfig:
        """Return the config with the paths of sources such as "world:NAME" in place of their names."""
        return type(config).model_validate(with_sources(config.model_dump(), self.path_of))

    def path_of(self, source: str) -> str:
        """Return the file that "world:NAME" or "STAGE:NAME" stands for, and any other source unchanged."""
        prefix, separator, name = source.partition(":")
        if not separator:
            return source
        if prefix == "world":
            return str(self.run_folder / "world" / "data" / f"{name}.jsonl")
        if prefix in self.job.stage_names and name in self.job.stage(prefix).sources:
            return str(self.run_folder / prefix / self.job.stage(prefix).sources[name].file)
        return source

    def source_hashes(self, value: Any) -> dict[str, str]:
        """Return the SHA-256 of every `source` in a dumped config, by name; a hub id is hashed as its name."""
        return {source: path_hash(self.path_of(source)) for source in sources_in(value)}


def _with_own_folders(
    work: Callable[[StageContext, Unpack[Args]], Result], context: StageContext, args: tuple[*Args]
) -> Result:
    own: Any = tuple(on_this_machine(arg) if isinstance(arg, Path) else arg for arg in args)
    return work(context, *own)


def with_sources(value: Any, path_of: Callable[[str], str]) -> Any:
    """Return a dumped config with every `source` replaced."""
    if isinstance(value, dict):
        return {
            key: path_of(item) if key == "source" and isinstance(item, str) else with_sources(item, path_of)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [with_sources(item, path_of) for item in value]
    return value


def sources_in(value: Any) -> list[str]:
    """Return every `source` of a dumped config."""
    if isinstance(value, dict):
        own = [value["source"]] if isinstance(value.get("source"), str) else []
        return own + [source for item in value.values() for source in sources_in(item)]
    if isinstance(value, list | tuple):
        return [source for item in value for source in sources_in(item)]
    return []
