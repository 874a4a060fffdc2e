"""Linear maps under autocast: PyTorch's numbers, and gradients of weights without intermediate rounding."""

import pytest
import torch
from torch import Tensor, nn

from lm.layers import Linear, cache_weight_casts
from lm.native import install, kernels
from lm.native.kernels import library

pytestmark = pytest.mark.skipif(library() is None, reason="needs a compiler")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Sizes below a panel of 32, with a remainder, and above the block sizes in tokens, rows (with one thread) and columns.
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (5, 33, 40), (70, 100, 31), (300, 64, 600), (530, 700, 520), (1100, 290, 2100)]
)
def test_the_gradient_of_a_weight(sizes: tuple[int, int, int]) -> None:
    R, F, D = sizes
    gradient, x = drawn(R, F).bfloat16(), drawn(R, D, seed=1).bfloat16()
    threads, found = torch.get_num_threads(), []
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        found.append(kernels.weight_gradient(gradient, x))
    torch.set_num_threads(threads)
    assert all(torch.equal(other, found[0]) for other in found)
    torch.testing.assert_close(found[0].double(), gradient.double().T @ x.double(), rtol=1e-5, atol=1e-4)


def test_no_tokens_no_gradient() -> None:
    """As in a head's micro-batch in which no position counts."""
    module = Linear(32, 16)
    with torch.autocast("cpu", torch.bfloat16):
        module(drawn(0, 32)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_a_linear_map_under_autocast(bias: bool, dtype: torch.dtype) -> None:
    ours, theirs = Linear(48, 80, bias=bias), nn.Linear(48, 80, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    gradient = drawn(2, 9, 80, seed=1).bfloat16()
    inputs, results = [], []
    for module in (ours, theirs):
        x = drawn(2, 9, 48).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        y.backward(gradient)
        inputs.append(x.grad)
        results.append(y)
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    for mine, other in (results, inputs):
        if install.MULTIPLIES_BF16:  # the same kernel of PyTorch's
            assert torch.equal(mine, other)
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-2, atol=2e-2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(drawn(2, 9, 48).to(dtype)), results[0])


def test_the_weight_s_gradient_is_not_rounded() -> None:
    """The gradient of 2,049 equal tokens: bf16 has no number between 2,048 and 2,064."""
    module = Linear(32, 32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.ones(2049, 32)).backward(torch.ones(2049, 32).bfloat16())
    assert module.weight.grad is not None
    assert module.weight.grad.unique().tolist() == [2049.0]


def test_a_frozen_weight_and_an_input_without_gradient() -> None:
    module = Linear(32, 16)
    module.weight.requires_grad_(False)
    x = drawn(4, 32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        module(x).sum().backward()
    assert module.weight.grad is None
    assert x.grad is not None
    module.weight.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16):
        module(drawn(4, 32)).sum().backward()
    assert module.weight.grad is not None


def test_weights_that_do_not_change_are_rounded_once() -> None:
    module = Linear(32, 32, bias=False)

    def rounded() -> Tensor:
        """The copy that a pass keeps of a weight."""
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            module(drawn(3, 32).requires_grad_())
        return next(tensor for tensor in kept if tensor.shape == (32, 32))

    with cache_weight_casts():
        first = rounded()
        with cache_weight_casts():
            assert rounded().data_ptr() == first.data_ptr()
        assert rounded().data_ptr() == first.data_ptr()
    with torch.no_grad():
        module.weight.add_(1.0)
    with cache_weight_casts():
        torch.testing.assert_close(rounded(), module.weight.detach().bfloat16())
    torch.testing.assert_close(rounded(), module.weight.detach().bfloat16())
