"""Repairs bf16 in Triton's interpreter: it truncates instead of rounding, and multiplies matrices of bf16 as integers.

Import it before running a kernel.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_cast, _dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


def _widened(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def cast_impl(self: Any, source: Any, target: Any) -> Any:
    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16)
        return TensorHandle(rounded.numpy().reshape(source.data.shape), tl.bfloat16)
    return _cast(self, source, target)


def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _dot(self, _widened(a), _widened(b), *rest)


InterpreterBuilder.cast_impl = cast_impl
InterpreterBuilder.create_dot = create_dot
