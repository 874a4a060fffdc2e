"""One run of a job on disk: its folder, what each of its stages is made from, and the folders of the stages.

The folder of a stage is kept if the stage continues, replaced if it runs again, and restored if it then cannot begin.
"""

import shutil
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from files.atomic import write_json, write_text
from files.hashes import file_hash
from files.importing import file_of, load_function
from heed.jobs.job import JobConfig
from heed.jobs.registry import WORLD, AnyStage
from lm.hub import model_hash
from preferences.store import LabelStore
from stages.contract import StageWaitsError
from stages.lineage import LINEAGE, Inputs, forced_by, outputs_hash, started_with
from stages.progress import StageProgress, console
from stages.run import StageRun, StageWorkers
from stages.world import World
from training.config import values_at

NUM_KEYS_SHOWN = 4  # at most, of the keys that changed
REPLACED = "replaced"
_OPENED = ("inputs.json", "config.toml")  # what `open_folder` writes

# Keys of any stage that do not change its results: how a batch is split, how often the stage saves and evaluates, and
# whether invalid rows stop it (a stage that they stopped has no results).
_SPLIT_KEYS = ("micro_batch_size", "micro_batch_tokens", "forward_tokens")
LAYOUT_KEYS = frozenset(
    (*_SPLIT_KEYS, "save_every_steps", "save_every_iterations", "evaluate_every_steps", "on_invalid")
)


@dataclass(frozen=True)
class Run:
    """One run of a job: its folder, and the workers that work for it."""

    job: JobConfig
    folder: Path
    opened_world: World | None
    workers: StageWorkers

    def of(self, stage: str, progress: StageProgress | None = None) -> StageRun:
        """Returns what a stage of this run receives."""
        return StageRun(stage, self.job, self.folder, self.workers, self.opened_world, LabelStore, progress)

    def stage_folder(self, name: str) -> Path:
        """The folder of a stage or a preparation."""
        return self.folder / name

    def output(self, name: str) -> Path:
        """Returns the folder or file of a stage or a preparation that later stages read."""
        return self.folder / name / self.job.registry.output(name)


def inputs_of(run: Run, stage: AnyStage) -> Inputs:
    """Returns what the stage would be made from now, without settings that change no result (how work is split)."""
    # The stage's config is kept as TOML, which has no null.
    sections = {
        name: run.job.part(name).model_dump(mode="json", exclude_none=True)
        for name in (stage.name, *stage.sections, *stage.optional_sections)
        if run.job.part(name) is not None
    }
    config = {name: _without(section, LAYOUT_KEYS | stage.layout_keys) for name, section in sections.items()}
    config["precision"] = run.job.engine.resolved_precision()
    parents = {parent: outputs_hash(run.output(parent)) for parent in run.job.parents(stage.name)}
    hashes = _data_hashes(run.of(stage.name), stage, config)
    hashes |= world_hash(run) if WORLD in sections else {}
    return Inputs(stage.name, run.job.seed, config, parents, hashes)


def world_hash(run: Run) -> dict[str, str]:
    """Returns the SHA-256 of the source file of a world that the job names by its place; empty for the playground."""
    module = run.job.world_module
    return {} if module is None else {WORLD: file_hash(Path(str(module.__file__)))}


def _without(value: Any, left_out: frozenset[str]) -> Any:
    """Returns a dumped config without these keys: a plain key at any depth, a dotted one at that place."""
    if isinstance(value, dict):
        below = {key: frozenset(_below(key, left_out)) for key in value}
        return {key: _without(item, left_out | below[key]) for key, item in value.items() if key not in left_out}
    return [_without(item, left_out) for item in value] if isinstance(value, list) else value


def _below(key: str, dotted: Iterable[str]) -> Iterator[str]:
    return (name.removeprefix(f"{key}.") for name in dotted if name.startswith(f"{key}."))


def _data_hashes(run: StageRun, stage: AnyStage, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns SHA-256 by name: of the data that the config's sections read, of the models that the stage's own section
    names, and of the source files of the functions that it names and of a custom stage.
    """
    hashes, section = run.source_hashes(dict(config)), run.job.section(stage)
    assert section is not None, f"the job has no [{stage.name}]"
    for _, name in stage.models_in(section):
        hashes[name] = model_hash(name)
    for field in stage.function_fields:
        for name in values_at(section, field):
            hashes[name] = file_hash(file_of(load_function(name, words(field))))
    if stage.module is not None:
        hashes[f"stage {stage.name}"] = file_hash(Path(str(stage.module.__file__)))
    return hashes


def words(key: str) -> str:
    """Returns what a key means in an error message: "reward function" for "reward.function"."""
    return key.replace("sources.*.", "").replace("_", " ").replace(".", " ")


def what_changed(folder: Path, inputs: Inputs) -> str:
    """Returns which keys differ from those that the stage in `folder` was made with; if none, what else may differ."""
    try:
        before = _flat(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")))
    except OSError:
        return "changed"
    now = _flat(tomllib.loads(tomli_w.dumps({"seed": inputs.seed, **inputs.config})))
    keys = [key for key in sorted({**before, **now}) if before.get(key) != now.get(key)]
    shown = ", ".join(keys[:NUM_KEYS_SHOWN]) + (", ..." if len(keys) > NUM_KEYS_SHOWN else "")
    return f"changed: {shown}" if keys else "its data or an earlier stage changed"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested tables to dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def is_replaced(folder: Path, inputs: Inputs, *, forced: bool) -> bool:
    """Returns whether the stage has an earlier folder and starts over: its inputs changed, or a rerun is forced."""
    is_interrupted = started_with(folder) == inputs.fingerprint and not (folder / LINEAGE).exists()
    return folder.exists() and (forced or not is_interrupted)


@contextmanager
def open_folder(folder: Path, inputs: Inputs, *, forced: bool, submission: str = "") -> Iterator[None]:
    """Keep the folder of an interrupted stage with the same inputs; otherwise move it away and start an empty one.
    The `submission` that forces it is written down, so that it forces it once.

    If the block fails, or is interrupted, before it has written anything, the folder that was moved away is put back.
    """
    kept = None
    if is_replaced(folder, inputs, forced=forced):
        kept = put_aside(folder, "forced" if forced else what_changed(folder, inputs))
    try:
        folder.mkdir(exist_ok=True)
        submission = submission if forced else forced_by(folder)
        write_json(folder / "inputs.json", {"fingerprint": inputs.fingerprint, "submission": submission})
        config: dict[str, Any] = dict(inputs.config)
        write_text(folder / "config.toml", tomli_w.dumps({"seed": inputs.seed, **config}))
        yield
    except StageWaitsError:
        raise
    except BaseException:  # Ctrl-C too
        if kept is not None:
            _put_back(folder, kept)
        raise


def put_aside(folder: Path, reason: str = "changed") -> Path:
    """Move a replaced stage's folder into `replaced/`, where nothing is deleted. Returns its new path."""
    target = folder.parent / REPLACED
    target.mkdir(exist_ok=True)
    numbers = (path.name.removeprefix(f"{folder.name}-") for path in target.glob(f"{folder.name}-*"))
    kept = target / f"{folder.name}-{1 + max((int(number) for number in numbers if number.isdigit()), default=0)}"
    folder.rename(kept)
    console.print(f"{folder.name}: runs again ({reason}); the earlier result is kept in {kept}", markup=False)
    return kept


def _put_back(folder: Path, kept: Path) -> None:
    """Undo `put_aside`, unless the new run of the stage has written something or the storage is unavailable."""
    if any(path.is_file() and path.name not in _OPENED for path in folder.rglob("*")):
        return
    with suppress(OSError):
        for name in _OPENED:
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder)
        kept.rename(folder)
        console.print(f"{folder.name}: failed before it began; restored the earlier result in {folder}", markup=False)
        kept.parent.rmdir()  # unless it holds other results
