"""The kernels as functions of tensors. Each has a twin in PyTorch's own operations beside its caller.

Shape letters: R rows, D width, M MLP width, B batch, T tokens, S keys, N heads, G key-value heads, H head dim,
V vocabulary, F outputs of a product.
"""

import math
from ctypes import c_bool, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from lm.native.build import has_matrix_unit, kernels

TYPES = (torch.float32, torch.bfloat16)
_ARGUMENTS = {  # p pointer, b whether it is bf16, i integer, f float
    "rms_norm": "pbppbppbpiif",
    "rms_norm_backward": "pbpbpbpppppii",
    "swiglu": "pbpii",
    "swiglu_backward": "ppbpii",
    "split_heads": "pbpppppiiiiib",
    "token_logprobs": "pbpppiif",
    "token_logprobs_backward": "ppbpppiif",
    "draw": "pbpfppii",
    "weight_gradient": "pppiii",
    "dropout": "pbppiiif",
    "attend": "ppppippiiiiiif",
    "attend_backward": "pppppppipppiiiiiif",
}
_KINDS = {"p": c_void_p, "b": c_bool, "i": c_int64, "f": c_float}


def runs(*tensors: Tensor) -> bool:
    """Whether the kernels take these: contiguous, in the CPU's memory, fp32 or bf16."""
    return all(x.is_cpu and x.dtype in TYPES and x.is_contiguous() for x in tensors) and kernels() is not None


def _call(name: str, *arguments: Any) -> None:
    function = getattr(kernels(), name)
    if function.argtypes is None:
        function.argtypes, function.restype = [_KINDS[letter] for letter in _ARGUMENTS[name]], None
    function(*arguments)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _is_bf16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x²) + eps) · weight as `dtype`, and 1 / sqrt(...) [R] in fp32; leading dimensions are free."""
    return _norm(x, None, weight_D, eps, x, dtype)


def add_rms_norm(x: Tensor, branch: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + branch, in x's type, and as `rms_norm` of it in the branch's type."""
    total = torch.empty_like(x)
    return total, *_norm(x, branch, weight_D, eps, total, branch.dtype)


def _norm(
    x: Tensor, branch: Tensor | None, weight_D: Tensor, eps: float, total: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    D = x.shape[-1]
    y, inverse_R = torch.empty_like(x, dtype=dtype), torch.empty(x.numel() // D)
    _call(
        "rms_norm", x.data_ptr(), _is_bf16(x), _address(branch), weight_D.data_ptr(), _is_bf16(weight_D),
        total.data_ptr(), y.data_ptr(), _is_bf16(y), inverse_R.data_ptr(), len(inverse_R), D, eps,
    )  # fmt: skip
    return y, inverse_R


def rms_norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight_D: Tensor,
    inverse_R: Tensor,
    *,
    carried: Tensor | None = None,
    has_branch: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradients of what was normed, in its type, of the branch in it, if it has one, and of the weight, in fp32.

    `carried` is what the sum's gradient would be without the norm.
    """
    x_gradient, weight_gradient_D = torch.empty_like(x), torch.empty(weight_D.shape)
    branch_gradient = torch.empty_like(gradient) if has_branch else None
    _call(
        "rms_norm_backward", gradient.data_ptr(), _is_bf16(gradient), x.data_ptr(), _is_bf16(x), weight_D.data_ptr(),
        _is_bf16(weight_D), inverse_R.data_ptr(), _address(carried), x_gradient.data_ptr(), _address(branch_gradient),
        weight_gradient_D.data_ptr(), len(inverse_R), x.shape[-1],
    )  # fmt: skip
    return x_gradient, branch_gradient, weight_gradient_D


def swiglu(x: Tensor) -> Tensor:
    """silu(first half) · second half of the last dimension."""
    M = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], M)
    _call("swiglu", x.data_ptr(), _is_bf16(x), y.data_ptr(), x.numel() // (2 * M), M)
    return y


def swiglu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    M = x.shape[-1] // 2
    x_gradient = torch.empty_like(x)
    _call(
        "swiglu_backward",
        gradient.data_ptr(),
        x.data_ptr(),
        _is_bf16(x),
        x_gradient.data_ptr(),
        x.numel() // (2 * M),
        M,
    )
    return x_gradient


def dropout(x: Tensor, keys: Tensor, threshold: int, scale: float) -> Tensor:
    """x · scale, and 0 where the 16 bits that `keys`, one a row, draw for a column lie below the threshold."""
    y, D = torch.empty_like(x), x.shape[-1]
    _call(
        "dropout", x.data_ptr(), _is_bf16(x), keys.data_ptr(), y.data_ptr(), keys.numel(), D, threshold, scale
    )  # fmt: skip
    return y


def split_heads(
    qkv_BTE: Tensor, rotary: tuple[Tensor, Tensor] | None, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, N, T, H], k and v [B, G, T, H] of one product's output, q and k rotated where there are tables."""
    B, T, E = qkv_BTE.shape
    N, G = num_heads, num_kv_heads
    H = E // (N + 2 * G)
    q, k, v = qkv_BTE.new_empty(B, N, T, H), qkv_BTE.new_empty(B, G, T, H), qkv_BTE.new_empty(B, G, T, H)
    _split(qkv_BTE, rotary, q, k, v, back=False)
    return q, k, v


def join_heads(q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """The other way, by the transposed rotation: the gradient of `split_heads`' input from those of its results."""
    B, N, T, H = q.shape
    qkv_BTE = q.new_empty(B, T, (N + 2 * k.shape[1]) * H)
    _split(qkv_BTE, rotary, q, k, v, back=True)
    return qkv_BTE


def _split(qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, q: Tensor, k: Tensor, v: Tensor, *, back: bool) -> None:
    B, N, T, H = q.shape
    cos, sin = (None, None) if rotary is None else (table.data_ptr() for table in rotary)
    _call(
        "split_heads", qkv.data_ptr(), _is_bf16(qkv), cos, sin, q.data_ptr(), k.data_ptr(), v.data_ptr(), B, T, N,
        k.shape[1], H, back,
    )  # fmt: skip


def sums_gradients(weight_FD: Tensor) -> bool:
    """Whether `weight_gradient` gives this weight's gradient as it is kept: fp32, on a CPU with a matrix unit."""
    return weight_FD.is_cpu and weight_FD.dtype == torch.float32 and has_matrix_unit()


def weight_gradient(gradient_RF: Tensor, x_RD: Tensor) -> Tensor:
    """gradientᵀ x of contiguous bf16 numbers, [F, D] in fp32."""
    (R, F), D = gradient_RF.shape, x_RD.shape[1]
    if not R:
        return torch.zeros(F, D)
    out_FD = torch.empty(F, D)
    _call("weight_gradient", gradient_RF.data_ptr(), x_RD.data_ptr(), out_FD.data_ptr(), R, F, D)
    return out_FD


def attends(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor) -> bool:
    """Whether `attend` takes these: bf16 in the memory of a CPU with a matrix unit, values as wide as keys."""
    is_bf16 = all(x.is_cpu and x.dtype == torch.bfloat16 for x in (q_BNTH, k_BGSH, v_BGSH))
    return is_bf16 and k_BGSH.shape == v_BGSH.shape and has_matrix_unit()


def attend(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask_BTS: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax(Q Kᵀ / √H) V as [B, T, N, H], and each query's ln Σ exp(scores) [B, N, T] in fp32; all contiguous.

    `mask_BTS` (or [1, T, S]) True = may attend; None = causal, T = S. Scores and their softmax are fp32.
    """
    B, N, T, H = q_BNTH.shape
    y_BTNH, totals_BNT = q_BNTH.new_empty(B, T, N, H), torch.empty(B, N, T)
    _call(
        "attend", q_BNTH.data_ptr(), k_BGSH.data_ptr(), v_BGSH.data_ptr(), *_mask(mask_BTS), y_BTNH.data_ptr(),
        totals_BNT.data_ptr(), *_attention_sizes(q_BNTH, k_BGSH),
    )  # fmt: skip
    return y_BTNH, totals_BNT


def attend_backward(
    gradient_BTNH: Tensor,
    q_BNTH: Tensor,
    k_BGSH: Tensor,
    v_BGSH: Tensor,
    y_BTNH: Tensor,
    totals_BNT: Tensor,
    mask_BTS: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, laid out like these."""
    gradients = torch.empty_like(q_BNTH), torch.empty_like(k_BGSH), torch.empty_like(v_BGSH)
    _call(
        "attend_backward", gradient_BTNH.data_ptr(), q_BNTH.data_ptr(), k_BGSH.data_ptr(), v_BGSH.data_ptr(),
        y_BTNH.data_ptr(), totals_BNT.data_ptr(), *_mask(mask_BTS), *(x.data_ptr() for x in gradients),
        *_attention_sizes(q_BNTH, k_BGSH),
    )  # fmt: skip
    return gradients


def _mask(mask_BTS: Tensor | None) -> tuple[int | None, int]:
    """Where it lies, and how far one row's is from the next."""
    if mask_BTS is None:
        return None, 0
    return mask_BTS.data_ptr(), mask_BTS[0].numel() if len(mask_BTS) > 1 else 0


def _attention_sizes(q_BNTH: Tensor, k_BGSH: Tensor) -> tuple[int | float, ...]:
    B, N, T, H = q_BNTH.shape
    G, S = k_BGSH.shape[1:3]
    return B, T, S, N, G, H, 1 / math.sqrt(H)


def token_logprobs(logits_RV: Tensor, tokens_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at the tokens, and ln Σ exp(logits / temperature): [R] each, fp32.

    Errors: IndexError for a token beyond the vocabulary.
    """
    R, V = logits_RV.shape
    if R and not 0 <= int(tokens_R.min()) <= int(tokens_R.max()) < V:
        raise IndexError(f"tokens run from {int(tokens_R.min())} to {int(tokens_R.max())}; 0 to {V - 1} were expected")
    logprobs_R, totals_R = torch.empty(R), torch.empty(R)
    _call(
        "token_logprobs", logits_RV.data_ptr(), _is_bf16(logits_RV), tokens_R.data_ptr(), logprobs_R.data_ptr(),
        totals_R.data_ptr(), R, V, 1 / temperature,
    )  # fmt: skip
    return logprobs_R, totals_R


def token_logprobs_backward(
    gradient_R: Tensor, logits_RV: Tensor, tokens_R: Tensor, totals_R: Tensor, temperature: float
) -> Tensor:
    R, V = logits_RV.shape
    logits_gradient_RV = torch.empty_like(logits_RV)
    _call(
        "token_logprobs_backward", gradient_R.data_ptr(), logits_RV.data_ptr(), _is_bf16(logits_RV),
        tokens_R.data_ptr(), totals_R.data_ptr(), logits_gradient_RV.data_ptr(), R, V, 1 / temperature,
    )  # fmt: skip
    return logits_gradient_RV


def draw(logits_RV: Tensor, uniforms_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """A token of softmax(logits / temperature) for each uniform number, and its log-probability: [R] each."""
    R, V = logits_RV.shape
    tokens_R, logprobs_R = torch.empty(R, dtype=torch.int64), torch.empty(R)
    _call(
        "draw", logits_RV.data_ptr(), _is_bf16(logits_RV), uniforms_R.data_ptr(), 1 / temperature, tokens_R.data_ptr(),
        logprobs_R.data_ptr(), R, V,
    )  # fmt: skip
    return tokens_R, logprobs_R
