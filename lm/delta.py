"""Linear attention by the gated delta rule (Gated DeltaNet, arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

A layer keeps a matrix per head, whose size does not grow with the sequence. A token with key k, value v and query q
lets it decay by α, corrects what it holds under k by the share β, and reads it:

    S_t = α_t S_{t-1} + k_t u_tᵀ,   u_t = β_t (v_t - α_t S_{t-1}ᵀ k_t),   o_t = S_tᵀ q_t          (eq. 10)

`step` computes this for one token, given the state. `chunks` computes it for whole rows, with products of matrices
(section 3.3): with a_ij = α_{j+1} ... α_i and a_i = α_1 ... α_i, counted in a chunk that starts from S_0,

    u_i + β_i Σ_{j<i} a_ij (k_i · k_j) u_j = β_i (v_i - a_i S_0ᵀ k_i)      a triangular system per chunk
    o_i = a_i S_0ᵀ q_i + Σ_{j≤i} a_ij (q_i · k_j) u_j
    S   = a_C S_0 + Σ_j a_Cj k_j u_jᵀ                                      one chunk after the other

A sequence starts with α = 0. So packed sequences, and padding before one, have no effect on each other: every product
of α across a start is exactly 0. All of this is computed in fp32, by samplers and learners alike.

Shape letters: B rows, T tokens, D model width, G key heads, N value heads, R = N/G, K dims of a key, V of a value,
W = 2 G K + N V inputs of the convolution, P tokens that it reads, n chunks, C tokens of a chunk, i and j tokens in it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.cache import PassCache, State
from lm.config import ModelConfig
from lm.layers import Linear

CHUNK = 64  # tokens; whatever a row's length is, so that rounding does not depend on it
EPS = 1e-6  # in the norms of queries and keys, whatever `norm_eps` is: the published code fixes it


class GatedDeltaNet(nn.Module):
    """Self-attention's place in a linear layer. From x, with a convolution over each input's last P tokens:

    q, k, v = silu(conv(x W_qkv))     q and k divided by their lengths, and q by √K; R value heads share q and k
    β = sigmoid(x W_b)                α = exp(-exp(a_log) softplus(x W_a + dt_bias))
    y = (RMSNorm(o) · silu(x W_z)) W_out
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        G, N, D = config.linear_num_key_heads, config.linear_num_value_heads, config.hidden_size
        K, V = config.linear_key_head_dim, config.linear_value_head_dim
        W = 2 * G * K + N * V
        self.key_dim, self.value_dim, self.norm_eps = K, V, config.norm_eps
        self.qkvz = Linear(D, W + N * V, bias=False)
        self.gates = Linear(D, 2 * N, bias=False)  # β's rows, then α's
        self.conv = nn.Parameter(torch.empty(W, 1, config.linear_conv_kernel_dim))
        self.a_log = nn.Parameter(torch.empty(N))
        self.dt_bias = nn.Parameter(torch.empty(N))
        self.norm = nn.Parameter(torch.ones(V))
        self.out = Linear(N * V, D, bias=False)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor, cache: PassCache | None, layer: int) -> Tensor:
        """Returns [B, T, D]. A sequence starts wherever a position is 0, as all padding's are."""
        inputs = self.qkvz(x_BTD), self.gates(x_BTD), self.conv, self.a_log, self.dt_bias, self.norm
        with torch.autocast(x_BTD.device.type, enabled=False):
            y_BTE = self._mixed(positions_BT, inputs, cache, layer)
        return self.out(y_BTE)

    def _mixed(self, positions_BT: Tensor, inputs: tuple[Tensor, ...], cache: PassCache | None, layer: int) -> Tensor:
        """Returns the input of `out`, [B, T, N V], given the products and the other parameters."""
        if cache is None:
            y_BTE: Tensor = _Recomputed.apply(lambda *given: self._read_rows(positions_BT, *given)[0], *inputs)  # type: ignore[no-untyped-call]
            return y_BTE
        if (state := cache.state(layer)) is not None:
            return self._read_one(state, *inputs)
        y_BTE, state = self._read_rows(positions_BT, *inputs)
        cache.keep_state(layer, state)
        return y_BTE

    def _read_rows(self, positions_BT: Tensor, qkvz: Tensor, gates: Tensor, *own: Tensor) -> tuple[Tensor, State]:
        """Returns o, normed and gated, [B, T, N V], and the state after the rows."""
        conv, a_log, dt_bias, norm = own
        W, T = len(conv), qkvz.shape[1]
        mixed_BTW, z = qkvz[..., :W], qkvz[..., W:]
        q, k, v = self._heads(convolve(mixed_BTW.float(), conv.float(), positions_BT))
        beta, log_alpha = decays(gates, a_log, dt_bias)
        log_alpha = log_alpha.masked_fill(positions_BT[..., None] == 0, -torch.inf)
        o_BTNV, S = chunks(q, k, v, log_alpha, beta)
        P = conv.shape[-1]
        # At the place before the last but d, the last token's sequence has a token if its position is at least d.
        back = torch.arange(P - 2, -1, -1, device=qkvz.device)
        recent = F.pad(mixed_BTW, (0, 0, P - 1, 0))[:, T:] * (positions_BT[:, -1:] >= back)[..., None]
        return self._gated(o_BTNV, z, norm), (S, recent)

    def _read_one(self, state: State, qkvz: Tensor, gates: Tensor, *own: Tensor) -> Tensor:
        """Returns the same for one token per row, [B, 1, N V], after `state`, which it changes in place."""
        conv, a_log, dt_bias, norm = own
        S, recent = state
        window_BPW = torch.cat([recent, qkvz[..., : len(conv)]], dim=1)
        recent.copy_(window_BPW[:, 1:])
        mixed_B1W = F.silu((window_BPW.float() * conv[:, 0].float().T).sum(dim=1, keepdim=True))
        beta, log_alpha = decays(gates, a_log, dt_bias)
        o_B1NV = step(*self._heads(mixed_B1W), log_alpha, beta, S)
        return self._gated(o_B1NV, qkvz[..., len(conv) :], norm)

    def _heads(self, mixed_BTW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q and k [B, T, G, K], of their lengths, and v [B, T, N, V]."""
        NV = self.out.in_features
        GK = (mixed_BTW.shape[-1] - NV) // 2
        q, k, v = mixed_BTW.split([GK, GK, NV], dim=-1)
        q, k = (part.unflatten(-1, (-1, self.key_dim)) for part in (q, k))
        q, k = (part * (part.square().sum(dim=-1, keepdim=True) + EPS).rsqrt() for part in (q, k))
        return q * self.key_dim**-0.5, k, v.unflatten(-1, (-1, self.value_dim))

    def _gated(self, o_BTNV: Tensor, z: Tensor, norm_V: Tensor) -> Tensor:
        """RMSNorm(o) · silu(z) as z's dtype, [B, T, N V]."""
        inverse_rms = (o_BTNV.square().mean(dim=-1, keepdim=True) + self.norm_eps).rsqrt()
        normed = (o_BTNV * inverse_rms * norm_V.float()).flatten(2)
        return (normed * F.silu(z.float())).to(z.dtype)


def convolve(x_BTW: Tensor, weight_W1P: Tensor, positions_BT: Tensor) -> Tensor:
    """Returns silu(Σ_d w_d x_{t-d}), [B, T, W], of the last P tokens of the token's own sequence; w_0 is the last."""
    P, T = weight_W1P.shape[-1], x_BTW.shape[1]
    y_BTW = x_BTW * weight_W1P[:, 0, -1]
    for d in range(1, P):
        earlier_BTW = F.pad(x_BTW, (0, 0, d, 0))[:, :T]
        y_BTW = y_BTW + earlier_BTW * (positions_BT[..., None] >= d) * weight_W1P[:, 0, P - 1 - d]
    return F.silu(y_BTW)


def decays(gates: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns β and ln α, [B, T, N] each."""
    b_BTN, a_BTN = gates.float().chunk(2, dim=-1)
    return b_BTN.sigmoid(), -a_log.float().exp() * F.softplus(a_BTN + dt_bias.float())


def chunks(
    q_BTGK: Tensor, k_BTGK: Tensor, v_BTNV: Tensor, log_alpha_BTN: Tensor, beta_BTN: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns o [B, T, N, V] and the state S after the rows, [B, N, K, V]; ln α is -∞ where a sequence starts."""
    T, (G, K), (N, V) = q_BTGK.shape[1], q_BTGK.shape[2:], v_BTNV.shape[2:]

    def chunked(x: Tensor, heads: int) -> Tensor:
        """[B, T, G · R, ...] to [B, G, R, n, C, ...]. Padding has β = 0 and α = 1, so the state stays as it is."""
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -T % CHUNK))
        return padded.unflatten(1, (-1, CHUNK)).unflatten(3, (G, heads)).movedim((3, 4), (1, 2))

    q, k = chunked(q_BTGK, 1), chunked(k_BTGK, 1)  # [B, G, 1, n, C, K]
    v, log_alpha, beta = (chunked(x, N // G) for x in (v_BTNV, log_alpha_BTN, beta_BTN))
    lower_CC = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # ln a_ij is a sum of the terms after j: a difference of two sums would lose digits, and ∞ - ∞ is not a number.
    terms = log_alpha.unsqueeze(-1).expand(*log_alpha.shape, CHUNK).masked_fill(~lower_CC.tril(-1), 0.0)
    sums = running_sums if q.is_cuda else partial(torch.cumsum, dim=-2)
    a_ij = sums(terms).masked_fill(~lower_CC, -torch.inf).exp()
    beta, a_i = beta.unsqueeze(-1), sums(log_alpha.unsqueeze(-1)).exp()
    system = beta * a_ij * (k @ k.mT)
    right = torch.cat([beta * v, (beta * a_i) * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([V, K], dim=-1)  # u_i = u - w S_0
    scores, q_in, k_out = a_ij * (q @ k.mT), a_i * q, a_ij[..., -1, :, None] * k
    S, found = v.new_zeros(*v.shape[:3], K, V), []
    for c in range(v.shape[3]):
        u_c = u[:, :, :, c] - w[:, :, :, c] @ S
        found.append(q_in[:, :, :, c] @ S + scores[:, :, :, c] @ u_c)
        S = a_i[:, :, :, c, -1:] * S + k_out[:, :, :, c].mT @ u_c
    o_BGRTV = torch.cat(found, dim=3)[:, :, :, :T]
    return o_BGRTV.flatten(1, 2).transpose(1, 2), S.flatten(1, 2)


def running_sums(x: Tensor) -> Tensor:
    """x.cumsum(-2) in an order that is the same every time; `engine.deterministic` refuses CUDA's own."""
    for shift in (2**power for power in range((x.shape[-2] - 1).bit_length())):
        x = x + F.pad(x, (0, 0, shift, 0))[..., : x.shape[-2], :]
    return x


def step(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, S_BNKV: Tensor) -> Tensor:
    """Returns o [B, 1, N, V] of one token per row, and changes S in place; arguments are those of `chunks`, T = 1."""
    R = v.shape[2] // q.shape[2]
    q_BNK1, k_BNK1 = (x[:, 0].repeat_interleave(R, dim=1).unsqueeze(-1) for x in (q, k))
    S_BNKV.mul_(log_alpha[:, 0].exp()[..., None, None])
    u_BN1V = beta[:, 0, :, None, None] * (v[:, 0].unsqueeze(2) - k_BNK1.mT @ S_BNKV)
    S_BNKV.addcmul_(k_BNK1, u_BN1V)
    return (q_BNK1.mT @ S_BNKV).transpose(1, 2)


def chunk_bytes(config: ModelConfig) -> int:
    """Returns the bytes per token that a linear layer takes while it reads rows, and again in its backward pass: what
    autograd saves of `chunks` and the convolution, in fp32. A pass without gradients takes somewhat less.
    """
    G, N, K, V = (
        config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim,
        config.linear_value_head_dim,
    )  # fmt: skip
    W, P = 2 * G * K + N * V, config.linear_conv_kernel_dim
    of_pairs = CHUNK * (4 * N + 2 * G)  # a_ij, the system, its solution's gradient and scores; k · k and q · k
    return 4 * (of_pairs + (P + 4) * W + 3 * N * K + 4 * N * V + N * K * V // CHUNK)


class _Recomputed(torch.autograd.Function):
    """function(*inputs), which the backward pass computes again: chunks keep some twenty times as much as inputs."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        with torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
            inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
            y = ctx.function(*inputs)
        found = iter(torch.autograd.grad(y, [x for x in inputs if x.requires_grad], gradient))
        return None, *(next(found) if need else None for need in needed)
