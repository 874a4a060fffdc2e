"""What a transformer is stacked from: self-attention and cross-attention, the MLP, the block.

Shape letters: B batch, T query tokens, S key tokens, D model width, N heads, G key-value heads, H head dim,
M MLP width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lm.attention import CrossAttentionCache, KVCache, attend
from lm.config import ModelConfig
from lm.dropout import Dropout
from lm.heads import Rotary, split_heads
from lm.linear import Linear
from lm.native import ops
from lm.norms import RMSNorm, Stream, add_norm, make_norm
from lm.positions import rotate


class _SwiGLU(torch.autograd.Function):
    """silu(gate) · up, where x is both side by side, and all that is kept for the gradient.

    With s = sigmoid(gate):  d up = g · gate · s,  d gate = g · up · s · (1 + gate · (1 - s)).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        if ops.runs(x):
            return ops.swiglu(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        if ops.runs(gradient, x):
            return ops.swiglu_backward(gradient, x)
        gate, up = x.chunk(2, dim=-1)
        return torch.cat([torch.ops.aten.silu_backward(gradient * up, gate), gradient * F.silu(gate)], dim=-1)


class _SquaredReLU(torch.autograd.Function):
    """relu(x)², keeping relu(x) alone for the gradient 2·relu(x)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (gradient * positive).mul_(2)


class Attention(nn.Module):
    """Self-attention with grouped key-value heads, one product for Q, K and V."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        rows = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        self.qkv = Linear(config.hidden_size, rows, bias=config.attention_bias != "none")
        self.out = Linear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=config.attention_bias == "all"
        )
        self.query_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self, x_BTD: Tensor, rotary: Rotary | None, mask_BTS: Tensor | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        q_BNTH, k_BGTH, v_BGTH = self.project(x_BTD, rotary)
        if cache is not None:
            k_BGTH, v_BGTH = cache.append(layer, k_BGTH, v_BGTH)
        y_BNTH = attend(q_BNTH, k_BGTH, v_BGTH, mask_BTS)
        return self.out(y_BNTH.transpose(1, 2).flatten(2))

    def project(self, x_BTD: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, N, T, H], keys and values [B, G, T, H]; queries and keys know their positions."""
        N, G = self.num_heads, self.num_kv_heads
        qkv_BTE = self.qkv(x_BTD)
        if self.query_norm is None or self.key_norm is None:
            return split_heads(qkv_BTE, rotary, N, G)
        q, k, v = qkv_BTE.unflatten(-1, (N + 2 * G, -1)).split([N, G, G], dim=2)
        turned = torch.cat([self.query_norm(q), self.key_norm(k)], dim=2)
        if rotary is not None:
            turned = rotate(turned, rotary)
        q, k = turned.split([N, G], dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class CrossAttention(nn.Module):
    """Attention from a decoder's tokens to an encoder's: queries from one, keys and values from the other."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        bias = config.attention_bias != "none"
        self.query = Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=bias)
        self.key_value = Linear(config.hidden_size, 2 * config.num_key_value_heads * config.head_dim, bias=bias)
        self.out = Linear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=config.attention_bias == "all"
        )

    def cross_attention_cache(self, states_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, S, H] of the encoder's states, computed once for all tokens that will look at them."""
        B, S, _ = states_BSD.shape
        k, v = self.key_value(states_BSD).view(B, S, 2, self.num_kv_heads, self.head_dim).unbind(dim=2)
        return k.transpose(1, 2), v.transpose(1, 2)

    def queries(self, x_BTD: Tensor) -> Tensor:
        """[B, N, T, H] of the decoder's states."""
        B, T, _ = x_BTD.shape
        return self.query(x_BTD).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x_BTD: Tensor, cross_cache: CrossAttentionCache, layer: int) -> Tensor:
        mask_BTS = cross_cache.real_BS[:, None].expand(-1, x_BTD.shape[1], -1)
        y_BNTH = attend(self.queries(x_BTD), cross_cache.keys[layer], cross_cache.values[layer], mask_BTS)
        return self.out(y_BNTH.transpose(1, 2).flatten(2))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,  # of the gate
    "relu2": _SquaredReLU.apply,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)); or down(activation(up(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = _SwiGLU.apply if config.mlp == "swiglu" else ACTIVATIONS[config.mlp]
        rows = config.intermediate_size * (2 if config.mlp == "swiglu" else 1)
        self.up = Linear(config.hidden_size, rows, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BTD)))


BRANCHES = 3  # at most, of a block: each is a site of dropout of its own


class Block(nn.Module):
    """Attention, with `cross_attention` to an encoder too, then the MLP: branches of the residual stream, each
    with its norm and dropout.

    Norms first: x + branch(norm(x)). Norms last: norm(x + branch(x)).
    """

    def __init__(self, config: ModelConfig, dropout: float, *, cross_attention: bool = False) -> None:
        super().__init__()
        self.norms_first = config.norm_place == "pre"
        self.attention_norm = make_norm(config, config.hidden_size)
        self.attention = Attention(config)
        self.cross_norm = make_norm(config, config.hidden_size) if cross_attention else None
        self.cross = CrossAttention(config) if cross_attention else None
        self.mlp_norm = make_norm(config, config.hidden_size)
        self.mlp = MLP(config)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x_BTD: Tensor,
        branch_BTD: Tensor | None,
        rotary: Rotary | None,
        mask_BTS: Tensor | None,
        cache: KVCache | None,
        layer: int,
        cross_cache: CrossAttentionCache | None = None,
        keys_BT: Tensor | None = None,
    ) -> Stream:
        """The residual stream and the branch that is to be added to it next, as they come and as they go.

        `keys_BT` are the tokens' keys for dropout (`lm.dropout`).
        """

        def drop(branch_BTD: Tensor, number: int) -> Tensor:
            return self.dropout(branch_BTD, keys_BT, 1 + BRANCHES * layer + number)

        stream = self._branch(
            (x_BTD, branch_BTD),
            self.attention_norm,
            lambda x: drop(self.attention(x, rotary, mask_BTS, cache, layer), 0),
        )
        if self.cross is not None and self.cross_norm is not None:
            cross = self.cross
            stream = self._branch(stream, self.cross_norm, lambda x: drop(cross(x, cross_cache, layer), 1))
        return self._branch(stream, self.mlp_norm, lambda x: drop(self.mlp(x), 2))

    def _branch(self, stream: Stream, norm: nn.Module, run: Callable[[Tensor], Tensor]) -> Stream:
        if self.norms_first:
            x_BTD, normed_BTD = add_norm(*stream, norm)
            return x_BTD, run(normed_BTD)
        x_BTD, _ = stream
        return norm(x_BTD + run(x_BTD)), None
