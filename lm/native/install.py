"""Replaces plain functions by CPU kernels, or Triton kernels on a GPU, for the arguments that the kernels support.

Importing this module installs them; `lm.model` imports it. With HEED_TRITON=0 in the environment, a GPU computes with
PyTorch's kernels alone, for machines on which Triton does not work and for comparisons.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lm import attention, dropout, layers, sampling, sinks
from lm.block import Block, BlockInputs, run_blocks
from lm.layers import RMSNorm, cast_weight, compute_dtype, recomputed
from lm.native import operators
from lm.native.operators import TYPES, is_available, runs
from lm.positions import Rotary, turns_whole_heads

# In fp32, PyTorch's default, MKL, does not use AVX-512 on AMD: .11 TFLOP/s per core instead of .24. Without AVX-512,
# MKL is faster (docs/negative-results.md).
ONEDNN_IS_FASTER = (
    str(torch.cpu.get_capabilities().get("cpu_name", "")).startswith("AMD")
    and bool(torch.cpu.get_capabilities().get("avx512_f"))
    and torch.backends.mkl.is_available()
    and torch.backends.mkldnn.is_available()
)
BLOCK, DEPTH = 128, 512  # rows or outputs, and inputs, that are multiplied at a time
# Without bf16 instructions PyTorch multiplies bf16 at a ninth of the speed of fp32 (docs/negative-results.md).
MULTIPLIES_BF16 = torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _takes_rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> bool:
    return runs(x, weight_D) and dtype in TYPES


def _rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return operators.rms_norm(x, weight_D, eps, dtype)[0]


def _takes_swiglu(gate_and_up: Tensor) -> bool:
    return runs(gate_and_up)


def _swiglu(gate_and_up: Tensor) -> Tensor:
    return operators.swiglu(gate_and_up)


def _takes_dropout(x: Tensor, keys: Tensor, threshold: int) -> bool:
    return x.is_cpu and x.dtype in TYPES and is_available()


def _dropout(x: Tensor, keys: Tensor, threshold: int) -> Tensor:
    return operators.dropout(x.contiguous(), keys, threshold, dropout.dropout_scale(threshold))


def _takes_heads(qkv_BTE: Tensor, rotary: Rotary | None, num_heads: int, num_kv_heads: int) -> bool:
    tables = rotary or ()
    is_whole = rotary is None or turns_whole_heads(qkv_BTE, rotary, num_heads, num_kv_heads)
    return is_whole and runs(qkv_BTE, *tables) and all(table.dtype == qkv_BTE.dtype for table in tables)


def _split_heads(
    qkv_BTE: Tensor, rotary: Rotary | None, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = rotary or (None, None)
    return operators.split_heads(qkv_BTE, cos, sin, num_heads, num_kv_heads)


def takes_attention(
    q_BNTH: Tensor,
    k_BGSH: Tensor,
    v_BGSH: Tensor,
    mask_BTS: Tensor | None,
    sinks_N: Tensor | None = None,
    cap: float = 0.0,
) -> bool:
    """Whether the attention kernel supports these: all fp32 or all bf16, values as wide as keys, no cap."""
    is_one_type = all(x.is_cpu and x.dtype == q_BNTH.dtype for x in (q_BNTH, k_BGSH, v_BGSH))
    return is_one_type and not cap and q_BNTH.dtype in TYPES and k_BGSH.shape == v_BGSH.shape and is_available()


def _attend(
    q_BNTH: Tensor,
    k_BGSH: Tensor,
    v_BGSH: Tensor,
    mask_BTS: Tensor | None,
    sinks_N: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    assert not cap, "no kernel caps scores"
    mask_BTS = None if mask_BTS is None else mask_BTS.contiguous()
    qkv = q_BNTH.contiguous(), k_BGSH.contiguous(), v_BGSH.contiguous()
    if sinks_N is None:
        return operators.attend(*qkv, mask_BTS)[0].transpose(1, 2)
    y_BTNH: Tensor = sinks.WithSinks.apply(*qkv, sinks_N, _CpuKernel(mask_BTS))  # type: ignore[no-untyped-call]
    return y_BTNH.transpose(1, 2)


@dataclass(frozen=True)
class _CpuKernel:
    """The attention kernel, as `lm.sinks` calls it."""

    mask_BTS: Tensor | None

    def forward(self, q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor) -> tuple[Tensor, Tensor]:
        y_BTNH, totals_BNT = operators.attend(q_BNTH, k_BGSH, v_BGSH, self.mask_BTS)
        return y_BTNH, totals_BNT.transpose(1, 2)

    def backward(
        self, gradient: Tensor, q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, y_BTNH: Tensor, totals_BTN: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        results = y_BTNH, totals_BTN.transpose(1, 2).contiguous(), self.mask_BTS
        return operators.attend_backward(gradient.contiguous(), q_BNTH, k_BGSH, v_BGSH, *results)


def _takes_logprobs(logits_CV: Tensor, tokens_C: Tensor, temperature: float) -> bool:
    return runs(logits_CV)


def _logprobs(logits_CV: Tensor, tokens_C: Tensor, temperature: float) -> Tensor:
    return operators.token_logprobs(logits_CV, tokens_C.contiguous(), temperature)[0]


def _takes_sampling(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> bool:
    return runs(logits_BV, uniforms_B)


def _sample(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    return operators.sample(logits_BV, uniforms_B, temperature)


def takes_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `_Linear` computes this product: in bf16 on a CPU, to keep a weight's gradient unrounded or because
    PyTorch's bf16 products are slow.
    """
    if not x.is_cpu or not (_is_autocast() or x.dtype == weight.dtype == torch.bfloat16):
        return False
    learns = torch.is_grad_enabled() and weight.requires_grad and weight.dtype == torch.float32
    return (learns or not MULTIPLIES_BF16) and is_available()


def _is_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """x Wᵀ + b in bf16. dX = dY W, dW = dYᵀ X, db = Σ dY; dW and db are summed in fp32, and not rounded for weights in
    fp32.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Autocast keeps no copy of a frozen weight either.
        narrow, narrow_weight = x.bfloat16(), cast_weight(weight) if weight.requires_grad else weight.bfloat16()
        needs_x, needs_weight, _ = ctx.needs_input_grad  # type: ignore[attr-defined]
        kept = narrow if needs_weight else None, narrow_weight if needs_x else None
        ctx.save_for_backward(*kept)  # type: ignore[arg-type]
        ctx.dtypes = x.dtype, weight.dtype  # type: ignore[attr-defined]
        product = F.linear if MULTIPLIES_BF16 else _product_by_blocks
        return product(narrow, narrow_weight, None if bias is None else cast_weight(bias))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_dtype, dtype = ctx.dtypes
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        x_gradient = None
        if needs_x:
            product = gradient @ weight if MULTIPLIES_BF16 else _product_by_blocks(gradient, weight.T, None)
            x_gradient = product.to(x_dtype)
        gradient_RF = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        return (
            x_gradient,
            operators.weight_gradient(gradient_RF, x.flatten(0, -2).contiguous()).to(dtype) if needs_weight else None,
            gradient_RF.sum(dim=0, dtype=torch.float32).to(dtype) if needs_bias else None,
        )


def _product_by_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b of bf16 with fp32 sums, rounded to bf16. Rows, outputs and inputs are multiplied in blocks, so that fp32
    copies take little memory.
    """
    y = x.new_empty(*x.shape[:-1], len(weight))
    rows, outputs = zip(x.flatten(0, -2).split(BLOCK), y.flatten(0, -2).split(BLOCK), strict=True), weight.split(BLOCK)
    with torch.autocast("cpu", enabled=False):
        for x_RD, y_RF in rows:
            for number, (weight_FD, part) in enumerate(zip(outputs, y_RF.split(BLOCK, dim=1), strict=True)):
                offset = 0.0 if bias is None else bias[BLOCK * number : BLOCK * (number + 1)].float()
                parts = zip(x_RD.split(DEPTH, dim=1), weight_FD.split(DEPTH, dim=1), strict=True)
                part.copy_(sum((F.linear(a.float(), b.float()) for a, b in parts), offset))
    return y


def takes_fp32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN computes this product. Inputs without rows count too: all ranks must compute gradients in the same
    order, or ZeRO would add up different ones.
    """
    is_fp32 = x.is_cpu and x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return is_fp32 and ONEDNN_IS_FASTER


def _takes_blocks(
    blocks: nn.ModuleList, final_norm: nn.Module, x_BTD: Tensor, inputs: BlockInputs, recompute: bool = False
) -> bool:
    """Whether norms come first and are RMSNorm, and no positions come between blocks. Recomputed blocks run as
    `lm.block` runs them.
    """
    is_plain = inputs.positions_BTD is None and not recompute
    return is_plain and isinstance(final_norm, RMSNorm) and runs(x_BTD, final_norm.weight)


def _gpu_takes_blocks(
    blocks: nn.ModuleList, final_norm: nn.Module, x_BTD: Tensor, inputs: BlockInputs, recompute: bool = False
) -> bool:
    return inputs.positions_BTD is None and gpu_layers.takes_add_norm(x_BTD, x_BTD, final_norm)


def _run_blocks(
    blocks: nn.ModuleList, final_norm: nn.Module, x_BTD: Tensor, inputs: BlockInputs, recompute: bool = False
) -> Tensor:
    """`lm.block.run_blocks`, with the residual stream and its norms in one pass over memory.

    A block ends by adding its last branch to the stream, and the next one begins by reading the stream for its norm.
    Here the addition waits for that norm, and one kernel does both. On a CPU each number is computed and rounded as in
    `lm.block`. With `recompute`, a block still ends with its own sum, the only tensor that the next one saves.
    """
    branch_BTD: Tensor | None = None
    for layer, block in enumerate(blocks):
        assert isinstance(block, Block), type(block)
        if recompute:
            x_BTD = recomputed(_run_whole_block, block, x_BTD, inputs, layer)
        else:
            x_BTD, branch_BTD = _run_block(block, x_BTD, branch_BTD, inputs, layer)
    return _norm_of_sum(x_BTD, branch_BTD, final_norm)[1]


def _run_whole_block(block: Block, x_BTD: Tensor, inputs: BlockInputs, layer: int) -> Tensor:
    x_BTD, branch_BTD = _run_block(block, x_BTD, None, inputs, layer)
    return x_BTD + branch_BTD


def _run_block(
    block: Block, x_BTD: Tensor, branch_BTD: Tensor | None, inputs: BlockInputs, layer: int
) -> tuple[Tensor, Tensor]:
    """Returns the stream and the branch that is still to be added to it, given those of the previous block."""
    x_BTD, normed_BTD = _norm_of_sum(x_BTD, branch_BTD, block.attention_norm)
    branch_BTD = block.attend(normed_BTD, inputs, layer)
    if block.cross_norm is not None:
        x_BTD, normed_BTD = _norm_of_sum(x_BTD, branch_BTD, block.cross_norm)
        branch_BTD = block.attend_to_encoder(normed_BTD, inputs, layer)
    x_BTD, normed_BTD = _norm_of_sum(x_BTD, branch_BTD, block.mlp_norm)
    return x_BTD, block.transform(normed_BTD, inputs, layer)


def _norm_of_sum(x_BTD: Tensor, branch_BTD: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns x + branch (or x, if there is no branch) and its norm."""
    return (x_BTD, norm(x_BTD)) if branch_BTD is None else layers.add_norm(x_BTD, branch_BTD, norm)


def _takes_add_norm(x: Tensor, branch: Tensor, norm: nn.Module) -> bool:
    return isinstance(norm, RMSNorm) and branch.dtype == compute_dtype(x) and runs(x, branch, norm.weight)


def _add_norm(x: Tensor, branch: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(norm, RMSNorm)
    total, normed, _ = operators.add_rms_norm(x, branch, norm.weight, norm.eps)
    return total, normed


layers.rms_norm.replace_where(_takes_rms_norm, _rms_norm)
layers.add_norm.replace_where(_takes_add_norm, _add_norm)
layers.swiglu.replace_where(_takes_swiglu, _swiglu)
dropout.drop.replace_where(_takes_dropout, _dropout)
attention.split_heads.replace_where(_takes_heads, _split_heads)
attention.attend_written_out.replace_where(takes_attention, _attend)
sampling.logprobs_of_rows.replace_where(_takes_logprobs, _logprobs)
sampling.sample.replace_where(_takes_sampling, _sample)
layers.linear.replace_where(takes_linear, _linear)
layers.linear.replace_where(takes_fp32_linear, operators.fp32_linear)
run_blocks.replace_where(_takes_blocks, _run_blocks)
if torch.cuda.is_available() and find_spec("triton") is not None and os.environ.get("HEED_TRITON", "1") != "0":
    from lm.native import gpu, gpu_layers

    layers.rms_norm.replace_where(gpu_layers.takes_rms_norm, gpu_layers.rms_norm)
    layers.add_norm.replace_where(gpu_layers.takes_add_norm, gpu_layers.add_norm)
    layers.swiglu.replace_where(gpu_layers.takes_swiglu, gpu_layers.swiglu)
    attention.split_heads.replace_where(gpu_layers.takes_heads, gpu_layers.split_heads)
    attention.attend_own_keys.replace_where(gpu.takes_own_keys, gpu.attend_own_keys)
    attention.store_heads.replace_where(gpu_layers.takes_stored_heads, gpu_layers.store_heads)
    sampling.logprobs_of_rows.replace_where(gpu.takes_logprobs, gpu.token_logprobs)
    sampling.sample.replace_where(gpu.takes_sampling, gpu.sample)
    run_blocks.replace_where(_gpu_takes_blocks, _run_blocks)
# After Triton's, which round in the same pass; a GPU may have no Triton.
layers.rms_norm.replace_where(layers.takes_fused_norm, layers.fused_rms_norm)
