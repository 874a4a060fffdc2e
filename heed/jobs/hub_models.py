"""A job's models from the hub and from GGUF files: every machine downloads, or dequantises, them for itself."""

import socket
from collections.abc import Sequence
from pathlib import Path

from cluster.group import WorkerGroup
from heed.jobs.job import JobConfig
from lm.hub import hub_name, is_gguf, model_directory, on_this_machine


def hub_models(job: JobConfig) -> tuple[Path, ...]:
    """The folders on this machine of the hub models that the job's stages name, downloaded if needed; the GGUF files.

    Raises: ValueError naming the field of a model that is neither a folder, nor a GGUF file, nor on the hub.
    """
    found = list[Path]()
    for stage in job.stages:
        for field in stage.model_fields:
            name = getattr(job.section_of(stage), field)
            try:
                folder = model_directory(name) if name else Path()
                found += [folder] if hub_name(folder) else []
                found += [Path(name).expanduser().absolute()] if is_gguf(name) else []
            except ValueError as error:
                raise ValueError(f"{stage.name}.{field}: {error}") from None
    return tuple(dict.fromkeys(found))


def fetch_models(group: WorkerGroup, models: Sequence[Path]) -> None:
    """Download these models on each machine of a group that lacks them, and dequantise these GGUF files, which all
    machines must see. No rank waits for another meanwhile.

    Raises: ValueError naming the machine that cannot, and why.
    """
    if models:
        group.run("hub models", _fetch, models)


def _fetch(models: Sequence[Path]) -> None:
    for folder in models:
        try:
            _ = model_directory(str(folder)) if is_gguf(str(folder)) else on_this_machine(folder)
        except ValueError as error:
            raise ValueError(f"{socket.gethostname()}: {error}") from None
