"""Inspect a model: where its parameters are, what a token costs, and the memory of a pass.

Memory is a count of the tensors that autograd keeps from the forward to the backward pass. Korthikanti et al. (arXiv
2205.05198, eq. 1) count 34 s·b·h + 5 a·s²·b bytes per layer for a GPT with dropout in fp16. This is the same count for
this code: its norms keep their input, SwiGLU keeps three widths, dropout is optional, and fused attention (on a GPU)
keeps no attention weights. `tests/lm/test_inspection.py` compares every term with what PyTorch saves.

In the memory formulas, c is the bytes per number in a matrix product, s those in the residual stream; N heads, H head
dim, D width, G key-value heads, M MLP width, T tokens of a row. Letters of linear layers are those of `lm.delta`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from lm.config import ModelConfig
from lm.delta import chunk_bytes
from lm.experts import route_dtype
from lm.source import on_meta
from lm.weights import PRETRAINED


@dataclass(frozen=True)
class Part:
    """A group of parameters: `name` without the layer number, tensors of that name, and their parameters in total."""

    name: str
    shape: tuple[int, ...]
    num_tensors: int
    num_parameters: int


@functools.lru_cache(maxsize=256)  # a plan asks for the same shapes dozens of times
def parameter_table(config: ModelConfig) -> tuple[Part, ...]:
    """Returns the parameters of a model of this shape, as it is pretrained, in the order of the forward pass.

    No weights are allocated. Blocks share one row per tensor; a tied head is the embedding and is not counted again.
    """
    kind = PRETRAINED[config.kind]
    model = on_meta(lambda: kind(config))
    # Names leave out a model's only transformer.
    stack = "" if config.kind == "encoder-decoder" else f"{config.kind}."
    parts: dict[str, Part] = {}
    for name, parameter in model.named_parameters():
        fields = name.removeprefix(stack).split(".")
        label = ".".join("*" if field.isdigit() else field for field in fields)
        before = parts.get(label, Part(label, tuple(parameter.shape), 0, 0))
        parts[label] = Part(
            label, before.shape, before.num_tensors + 1, before.num_parameters + parameter.numel()
        )  # fmt: skip
    return tuple(parts.values())


def flops_per_token(config: ModelConfig, max_position_embeddings: int | None = None) -> int:
    """Returns the floating-point operations of a forward pass for the last token of a context (default: the longest).

    They are two per weight of a matrix product (not the embedding, which is looked up), and four per key and dimension
    of each head: the product with the key and the sum of the values. A linear layer reads, corrects and writes its
    state, with two each per number. Norms, convolutions and activations are left out, and so is an encoder's head. An
    encoder-decoder's target token has a source of the same length; `flops_per_source_token` counts the source itself. A
    training step takes three times as many.
    """
    length = config.max_position_embeddings if max_position_embeddings is None else max_position_embeddings
    names = [part.name for part in parameter_table(config)]
    if config.kind == "encoder-decoder":
        names = [name for name in names if name.startswith("decoder.") and ".cross.key_value." not in name]
    attending = [layer for layer in range(config.num_hidden_layers) if not config.is_linear(layer)]
    keys = sum(min(length, config.window(layer) or length) for layer in attending)
    keys += config.num_hidden_layers * length if config.kind == "encoder-decoder" else 0
    head = 0 if config.kind == "encoder" else config.vocab_size * config.hidden_size
    state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    products = _multiplying_weights(config, names) + head + 3 * config.num_linear_layers * state
    return 2 * products + 4 * config.num_attention_heads * config.head_dim * keys


def flops_per_source_token(config: ModelConfig, source_tokens: int | None = None) -> int:
    """Like `flops_per_token`, for a source token of an encoder-decoder: the encoder, and the keys and values to which
    the decoder's blocks attend.
    """
    config.require_kind("encoder-decoder")
    length = config.max_position_embeddings if source_tokens is None else source_tokens
    names = [part.name for part in parameter_table(config) if part.name.startswith("encoder.")]
    names += [part.name for part in parameter_table(config) if ".cross.key_value." in part.name]
    keys = config.num_encoder_layers * length
    return 2 * _multiplying_weights(config, names) + 4 * config.num_attention_heads * config.head_dim * keys


def _multiplying_weights(config: ModelConfig, names: Sequence[str]) -> int:
    """Counts the weights of the blocks' matrices among these parts that a token is multiplied by."""

    def chosen(part: Part) -> int:
        inside = ".experts." in part.name
        return part.num_parameters * config.num_experts_per_tok // config.num_experts if inside else part.num_parameters

    return sum(
        chosen(part)
        for part in parameter_table(config)
        if part.name in names and len(part.shape) == 2 and "blocks." in part.name
    )


def num_unread(config: ModelConfig, num_tokens: int) -> float:
    """Returns how many parameters a decoding step of `num_tokens` rows does not read: those of experts that no token
    chooses, if all are equally likely.
    """
    if not config.num_experts:
        return 0.0
    inside = sum(part.num_parameters for part in parameter_table(config) if ".experts." in part.name)
    return inside * (1 - config.num_experts_per_tok / config.num_experts) ** num_tokens


def cache_bytes_per_token(config: ModelConfig, bytes_per_number: int = 2) -> int:
    """Returns the key-value cache's bytes per token of a sequence (bf16 by default), with a mixture's routes; in an
    encoder-decoder, per source or target token. Linear layers have states instead (`lm.cache.state_bytes`).
    """
    routes = config.num_experts_per_tok * route_dtype(config.num_experts).itemsize
    keys_and_values = 2 * config.num_key_value_heads * config.head_dim * bytes_per_number
    return config.num_hidden_layers * (keys_and_values + routes) - config.num_linear_layers * keys_and_values


@dataclass(frozen=True)
class Pass:
    """A forward pass with gradients over `rows` rows of `seq_len` tokens.

    `compute_bytes` per number is 2 in bf16 and 4 in fp32; `stream_bytes` is that of the residual stream, which autocast
    leaves in fp32. `is_fused`: attention is one kernel, as on a GPU; `is_tiled`: it is Heed's kernel for CPUs.
    `split_among` ranks each hold a slice of the rows' tokens (`lm.sequence_parallel`).
    """

    rows: int
    seq_len: int
    compute_bytes: int
    stream_bytes: int
    is_fused: bool
    has_dropout: bool
    is_tiled: bool = False
    split_among: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of one rank."""
        return self.rows * -(-self.seq_len // self.split_among)


def block_bytes(config: ModelConfig, batch: Pass, *, cross_attention: bool = False) -> int:
    """Returns the bytes that a block keeps, on average if some layers are linear; `cross_attention` adds attention to
    encoder rows of the same length.
    """
    share = config.num_linear_layers / config.num_hidden_layers
    attention = round((1 - share) * _attention_bytes(config, batch) + share * _linear_bytes(config, batch))
    branches = [attention, _mlp_bytes(config, batch)]
    if cross_attention:
        branches.append(_cross_bytes(config, batch))
    return batch.num_tokens * sum(_branch_bytes(config, batch) + kept for kept in branches)


def ends_bytes(config: ModelConfig, batch: Pass) -> int:
    """Returns the bytes kept outside the blocks: rotary tables, embedding norm and dropout, final norm, head input."""
    tables = 2 if config.rope_local_base_freq else 1
    kept = 2 * tables * config.rotary_dim * batch.compute_bytes if config.positions == "rotary" else 0
    kept += _norm_bytes(config, batch) if config.embedding_norm else 0
    kept += _dropout_bytes(batch)
    kept += _norm_bytes(config, batch) if config.norm_place != "post" else 0
    table = batch.seq_len**2 * _bias_bytes(config, batch) if config.positions == "relative" else 0
    return batch.num_tokens * (kept + config.hidden_size * batch.compute_bytes) + table


def forward_bytes(config: ModelConfig, batch: Pass) -> int:
    """Returns the peak bytes of a pass without gradients, which keeps only the residual stream.

    The peak is in attention or in the MLP. Callers hold the stream as it was at the embeddings, before the block and
    before the branch. A branch's input and the rotary tables are in the compute dtype. So is a branch's output on a
    CPU, where one kernel adds it for the next norm.
    """
    N, G, H, c = config.num_attention_heads, config.num_key_value_heads, config.head_dim, batch.compute_bytes
    around = (3 * batch.stream_bytes + (1 if batch.is_fused else 2) * c) * config.hidden_size
    around += 2 * c * H if config.positions == "rotary" else 0
    around += batch.stream_bytes * config.hidden_size if config.positions_every_layer else 0
    in_one_pass = batch.is_fused or _is_tiled(config, batch)
    attention = (
        (3 if config.kv_lora_rank else 2) * c * (N + 2 * G) * H
        + c * N * H
        + (2 * _score_bytes(config, batch) if config.attn_logit_softcapping or not in_one_pass else 0)
    )
    widths = {"swiglu": 3, "clamped_swiglu": 6, "geglu": 4}.get(config.mlp, 2)
    mlp = c * config.intermediate_size * widths
    if config.num_experts:
        pairs = config.num_experts_per_tok * (3 * config.hidden_size + widths * config.moe_intermediate_size)
        shared = c * config.shared_expert_intermediate_size * widths
        mlp = max(mlp, shared + c * pairs + 4 * (config.hidden_size + 2 * config.num_experts))
    return batch.num_tokens * (around + max(attention, mlp, chunk_bytes(config)))


def _linear_bytes(config: ModelConfig, batch: Pass) -> int:
    """The two products of the input, and the input of the last one. The rest is computed again (`chunk_bytes`)."""
    N, values = config.linear_num_value_heads, config.linear_num_value_heads * config.linear_value_head_dim
    W = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
    return batch.compute_bytes * (W + values + 2 * N + values)


def _branch_bytes(config: ModelConfig, batch: Pass) -> int:
    """Returns the bytes per token around a branch: its norms, its first product's input, its dropout. A norm of its
    output keeps that in the compute dtype.
    """
    kept = 0 if config.norm_place == "output" else _norm_bytes(config, batch)
    kept += config.hidden_size * batch.compute_bytes + _norm_numbers(config) if config.norms_outputs else 0
    return kept + config.hidden_size * batch.compute_bytes + _dropout_bytes(batch)


def _norm_bytes(config: ModelConfig, batch: Pass) -> int:
    """RMSNorm keeps x and 1 / rms(x); PyTorch's LayerNorm keeps x, its mean and its deviation."""
    return batch.stream_bytes * config.hidden_size + _norm_numbers(config)


def _norm_numbers(config: ModelConfig) -> int:
    return 4 if config.norm == "rms" else 8


def _dropout_bytes(batch: Pass) -> int:
    """A 64-bit key per token; the backward pass draws the mask again."""
    return 8 if batch.has_dropout else 0


def _attention_bytes(config: ModelConfig, batch: Pass) -> int:
    """c·(2N + 2G)·H for Q, K, V and the output. Written-out attention keeps c·N·T more, a row of weights per head; a
    kernel keeps one fp32 number per head instead.

    With fused attention, Q, K and V are views of one product. Norms of queries and keys keep that product too, with one
    fp32 number each.
    """
    N, G, H, c = config.num_attention_heads, config.num_key_value_heads, config.head_dim, batch.compute_bytes
    kept = 4 * (N + G if config.qk_norm_over == "head" else 2) if config.qk_norm else 0
    if config.qk_norm and not batch.is_fused:
        kept += c * (N + 2 * G) * H
    kept += _latent_bytes(config, batch)
    kept += 2 * c * N * H if config.attn_output_gate else 0  # the sigmoid, and the gated output
    turned = config.positions == "rotary" or config.qk_norm
    if batch.split_among > 1:  # what was exchanged is kept, not what it was copied from; the output on both sides
        return kept + c * (exchanged_numbers(config, batch) + 2 * N * H) + _score_bytes(config, batch)
    if batch.is_fused:
        views = (N + 2 * G) * H + ((N + G) * H if turned else 0)
        return kept + c * (views + N * H) + _score_bytes(config, batch)
    return kept + c * (2 * N + 2 * G) * H + _score_bytes(config, batch)


def _latent_bytes(config: ModelConfig, batch: Pass) -> int:
    """Each latent vector before and after its norm, with one fp32 number, the keys that heads share, and the output
    without the values' padding.
    """
    if not config.kv_lora_rank:
        return 0
    numbers = 2 * (config.kv_lora_rank + config.q_lora_rank) + config.qk_rope_head_dim
    cut = config.num_attention_heads * config.value_dim if config.value_dim < config.head_dim else 0
    return batch.compute_bytes * (numbers + cut) + 4 * (2 if config.q_lora_rank else 1)


def exchanged_numbers(config: ModelConfig, batch: Pass) -> int:
    """Returns how many numbers of Q, K and V ranks exchange per token. Each rank gets at least one key-value head."""
    heads = config.num_attention_heads + 2 * max(config.num_key_value_heads, batch.split_among)
    return heads * config.head_dim if batch.split_among > 1 else 0


def _score_bytes(config: ModelConfig, batch: Pass) -> int:
    """A row of weights per head, or ln Σ exp(scores)."""
    if config.attn_logit_softcapping:  # written out everywhere; what tanh returns is kept too
        in_fp32 = 4 if batch.is_fused and batch.compute_bytes < batch.stream_bytes else 0  # autocast's, on a GPU
        return config.num_attention_heads * batch.seq_len * (2 * batch.compute_bytes + in_fp32)
    if batch.is_fused or _is_tiled(config, batch):
        return 4 * config.num_attention_heads
    # With a bias, PyTorch's attention on a CPU computes in fp32, and keeps the weights in both types.
    in_fp32 = 4 if config.positions == "relative" and batch.compute_bytes < 4 else 0
    return config.num_attention_heads * batch.seq_len * (batch.compute_bytes + in_fp32)


def _is_tiled(config: ModelConfig, batch: Pass) -> bool:
    """Heed's kernel for CPUs adds no bias to scores."""
    return batch.is_tiled and config.positions != "relative"


def _bias_bytes(config: ModelConfig, batch: Pass) -> int:
    """A bias per head, the number of its bucket, and whether it counts: for each pair of places, whatever the rows."""
    return batch.compute_bytes * config.num_attention_heads + 8 + 1


def _cross_bytes(config: ModelConfig, batch: Pass) -> int:
    """Like self-attention, with keys and values from as many encoder states, and no bias."""
    N, G, H, c = config.num_attention_heads, config.num_key_value_heads, config.head_dim, batch.compute_bytes
    scores = N * (4 if batch.is_fused or batch.is_tiled else c * batch.seq_len)
    return c * (2 * N + 2 * G) * H + scores


def _mlp_bytes(config: ModelConfig, batch: Pass) -> int:
    """c·M for the input of the last product, plus what the activation needs: SwiGLUs their gate and up, GEGLU also the
    gate's activation, ReLU only its result, which is that input.
    """
    widths = {"swiglu": 3, "clamped_swiglu": 3, "geglu": 4, "relu2": 2, "gelu": 2, "gelu_tanh": 2, "relu": 1}[
        config.mlp
    ]
    plain = widths * config.intermediate_size * batch.compute_bytes
    return max(plain, _mixture_bytes(config, batch, widths)) if config.num_experts else plain


def _mixture_bytes(config: ModelConfig, batch: Pass, widths: int) -> int:
    """For each of a token's experts, its input and output with its activations, its weight, and where its row is. The
    router keeps its input and all scores in fp32; a shared expert what an MLP does, and its output for its gate. A
    router's losses, at most three numbers per expert, are left out.
    """
    c, K = batch.compute_bytes, config.num_experts_per_tok
    expert = c * (2 * config.hidden_size + widths * config.moe_intermediate_size)
    weights = 8 + c + 4 * config.norm_topk_prob
    router = (4 - c) * config.hidden_size + 4 * config.num_experts  # `_branch_bytes` counts the input's first c
    shared = c * widths * config.shared_expert_intermediate_size
    shared += c * (config.hidden_size + 1) if config.shared_expert_gate else 0
    return K * (expert + weights + 2 * 8) + router + shared
