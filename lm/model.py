"""The transformer: one block, a decoder made of it, and two heads (next token, one score).

Shape letters: B batch, T query tokens, S key tokens, D model width, N heads, G key-value heads, H head dim,
M MLP width, V vocabulary, C selected positions.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lm.attention import KVCache, attend, attention_mask, banded
from lm.config import ModelConfig
from lm.positions import rotary_tables, rotate, sinusoids

Rotary = tuple[Tensor, Tensor]  # cos and signed sin


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product with x gives: autocast's type where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, computed in fp32 (arXiv 1910.07467, eq. 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """PyTorch takes RMSNorm apart into eight passes over memory on a CPU; written out it needs half as many.

    With n = x / rms(x):  dx = (g·w - n · mean(g·w·n)) / rms(x),  dw = Σ g·n.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse_rms = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
        normed = wide * inverse_rms
        ctx.save_for_backward(normed, inverse_rms, weight)
        ctx.dtype = x.dtype  # type: ignore[attr-defined]
        # What follows is a matrix product, so under autocast the result may as well come rounded for it.
        return (normed * weight).to(compute_dtype(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, inverse_rms, weight = ctx.saved_tensors
        wide = gradient.float()
        product = wide * normed
        weight_gradient = product.sum(dim=tuple(range(product.dim() - 1)))
        mean = (product @ weight.float()).unsqueeze(-1) / normed.shape[-1]
        x_gradient = torch.addcmul(wide * weight, normed, mean, value=-1).mul_(inverse_rms)
        return x_gradient.to(ctx.dtype), weight_gradient.to(weight.dtype), None


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


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """The config's kind of norm over `width` numbers."""
    return RMSNorm(width, config.norm_eps) if config.norm == "rms" else nn.LayerNorm(width, config.norm_eps)


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads, one product for Q, K and V."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.width, rows, bias=config.attention_bias != "none")
        self.out = nn.Linear(config.num_heads * config.head_dim, config.width, bias=config.attention_bias == "all")
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
        B, T, _ = x_BTD.shape
        N, G = self.num_heads, self.num_kv_heads
        heads_BTNH = self.qkv(x_BTD).view(B, T, N + 2 * G, self.head_dim)
        turned, v = heads_BTNH.split([N + G, G], dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = turned.split([N, G], dim=2)
            turned = torch.cat([self.query_norm(q), self.key_norm(k)], dim=2)
        if rotary is not None:
            turned = rotate(turned, rotary)
        q, k = turned.split([N, G], dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": _SquaredReLU.apply,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)); or down(activation(up(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        rows = config.mlp_width * (2 if config.mlp == "swiglu" else 1)
        self.up = nn.Linear(config.width, rows, bias=config.mlp_bias)
        self.down = nn.Linear(config.mlp_width, config.width, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        up = self.up(x_BTD)
        if self.kind == "swiglu":
            gate_BTM, up_BTM = up.chunk(2, dim=-1)
            return self.down(F.silu(gate_BTM) * up_BTM)
        return self.down(_ACTIVATIONS[self.kind](up))


class Block(nn.Module):
    """Attention, then the MLP, each a branch beside the residual stream with its norm and dropout.

    Norms first: x + branch(norm(x)). Norms last: norm(x + branch(x)).
    """

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.norms_first = config.norm_place == "pre"
        self.attention_norm = make_norm(config, config.width)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config, config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x_BTD: Tensor, rotary: Rotary | None, mask_BTS: Tensor | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        if self.norms_first:
            x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), rotary, mask_BTS, cache, layer))
            return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))
        x_BTD = self.attention_norm(x_BTD + self.dropout(self.attention(x_BTD, rotary, mask_BTS, cache, layer)))
        return self.mlp_norm(x_BTD + self.dropout(self.mlp(x_BTD)))


class Decoder(nn.Module):
    """Tokens to hidden states."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.context_tokens, config.width) if learned else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(config, dropout) for _ in range(config.num_layers))
        # With norms last the final block's own norm is the last one.
        self.norm = make_norm(config, config.width) if config.norm_place == "pre" else nn.Identity()

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        mask_BTS: Tensor | None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Hidden states [B, T, D] after the final norm. `mask_BTS`: True = may attend; None = plainly causal."""
        x_BTD = self.embed(tokens_BT, positions_BT)
        rotary = self.rotary(positions_BT, compute_dtype(x_BTD))
        T = tokens_BT.shape[1]
        S = T + (cache.length if cache is not None else 0)
        masks = {window: banded(mask_BTS, window, T, S, tokens_BT.device) for window in self.config.windows}
        for layer, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, rotary, masks[self.config.window(layer)], cache, layer)
        return self.norm(x_BTD)

    def embed(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """Token embeddings [B, T, D], with what positions add to them."""
        x_BTD = self.embedding(tokens_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_BT)
        elif self.config.positions == "sinusoidal":
            x_BTD = x_BTD + sinusoids(positions_BT, self.config.width).to(x_BTD.dtype)
        return self.dropout(x_BTD)

    def rotary(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotary | None:
        config = self.config
        if config.positions != "rotary":
            return None
        return rotary_tables(positions_BT, config.head_dim, config.rope_theta, config.rope_scaling, dtype)

    def hidden(self, tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
        """Hidden states of whole rows. `segments_BT` numbers the sequences packed in a row from 1; 0 = padding.

        Positions restart at 0 in every segment and no token attends across segments, so a packed row gives each of
        its sequences what it would get alone. None means one sequence a row, without padding on the left.
        """
        T = tokens_BT.shape[1]
        if segments_BT is None:
            positions_BT = torch.arange(T, device=tokens_BT.device).expand(tokens_BT.shape)
            return self(tokens_BT, positions_BT, None)
        return self(tokens_BT, segment_positions(segments_BT), attention_mask(segments_BT))


class LanguageModel(nn.Module):
    """A decoder with a next-token head."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config, dropout)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Make the head's matrix the embedding's, where the config says so."""
        if self.config.tie_embeddings:
            self.head.weight = self.decoder.embedding.weight

    def forward(
        self, tokens_BT: Tensor, segments_BT: Tensor | None = None, selected_BT: Tensor | None = None
    ) -> Tensor:
        """Logits [C, V] of the positions that `selected_BT` marks True, row by row; [B, T, V] where it is None."""
        hidden_BTD = self.decoder.hidden(tokens_BT, segments_BT)
        return self.head(hidden_BTD if selected_BT is None else hidden_BTD[selected_BT])


class ScalarModel(nn.Module):
    """A decoder with one number a token: a reward model's score (higher is better) or a value function."""

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config, dropout)
        self.score = nn.Linear(config.width, 1, bias=False)
        # Not a parameter: it is set once, after training, so that demonstrations score 0 on average.
        self.register_buffer("bias", torch.zeros(()))
        self.bias: Tensor

    def forward(
        self, tokens_BT: Tensor, segments_BT: Tensor | None = None, selected_BT: Tensor | None = None
    ) -> Tensor:
        """Scores [C] of the positions that `selected_BT` marks True, row by row; [B, T] where it is None."""
        hidden_BTD = self.decoder.hidden(tokens_BT, segments_BT)
        selected = hidden_BTD if selected_BT is None else hidden_BTD[selected_BT]
        return self.score(selected).squeeze(-1).float() + self.bias


def segment_positions(segments_BT: Tensor) -> Tensor:
    """Position of each token in its segment: (1, 1, 2, 2, 2, 0) gives (0, 1, 0, 1, 2, 0)."""
    T = segments_BT.shape[1]
    index_BT = torch.arange(T, device=segments_BT.device).expand(segments_BT.shape)
    starts_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    starts_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    return index_BT - torch.where(starts_BT, index_BT, 0).cummax(dim=1).values


def initialise(model: LanguageModel | ScalarModel, seed: int) -> None:
    """Draw all weights from `seed`.

    | weight                        | distribution   | why                                                        |
    |-------------------------------|----------------|------------------------------------------------------------|
    | embedding, positions, head    | N(0, 1/D)      | first logits have unit variance                            |
    | qkv, up                       | N(0, 1/D)      | outputs keep the input's variance at every width           |
    | out, down (into the residual) | N(0, 1/(2LF))  | as above for fan-in F; L layers add 2L branches (GPT-2)    |
    | norms                         | 1              |                                                            |
    | biases                        | 0              |                                                            |
    | score                         | N(0, 1/(D+1))  | a fresh score has unit variance                            |

    GPT-2's fixed 0.02 is 1/√D at a width of 2,500. On narrow models it leaves attention nearly uniform, and heads that
    copy from the context took more than three times as many steps to form (docs/log.md).
    """
    generator = torch.Generator().manual_seed(seed)
    branches = 2 * model.config.num_layers
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif name.startswith("score."):
            initialise_score_head(parameter, generator)
        else:
            into_residual = name.endswith(("out.weight", "down.weight"))
            std = 1 / math.sqrt(parameter.shape[-1] * (branches if into_residual else 1))
            nn.init.normal_(parameter, std=std, generator=generator)


def initialise_score_head(weight: Tensor, generator: torch.Generator) -> None:
    """N(0, 1/(D+1)): standard deviation 1/√(D+1) for width D (summarize-from-feedback, `query_response_model.py`)."""
    nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[-1] + 1), generator=generator)


def freeze_all_but_last(model: LanguageModel | ScalarModel, num_blocks: int) -> None:
    """Transfer learning: gradients reach the last `num_blocks` blocks, what follows them, and an untied head.

    A tied head is the embedding, which lies before the blocks and is frozen with it.
    Errors: ValueError for more blocks than there are.
    """
    first = model.config.num_layers - num_blocks
    if first < 0:
        raise ValueError(f"{num_blocks} blocks are to be trained; the model has {model.config.num_layers}")
    frozen = {"decoder.embedding", "decoder.positions", *(f"decoder.blocks.{layer}" for layer in range(first))}
    for name, module in model.named_modules():
        if name in frozen:
            module.requires_grad_(False)


def count_parameters(models: Sequence[nn.Module]) -> int:
    """Distinct parameters; tied weights count once."""
    return sum(p.numel() for model in models for p in model.parameters())
