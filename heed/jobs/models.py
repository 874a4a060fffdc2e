"""The models that a job names: the shape of its policy, and the copies that each machine downloads.

The shape is written in the job, named, pasted from a config.json, or taken from the model that the first stage starts
from. Each machine downloads hub models and dequantises GGUF files itself.
"""

import socket
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from cluster.group import WorkerGroup
from heed.jobs.job import JobConfig
from heed.jobs.registry import Registry
from lm.config import ModelConfig
from lm.hub import hub_name, is_gguf, model_directory, on_this_machine, shape_and_tokenizer
from lm.weights import PRETRAINED, PURPOSES, config_from_hf, purpose_of, read_config


def take_shape(at: Callable[[str], str], values: dict[str, Any], registry: Registry, *, opens_models: bool) -> None:
    """Completes `model` in a job's values. A name from configs/models or a config.json becomes a table of fields. If
    the first stage starts from a model, the shape is that model's, and what the job writes must agree with it.

    Without `opens_models`, a written shape is not checked against the model, and a built-in shape is preferred to the
    hub's.
    `at` names the place of a dotted key. Raises: ValueError naming file, line and field.
    """
    if "model" in values:
        values["model"] = _written(at("model"), values["model"])
    # Leave out stages whose model may have another shape than the policy, such as a reward model.
    of_policy = (stage for stage in registry if "init_from" in stage.config.model_fields and not stage.has_own_shape)
    start = next((stage for stage in of_policy if isinstance(values.get(stage.name), dict)), None)
    first = start.name if start is not None else ""
    init_from = values[first].get("init_from") if first else None
    if start is None or not isinstance(init_from, str) or not init_from or (not opens_models and "model" in values):
        return
    try:
        takes_any_head = [*start.model_kinds] == ["encoder"]
        shape = shape_of(init_from, opens_models=opens_models, takes_any_head=takes_any_head)
    except ValueError as error:
        raise ValueError(f"{at(f'{first}.init_from')}: {first}.init_from: {error}") from None
    written = values.get("model", {})
    for key, value in written.items() if isinstance(written, dict) else ():
        if key in shape and value != shape[key]:
            own = f"{init_from} has {shape[key]!r}; leave [model] out, since {first}.init_from sets the shape"
            raise ValueError(f"{at(f'model.{key}')}: model.{key} is {value!r}, but {own}")
    values["model"] = {**shape, **written} if isinstance(written, dict) else written


def _written(name: str, model: Any) -> Any:
    """Returns `[model]` as fields of ModelConfig: a name such as "gpt3-125m" and a config.json are translated."""
    if isinstance(model, str):
        shape = built_in_shape(model)
        if shape is None:
            raise ValueError(f"{name}: model is {model!r}; one of {', '.join(built_in_names())} was expected")
        return shape
    if isinstance(model, Mapping) and "model_type" in model:
        return config_from_hf(model, f"{name}: [model]").model_dump(mode="json")
    return model


def shape_of(init_from: str, *, opens_models: bool, takes_any_head: bool) -> dict[str, Any]:
    """Returns the shape of a stage that starts from this folder or hub id. Unless it `takes_any_head`, as a stage for
    encoders alone does, it trains the model with the head that its kind is pretrained with.
    """
    built_in = None if opens_models or Path(init_from).is_dir() else built_in_shape(init_from)
    if built_in is not None:
        return built_in
    try:
        folder = model_directory(init_from) if opens_models else shape_and_tokenizer(init_from)
    except ValueError as error:
        if opens_models:
            raise
        names = ", ".join(built_in_names())
        raise ValueError(f"{error}. These need no download, because their shapes are built in: {names}") from None
    shape = read_config(folder, purpose_of(folder))[0]
    if not (takes_any_head and shape.kind == "encoder"):
        read_config(folder, PURPOSES[PRETRAINED[shape.kind]])
    return shape.model_dump(mode="json")


def known_shape(name: str) -> ModelConfig | None:
    """Returns the shape of a built-in name or of a local model; None for anything else."""
    if Path(name).is_dir() or is_gguf(name):
        folder = shape_and_tokenizer(name)
        return read_config(folder, purpose_of(folder))[0]
    built_in = built_in_shape(name)
    return None if built_in is None else ModelConfig.model_validate(built_in)


def built_in_names() -> list[str]:
    """Returns the names of the shapes in configs/models. Shapes of hub models are named by their hub ids."""
    folder = Path(str(files("configs").joinpath("models")))
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in _shape_files(folder))


def built_in_shape(name: str) -> dict[str, Any] | None:
    """Returns the fields of a shape in configs/models, such as "gpt3-125m" or "Qwen/Qwen2.5-0.5B", or else None."""
    if name not in built_in_names():
        return None
    return tomllib.loads(files("configs").joinpath(f"models/{name}.toml").read_text(encoding="utf-8"))


def _shape_files(folder: Path) -> list[Path]:
    return [*folder.glob("*.toml"), *folder.glob("*/*.toml")]


def hub_models(job: JobConfig) -> tuple[Path, ...]:
    """Returns the local folders of the hub models that stages name, downloaded if needed, and the GGUF files they name.

    Raises: ValueError naming the field of a model that is not found, or that cannot be trained as [engine] says.
    """
    folders = list[Path]()
    for stage in job.stages:
        for field, name in stage.models_in(job.section_of(stage)):
            try:
                folder = model_directory(name)
                if field == "init_from":
                    job.check_shape(read_config(folder, purpose_of(folder))[0])
                folders += [folder] if hub_name(folder) else []
                folders += [Path(name).expanduser().absolute()] if is_gguf(name) else []
            except ValueError as error:
                raise ValueError(f"{stage.name}.{field}: {error}") from None
    return tuple(dict.fromkeys(folders))


def fetch_models(group: WorkerGroup, models: Sequence[Path]) -> None:
    """Download these models on each machine of a group that lacks them, and dequantise the GGUF files among them.

    All machines must see the GGUF files. No rank waits for another meanwhile.
    Raises: ValueError naming a machine that fails, and why.
    """
    if models:
        group.run("hub models", _fetch, models)


def _fetch(models: Sequence[Path]) -> None:
    for folder in models:
        try:
            _ = model_directory(str(folder)) if is_gguf(str(folder)) else on_this_machine(folder)
        except ValueError as error:
            raise ValueError(f"{socket.gethostname()}: {error}") from None
