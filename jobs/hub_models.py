"""A job's models from the Hugging Face hub: every machine downloads them for itself."""

import socket
from collections.abc import Sequence
from pathlib import Path

from cluster.group import WorkerGroup
from jobs.job import JobConfig
from lm.hub import hub_name, model_directory, on_this_machine


def hub_models(job: JobConfig) -> tuple[Path, ...]:
    """The folders on this machine of the hub models that the job's stages name, downloaded if needed.

    Raises: ValueError naming the field of a model that is neither a folder nor on the hub.
    """
    found = list[Path]()
    for stage in job.stages:
        for field in stage.model_fields:
            name = getattr(job.section_of(stage), field)
            try:
                found += [model_directory(name)] if name else []
            except ValueError as error:
                raise ValueError(f"{stage.name}.{field}: {error}") from None
    return tuple(folder for folder in dict.fromkeys(found) if hub_name(folder))


def fetch_models(group: WorkerGroup, models: Sequence[Path]) -> None:
    """Download these hub models on each machine of a group that lacks them. No rank waits for another meanwhile.

    Raises: ValueError naming the machine that cannot, and why.
    """
    if models:
        group.run("hub models", _fetch, models)


def _fetch(models: Sequence[Path]) -> None:
    for folder in models:
        try:
            on_this_machine(folder)
        except ValueError as error:
            raise ValueError(f"{socket.gethostname()}: {error}") from None
