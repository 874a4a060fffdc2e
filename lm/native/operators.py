"""The kernels as PyTorch operators `heed::*`: with shapes for fake tensors and `torch.compile`, and with gradients.

An operator is called through PyTorch's dispatcher, so compiled graphs hold it as one node, and autograd knows its
gradient. In inference that costs 2 µs per call, less than an autograd.Function; `torch.library.custom_op` would cost 4.

Shape letters: R rows, D width, B batch, T tokens, S keys, N heads, G key-value heads, H head dim, F outputs,
V vocabulary.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lm.native import kernels
from lm.native.kernels import library

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY = torch.library.Library("heed", "DEF")
TYPES = (torch.float32, torch.bfloat16)


def is_available() -> bool:
    """Whether the kernels are compiled; the first call compiles them."""
    return library() is not None


def prepare_for_compile() -> None:
    """Make `is_available`, which is constant in a process, a constant of compiled graphs. Call before `torch.compile`.

    This is not done at import, because it imports TorchDynamo, which takes a second or two per process.
    """
    torch.compiler.assume_constant_result(is_available)


def runs(*tensors: Tensor) -> bool:
    """Whether the kernels support these tensors: contiguous, in CPU memory, fp32 or bf16."""
    return all(x.is_cpu and x.dtype in TYPES and x.is_contiguous() for x in tensors) and is_available()


def _operator(
    kernel: Callable[P, R],
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[P, R]:
    """Registers the kernel under its own name and signature.

    `fake` returns empty results; `save(ctx, inputs, output)` keeps what `backward(ctx, *gradients)` needs.
    """
    name = kernel.__name__
    LIBRARY.define(name + torch.library.infer_schema(kernel, mutates_args=()))
    LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"heed::{name}", fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"heed::{name}", backward, setup_context=save, lib=LIBRARY)
    operator: Callable[P, R] = getattr(torch.ops.heed, name).default
    return operator


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


# RMSNorm, alone and of a sum.


def _fake_rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=dtype), _fp32(x, x.numel() // x.shape[-1])


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight_D, _, _ = inputs
    ctx.save_for_backward(x, output[1], weight_D)
    ctx.set_materialize_grads(False)


def _rms_norm_gradients(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return None, None, None, None
    x, inverse_R, weight_D = ctx.saved_tensors
    x_gradient, weight_gradient_D = rms_norm_backward(gradient.contiguous(), x, weight_D, inverse_R)
    return x_gradient, weight_gradient_D.to(weight_D.dtype), None, None


def _fake_add_rms_norm(x: Tensor, branch: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(branch), _fp32(x, x.numel() // x.shape[-1])


def _save_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    total, _, inverse_R = output
    ctx.save_for_backward(total, inverse_R, inputs[2])
    ctx.set_materialize_grads(False)  # the last sum is used only through its norm


def _add_rms_norm_gradients(
    ctx: Any, carried: Tensor | None, gradient: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    total, inverse_R, weight_D = ctx.saved_tensors
    assert gradient is not None, "the norm of a sum is always used"
    carried = None if carried is None else carried.contiguous()
    x_gradient, branch_gradient, weight_gradient_D = add_rms_norm_backward(
        gradient.contiguous(), carried, total, weight_D, inverse_R
    )
    return x_gradient, branch_gradient, weight_gradient_D.to(weight_D.dtype), None


rms_norm_backward = _operator(
    kernels.rms_norm_backward,
    lambda gradient, x, weight_D, inverse_R: (torch.empty_like(x), _fp32(x, *weight_D.shape)),
)
add_rms_norm_backward = _operator(
    kernels.add_rms_norm_backward,
    lambda gradient, carried, total, weight_D, inverse_R: (
        torch.empty_like(total), torch.empty_like(gradient), _fp32(total, *weight_D.shape),
    ),
)  # fmt: skip
rms_norm = _operator(kernels.rms_norm, _fake_rms_norm, _save_rms_norm, _rms_norm_gradients)
add_rms_norm = _operator(kernels.add_rms_norm, _fake_add_rms_norm, _save_add_rms_norm, _add_rms_norm_gradients)

# SwiGLU and dropout.


def _save_swiglu(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_gradient(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return swiglu_backward(gradient.contiguous(), x)


def _save_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, keys, ctx.threshold, ctx.scale = inputs
    ctx.save_for_backward(keys)


def _dropout_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (keys,) = ctx.saved_tensors
    return dropout(gradient.contiguous(), keys, ctx.threshold, ctx.scale), None, None, None


swiglu_backward = _operator(kernels.swiglu_backward, lambda gradient, x: torch.empty_like(x))
swiglu = _operator(
    kernels.swiglu, lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2), _save_swiglu, _swiglu_gradient
)
dropout = _operator(
    kernels.dropout, lambda x, keys, threshold, scale: torch.empty_like(x), _save_dropout, _dropout_gradient
)

# Heads, and attention of bf16.


def _fake_split_heads(
    qkv_BTE: Tensor, cos: Tensor | None, sin: Tensor | None, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, ...]:
    B, T, E = qkv_BTE.shape
    H = E // (num_heads + 2 * num_kv_heads)
    return tuple(qkv_BTE.new_empty(B, heads, T, H) for heads in (num_heads, num_kv_heads, num_kv_heads))


def _save_split_heads(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, cos, sin, _, _ = inputs
    ctx.save_for_backward(cos, sin)


def _split_heads_gradient(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v = (gradient.contiguous() for gradient in gradients)
    cos, sin = ctx.saved_tensors
    return join_heads(q, k, v, cos, sin), None, None, None, None


def _save_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask_BTS = inputs
    ctx.save_for_backward(q, k, v, *output, mask_BTS)
    ctx.set_materialize_grads(False)


def _attend_gradients(ctx: Any, gradient_BTNH: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gradient_BTNH is None:
        return None, None, None, None
    return *attend_backward(gradient_BTNH.contiguous(), *ctx.saved_tensors), None


def _fake_attend(q: Tensor, k: Tensor, v: Tensor, mask_BTS: Tensor | None) -> tuple[Tensor, Tensor]:
    B, N, T, H = q.shape
    return q.new_empty(B, T, N, H), _fp32(q, B, N, T)


join_heads = _operator(
    kernels.join_heads,
    lambda q, k, v, cos, sin: q.new_empty(q.shape[0], q.shape[2], (q.shape[1] + 2 * k.shape[1]) * q.shape[3]),
)
split_heads = _operator(kernels.split_heads, _fake_split_heads, _save_split_heads, _split_heads_gradient)
attend_backward = _operator(
    kernels.attend_backward, lambda gradient, q, k, v, *_: tuple(map(torch.empty_like, (q, k, v)))
)
attend = _operator(kernels.attend, _fake_attend, _save_attend, _attend_gradients)

# Products of fp32 by oneDNN.


def _save_fp32_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _fp32_linear_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    gradient_RF, x_RD = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
    return (
        fp32_linear(gradient.contiguous(), weight.T, None) if needs_x else None,
        fp32_linear(gradient_RF.T, x_RD.T, None) if needs_weight else None,
        gradient_RF.sum(dim=0) if needs_bias else None,
    )


fp32_linear = _operator(
    kernels.fp32_linear,
    lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)),
    _save_fp32_linear,
    _fp32_linear_gradients,
)

# Gradients of weights; log-probabilities and sampling.


def _save_token_logprobs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits_RV, tokens_R, ctx.temperature = inputs
    ctx.save_for_backward(logits_RV, tokens_R, output[1])
    ctx.set_materialize_grads(False)


def _token_logprobs_gradient(ctx: Any, gradient_R: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gradient_R is None:
        return None, None, None
    logits_RV, tokens_R, totals_R = ctx.saved_tensors
    gradient = token_logprobs_backward(gradient_R.contiguous(), logits_RV, tokens_R, totals_R, ctx.temperature)
    return gradient, None, None


weight_gradient = _operator(
    kernels.weight_gradient, lambda gradient_RF, x_RD: _fp32(x_RD, gradient_RF.shape[1], x_RD.shape[1])
)
token_logprobs_backward = _operator(
    kernels.token_logprobs_backward, lambda gradient_R, logits_RV, *_: torch.empty_like(logits_RV)
)
token_logprobs = _operator(
    kernels.token_logprobs,
    lambda logits_RV, tokens_R, temperature: (_fp32(logits_RV, len(tokens_R)), _fp32(logits_RV, len(tokens_R))),
    _save_token_logprobs,
    _token_logprobs_gradient,
)
sample = _operator(
    kernels.sample,
    lambda logits_RV, uniforms_R, temperature: (
        logits_RV.new_empty(len(logits_RV), dtype=torch.int64), _fp32(logits_RV, len(logits_RV)),
    ),
)  # fmt: skip
