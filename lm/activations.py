"""Memory that autograd keeps from a forward pass to its backward: a count of the tensors that `lm.block` saves.

Korthikanti et al. (arXiv 2205.05198, eq. 1) count 34 s·b·h + 5 a·s²·b bytes per layer for a GPT with dropout in
fp16. This is the same count for this code: its norms keep their input, SwiGLU keeps three widths, dropout is optional,
and fused attention (on a GPU) keeps no table of its weights. `tests/lm/test_activations.py` compares every term
with what PyTorch saves.

In the formulas c is the bytes of a number in a matrix product, s of one in the residual stream; D width, N heads, G
key-value heads, H head dim, M MLP width, T tokens of a row.
"""

from dataclasses import dataclass

from lm.config import ModelConfig


@dataclass(frozen=True)
class Pass:
    """A forward pass of `rows` rows of `seq_len` tokens under gradients.

    `compute_bytes` per number is 2 in bf16 and 4 in fp32; `stream_bytes` is that of the residual stream, which autocast
    leaves in fp32. `is_fused`: attention is one kernel, as on a GPU; `is_tiled`: Heed's on a CPU.
    """

    rows: int
    seq_len: int
    compute_bytes: int
    stream_bytes: int
    is_fused: bool
    has_dropout: bool
    is_tiled: bool = False

    @property
    def num_tokens(self) -> int:
        return self.rows * self.seq_len


def block_bytes(config: ModelConfig, of: Pass, *, cross_attention: bool = False) -> int:
    """Bytes that one block keeps; `cross_attention` also counts attention to an encoder's rows of the same length."""
    branches = [_attention(config, of), _mlp(config, of)]
    if cross_attention:
        branches.append(_cross(config, of))
    return of.num_tokens * sum(_branch(config, of) + kept for kept in branches)


def ends_bytes(config: ModelConfig, of: Pass) -> int:
    """Bytes kept outside the blocks: rotary tables, the embeddings' norm and dropout, final norm, the head's input."""
    kept = 2 * config.head_dim * of.compute_bytes if config.positions == "rotary" else 0
    kept += _norm(config, of) if config.embedding_norm else 0
    kept += _dropout(of)
    kept += _norm(config, of) if config.norm_place == "pre" else 0
    return of.num_tokens * (kept + config.hidden_size * of.compute_bytes)


def gradient_bytes(config: ModelConfig, of: Pass) -> int:
    """Bytes that the backward of a block needs beyond what forwards kept, at most: in the MLP its activation's
    gradients, or in attention a table of the weights' gradients and one of the scores', when what the MLP and the last
    norm kept is free again.
    """
    inner = config.intermediate_size * of.compute_bytes
    mlp = 2 * inner - config.hidden_size * of.compute_bytes if config.mlp == "swiglu" else inner
    tables = 0 if of.is_fused or of.is_tiled else 2 * _weights(config, of)
    after = _branch(config, of) + _mlp(config, of) + _norm(config, of) + config.hidden_size * of.compute_bytes
    return of.num_tokens * max(mlp, tables - after)


def forward_bytes(config: ModelConfig, of: Pass) -> int:
    """Bytes of a pass without gradients, which keeps nothing but the residual stream, at its largest: in attention or
    in the MLP.

    Callers hold the stream as it was at the embeddings, before the block and before the branch. In the compute dtype
    are a branch's input, rotary tables and, where one kernel adds a branch's output for the next norm (on a CPU), that.
    """
    N, G, H, c = config.num_attention_heads, config.num_key_value_heads, config.head_dim, of.compute_bytes
    around = (3 * of.stream_bytes + (1 if of.is_fused else 2) * c) * config.hidden_size
    around += 2 * c * H if config.positions == "rotary" else 0
    attention = 2 * c * (N + 2 * G) * H + c * N * H + (0 if of.is_fused or of.is_tiled else 2 * _weights(config, of))
    mlp = c * config.intermediate_size * (3 if config.mlp == "swiglu" else 2)
    return of.num_tokens * (around + max(attention, mlp))


def _branch(config: ModelConfig, of: Pass) -> int:
    """Bytes per token around a branch: its norm, its first product's input, its dropout."""
    return _norm(config, of) + config.hidden_size * of.compute_bytes + _dropout(of)


def _norm(config: ModelConfig, of: Pass) -> int:
    """RMSNorm keeps x and 1 / rms(x); PyTorch's LayerNorm keeps x, its mean and its deviation."""
    return of.stream_bytes * config.hidden_size + (4 if config.norm == "rms" else 8)


def _dropout(of: Pass) -> int:
    """A token's key of 64 bits; the gradient draws the mask again."""
    return 8 if of.has_dropout else 0


def _attention(config: ModelConfig, of: Pass) -> int:
    """c·(2N + 2G)·H for Q, K, V and the output. Written-out attention keeps c·N·T more, a row of weights per head; a
    kernel keeps one fp32 number per head instead.

    With fused attention Q, K and V are views of the product that they are parts of. Norms of queries and keys keep that
    product too, with one fp32 number each.
    """
    N, G, H, c = config.num_attention_heads, config.num_key_value_heads, config.head_dim, of.compute_bytes
    kept = 4 * (N + G) if config.qk_norm else 0
    if config.qk_norm and not of.is_fused:
        kept += c * (N + 2 * G) * H
    turned = config.positions == "rotary" or config.qk_norm
    if of.is_fused:
        views = (N + 2 * G) * H + ((N + G) * H if turned else 0)
        return kept + c * (views + N * H) + _weights(config, of)
    return kept + c * (2 * N + 2 * G) * H + _weights(config, of)


def _weights(config: ModelConfig, of: Pass) -> int:
    """A row of weights per head, or ln Σ exp(scores)."""
    return config.num_attention_heads * (4 if of.is_fused or of.is_tiled else of.compute_bytes * of.seq_len)


def _cross(config: ModelConfig, of: Pass) -> int:
    """Like self-attention, with keys and values from as many encoder states."""
    N, G, H, c = config.num_attention_heads, config.num_key_value_heads, config.head_dim, of.compute_bytes
    return c * (2 * N + 2 * G) * H + _weights(config, of)


def _mlp(config: ModelConfig, of: Pass) -> int:
    """c·M for the input of the last product, plus what the activation needs: SwiGLU its gate and up, ReLU only its
    result, which is that input.
    """
    widths = {"swiglu": 3, "relu2": 2, "gelu": 2, "gelu_tanh": 2, "relu": 1}[config.mlp]
    return widths * config.intermediate_size * of.compute_bytes
