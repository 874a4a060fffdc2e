"""The MLP and its activations. Shape letters: B batch, T tokens, D model width, M MLP width."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lm.config import ModelConfig
from lm.linear import Linear
from lm.replaceable import Replaceable


@Replaceable
def swiglu(gate_and_up: Tensor) -> Tensor:
    """silu(gate) · up, [..., M], of both side by side, [..., 2M] (arXiv 2002.05202)."""
    return _SwiGLU.apply(gate_and_up)  # type: ignore[no-untyped-call]


class _SwiGLU(torch.autograd.Function):
    """Saves only its input for the gradient: two elementwise passes forward, four backward.

    With s = sigmoid(gate):  d up = g · gate · s,  d gate = g · up · s · (1 + gate · (1 - s)).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        if torch.compiler.is_compiling():  # which fuses it, and takes no `out`
            gate, up = gate_and_up.chunk(2, dim=-1)
            return torch.cat([torch.ops.aten.silu_backward(gradient * up, gate), gradient * F.silu(gate)], dim=-1)
        result = torch.empty_like(gate_and_up)
        (gate, up), (of_gate, of_up) = gate_and_up.chunk(2, dim=-1), result.chunk(2, dim=-1)
        # Each half in place: nothing as large is allocated, and nothing is put together.
        torch.mul(gradient, up, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        torch.ops.aten.silu.out(gate, out=of_up)
        of_up.mul_(gradient)
        return result


class _SquaredReLU(torch.autograd.Function):
    """relu(x)², saving only relu(x) for the gradient 2·relu(x)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (gradient * positive).mul_(2)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,  # of the gate
    "relu2": _SquaredReLU.apply,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """down(activation(up(x))); SwiGLU's `up` holds the gate's rows too."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = swiglu if config.mlp == "swiglu" else ACTIVATIONS[config.mlp]
        rows = config.intermediate_size * (2 if config.mlp == "swiglu" else 1)
        self.up = Linear(config.hidden_size, rows, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BTD)))
