"""Draws the attention of every head of a layer as one picture, and measures the heads of all layers:

    python -m benchmarks.attention runs/demo/sft/model "Mia has a red kite." --layer 1

docs/transformer.md shows what came out. Without --target, it lists how much of its attention each head gives to the
preceding token, to the first token and to the token itself, on average over tokens from the third on.

Shape letters: L layers, B batch, T query tokens, S key tokens, N heads, H head dim.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from heed.commands.options import model_folder
from lm.attention import Attention, CrossAttention, attend
from lm.cache import CrossAttentionCache
from lm.encoder import EncoderDecoder
from lm.model import LanguageModel, ScalarModel, Transformer
from lm.tokenizer import Tokenizer
from lm.weights import Model, load_any
from stages.progress import console, results_console
from training.data import TextConfig, read_texts

NUM_TEXTS = 100  # that heads are measured on, at most
MAX_TOKENS = 64  # a picture with more labels than that cannot be read
MAX_MEASURED_TOKENS = 512  # all heads' weights are in memory at once: 0.4 GB for 24 layers of 16 heads


@torch.inference_mode()
def attention_weights(
    stack: Transformer, tokens_BT: Tensor, cross_cache: CrossAttentionCache | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns softmax(Q Kᵀ / √H) of every head: self-attention [L, B, N, T, T], and attention to an encoder
    [L, B, N, T, S] or None. Rows sum to 1.

    Raises: ValueError for a model with linear layers, which have no weights.
    """
    if stack.config.num_linear_layers:
        raise ValueError(
            "model.layer_types has linear_attention, which has no weights to draw; full_attention expected"
        )
    self_weights: list[Tensor] = []
    across: list[Tensor] = []

    def look(attention: Attention, inputs: tuple[Any, ...]) -> None:
        x_BTD, rotary, mask_BTT, _, _, _, query_scale = inputs
        q_BNTH, k_BGTH, _ = attention.project(x_BTD, rotary)
        scaled_BNTH = q_BNTH if query_scale is None else q_BNTH * query_scale
        self_weights.append(_weights(scaled_BNTH, k_BGTH, mask_BTT, attention.cap))

    def look_across(attention: CrossAttention, inputs: tuple[Any, ...]) -> None:
        x_BTD, seen, layer = inputs
        across.append(_weights(attention.queries(x_BTD), seen.keys[layer], seen.real_BS[:, None]))

    with ExitStack() as watching:
        for module in stack.modules():
            if isinstance(module, Attention):
                watching.enter_context(module.register_forward_pre_hook(look))
            elif isinstance(module, CrossAttention):
                watching.enter_context(module.register_forward_pre_hook(look_across))
        stack.hidden(tokens_BT, None, cross_cache)
    return torch.stack(self_weights), torch.stack(across) if across else None


@dataclass(frozen=True)
class HeadAttention:
    """Mean attention weights of a head, from 0 to 1: to the preceding token, the first token, and the token itself."""

    layer: int
    head: int
    preceding: float
    first: float
    itself: float


def measure_heads(stack: Transformer, texts: Iterable[Sequence[int]]) -> list[HeadAttention]:
    """Returns every head's mean weights in self-attention, over all texts' tokens from the third on.

    For the first two tokens, some of the three coincide. The list is empty if no text has three tokens.
    """
    sums_3LN, count = torch.zeros(3, 1, 1), 0
    for tokens in texts:
        if len(tokens) < 3:
            continue
        weights_LNTT = attention_weights(stack, torch.tensor([list(tokens)]))[0][:, 0]
        to_preceding = weights_LNTT.diagonal(-1, dim1=-2, dim2=-1)[..., 1:]
        to_itself = weights_LNTT.diagonal(0, dim1=-2, dim2=-1)[..., 2:]
        sums_3LN = sums_3LN + torch.stack([to_preceding, weights_LNTT[..., 2:, 0], to_itself]).double().sum(dim=-1)
        count += len(tokens) - 2
    if not count:
        return []
    preceding_LN, first_LN, itself_LN = (sums_3LN / count).tolist()
    rows = zip(preceding_LN, first_LN, itself_LN, strict=True)
    return [
        HeadAttention(layer, head, *means)
        for layer, of_layer in enumerate(rows)
        for head, means in enumerate(zip(*of_layer, strict=True))
    ]


def _weights(q_BNTH: Tensor, k_BGSH: Tensor, mask_BTS: Tensor | None, cap: float = 0.0) -> Tensor:
    """Computes attention weights: with unit vectors as values, `attend` returns them."""
    T, S = q_BNTH.shape[2], k_BGSH.shape[2]
    unit_BGSS = torch.eye(S, dtype=q_BNTH.dtype, device=q_BNTH.device).expand(*k_BGSH.shape[:2], S, S)
    if mask_BTS is not None and mask_BTS.dim() == 3:
        mask_BTS = mask_BTS.expand(-1, T, -1)
    return attend(q_BNTH, k_BGSH, unit_BGSS, mask_BTS, cap=cap)


def draw_attention(
    folder: Path, text: str, layer: int, path: Path, target: str = "", texts: Sequence[str] = ()
) -> list[HeadAttention]:
    """Draws heatmaps of all heads of a layer into one PNG: rows are queries, columns keys; darker means more attention.

    For an encoder-decoder, it shows the encoder or, with a `target`, how the target's tokens attend to the text.
    `layer` counts from 0; negative numbers count from the last.
    Returns the measures of all layers' heads, over `texts` or, without any, over `text`; none with a `target`, since
    they are about tokens of one text. `texts` are cut at the context's end, or after `MAX_MEASURED_TOKENS`.
    Raises: ValueError for a layer that does not exist, for text without tokens or with more than fit the context or a
    picture, and for a target if the model is not an encoder-decoder.
    """
    model, tokenizer = load_any(folder).eval(), Tokenizer.load(folder)
    if target and not isinstance(model, EncoderDecoder):
        raise ValueError(f"{folder}: a target needs an encoder-decoder; model.kind is {model.config.kind!r}")

    def encoded(read: Sequence[str]) -> list[list[int]]:
        found = tokenizer.encode_plain(read)
        if model.config.kind == "decoder":
            return found
        start = [tokenizer.start_id] if tokenizer.start or model.config.kind == "encoder" else []
        return [[*start, *own, tokenizer.end_id] for own in found]

    (keys,) = encoded([text])
    queries = [tokenizer.target_start_id, *tokenizer.encode_plain([target])[0]] if target else keys
    most = min(MAX_TOKENS, model.config.max_position_embeddings)
    for tokens in (keys, queries):
        if not 1 <= len(tokens) <= most:
            raise ValueError(f"the text has {len(tokens)} tokens; 1 to {most} were expected")
    weights_LNTS = _all_weights(model, keys, queries if target else [])
    longest = min(MAX_MEASURED_TOKENS, model.config.max_position_embeddings)
    measured = [own[:longest] for own in encoded(texts)] or [keys]
    heads = [] if target else measure_heads(_stack(model), measured)
    num_layers = len(weights_LNTS)
    if not -num_layers <= layer < num_layers:
        raise ValueError(f"layer is {layer}; {-num_layers} to {num_layers - 1} were expected")
    title = f"{folder}: layer {layer % num_layers} (0 to {num_layers - 1})"
    chosen_heads = [head for head in heads if head.layer == layer % num_layers]
    _draw(weights_LNTS[layer], _labels(tokenizer, queries), _labels(tokenizer, keys), title, path, chosen_heads)
    return heads


def _all_weights(model: Model, keys: Sequence[int], queries: Sequence[int]) -> Tensor:
    """Returns the attention weights [L, N, T, S] within one text, or from `queries` to `keys`."""
    source = torch.tensor([keys])
    if queries:
        assert isinstance(model, EncoderDecoder)
        _, across_LBNTS = attention_weights(model.decoder, torch.tensor([queries]), model.read(source))
        assert across_LBNTS is not None
        return across_LBNTS[:, 0]
    return attention_weights(_stack(model), source)[0][:, 0]


def _stack(model: Model) -> Transformer:
    return model.decoder if isinstance(model, LanguageModel | ScalarModel) else model.encoder


def _labels(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    return [tokenizer.decode([token]).replace("\n", "\\n") or tokenizer.token_text(token) for token in tokens]


def _draw(
    weights_NTS: Tensor,
    queries: Sequence[str],
    keys: Sequence[str],
    title: str,
    path: Path,
    measures: Sequence[HeadAttention],
) -> None:
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
        label = f"head {head}"
        if measures:
            measure = measures[head]
            label += f"\npreceding {measure.preceding:.2f}, first {measure.first:.2f}, itself {measure.itself:.2f}"
        axis.set_title(label, fontsize=9)
        axis.set_xticks(range(len(keys)), keys, rotation=90, fontsize=7)
        axis.set_yticks(range(len(queries)), queries, fontsize=7)
    axes[0, 0].set_ylabel("query", fontsize=8)
    axes[0, 0].set_xlabel("key", fontsize=8)
    figure.colorbar(picture, ax=axes, shrink=0.6, label="weight")
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def heads_table(heads: Sequence[HeadAttention]) -> Table:
    """Returns a table of the heads, those that attend most to the preceding token first."""
    table = Table(box=None, pad_edge=False)
    for column in ("layer", "head", "preceding token", "first token", "itself"):
        table.add_column(column, justify="right")
    for of in sorted(heads, key=lambda of: -of.preceding):
        table.add_row(str(of.layer), str(of.head), *(f"{mean:.3f}" for mean in (of.preceding, of.first, of.itself)))
    return table


def main(
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
    if texts and target:
        raise ValueError("--texts with --target: heads are measured within one text; one of the two was expected")
    read = list(read_texts([TextConfig(source=texts, max_rows=NUM_TEXTS)])) if texts else []
    heads = draw_attention(model_folder(model), text, layer, png, target, read)
    if heads:
        results_console().print(heads_table(heads))
    elif not target:
        console.print("heads are not measured: no text has three tokens")
    console.print(str(png))


if __name__ == "__main__":
    typer.run(main)
