"""The stages that a job can have: the built-in ones in their order, and those that a job file brings."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpo.stage import STAGE as DPO
from evaluation.compare.stage import STAGE as COMPARE
from files.python_names import load_module
from ppo.stage import STAGE as PPO
from pretrain.stage import STAGE as PRETRAIN
from reward.collect import STAGE as COLLECT
from reward.stage import STAGE as REWARD
from sft.rejection import STAGE as REJECTION
from sft.stage import STAGE as SFT
from stages.contract import POLICIES, Stage
from stages.report import plain_reporter
from stages.reports.parts import StageReporter

PREPARED = "data"  # the folder that a preparation writes, below one of its own name
WORLD = "world"  # the world's folder, which is a preparation of the job

AnyStage = Stage[Any]


@dataclass(frozen=True)
class Registry:
    """Stages in the order in which they run."""

    stages: tuple[AnyStage, ...]

    def __iter__(self) -> Iterator[AnyStage]:
        return iter(self.stages)

    def __getitem__(self, name: str) -> AnyStage:
        return next(stage for stage in self.stages if stage.name == name)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    @property
    def preparations(self) -> tuple[str, ...]:
        """Folders of what is made before any stage runs."""
        return tuple(stage.preparation.name for stage in self.stages if stage.preparation is not None)

    def output(self, name: str) -> str:
        """What is read of the folder of a stage or a preparation."""
        return self[name].output if name in self else PREPARED

    @property
    def reporters(self) -> dict[str, StageReporter]:
        """How each stage is shown in the report of a run, in order."""
        return {stage.name: stage.report or plain_reporter(stage.name) for stage in self.stages}

    def with_stages(self, added: Sequence[AnyStage]) -> "Registry":
        """This registry with more stages, each right after the last of its parents, or first if it has none."""
        stages = list(self.stages)
        for stage in added:
            names = [other.name for other in stages]
            parents = [parent.stage for parent in stage.parents if parent.stage != POLICIES]
            unknown = [parent for parent in parents if parent not in names]
            if unknown:
                raise ValueError(f"stage {stage.name}: parent {unknown[0]!r} is no stage; known are {', '.join(names)}")
            stages.insert(max((names.index(parent) + 1 for parent in parents), default=0), stage)
        return Registry(tuple(stages))


BUILT_IN = Registry((PRETRAIN, SFT, COLLECT, REWARD, REJECTION, DPO, PPO, COMPARE))


def registry_with(custom_stages: Sequence[str]) -> Registry:
    """The built-in stages and those of `FILE.py:NAME` or `MODULE:NAME`.

    Raises: ValueError for a name that leads to no stage, or to one whose name is taken.
    """
    added: list[AnyStage] = []
    for place in custom_stages:
        file, _, attribute = place.partition(":")
        module = load_module(file, "stage")
        found = getattr(module, attribute, None)
        if not isinstance(found, Stage):
            raise ValueError(f"stage {place!r}: {file} has no stages.contract.Stage {attribute!r}")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", found.name):
            raise ValueError(f"stage {place!r}: name {found.name!r}; lower-case letters, digits and _ were expected")
        if found.name in (*BUILT_IN.names, *BUILT_IN.preparations, WORLD, *(stage.name for stage in added)):
            raise ValueError(f"stage {place!r}: the name {found.name!r} is taken")
        added.append(replace(found, module=module))
    return BUILT_IN.with_stages(added)
