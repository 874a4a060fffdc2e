"""What a stage is made from, and what differs from the last time."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from files.hashes import file_hash
from files.importing import file_of, load_function
from heed.jobs.registry import AnyStage
from heed.jobs.run import Run
from lm.hub import model_hash
from stages.lineage import Inputs, outputs_hash
from stages.run import StageRun

NUM_KEYS_SHOWN = 4


def inputs_of(run: Run, stage: AnyStage) -> Inputs:
    """What the stage would be made from now, without how the work is split and logged, which changes no result."""
    # The stage's config is kept as TOML, which has no null.
    sections = {
        name: run.job.part(name).model_dump(mode="json", exclude_none=True)
        for name in (stage.name, *stage.sections, *stage.optional_sections)
        if run.job.part(name) is not None
    }
    config = {name: _without(section, LAYOUT_KEYS | stage.layout_keys) for name, section in sections.items()}
    config["precision"] = run.job.engine.resolved_precision()
    parents = {parent: outputs_hash(run.output(parent)) for parent in run.job.parents(stage.name)}
    return Inputs(stage.name, run.job.seed, config, parents, _data_hashes(run.of(stage.name), stage, config))


# Keys of any stage that say how a batch is split, how often the stage saves and evaluates, and whether invalid rows
# stop it, which changes no result of a stage that was not stopped.
_SPLIT_KEYS = ("micro_batch_size", "micro_batch_tokens", "forward_tokens")
LAYOUT_KEYS = frozenset(
    (*_SPLIT_KEYS, "save_every_steps", "save_every_iterations", "evaluate_every_steps", "on_invalid")
)


def _without(value: Any, left_out: frozenset[str]) -> Any:
    """A dumped config without some keys, at any depth."""
    if isinstance(value, dict):
        return {key: _without(item, left_out) for key, item in value.items() if key not in left_out}
    return [_without(item, left_out) for item in value] if isinstance(value, list) else value


def _data_hashes(run: StageRun, stage: AnyStage, config: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 by name of what the config's sections read, of the models that the stage's own section names,
    and of the files in which the functions that it names, and a stage that the job brings, are written.
    """
    found, section = run.source_hashes(dict(config)), config[stage.name]
    for field in stage.model_fields:
        if section.get(field):
            found[section[field]] = model_hash(section[field])
    for field in stage.function_fields:
        if section.get(field):
            found[section[field]] = file_hash(file_of(load_function(section[field], field.replace("_", " "))))
    if stage.module is not None:
        found[f"stage {stage.name}"] = file_hash(Path(str(stage.module.__file__)))
    return found


def what_changed(folder: Path, inputs: Inputs) -> str:
    """Returns which keys differ from those that the stage in `folder` was made with, or else what may differ."""
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
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
