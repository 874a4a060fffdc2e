"""`heed inspect`: a model's shape in numbers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from heed.commands.options import model_folder
from stages.progress import results_console

if TYPE_CHECKING:
    from lm.config import ModelConfig

_LOOKED_UP = ("embedding.weight", "positions.weight", "token_types.weight")


def inspect(
    shape: Annotated[
        Path, typer.Argument(help="A model directory or .gguf file, or a TOML file with a model's shape or a job.")
    ],
) -> None:
    """Show parameters by part, FLOPs per token and key-value cache per token."""
    results_console().print(describe(read_shape(shape)))


def read_shape(path: Path) -> "ModelConfig":
    """Returns the shape of a model, of a file such as configs/models/gpt3-175b.toml, or of a job.

    Raises: ValueError naming file and field.
    """
    from heed.jobs.job_file import load_job, read_toml, validated
    from lm.config import ModelConfig
    from lm.hub import is_gguf
    from lm.weights import purpose_of, read_config

    if path.is_dir() or is_gguf(str(path)):
        folder = model_folder(path)
        return read_config(folder, purpose_of(folder))[0]
    values = read_toml(path, str(path))
    if "name" in values:
        model = load_job(path, opens_models=False).model
        if model is None:
            raise ValueError(f"{path}: the job has no [model] and starts from none")
        return model
    return validated(ModelConfig, values.get("model", values), lambda _key: str(path))


def describe(config: "ModelConfig") -> Table:
    """Returns a table of parameters by part, and of costs per token."""
    from lm.inspection import cache_bytes_per_token, flops_per_source_token, flops_per_token, parameter_table

    table = Table(box=None, pad_edge=False)
    for column in ("part", "shape", "tensors", "parameters"):
        table.add_column(column, justify="left" if column == "part" else "right", overflow="fold")
    parts = parameter_table(config)
    for part in parts:
        shape = " x ".join(f"{size:,}" for size in part.shape)
        table.add_row(part.name, shape, str(part.num_tensors), f"{part.num_parameters:,}")
    total = sum(part.num_parameters for part in parts)
    lookups = sum(part.num_parameters for part in parts if part.name.endswith(_LOOKED_UP))
    table.add_section()
    table.add_row("all", "", str(sum(part.num_tensors for part in parts)), f"{total:,}")
    table.add_row("without embeddings", "", "", f"{total - lookups:,}")
    table.add_section()
    for context in (1, config.max_position_embeddings):
        label = f"FLOPs per token, forward, {context:,} in context"
        table.add_row(label, "", "", f"{flops_per_token(config, context):,}")
    if config.kind == "encoder-decoder":
        label = f"FLOPs per source token, of {config.max_position_embeddings:,}"
        table.add_row(label, "", "", f"{flops_per_source_token(config):,}")
    if config.kind != "encoder":
        table.add_row("key-value cache, bytes per token, bf16", "", "", f"{cache_bytes_per_token(config):,}")
    return table
