"""Tests the kernels of `lm.native.gpu_layers` against their plain twins in Triton's interpreter.

Run by tests/lm/test_gpu_kernels.py. The twins compute in fp64 from the same rounded inputs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lm.attention import Attention
from lm.attention import split_heads as plain_split_heads
from lm.attention import store_heads as plain_store_heads
from lm.cache import KVCache, TokenWriter
from lm.config import ModelConfig
from lm.layers import RMSNorm
from lm.layers import add_norm as plain_add_norm
from lm.layers import swiglu as plain_swiglu
from lm.native import gpu_layers
from lm.native.gpu_layers import MLP_BLOCK, NORM_PROGRAMS, add_norm, rms_norm, split_heads, store_heads, swiglu
from lm.positions import rotary_tables
from tests.lm.native import triton_interpreter  # noqa: F401 - bf16

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEEDS = st.integers(0, 10**6)
FEW = settings(deadline=None, max_examples=40, derandomize=True)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def check(found: Tensor, exact: Tensor) -> None:
    """Equal up to one rounding of the result."""
    rounding = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[found.dtype]
    torch.testing.assert_close(found.double(), exact.detach(), atol=rounding, rtol=rounding, equal_nan=True)


def check_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    exact: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    seed: int,
) -> None:
    """Results and gradients of all inputs, each in its input's dtype."""
    ours = [x.detach().clone().requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = function(*ours), exact(*theirs)
    found, expected = (part if isinstance(part, tuple) else (part,) for part in (found, expected))
    for own, wanted in zip(found, expected, strict=True):
        check(own, wanted)
    weights = [drawn(seed + place, *part.shape, dtype=part.dtype) for place, part in enumerate(found)]
    of_ours = torch.autograd.grad(found, ours, weights)
    of_theirs = torch.autograd.grad(expected, theirs, [weight.double() for weight in weights])
    for own, wanted, given_ in zip(of_ours, of_theirs, inputs, strict=True):
        assert own.dtype == given_.dtype
        scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        check((own.float() / scale).to(own.dtype), wanted / scale)


# --- norms -----------------------------------------------------------------------------------------------------------


def norm_of(kind: str, width: int, seed: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Module:
    norm = RMSNorm(width, 1e-5) if kind == "rms" else nn.LayerNorm(width, bias=bias)
    for place, parameter in enumerate(norm.parameters()):
        parameter.data = 1 + 0.3 * drawn(seed + place, width)
    return norm.to(dtype)


@FEW
@given(
    SEEDS, st.sampled_from(["rms", "layer", "layer without bias"]), st.integers(0, 5), st.integers(1, 300),
    st.sampled_from([(torch.float32, dtype) for dtype in DTYPES] + [(dtype, dtype) for dtype in DTYPES[1:]]),
    st.booleans(),
)  # fmt: skip
def test_a_norm_of_a_sum(
    seed: int, kind: str, rows: int, width: int, dtypes: tuple[torch.dtype, torch.dtype], last: bool
) -> None:
    """A stream as wide as its branch, or in fp32 as under autocast. The last sum is used only through its norm."""
    stream, branch = dtypes
    norm = norm_of(kind.partition(" ")[0], width, seed, branch, bias=kind != "layer without bias")
    x, y = drawn(seed + 7, rows, width, dtype=stream, scale=2.0), drawn(seed + 8, rows, width, dtype=branch)
    total = (x.float() + y.float()).to(stream)

    def exact(x: Tensor, y: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        # The norm reads the rounded sum; its gradient is that of the sum.
        rounded = x + y + (total.double() - (x + y)).detach()
        wide = norm_of(kind.partition(" ")[0], width, seed, torch.float64, bias=kind != "layer without bias")
        values = dict(zip((name for name, _ in wide.named_parameters()), weights, strict=True))
        normed = torch.func.functional_call(wide, values, rounded)
        return (normed,) if last else (rounded, normed)

    def ours(x: Tensor, y: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        if kind == "rms":
            own: nn.Module = RMSNorm(width, 1e-5)
        else:
            own = nn.LayerNorm(width, bias=kind == "layer")
        for (name, _), weight in zip(list(own.named_parameters()), weights, strict=True):
            delattr(own, name)
            setattr(own, name, weight)
        total, normed = add_norm(x, y, own)
        assert (total.dtype, normed.dtype) == (stream, stream)  # no autocast here
        return (normed,) if last else (total, normed)

    check_gradients(ours, exact, [x, y, *norm.parameters()], seed)


@FEW
@given(SEEDS, st.integers(0, 4), st.integers(1, 200), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_a_norm_alone(seed: int, rows: int, width: int, dtype: torch.dtype, out: torch.dtype) -> None:
    """Of rows that are not one after another too, as the queries of one product are."""
    x, weight = drawn(seed, rows, 2 * width, dtype=dtype), 1 + 0.3 * drawn(seed + 1, width)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        own = x[:, width:]
        return own * (own.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt() * weight

    check_gradients(lambda x, w: rms_norm(x[:, width:], w, 1e-5, out), exact, [x, weight], seed)


def test_gradients_of_weights_sum_over_more_rows_than_programs() -> None:
    norm = norm_of("layer", 3, 1, torch.float32)
    x, y = drawn(2, NORM_PROGRAMS + 9, 3), drawn(3, NORM_PROGRAMS + 9, 3)
    found, expected = (
        torch.autograd.grad(function(x, y, norm)[1].square().sum(), list(norm.parameters()))
        for function in (add_norm, plain_add_norm.plain)
    )
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_of_values_that_are_not_finite(value: float, kind: str) -> None:
    """Only the row with the value is affected."""
    norm, x = norm_of(kind, 20, 0, torch.float32), drawn(1, 3, 20)
    x[1, 4] = value
    (_, found), (_, expected) = (function(x, x, norm) for function in (add_norm, plain_add_norm.plain))
    assert torch.equal(found.isfinite(), expected.isfinite())
    torch.testing.assert_close(found, expected, equal_nan=True)


# --- SwiGLU ----------------------------------------------------------------------------------------------------------


@FEW
@given(
    SEEDS, st.integers(0, 4), st.one_of(st.integers(1, 200), st.sampled_from([MLP_BLOCK, MLP_BLOCK + 3])),
    st.sampled_from(DTYPES),
)  # fmt: skip
def test_swiglu(seed: int, rows: int, width: int, dtype: torch.dtype) -> None:
    def exact(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gate * gate.sigmoid() * up

    check_gradients(swiglu, exact, [drawn(seed, rows, 2 * width, dtype=dtype, scale=2.0)], seed)


def test_swiglu_of_gates_that_are_not_finite_or_huge() -> None:
    gates = torch.tensor([-1e30, -200.0, -90.0, 90.0, 200.0, 1e30, math.inf, -math.inf, math.nan])
    found, expected = (results(function, gates) for function in (swiglu, plain_swiglu.plain))
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, equal_nan=True)


def results(function: Callable[[Tensor], Tensor], gates: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.stack([gates, torch.ones(len(gates))], dim=-1).requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


# --- heads -----------------------------------------------------------------------------------------------------------

HEADS = st.sampled_from([(1, 1), (4, 2), (14, 2), (20, 5), (3, 3)])
HEAD_DIMS = st.sampled_from([2, 6, 16, 40])


@FEW
@given(SEEDS, st.integers(0, 3), st.integers(1, 4), HEADS, HEAD_DIMS, st.sampled_from(DTYPES))
def test_split_and_rotated_heads(
    seed: int, rows: int, length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    N, G = heads
    positions = torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(seed))
    cos, sin = rotary_tables(positions, head_dim, 10_000.0, None, dtype)
    wide = cos.double(), sin.double()
    qkv = drawn(seed, rows, length, (N + 2 * G) * head_dim, dtype=dtype)
    check_gradients(
        lambda x: split_heads(x, (cos, sin), N, G), lambda x: plain_split_heads.plain(x, wide, N, G), [qkv], seed
    )


def test_gradients_of_heads_in_other_layouts() -> None:
    """Gradients of keys and values that are apart in memory, or with heads last."""
    cos, sin = rotary_tables(torch.arange(5).expand(2, 5), 6, 10_000.0, None, torch.float32)
    found = []
    for is_ours in (True, False):
        qkv = drawn(0, 2, 5, 8 * 6).requires_grad_()
        q, k, v = (split_heads if is_ours else plain_split_heads.plain)(qkv, (cos, sin), 4, 2)
        of_q = drawn(1, 2, 4, 6, 5).transpose(2, 3)
        of_k, of_v = drawn(2, 2, 2, 5, 6), drawn(3, 2, 5, 2, 6).transpose(1, 2)
        found.append(torch.autograd.grad([q, k, v], qkv, [of_q, of_k, of_v])[0])
    torch.testing.assert_close(found[0], found[1])


@FEW
@given(
    SEEDS, st.integers(1, 4), HEADS, HEAD_DIMS, st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.booleans()
)  # fmt: skip
def test_heads_of_a_step_go_to_the_cache(
    seed: int, rows: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, rotates: bool, norms: bool,
    reads_all: bool,
) -> None:  # fmt: skip
    """Each row to its own column, and nothing else of the cache changes."""
    N, G = heads
    config = ModelConfig(
        vocab_size=16, max_position_embeddings=64, hidden_size=N * head_dim, num_hidden_layers=2,
        num_attention_heads=N, num_key_value_heads=G, head_dim=head_dim, intermediate_size=8, qk_norm=norms,
    )  # fmt: skip
    attention = Attention(config).to(dtype)
    if attention.query_norm is not None and attention.key_norm is not None:
        attention.query_norm.weight.data = (1 + 0.3 * drawn(seed + 1, head_dim)).to(dtype)
        attention.key_norm.weight.data = (1 + 0.3 * drawn(seed + 2, head_dim)).to(dtype)
    columns = torch.randint(0, 9, (rows,), generator=torch.Generator().manual_seed(seed))
    qkv = drawn(seed, rows, 1, (N + 2 * G) * head_dim, dtype=dtype)
    rotary = rotary_tables(columns[:, None], head_dim, 10_000.0, None, dtype) if rotates else None
    found: list[list[Tensor]] = []
    for function in (store_heads, plain_store_heads.plain):
        like = torch.zeros(1, dtype=dtype)
        cache = KVCache.empty(config, rows + 2, 12, like)
        cache.keys += 3
        cache.values += 4
        with torch.no_grad():
            writer = TokenWriter(cache, columns, 12 if reads_all else 9)
            assert gpu_layers.takes_stored_heads(attention, qkv, rotary, writer, 1) is False  # it is on a CPU
            found.append([*function(attention, qkv, rotary, writer, 1), cache.keys, cache.values])
    rounding = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 3e-3}[dtype]
    for own, wanted in zip(*found, strict=True):
        assert own.shape == wanted.shape
        torch.testing.assert_close(own, wanted, atol=rounding, rtol=rounding)


@pytest.mark.parametrize(
    "changes",
    [{}, {"partial_rotary_factor": 0.5}, {"query_pre_attn_scalar": 5}, {"qk_norm": True, "qk_norm_over": "projection"}],
)
def test_heads_that_the_kernels_do_not_compute_are_left_to_pytorch(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(
        vocab_size=16, max_position_embeddings=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=8, **changes,
    )  # fmt: skip
    monkeypatch.setattr(gpu_layers, "takes", lambda *_: True)  # as on a GPU
    qkv, columns = drawn(0, 3, 1, 32), torch.tensor([1, 2, 3])
    rotary = rotary_tables(columns[:, None], config.rotary_dim, 10_000.0, None, qkv.dtype)
    writer = TokenWriter(KVCache.empty(config, 3, 9, qkv), columns, 9)
    assert gpu_layers.takes_stored_heads(Attention(config), qkv, rotary, writer, 0) == (not changes)
    assert gpu_layers.takes_heads(qkv, rotary, 2, 1) == ("partial_rotary_factor" not in changes)
