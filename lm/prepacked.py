"""Linear maps with weights prepacked for a CPU's bf16 instructions (oneDNN). Shape letters: M rows, D in, F out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class PrepackedLinear:
    """x Wᵀ + b, the same numbers as `nn.Linear`, from a copy of W [F, D] packed for products with M rows.

    PyTorch packs W in every call, which takes as long as a product with few rows.
    """

    def __init__(self, linear: nn.Linear, num_rows: int) -> None:
        self.bias = linear.bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), num_rows)

    def __call__(self, x_MD: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x_MD, self.weight, self.bias, "none", [], "")
        return product


def gains(weight: Tensor) -> bool:
    """Whether prepacking helps: bf16 on a CPU that multiplies it natively."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


@contextmanager
def prepacked(model: nn.Module, num_rows: int) -> Iterator[None]:
    """Inside this context the model's linear maps use prepacked copies of their weights where that helps.

    The weights must not change meanwhile. The copies take as much memory as the weights.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and gains(module.weight)]
    for linear in linears:
        linear.forward = PrepackedLinear(linear, num_rows)  # type: ignore[assignment]
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward
