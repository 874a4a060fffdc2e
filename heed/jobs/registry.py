"""The stages that a job can have: the built-in ones in order, those that a job file brings, and those of later rounds.

A job with rounds samples the policy that it has trained, learns from those samples, and repeats that. A later round
just adds stages, so pipeline, lineage, plan and report need to know nothing about rounds. Round 2 of `dpo` is the stage
`dpo_2`. It has the settings of [dpo], but starts from `dpo` if `dpo` starts from `sft`, and reads `collect_2` if `dpo`
reads `collect`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from classify.stage import STAGE as CLASSIFY
from dpo.stage import STAGE as DPO
from evaluation.compare.stage import STAGE as COMPARE
from files.importing import load_module
from heed.loop.config import LoopConfig, name_of_round
from heed.loop.stages import loop_rounds, shown_in_loop
from ppo.stage import STAGE as PPO
from pretrain.stage import STAGE as PRETRAIN
from reward.collect import STAGE as COLLECT
from reward.stage import STAGE as REWARD
from sft.rejection import STAGE as REJECTION
from sft.stage import STAGE as SFT
from stages.contract import POLICIES, Stage
from stages.reports.parts import StageReport, StageReporter
from stages.reports.run_folder import StageFolder
from stages.reports.stage_report import plain_reporter
from stages.run import sources_in, with_sources
from training.config import Config

PREPARED = "data"  # what a preparation writes: this folder, inside the folder named after the preparation
WORLD = "world"  # the world's folder, which is a preparation of the job

AnyStage = Stage[Any]


@dataclass(frozen=True)
class Registry:
    """Stages in the order in which they run."""

    stages: tuple[AnyStage, ...]

    def __iter__(self) -> Iterator[AnyStage]:
        return iter(self.stages)

    def __getitem__(self, name: str) -> AnyStage:
        return self.stages[self.places[name]]

    def __contains__(self, name: str) -> bool:
        return name in self.places

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The place of each stage, from 0. A loop of many rounds has thousands of stages, which are looked up often."""
        return {stage.name: place for place, stage in enumerate(self.stages)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.places)

    @cached_property
    def preparations(self) -> tuple[str, ...]:
        """Names of the preparations' folders, which are made before any stage runs."""
        return tuple(stage.preparation.name for stage in self.stages if stage.preparation is not None)

    def output(self, name: str) -> str:
        """Returns the part of a stage's or preparation's folder that other stages read."""
        return self[name].output if name in self else PREPARED

    @property
    def reporters(self) -> dict[str, StageReporter]:
        """The reporters that show each stage in the report of a run, in order."""
        return {stage.name: stage.report or plain_reporter(stage.name) for stage in self.stages}

    def with_stages(self, added: Sequence[AnyStage]) -> "Registry":
        """Returns this registry with more stages, each right after the last of its parents, or first if it has none."""
        stages = list(self.stages)
        for stage in added:
            names = [other.name for other in stages]
            parents = [parent.stage for parent in stage.parents if parent.stage != POLICIES]
            unknown = [parent for parent in parents if parent not in names]
            if unknown:
                raise ValueError(
                    f"stage {stage.name}: parent is {unknown[0]!r}; one of {', '.join(names)} was expected"
                )
            stages.insert(max((names.index(parent) + 1 for parent in parents), default=0), stage)
        return Registry(tuple(stages))


BUILT_IN = Registry((PRETRAIN, CLASSIFY, SFT, COLLECT, REWARD, REJECTION, DPO, PPO, COMPARE))


def kind_in_words(kind: str, registry: Registry = BUILT_IN) -> str:
    """Returns what a kind of model is, and which stages train it."""
    stages = ", ".join(f"[{stage.name}]" for stage in registry if stage.round == 1 and kind in stage.model_kinds)
    body = ", or the body of a reward model (reward.init_from)" if kind == "encoder" else ""
    return f"{'an' if kind[0] == 'e' else 'a'} {kind} (for {stages}{body})"


def registry_with(custom_stages: Sequence[str]) -> Registry:
    """Returns the built-in stages plus those named as `FILE.py:NAME` or `MODULE:NAME`.

    Raises: ValueError for an entry that leads to no stage, or to a stage whose name is taken.
    """
    added: list[AnyStage] = []
    for place in custom_stages:
        file, _, attribute = place.partition(":")
        module = load_module(file, "stage")
        custom_stage = getattr(module, attribute, None)
        if not isinstance(custom_stage, Stage):
            raise ValueError(f"stage {place!r}: {file} has no stages.contract.Stage named {attribute!r}")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", custom_stage.name):
            raise ValueError(
                f"stage {place!r}: name {custom_stage.name!r}; lower-case letters, digits and _ were expected"
            )
        if custom_stage.name in (*BUILT_IN.names, *BUILT_IN.preparations, WORLD, *(stage.name for stage in added)):
            raise ValueError(f"stage {place!r}: the name {custom_stage.name!r} is taken; another was expected")
        added.append(replace(custom_stage, module=module))
    return BUILT_IN.with_stages(added)


def with_rounds(
    registry: Registry, num_rounds: int, values: Mapping[str, Any], loop: LoopConfig | None = None
) -> Registry:
    """Returns the registry with later rounds' stages after those of the first. `values` are a job's sections, as dicts.

    With `loop`, the stages of all rounds are those of a loop (`heed.loop.stages`).
    Raises: ValueError if not exactly one stage of the job trains a policy, or if no stage samples it.
    """
    if num_rounds < 2 and loop is None:
        return registry
    first = repeated_stages(registry, num_rounds, values, and_reward=loop is not None)
    rounds: Sequence[Sequence[AnyStage]] = [
        first,
        *([_of_round(stage, n, first) for stage in first] for n in range(2, num_rounds + 1)),
    ]
    if loop is not None:
        rounds = loop_rounds(rounds, loop)
        own = {stage.name: stage for stage in rounds[0]}
        registry = Registry(tuple(shown_in_loop(own.get(stage.name, stage)) for stage in registry))
    place = registry.names.index(first[-1].name) + 1
    later = [*rounds[0][len(first) :], *(stage for stages in rounds[1:] for stage in stages)]
    taken = [stage.name for stage in later if stage.name in registry]
    if taken:
        raise ValueError(
            f"rounds = {num_rounds}: the name of stage {taken[0]} is reserved for a later round; another was expected"
        )
    return Registry((*registry.stages[:place], *later, *registry.stages[place:]))


def repeated_stages(
    registry: Registry, num_rounds: int, values: Mapping[str, Any], *, and_reward: bool = False
) -> tuple[AnyStage, ...]:
    """Returns the stages of a round: those that the policy learns from, then the stage that trains it. `and_reward`
    adds [reward] even if the policy does not learn from it.
    """
    here = [stage for stage in registry if isinstance(values.get(stage.name), Mapping)]
    policies = [stage for stage in here if stage.policy_from]
    if len(policies) != 1:
        named = ", ".join(f"[{stage.name}]" for stage in policies) or "none"
        raise ValueError(f"rounds = {num_rounds}: one stage that trains a policy was expected; the job has {named}")
    policy, names = policies[0], registry.names
    span = range(names.index(policy.policy_from) + 1, names.index(policy.name) + 1)
    between = [stage for stage in here if names.index(stage.name) in span]
    read = {policy.name, *([REWARD.name] if and_reward else [])}
    for stage in reversed(between):
        if stage.name in read:
            sources = {source.partition(":")[0] for source in sources_in(dict(values[stage.name]))}
            read |= {parent.stage for parent in stage.parents} | sources
    repeated = tuple(stage for stage in between if stage.name in read)
    if not any("prompts" in stage.config.model_fields for stage in repeated):
        raise ValueError(
            f"rounds = {num_rounds}: no stage samples the policy of the round before; [collect], and"
            f' {policy.name}.rankings.source = "collect:rankings", were expected'
        )
    return repeated


def _of_round(stage: AnyStage, number: int, first: tuple[AnyStage, ...]) -> AnyStage:
    policy = first[-1]
    before = name_of_round(policy.name, number - 1)
    reads = {policy.policy_from: before, **{other.name: name_of_round(other.name, number) for other in first[:-1]}}
    return replace(
        stage,
        name=name_of_round(stage.name, number),
        repeats=stage.name,
        round=number,
        reads=reads,
        parents=tuple(replace(parent, stage=reads.get(parent.stage, parent.stage)) for parent in stage.parents),
        policy_from=reads.get(stage.policy_from, ""),
        report=_round_reporter(stage, number),
    )


def section_of_round(stage: AnyStage, section: Config) -> Config:
    """Returns the settings of a later round's stage: those of the first round, but reading the later round's outputs.

    A policy's `init_from` is dropped, since a later round starts from the previous round's policy. Any other stage
    starts from the same model as in the first round. In a loop, the stage's own `settings` are added.
    """

    def renamed(source: str) -> str:
        prefix, separator, name = source.partition(":")
        return f"{stage.reads.get(prefix, prefix)}{separator}{name}"

    values = with_sources(section.model_dump(), renamed)
    if stage.policy_from:
        own = {field for parent in stage.parents if parent.stage == stage.policy_from for field in parent.substitutes}
        values |= {field: "" for field in (*own, "end_token") if field in values}
    return stage.config.model_validate(values | dict(stage.settings))


def _round_reporter(stage: AnyStage, number: int) -> StageReporter:
    reporter = stage.report or plain_reporter(stage.name)

    def report(folder: StageFolder) -> StageReport:
        stage_report = reporter.report(folder)
        headlines = tuple(replace(line, title=f"{line.title}, round {number}") for line in stage_report.headlines)
        return replace(
            stage_report,
            sections=tuple(
                replace(section, anchor=f"{section.anchor}-{number}", title=f"{section.title}, round {number}")
                for section in stage_report.sections
            ),
            headlines=headlines,
            sentence=stage_report.sentence and f"Round {number}: {stage_report.sentence}",
        )

    def named(folder: StageFolder) -> tuple[str, str]:
        title, about = reporter.head_of(folder)
        return f"{title}, round {number}", about

    return replace(reporter, report=report, named=named)
