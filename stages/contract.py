"""The contract of a stage. Each stage's package exports one `Stage`; job files, pipeline, preflight, plan and report
iterate over these and know none by name (docs/architecture.md, "The contract of a stage").
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from lm.tokenizer import Tokenizer
from stages.plan import Planner, Work
from stages.reports.parts import StageReporter
from stages.run import JobView, StageRun
from stages.sizes import Sizes, SourceSize
from training.config import Config, values_at
from training.data import DataConfig

AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclass(frozen=True)
class Parent(Generic[AnyConfig]):
    """A stage whose outputs another stage reads.

    `substitutes` are fields of the reader's section that name a model, or another source of scores, to use in place of
    the parent; at most one of them may be set. `is_read` decides from the section and the names of the job's stages
    whether the parent is read at all. With `own_shape`, a substitute may have a different shape from `[model]`, and may
    be set even if the job has the parent.
    """

    stage: str
    substitutes: tuple[str, ...] = ()
    is_read: Callable[[AnyConfig, Collection[str]], bool] = lambda _config, _stages: True
    own_shape: bool = False


class StageWaitsError(Exception):
    """A stage cannot continue until people have acted. Its work so far is kept, and the same command continues it.

    The message says what it waits for, and what people have to do.
    """


POLICIES = "every policy"  # as a parent: all stages before this one whose model is a policy to compare


@dataclass(frozen=True)
class Source(Generic[AnyConfig]):
    """A file of a stage that later stages may read as data: `source = "STAGE:NAME"` names it and makes it a parent.

    `size` is what `heed plan` assumes the file will hold, given the section of the stage that writes it.
    """

    file: str
    size: Callable[[AnyConfig, Sizes], SourceSize]


@dataclass(frozen=True)
class Preparation(Generic[AnyConfig]):
    """Data that a stage needs before any training starts. The driver writes it into RUN/`name`/data without workers.

    `inputs` returns the values and the file hashes that it is made from. It is made again when they change.
    """

    name: str
    inputs: Callable[[StageRun, AnyConfig], tuple[Mapping[str, Any], Mapping[str, str]]]
    write: Callable[[StageRun, AnyConfig, Path], None]


@dataclass(frozen=True)
class Stage(Generic[AnyConfig]):
    """One stage: its section of the job file, what it reads, how it runs, and what it leaves in its folder.

    `name` is the section, the folder in the run and the argument of `--from` and `--only`. `run` is called on the
    driver. It calls the ranks through `StageRun.workers`, and when called again it must continue from what it has
    saved. Everything else has a default that fits a stage which trains one decoder.
    """

    name: str
    config: type[AnyConfig]
    run: Callable[[StageRun, AnyConfig], None]

    # What it reads.
    parents: tuple[Parent[AnyConfig], ...] = ()
    sections: tuple[str, ...] = ()  # other sections that its result depends on, which the job must have
    optional_sections: tuple[str, ...] = ()  # others that its result depends on if the job has them
    preparation: Preparation[AnyConfig] | None = None
    model_fields: tuple[str, ...] = ("init_from",)  # that name a model directory or hub id; `*`: each table of a list
    function_fields: tuple[str, ...] = ()  # fields that name a Python function

    # What it leaves, always including `results.json`.
    output: str = "model"  # the file or folder that later stages read; its hash is part of their inputs
    policy_from: str = ""  # the parent that its policy starts from and is compared with; "" = it leaves none to compare
    chooses: bool = False  # whether it collects samples that a rule has chosen, which are not typical of their policy
    also_required: tuple[str, ...] = ()  # other files that it must have written to be finished
    sources: Mapping[str, Source[AnyConfig]] = field(default_factory=dict)
    tokenizer: Callable[[StageRun, AnyConfig], Tokenizer] | None = None  # of the model it will leave, before it runs

    # What is checked across the job before anything runs. BatchConfig and OptimizerConfig fields are always checked.
    model_kinds: tuple[str, ...] = ("decoder",)  # values of model.kind that it works with
    context_tokens: Callable[[AnyConfig], Mapping[str, int]] = lambda _config: {}  # by field: must fit the context
    split_rows: Callable[[AnyConfig], Mapping[str, int]] = lambda _config: {}  # by field: must divide among workers
    worker_teams: Callable[[AnyConfig], Mapping[str, int]] = lambda _config: {}  # by field: must divide the workers
    extra_ranks: Callable[[AnyConfig], int] = lambda _config: 0  # processes next to the job's workers
    check: Callable[[AnyConfig, JobView], None] = lambda _config, _job: None  # raises ValueError
    preflight: Callable[[StageRun, AnyConfig], None] = lambda _run, _config: None  # reads every row; raises ValueError

    # What the lineage leaves out, what `heed plan` shows, and what the report shows.
    layout_keys: frozenset[str] = frozenset()  # keys that say how work is placed and change no result
    plan: Callable[[Planner, AnyConfig], Work] | None = None  # None: its memory and time are unknown
    conversation_tokens: Callable[[AnyConfig], int] | None = None  # bound on the conversations it teaches
    report: StageReporter | None = None  # what the run's page shows; None: the numbers of results.json

    # What a comparison of policies asks.
    title: Callable[[AnyConfig], str] | None = None  # what reports call the model that it trains; None: its own name
    trained_prompts: Callable[[AnyConfig], tuple[DataConfig, ...]] | None = None  # that it trains on; None: not known
    score: Callable[[AnyConfig], object] | None = None  # `reward.sampling.StageScore`: learned or raised

    # Set for a stage of a later round (heed/jobs/registry.py).
    repeats: str = ""  # the stage of the first round, whose section it has
    round: int = 1
    reads: Mapping[str, str] = field(default_factory=dict)  # stage that the first round reads -> stage read instead
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of its section that a loop sets in this round

    module: ModuleType | None = None  # set if a job file brings the stage; its file's hash is part of the inputs

    def models_in(self, section: AnyConfig) -> list[tuple[str, str]]:
        """Returns (field, name) of each model directory, file or hub id in a section. Models behind URLs are none."""
        named = [(field, str(name)) for field in self.model_fields for name in values_at(section, field)]
        return [(field, name) for field, name in named if "://" not in name]

    @property
    def has_own_shape(self) -> bool:
        """Whether it may start from a model whose shape differs from the policy's."""
        return any(parent.own_shape for parent in self.parents)
