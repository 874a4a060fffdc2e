"""`heed inspect`: a model's shape in numbers, and what its heads attend to as a picture."""

import tomllib
from pathlib import Path

import torch
from pydantic import ValidationError
from rich.table import Table

from lm.config import ModelConfig
from lm.inspection import attention_weights, cache_bytes_per_token, flops_per_token, parameter_table
from lm.tokenizer import Tokenizer
from lm.weights import load_language_model, read_config

MAX_TOKENS = 64  # more labels than that cannot be read on one picture


def read_shape(path: Path) -> ModelConfig:
    """The shape of a model directory, of a file such as configs/models/gpt3-175b.toml, or of a job's `[model]`.

    Errors: ValueError naming file and field.
    """
    if path.is_dir():
        return read_config(path, "language")[0]
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; a model directory or a TOML file was expected") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    try:
        return ModelConfig.model_validate(values.get("model", values))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def describe(config: ModelConfig) -> Table:
    """Parameters part by part, and what a token costs."""
    table = Table(box=None, pad_edge=False)
    for column in ("part", "shape", "tensors", "parameters"):
        table.add_column(column, justify="left" if column == "part" else "right", overflow="fold")
    parts = parameter_table(config)
    for part in parts:
        shape = " x ".join(f"{size:,}" for size in part.shape)
        table.add_row(part.name, shape, str(part.num_tensors), f"{part.num_parameters:,}")
    total = sum(part.num_parameters for part in parts)
    lookups = sum(part.num_parameters for part in parts if part.name in ("embedding.weight", "positions.weight"))
    table.add_section()
    table.add_row("all", "", str(sum(part.num_tensors for part in parts)), f"{total:,}")
    table.add_row("without embeddings", "", "", f"{total - lookups:,}")
    table.add_section()
    for context in (1, config.context_tokens):
        label = f"FLOPs a token, forward, {context:,} in context"
        table.add_row(label, "", "", f"{flops_per_token(config, context):,}")
    table.add_row("key-value cache, bytes a token, bf16", "", "", f"{cache_bytes_per_token(config):,}")
    return table


def draw_attention(folder: Path, text: str, layer: int, path: Path) -> None:
    """Heatmaps of all heads of a layer as one PNG: rows are queries, columns keys, dark is attended.

    `layer` counts from 0; negative numbers count from the last. Errors: ValueError for a layer that is not there, or
    text of no token or more than fit the context or a picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    model, tokenizer = load_language_model(folder).eval(), Tokenizer.load(folder)
    (tokens,) = tokenizer.encode_plain([text])
    most = min(MAX_TOKENS, model.config.context_tokens)
    if not 1 <= len(tokens) <= most:
        raise ValueError(f"the text has {len(tokens)} tokens; 1 to {most} were expected")
    num_layers, num_heads = model.config.num_layers, model.config.num_heads
    if not -num_layers <= layer < num_layers:
        raise ValueError(f"layer is {layer}; {-num_layers} to {num_layers - 1} were expected")
    weights_NTS = attention_weights(model, torch.tensor([tokens]))[layer, 0]
    labels = [tokenizer.decode([token]).replace("\n", "\\n") or tokenizer.token_text(token) for token in tokens]
    columns = min(4, num_heads)
    rows = -(-num_heads // columns)
    side = max(2.4, 0.26 * len(tokens))
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(side * columns + 1, (side + 0.6) * rows), squeeze=False, layout="constrained"
    )
    for head, axis in enumerate(axes.flat):
        if head >= num_heads:
            axis.set_axis_off()
            continue
        picture = axis.imshow(weights_NTS[head].float().numpy(), cmap="Greys", vmin=0, vmax=1)
        axis.set_title(f"head {head}", fontsize=9)
        axis.set_xticks(range(len(tokens)), labels, rotation=90, fontsize=7)
        axis.set_yticks(range(len(tokens)), labels, fontsize=7)
    axes[0, 0].set_ylabel("query", fontsize=8)
    axes[0, 0].set_xlabel("key", fontsize=8)
    figure.colorbar(picture, ax=axes, shrink=0.6, label="weight")
    figure.suptitle(f"{folder}: layer {layer % num_layers} (0 to {num_layers - 1})", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
