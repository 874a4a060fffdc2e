"""Reading a job file: TOML, bases and `--set` overrides to a checked job, or an error that names the place."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from heed.jobs.config_errors import fields_at, literals_of, unknown_key, validated
from heed.jobs.job import BUILT_IN_JOB, JobConfig, job_type
from heed.jobs.model_shape import take_shape
from heed.jobs.registry import registry_with
from heed.jobs.toml_values import NONE, Override, read_job_values, read_toml


def load_job(path: Path | None, overrides: Sequence[str] = (), *, opens_models: bool = True) -> JobConfig:
    """A job file (None: the built-in demo) with `--set` overrides such as "ppo.kl_coef=0.05".

    Where the first stage starts from a model, its shape is read from there. Without `opens_models` nothing is fetched
    as long as the shape is written out, built in, or in a folder here.
    Raises: ValueError naming file, field, value and what was expected.
    """
    name = "configs/jobs/demo.toml" if path is None else str(path)
    values = read_toml(files("configs").joinpath("jobs/demo.toml"), name) if path is None else read_job_values(path)
    for given in overrides:
        _apply(name, values, Override.parse(given))
    config = _job_type(name, values)
    take_shape(name, values, config.known_stages, opens_models=opens_models)
    return validated(config, values, name)


def _apply(name: str, values: dict[str, Any], override: Override) -> None:
    """Set one key, or remove it. A key that has "none" among its values, as `ppo.advantage_scale` has, is set to it.

    Raises: ValueError as `Override.set`, and for a key to be removed that no job has.
    """
    if not override.removes:
        override.set(values)
        return
    config = _job_type(name, values)
    if any(NONE in literals_of(field.annotation) for field in fields_at(config, override.path)):
        override.set(values)
    elif not override.remove(values):
        for place, key in enumerate(override.path):
            if not fields_at(config, override.path[: place + 1]):
                raise ValueError(f"--set {override}: {unknown_key(override.path[:place], key, config)}")


def _job_type(name: str, values: Mapping[str, Any]) -> type[JobConfig]:
    """The job's config, with a section for each stage that the job brings itself."""
    places = values.get("custom_stages")
    if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
        return BUILT_IN_JOB  # anything else is refused with the other keys
    try:
        return job_type(registry_with(places))
    except ValueError as error:
        raise ValueError(f"{name}: custom_stages: {error}") from None
