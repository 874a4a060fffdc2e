"""The kernels as PyTorch operators: fake tensors, gradients, compiled models, and what C++ and Python share."""

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lm.attention import split_heads
from lm.config import ModelConfig
from lm.layers import rms_norm, swiglu
from lm.model import LanguageModel, init_weights
from lm.native import decoder, kernels, operators
from lm.native.operators import prepare_for_compile
from lm.positions import rotary_tables
from lm.sampling import logprobs_of_rows, token_logprobs
from tests.lm.conftest import DECODERS

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="needs a C++ compiler")

LLAMA = DECODERS["llama"]
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arguments(name: str) -> tuple[Any, ...]:
    """Returns small inputs for the operator, with gradients where it has any."""
    x, weight = drawn(3, 8).requires_grad_(), drawn(8, seed=1).requires_grad_()
    q, k, v = (drawn(2, heads, 5, 4, seed=heads) for heads in (4, 2, 2))
    cos, sin = rotary_tables(torch.arange(5).expand(2, 5), 4, 1e4, None, torch.float32)
    rows = torch.arange(3)
    return {
        "rms_norm": (x, weight, 1e-5, torch.float32),
        "rms_norm_backward": (drawn(3, 8), drawn(3, 8), drawn(8), drawn(3)),
        "add_rms_norm": (x, drawn(3, 8, seed=2).requires_grad_(), weight, 1e-5),
        "add_rms_norm_backward": (drawn(3, 8), None, drawn(3, 8), drawn(8), drawn(3)),
        "swiglu": (x,),
        "swiglu_backward": (drawn(3, 4), drawn(3, 8)),
        "dropout": (x, rows, 9000, 1.2),
        "split_heads": (drawn(2, 5, 32).requires_grad_(), cos, sin, 4, 2),
        "join_heads": (q, k, v, cos, sin),
        "token_logprobs": (x, rows, 0.7),
        "token_logprobs_backward": (drawn(3), drawn(3, 8), rows, drawn(3), 0.7),
        "sample": (drawn(3, 8), torch.rand(3), 0.7),
        "fp32_linear": (drawn(2, 3, 8).requires_grad_(), drawn(5, 8).requires_grad_(), drawn(5).requires_grad_()),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "rms_norm", "rms_norm_backward", "add_rms_norm", "add_rms_norm_backward", "swiglu", "swiglu_backward",
        "dropout", "split_heads", "join_heads", "token_logprobs", "token_logprobs_backward", "sample",
        "fp32_linear",
    ],
)  # fmt: skip
def test_an_operator_keeps_pytorch_s_rules(name: str) -> None:
    """PyTorch's own check of schema, fake results and registered gradients."""
    torch.library.opcheck(getattr(operators, name), arguments(name))


@pytest.mark.parametrize("sizes", [(0, 8, 5), (1, 1, 1), (37, 70, 33), (1552, 192, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_an_fp32_product_by_onednn_is_a_linear_map(sizes: tuple[int, int, int], has_bias: bool) -> None:
    R, D, F = sizes
    inputs = [drawn(1, R, D), drawn(F, D, seed=1), *([drawn(F, seed=2)] if has_bias else [])]
    gradient, found = drawn(1, R, F, seed=3), []
    for run, dtype in ((operators.fp32_linear, torch.float32), (torch.nn.functional.linear, torch.float64)):
        own = [x.clone().to(dtype).requires_grad_() for x in inputs]
        y = run(*own, *([] if has_bias else [None]))
        y.backward(gradient.to(dtype))
        found.append([y.detach(), *(x.grad for x in own)])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6 * max(R, D, F))


def test_the_model_runs_on_fake_tensors() -> None:
    with FakeTensorMode():
        model = LanguageModel(LLAMA)
        logits_BTV = model(torch.zeros(2, 6, dtype=torch.int64))
        logits_BTV.sum().backward()
        logprobs_BT = token_logprobs(logits_BTV, torch.zeros(2, 6, dtype=torch.int64))
    assert logits_BTV.shape == (2, 6, LLAMA.vocab_size)
    assert logprobs_BT.shape == (2, 6)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize(
    "name", [name if name in ("llama", "gpt3") else pytest.param(name, marks=pytest.mark.nightly) for name in DECODERS]
)
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.long), "aot_eager"])
def test_the_compiled_model_is_the_model(name: str, backend: str) -> None:
    """One graph without breaks, and the same bits."""
    model = LanguageModel(DECODERS[name])
    init_weights(model, 3)
    logits = model(TOKENS)
    expected = [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]
    torch.compiler.reset()
    prepare_for_compile()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    logits = compiled(TOKENS)
    found = [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def results(function: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """Returns the function's result and the gradients of its inputs."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    found = function(*inputs)
    found = list(found) if isinstance(found, tuple) else [found]
    return [*found, *torch.autograd.grad(sum(x.square().sum() for x in found), inputs)]


def check_twin(kernel: Callable[..., Any], twin: Callable[..., Any], *inputs: Tensor) -> None:
    for ours, theirs in zip(results(kernel, *inputs), results(twin, *inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_replaced_functions_compute_what_they_replace() -> None:
    tables = rotary_tables(torch.arange(5).expand(2, 5), 4, 1e4, None, torch.float32)
    tokens = torch.tensor([0, 3, 7])
    check_twin(
        lambda x, w: rms_norm(x, w, 1e-5, torch.float32), lambda x, w: rms_norm.plain(x, w, 1e-5, torch.float32),
        drawn(3, 8), drawn(8),
    )  # fmt: skip
    check_twin(swiglu, swiglu.plain, drawn(3, 8))
    check_twin(lambda x: split_heads(x, tables, 4, 2), lambda x: split_heads.plain(x, tables, 4, 2), drawn(2, 5, 32))
    check_twin(
        lambda x: logprobs_of_rows(x, tokens, 0.7), lambda x: logprobs_of_rows.plain(x, tokens, 0.7), drawn(3, 8)
    )


def test_the_fused_residual_stream_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LanguageModel(LLAMA)
    init_weights(model, 3)

    def passed() -> Sequence[Tensor]:
        logits = model(TOKENS)
        return [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]

    fused = passed()
    monkeypatch.setattr("lm.native.operators.add_rms_norm", None)
    with pytest.raises(TypeError):  # the fused stream was used
        model(TOKENS)
    monkeypatch.setattr("lm.block.run_blocks._replacements", [])
    assert all(torch.equal(a, b) for a, b in zip(fused, passed(), strict=True))


def test_python_calls_the_kernels_as_cpp_declares_them() -> None:
    """Compares argument by argument: a pointer, a bool, an int64 or a float."""
    sources = [
        path.read_text() for path in kernels.SOURCES if path.stem != "decoder"
    ]  # which contain structs to compare
    exported = "".join(source.partition('extern "C" {')[2] for source in sources)
    kinds = {"*": "p", "bool": "b", "int64_t": "i", "float": "f"}
    for name, letters in kernels.ARGUMENTS.items():
        (declared,) = re.findall(rf"^void {name}\(([^)]*)\) {{$", exported, re.MULTILINE)
        found = [next(letter for kind, letter in kinds.items() if kind in argument) for argument in declared.split(",")]
        assert "".join(found) == letters, name


def test_structs_lie_as_the_compiler_lays_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = kernels.library()
    assert loaded is not None
    decoder.check_layouts(loaded)

    class Shorter(ctypes.Structure):
        _fields_ = decoder._Step._fields_[1:]

    monkeypatch.setattr(decoder, "_Step", Shorter)
    with pytest.raises(RuntimeError, match=r"Shorter has size and offsets \[80, 0, .*decoder.cpp has \[88, 0"):
        decoder.check_layouts(loaded)


def test_the_largest_shapes_take_no_memory_on_fake_tensors() -> None:
    config = ModelConfig(
        vocab_size=50_257, max_position_embeddings=2048, hidden_size=12_288, num_hidden_layers=2,
        num_attention_heads=96, num_key_value_heads=96, intermediate_size=49_152,
    )  # fmt: skip
    with FakeTensorMode():
        logits_BTV = LanguageModel(config)(torch.zeros(4, 2048, dtype=torch.int64))
    assert logits_BTV.shape == (4, 2048, 50_257)
