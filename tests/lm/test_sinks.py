"""Attention with sinks: every path against the equation in double precision, with gradients."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from lm.attention import OwnKeys, attend, attend_written_out, attention_mask
from lm.config import ModelConfig
from lm.decoding import decoding_steps
from lm.model import LanguageModel, compile_blocks
from lm.native.decoder import NativeSteps
from lm.native.kernels import library
from lm.sinks import WithSinks, attend_with_a_key_more

CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SEGMENTS = torch.tensor([[1] * 40 + [2] * 27 + [0] * 3, [1] * 3 + [2] * 1 + [3] * 66])


def equation(q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor, mask_BTS: Tensor) -> Tensor:
    """exp(score) / (exp(sink) + Σ exp(score)), in double precision."""
    q, k, v, sinks_N = (x.double() for x in (q, k, v, sinks_N))
    shared = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(shared, dim=1).transpose(2, 3) / math.sqrt(q.shape[3])
    terms = scores.exp() * mask_BTS[:, None]
    weights = terms / (terms.sum(dim=-1, keepdim=True) + sinks_N.exp()[:, None, None])
    return weights @ v.repeat_interleave(shared, dim=1)


class CpuFlash:
    """PyTorch's flash attention for CPUs, causal."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y, totals = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)
        return y.transpose(1, 2), totals.transpose(1, 2)

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, totals: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient.transpose(1, 2), q, k, v, y.transpose(1, 2), totals.transpose(1, 2).contiguous(), 0.0, True
        )
        return found


def with_flash(q: Tensor, k: Tensor, v: Tensor, _mask: None, sinks_N: Tensor) -> Tensor:
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    y: Tensor = WithSinks.apply(q, k, v, sinks_N, CpuFlash())  # type: ignore[no-untyped-call]
    return y.transpose(1, 2)


PATHS: dict[str, Callable[..., Tensor]] = {
    "Heed's kernel": attend,
    "written out": attend_written_out.plain,
    "a key more": attend_with_a_key_more,
    "flash": with_flash,
}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(
    ("path", "packed"), [*((path, False) for path in PATHS), *((path, True) for path in PATHS if path != "flash")]
)
def test_a_path_computes_the_equation_and_its_gradients(path: str, packed: bool, dtype: torch.dtype) -> None:
    if path == "Heed's kernel" and library() is None:
        pytest.skip("needs a compiler")
    generator = torch.Generator().manual_seed(7)
    shapes = (2, 4, 70, 24), (2, 2, 70, 24), (2, 2, 70, 24), (4,), (2, 4, 70, 24)
    *inputs, gradient = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    mask = attention_mask(SEGMENTS) if packed else None
    narrow, wide = ([x.to(kind, copy=True).requires_grad_() for x in inputs] for kind in (dtype, torch.float64))
    q, k, v, sinks_N = narrow
    found = PATHS[path](q, k, v, mask, sinks_N)
    expected = equation(*wide, torch.ones(1, 70, 70, dtype=torch.bool).tril() if mask is None else mask)
    close = CLOSE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)
    found.backward(gradient)
    expected.backward(gradient.double())
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad.double() - theirs.grad).norm() <= close * theirs.grad.norm()


@pytest.mark.parametrize("window", [0, 3])
def test_a_decoding_step_attends_to_its_own_keys_and_the_sinks(window: int) -> None:
    generator = torch.Generator().manual_seed(7)
    q, k, v, sinks_N = (torch.randn(s, generator=generator) for s in ((3, 4, 1, 8), (3, 2, 9, 8), (3, 2, 9, 8), (4,)))
    last_B = torch.tensor([8, 2, 0])
    distance_BS = last_B[:, None] - torch.arange(9)
    seen_BS = (distance_BS >= 0) & (distance_BS < (window or 9))
    expected = equation(q, k, v, sinks_N, seen_BS[:, None])
    found = attend(q, k, v, OwnKeys(last_B, 9, window, q), sinks_N)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sink", [-100.0, 100.0, 1e4])
def test_a_sink_far_from_the_scores_takes_nothing_or_all(sink: float) -> None:
    q, k, v = (torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    without = attend(q, k, v, None)
    for path in (attend, attend_written_out.plain, attend_with_a_key_more, with_flash):
        found = path(q, k, v, None, torch.full((2,), sink))
        torch.testing.assert_close(found, without if sink < 0 else torch.zeros_like(without), rtol=1e-5, atol=1e-5)


def test_what_sinks_do_not_go_with_is_refused() -> None:
    shape = partial(
        ModelConfig, vocab_size=32, max_position_embeddings=16, hidden_size=64, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=64, attention_sinks=True,
    )  # fmt: skip
    model = LanguageModel(shape())
    with pytest.raises(ValueError, match=r"compile_blocks is true, but attention with sinks cannot be compiled"):
        compile_blocks(model)
    assert not isinstance(decoding_steps(model, "auto"), NativeSteps)
    with pytest.raises(ValueError, match=r"model\.attention_sinks is true, but model.kind is 'encoder', not 'decoder'"):
        shape(kind="encoder")
