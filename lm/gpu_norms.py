"""RMSNorm on a GPU by PyTorch's fused kernels: one pass over memory forward, two backward. Not yet run on a GPU.

Written out in PyTorch (`lm.norms`), it is eight passes forward and nine to thirteen backward.
"""

import torch
from torch import Tensor

from lm.norms import rms_norm


def _is_fused_kernel_there() -> bool:
    """From torch 2.9 on; before, an operator of another signature has the name."""
    found = getattr(torch.ops.aten, "_fused_rms_norm", None)
    return found is not None and "int[] normalized_shape" in str(found.default._schema)


IS_FUSED = _is_fused_kernel_there()


def takes_fused_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> bool:
    """Whether the fused kernel computes this norm: on a GPU, x and weight of one type."""
    return IS_FUSED and x.is_cuda and x.dtype == weight_D.dtype


def fused_rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`lm.norms.rms_norm`. The kernel computes in fp32, and its result has x's type: under autocast, where that is
    fp32, rounding it is a pass of its own.
    """
    normed: Tensor = torch.ops.aten._fused_rms_norm(x, weight_D.shape, weight_D, eps)[0]
    return normed.to(dtype)


rms_norm.replace_where(takes_fused_norm, fused_rms_norm)
