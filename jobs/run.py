"""One run of a job: where its things lie, and sampling on all its workers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from evaluation.sampling import Sample, SamplingSpec, sample_policy
from files.atomic import write_text
from jobs.job import JobConfig
from jobs.recovery import Workers
from lm.hub import model_directory
from stages.progress import StageProgress
from stages.world import World
from training.config import Config
from training.data import Prompt
from training.stage import StageContext

AnyConfig = TypeVar("AnyConfig", bound=Config)

PROMPTS_AT_ONCE = 64  # a worker's share between two steps of the progress bar
SAMPLES = "samples"  # the folder of a stage's samples while it samples


@dataclass(frozen=True)
class Run:
    """One run of a job: its folder, and the group that works for it."""

    job: JobConfig
    folder: Path
    opened_world: World | None
    group: Workers

    @property
    def world(self) -> World:
        assert self.opened_world is not None, "the job's own check lets no stage in that needs a world it has not"
        return self.opened_world

    def stage_folder(self, stage: str) -> Path:
        return self.folder / stage

    def model(self, stage: str) -> Path:
        return self.folder / stage / "model"

    def start(self, stage: str, parent: str) -> Path:
        """The model that a stage takes from a parent, or that its section names in the parent's place."""
        named = self.job.substitute(stage, parent)
        return model_directory(named) if named else self.model(parent)

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer" / "data"

    def context(self, stage: str) -> StageContext:
        return StageContext(self.stage_folder(stage), self.job.seed, self.group().num_workers, self.job.engine)

    def resolve(self, config: AnyConfig) -> AnyConfig:
        """The config with "world:NAME" and "collect:rankings" turned into paths."""
        values = _replace_sources(config.model_dump(), self.path_of)
        return type(config).model_validate(values)

    def path_of(self, source: str) -> str:
        kind, separator, name = source.partition(":")
        if separator and kind == "world":
            return str(self.folder / "world" / "data" / f"{name}.jsonl")
        if source == "collect:rankings":
            return str(self.stage_folder("collect") / "rankings.jsonl")
        return source


def _replace_sources(value: Any, path_of: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {
            key: path_of(item) if key == "source" and isinstance(item, str) else _replace_sources(item, path_of)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replace_sources(item, path_of) for item in value]
    return value


def sources_in(value: Any) -> list[str]:
    """Every `source` of a dumped config."""
    if isinstance(value, dict):
        own = [value["source"]] if isinstance(value.get("source"), str) else []
        return own + [source for item in value.values() for source in sources_in(item)]
    if isinstance(value, list | tuple):
        return [source for item in value for source in sources_in(item)]
    return []


def sample_everywhere(
    run: Run, stage: str, phase: str, spec: SamplingSpec, prompts: Sequence[Prompt], progress: StageProgress
) -> list[Sample]:
    """`sample_policy`, the prompts dealt to all workers in parts; the result does not depend on how.

    Each part is kept in the stage's folder as soon as it is there, so a stage that is begun again goes on.
    """
    folder = run.stage_folder(stage) / SAMPLES / phase
    for part in (folder.parent, folder):  # the stage's own is there, or is away and must not be made again
        part.mkdir(exist_ok=True)
    parts = [prompts[start : start + PROMPTS_AT_ONCE] for start in range(0, len(prompts), PROMPTS_AT_ONCE)]
    paths = [folder / f"{number:05d}.jsonl" for number in range(len(parts))]
    missing = [number for number, path in enumerate(paths) if not path.is_file()]
    group = run.group()
    for start in range(0, len(missing), group.num_workers):
        turn = missing[start : start + group.num_workers]
        shares = [parts[number] for number in turn] + [[]] * (group.num_workers - len(turn))
        found = group.run_each(f"{stage}: {phase}", sample_policy, [(spec, share) for share in shares])
        for number, samples in zip(turn, found, strict=False):  # a rank without a share has none
            write_text(paths[number], "".join(json.dumps(sample.as_dict()) + "\n" for sample in samples))
        num_done = len(parts) - len(missing) + start + len(turn)
        progress.update(min(num_done * PROMPTS_AT_ONCE, len(prompts)), len(prompts), phase)
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    return [Sample(**json.loads(line)) for line in lines]
