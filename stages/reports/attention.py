"""Draws the attention of a model's heads as a picture, for `heed inspect attention`.

Shape letters: L layers, B batch, N heads, T queries, S keys.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lm.encoder import EncoderDecoder
from lm.inspection import HeadAttention, attention_weights, measure_heads
from lm.model import LanguageModel, ScalarModel, Transformer
from lm.tokenizer import Tokenizer
from lm.weights import Model, load_any

MAX_TOKENS = 64  # a picture with more labels than that cannot be read
MAX_MEASURED_TOKENS = 512  # all heads' weights are in memory at once: 0.4 GB for 24 layers of 16 heads


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
