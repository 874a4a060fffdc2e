"""Attention with sinks by kernels that have none (gpt-oss, arXiv 2508.10925).

A head's sink s is one more term of its softmax's sum, and has no value. With t = ln Σ exp(scores) and y, the kernel's
results without the sink:

    t' = ln(exp(t) + exp(s)),  y' = y · exp(t - t')

A kernel's backward pass computes weights as exp(score - t) and gradients of scores as weight · (dy · v - dy · y). With
t' and y' in place of t and y, both are those of the softmax with a sink, whose own gradient is -exp(s - t') (dy · y').

Shape letters: B batch, T query tokens, S key tokens, N heads, G key-value heads, H head dim, M tokens of all rows.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Kernel(Protocol):
    """A kernel's two passes, with y and dy as [..., N, H], and t in fp32 as [..., N]. Q, K and V are as it has them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns y and t."""

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, totals: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of Q, K and V."""


class WithSinks(torch.autograd.Function):
    """Attention with the sinks [N], [..., N, H]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor, kernel: Kernel) -> Tensor:
        y, totals = kernel.forward(q, k, v)
        whole = torch.logaddexp(totals, sinks_N.float())
        y = (y * (totals - whole).exp().unsqueeze(-1)).to(y.dtype)
        ctx.save_for_backward(q, k, v, sinks_N, y, whole)
        ctx.kernel = kernel
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_N, y, whole = ctx.saved_tensors
        of_qkv = ctx.kernel.backward(gradient, q, k, v, y, whole)
        of_sinks = -(sinks_N.float() - whole).exp() * (gradient.float() * y).sum(dim=-1)
        return *of_qkv, of_sinks.flatten(0, -2).sum(dim=0).to(sinks_N.dtype), None


class FlashKernel:
    """PyTorch's variable-length flash attention on a GPU, causal; arguments as in `lm.attention`. The public function
    gives no gradients for t.
    """

    def __init__(self, starts: Tensor, longest: int, window: tuple[int, int]) -> None:
        no_dropout, is_causal = 0.0, window == (-1, 0)
        self._sequences = starts, starts, longest, longest, no_dropout, is_causal
        self._windows = {"window_size_left": window[0], "window_size_right": window[1]}

    def forward(self, q_MNH: Tensor, k_MGH: Tensor, v_MGH: Tensor) -> tuple[Tensor, Tensor]:
        y_MNH, totals_NM, *_ = torch.ops.aten._flash_attention_forward(
            q_MNH, k_MGH, v_MGH, *self._sequences, return_debug_mask=False, **self._windows
        )
        return y_MNH, totals_NM.T

    def backward(
        self, gradient: Tensor, q_MNH: Tensor, k_MGH: Tensor, v_MGH: Tensor, y_MNH: Tensor, totals_MN: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        state, unused = q_MNH.new_zeros(2, dtype=torch.uint64), q_MNH.new_empty(0)  # of dropout
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            gradient.contiguous(), q_MNH, k_MGH, v_MGH, y_MNH, totals_MN.T.contiguous(), *self._sequences,
            state, unused, **self._windows,
        )  # fmt: skip
        return found


def attend_with_a_key_more(
    q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask_BTS: Tensor | None, sinks_N: Tensor
) -> Tensor:
    """Compute `lm.attention.attend` with a key more: of zeros, with a value of zeros, and the sink as its score.

    It copies keys and values, so it is for GPUs without a kernel for these rows. Heads that share keys are its rows.
    """
    B, N, T, H = q_BNTH.shape
    G, S = k_BGSH.shape[1:3]
    if mask_BTS is None:
        mask_BTS = torch.ones(1, T, S, dtype=torch.bool, device=q_BNTH.device).tril()
    if mask_BTS.dtype == torch.bool:
        mask_BTS = q_BNTH.new_zeros(mask_BTS.shape).masked_fill_(~mask_BTS, -torch.inf)
    seen_BNTS = mask_BTS[:, None].to(q_BNTH.dtype).expand(B, N, T, S)
    bias = torch.cat([seen_BNTS, sink_scores(sinks_N, B, T, q_BNTH.dtype)], dim=-1).view(B, G, -1, S + 1)
    k, v = (F.pad(part, (0, 0, 0, 1)) for part in (k_BGSH, v_BGSH))
    return F.scaled_dot_product_attention(q_BNTH.reshape(B, G, -1, H), k, v, bias).reshape(B, N, T, -1)


def sink_scores(sinks_N: Tensor, num_rows: int, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Returns the sinks as a column of scores, [B, N, T, 1]."""
    return sinks_N.to(dtype)[None, :, None, None].expand(num_rows, -1, num_tokens, 1)
