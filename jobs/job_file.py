"""Reading a job file: TOML and `--set` overrides to a checked job, or an error that names the place."""

import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from jobs.job import BUILT_IN_JOB, JobConfig, PlaygroundSection, ReviewsSection, job_type
from jobs.registry import Registry, registry_with
from lm.hub import model_directory
from lm.weights import PRETRAINED, PURPOSES, purpose_of, read_config

AnyModel = TypeVar("AnyModel", bound=BaseModel)


def load_job(path: Path | None, overrides: Sequence[str] = (), *, opens_models: bool = True) -> JobConfig:
    """A job file (None: the built-in demo) with `--set` overrides such as "ppo.kl_coef=0.05".

    Where the first stage starts from a model, its shape is read from there; without `opens_models` a `[model]` that is
    written out is taken at its word, so that nothing is fetched.
    Errors: ValueError naming file, field, value and what was expected.
    """
    source = files("configs").joinpath("jobs/demo.toml") if path is None else path
    name = "configs/jobs/demo.toml" if path is None else str(path)
    values = read_toml(source, name)
    for override in overrides:
        _apply_override(values, override)
    made = _job_type(name, values)
    if opens_models or "model" not in values:
        _take_shape(name, values, made.registry)
    return validated(made, values, name)


def _job_type(name: str, values: Mapping[str, Any]) -> type[JobConfig]:
    """The job's config, with a section for each stage that the job brings itself."""
    places = values.get("custom_stages")
    if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
        return BUILT_IN_JOB  # what else it may be is refused with the other keys
    try:
        return job_type(registry_with(places))
    except ValueError as error:
        raise ValueError(f"{name}: custom_stages: {error}") from None


def read_toml(source: Traversable, name: str) -> dict[str, Any]:
    """Errors: ValueError naming the file, and the line where it is no TOML."""
    try:
        return tomllib.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{name}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name}: not TOML: {error}") from None


def validated(model: type[AnyModel], values: Mapping[str, Any], name: str) -> AnyModel:
    """Errors: ValueError naming the file and every key that is wrong, what was found, and what was expected."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_explain(dict(problem), model) for problem in error.errors())
        raise ValueError(f"{name}: {problems}") from None


def _take_shape(name: str, values: dict[str, Any], registry: Registry) -> None:
    """Where the first stage starts from a model, `[model]` is that model's shape, and is checked if it is written."""
    # A stage whose model may have another shape than the policy, as a reward model may, says nothing about it.
    of_policy = (stage for stage in registry if "init_from" in stage.config.model_fields and not stage.has_own_shape)
    first = next((stage.name for stage in of_policy if isinstance(values.get(stage.name), dict)), "")
    init_from = values[first].get("init_from") if first else None
    if not isinstance(init_from, str) or not init_from:
        return
    try:
        folder = model_directory(init_from)
        kind = read_config(folder, purpose_of(folder))[0].kind
        # A head for scores or labels is no start: the stage trains what such a shape is pretrained as.
        shape = read_config(folder, PURPOSES[PRETRAINED[kind]])[0].model_dump(mode="json")
    except ValueError as error:
        raise ValueError(f"{name}: {first}.init_from: {error}") from None
    written = values.get("model", {})
    for key, value in written.items() if isinstance(written, dict) else ():
        if key in shape and value != shape[key]:
            raise ValueError(
                f"{name}: model.{key} is {value!r}, but {init_from} has {shape[key]!r}; leave [model] out where"
                f" {first}.init_from brings its shape"
            )
    values["model"] = {**shape, **written} if isinstance(written, dict) else written


def _apply_override(values: dict[str, Any], override: str) -> None:
    """Set one dotted key; the value is TOML, or a bare string where it is not."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ValueError(f"--set {override!r}: KEY=VALUE was expected")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.strip().split(".")
    place = values
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ValueError(f"--set {override!r}: {parent!r} is not a section")
    place[leaf] = value


def _explain(problem: Mapping[str, Any], model: type[BaseModel]) -> str:
    """One validation error as: full key, what was found, what was expected."""
    # The discriminated union puts its tag into the location; users know the key without it.
    location = [str(part) for part in problem["loc"] if part not in ("playground", "reviews")]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _keys_beside(location, model)
        close = get_close_matches(location[-1], known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(sorted(known))}"
        return f"{key}: unknown key{hint}"
    if problem["type"] == "missing":
        return f"{key}: missing"
    message = problem["msg"].removeprefix("Value error, ")
    simple = isinstance(problem["input"], str | int | float | bool)
    return (f"{key}: " if key else "") + message + (f", found {problem['input']!r}" if simple else "")


def _keys_beside(location: Sequence[str], model: type[BaseModel]) -> list[str]:
    """The fields that the section holding this key knows."""
    models = [model]
    for part in location[:-1]:
        if part.isdigit():
            continue
        if part == "world":
            models = [PlaygroundSection, ReviewsSection]
            continue
        fields = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = [found for field in fields for found in _models_in(field)]
    return [name for model in models for name in model.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _models_in(part)]
