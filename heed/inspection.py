"""`heed inspect`: a model's shape in numbers, and what its heads attend to as a picture."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from jobs.job_file import read_toml, validated
from lm.config import ModelConfig
from lm.encoder_decoder import EncoderDecoder
from lm.inspection import (
    attention_weights,
    cache_bytes_per_token,
    flops_per_source_token,
    flops_per_token,
    parameter_table,
)
from lm.model import LanguageModel, ScalarModel
from lm.tokenizer import Tokenizer
from lm.weights import Model, load_any, purpose_of, read_config

_LOOKED_UP = ("embedding.weight", "positions.weight", "token_types.weight")
MAX_TOKENS = 64  # more labels than that cannot be read on one picture


def read_shape(path: Path) -> ModelConfig:
    """The shape of a model directory, of a file such as configs/models/gpt3-175b.toml, or of a job's `[model]`.

    Errors: ValueError naming file and field.
    """
    if path.is_dir():
        return read_config(path, purpose_of(path))[0]
    values = read_toml(path, str(path))
    return validated(ModelConfig, values.get("model", values), str(path))


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
    lookups = sum(part.num_parameters for part in parts if part.name.endswith(_LOOKED_UP))
    table.add_section()
    table.add_row("all", "", str(sum(part.num_tensors for part in parts)), f"{total:,}")
    table.add_row("without embeddings", "", "", f"{total - lookups:,}")
    table.add_section()
    for context in (1, config.max_position_embeddings):
        label = f"FLOPs a token, forward, {context:,} in context"
        table.add_row(label, "", "", f"{flops_per_token(config, context):,}")
    if config.kind == "encoder-decoder":
        label = f"FLOPs a token that is read, of {config.max_position_embeddings:,}"
        table.add_row(label, "", "", f"{flops_per_source_token(config):,}")
    if config.kind != "encoder":
        table.add_row("key-value cache, bytes a token, bf16", "", "", f"{cache_bytes_per_token(config):,}")
    return table


def draw_attention(folder: Path, text: str, layer: int, path: Path, target: str = "") -> None:
    """Heatmaps of all heads of a layer as one PNG: rows are queries, columns keys, dark is attended.

    An encoder-decoder's picture is of its encoder; with a `target`, of how the tokens of that look at the text's.
    `layer` counts from 0; negative numbers count from the last. Errors: ValueError for a layer that is not there, text
    of no token or more than fit the context or a picture, and a target for a model that reads no source.
    """
    model, tokenizer = load_any(folder).eval(), Tokenizer.load(folder)
    if target and not isinstance(model, EncoderDecoder):
        raise ValueError(f"{folder}: a target is for an encoder-decoder; model.kind is {model.config.kind!r}")
    (keys,) = tokenizer.encode_plain([text])
    if model.config.kind != "decoder":
        keys = [tokenizer.start_id, *keys, tokenizer.end_id]
    queries = [tokenizer.end_id, *tokenizer.encode_plain([target])[0]] if target else keys
    most = min(MAX_TOKENS, model.config.max_position_embeddings)
    for tokens in (keys, queries):
        if not 1 <= len(tokens) <= most:
            raise ValueError(f"the text has {len(tokens)} tokens; 1 to {most} were expected")
    weights_LNTS = _all_weights(model, keys, queries if target else [])
    num_layers = len(weights_LNTS)
    if not -num_layers <= layer < num_layers:
        raise ValueError(f"layer is {layer}; {-num_layers} to {num_layers - 1} were expected")
    title = f"{folder}: layer {layer % num_layers} (0 to {num_layers - 1})"
    _draw(weights_LNTS[layer], _labels(tokenizer, queries), _labels(tokenizer, keys), title, path)


def _all_weights(model: Model, keys: Sequence[int], queries: Sequence[int]) -> Tensor:
    """[L, N, T, S] of one text, or across from `queries` to it."""
    source = torch.tensor([keys])
    if queries:
        assert isinstance(model, EncoderDecoder)
        _, across_LBNTS = attention_weights(model.decoder, torch.tensor([queries]), model.read(source))
        assert across_LBNTS is not None
        return across_LBNTS[:, 0]
    stack = model.decoder if isinstance(model, LanguageModel | ScalarModel) else model.encoder
    return attention_weights(stack, source)[0][:, 0]


def _labels(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    return [tokenizer.decode([token]).replace("\n", "\\n") or tokenizer.token_text(token) for token in tokens]


def _draw(weights_NTS: Tensor, queries: Sequence[str], keys: Sequence[str], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_heads = len(weights_NTS)
    columns = min(4, num_heads)
    rows = -(-num_heads // columns)
    width, height = (max(2.4, 0.26 * len(labels)) for labels in (keys, queries))
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns + 1, (height + 0.6) * rows), squeeze=False, layout="constrained"
    )
    for head, axis in enumerate(axes.flat):
        if head >= num_heads:
            axis.set_axis_off()
            continue
        picture = axis.imshow(weights_NTS[head].float().numpy(), cmap="Greys", vmin=0, vmax=1)
        axis.set_title(f"head {head}", fontsize=9)
        axis.set_xticks(range(len(keys)), keys, rotation=90, fontsize=7)
        axis.set_yticks(range(len(queries)), queries, fontsize=7)
    axes[0, 0].set_ylabel("query", fontsize=8)
    axes[0, 0].set_xlabel("key", fontsize=8)
    figure.colorbar(picture, ax=axes, shrink=0.6, label="weight")
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
