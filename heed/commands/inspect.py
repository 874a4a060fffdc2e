"""`heed inspect`: a model's shape in numbers, and its attention as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from heed.commands.options import model_folder
from stages.progress import console, results_console

if TYPE_CHECKING:
    from lm.config import ModelConfig
    from lm.inspection import HeadAttention

inspect_app = typer.Typer(no_args_is_help=True, help="Look inside a model.")

NUM_TEXTS = 100  # that heads are measured on, at most
_LOOKED_UP = ("embedding.weight", "positions.weight", "token_types.weight")


@inspect_app.command("model")
def inspect_model(
    shape: Annotated[
        Path, typer.Argument(help="A model directory or .gguf file, or a TOML file with a model's shape or a job.")
    ],
) -> None:
    """Show parameters by part, FLOPs per token and key-value cache per token."""
    results_console().print(describe(read_shape(shape)))


@inspect_app.command("attention")
def inspect_attention(
    model: Annotated[Path, typer.Argument(help="A model directory, such as runs/demo/ppo/model.")],
    text: Annotated[str, typer.Argument(help="The text that the model reads.")],
    layer: Annotated[int, typer.Option(help="Layer, counted from 0; -1 is the last.")] = -1,
    png: Annotated[Path, typer.Option(help="File for the picture.")] = Path("attention.png"),
    target: Annotated[
        str, typer.Option(help="For an encoder-decoder: an output text, to show how it attends to TEXT.")
    ] = "",
    texts: Annotated[
        str,
        typer.Option(
            help="Texts to measure the heads on, of which the first 100 are read: a text file, or JSONL, CSV or Parquet"
            " with a field text (default: TEXT)."
        ),
    ] = "",
) -> None:
    """Draw the attention of every head of a layer as one picture: rows are queries, columns are keys.

    Also measure the heads of all layers, without --target: how much of its attention each gives to the preceding token,
    to the first token and to the token itself, on average over tokens from the third on.
    """
    from stages.reports.attention import draw_attention
    from training.data import TextConfig, read_texts

    if texts and target:
        raise ValueError("--texts with --target: heads are measured within one text; one of the two was expected")
    read = list(read_texts([TextConfig(source=texts, max_rows=NUM_TEXTS)])) if texts else []
    heads = draw_attention(model_folder(model), text, layer, png, target, read)
    if heads:
        results_console().print(heads_table(heads))
    elif not target:
        console.print("heads are not measured: no text has three tokens")
    console.print(str(png))


def heads_table(heads: Sequence["HeadAttention"]) -> Table:
    """Returns a table of the heads, those that attend most to the preceding token first."""
    table = Table(box=None, pad_edge=False)
    for column in ("layer", "head", "preceding token", "first token", "itself"):
        table.add_column(column, justify="right")
    for of in sorted(heads, key=lambda of: -of.preceding):
        table.add_row(str(of.layer), str(of.head), *(f"{mean:.3f}" for mean in (of.preceding, of.first, of.itself)))
    return table


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
