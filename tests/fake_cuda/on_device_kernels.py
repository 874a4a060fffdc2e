"""What the Triton kernels save, counted on the fake device with Triton's interpreter. Run by test_fake_cuda.py.

A launch of a Triton kernel counts as one kernel, and its bytes are those of its arguments.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.attention import split_heads
from lm.cache import KVCache
from lm.decoding import FixedSteps, decode
from lm.generation import generate
from lm.layers import add_norm, make_norm, swiglu
from lm.model import LanguageModel
from lm.native import gpu, gpu_layers
from lm.positions import rotary_tables
from lm.sampling import Choice
from tests.fake_cuda import kernels
from tests.gpu.models import SHAPES, distance, gradients, pair, prompts, shape
from training.objectives import PackedObjective
from training.packing import pack

CUDA = torch.device("cuda")
QWEN = shape(attention_bias="qkv")
ROWS = pack([([5 + length] * length, [True] * length) for length in (7, 12, 9)], 24, 0)


@contextmanager
def without_layers() -> Iterator[None]:
    """What a GPU runs without the kernels between products and without that of a step's attention."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_layers, "takes", lambda *_: False)
        patch.setattr(gpu, "DTYPES", ())
        yield


def counted(run: Callable[[], object]) -> tuple[kernels.Counts, kernels.Counts]:
    """Counts without these kernels, and with them."""
    with without_layers(), kernels.counted() as before:
        run()
    with kernels.counted() as after:
        run()
    return before, after


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        pytest.param("llama", 17, 9, marks=pytest.mark.nightly),
        pytest.param("qwen", 17, 9, marks=pytest.mark.nightly),
        ("qwen3", 20, 9),
        pytest.param("mistral", 17, 9, marks=pytest.mark.nightly),
        ("gpt2", 14, 9),
    ],
)
def test_kernels_of_a_layer_and_token(name: str, before: int, after: int) -> None:
    """The difference between models of three layers and of two; and the logits are the same.

    Without these kernels, a step makes a mask of each window that a layer has: Mistral's first and second layers have
    different ones, and the third has the first's. PyTorch's LayerNorm is one kernel less on a GPU than on the fake
    device, so GPT-2 had 12.
    """
    found: dict[int, tuple[int, int]] = {}
    for layers in (2, 3):
        config = {**SHAPES, "qwen": QWEN}[name].model_copy(update={"num_hidden_layers": layers})
        _, model = pair(config, torch.float32)
        logits: list[Tensor] = []

        def step(model: LanguageModel = model, logits: list[Tensor] = logits) -> None:
            columns_B = torch.arange(3, 11, device=CUDA)
            with torch.inference_mode():
                cache = KVCache.empty(model.config, 8, 40, like=model.head.weight)
                logits.append(decode(model, 7 + columns_B, columns_B, cache, 40))

        found[layers] = tuple(counts.num_kernels for counts in counted(step))
        assert distance(logits[1], logits[0]) < 1e-5
    assert tuple(three - two for three, two in zip(found[3], found[2], strict=True)) == (before, after)


def test_rows_with_more_keys_than_one_split_take_one_kernel_more() -> None:
    _, model = pair(QWEN.model_copy(update={"max_position_embeddings": 600}), torch.bfloat16)
    columns_B = torch.tensor([3, 290], device=CUDA)
    cache = KVCache.empty(model.config, 2, 300, like=model.head.weight)
    with torch.inference_mode(), kernels.counted() as counts:
        decode(model, columns_B, columns_B, cache, 300)
    assert counts.kernels["_attend_kernel"] == counts.kernels["_merge_kernel"] == 2


def test_recorded_steps_draw_the_same_tokens() -> None:
    """Kernels are replayed on the memory of the recording, also for a row that moves or enters later."""
    _, model = pair(QWEN, torch.float32)
    found = [
        generate(
            model, prompts(3, 5), max_new_tokens=3, end_ids=(), choice=Choice(), seeds=range(3), max_rows=2, steps=steps
        )
        for steps in ("eager", FixedSteps(model))
    ]
    assert found[0].responses == found[1].responses
    for eager, recorded in zip(found[0].logprobs, found[1].logprobs, strict=True):
        assert recorded == pytest.approx(eager, abs=1e-4)
    with without_layers():
        plain = generate(
            model, prompts(3, 5), max_new_tokens=3, end_ids=(), choice=Choice(), seeds=range(3), max_rows=2
        )
    assert found[0].responses == plain.responses


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stream", "before", "after"),
    [
        ("qwen", torch.bfloat16, 39, 25),
        pytest.param("qwen", torch.float32, 55, 35, marks=pytest.mark.nightly),
        pytest.param("gpt2", torch.bfloat16, 32, 28, marks=pytest.mark.nightly),
        ("gpt2", torch.float32, 54, 44),
    ],
    ids=str,
)
def test_kernels_of_a_layer_in_training(name: str, stream: torch.dtype, before: int, after: int) -> None:
    """Forward and backward: the difference between models of two layers and of one. The gradients are the same.

    An fp32 stream is under autocast.
    """
    found: dict[int, tuple[int, int]] = {}
    for layers in (1, 2):
        config = {**SHAPES, "qwen": QWEN}[name].model_copy(update={"num_hidden_layers": layers})
        _, model = pair(config, stream)
        losses: list[float] = []
        sums: list[dict[str, Tensor]] = []

        def passes(
            model: LanguageModel = model, losses: list[float] = losses, sums: list[dict[str, Tensor]] = sums
        ) -> None:
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=stream == torch.float32):
                loss, _ = PackedObjective(ROWS).loss(model, np.arange(len(ROWS)), CUDA)
            loss.backward()
            losses.append(float(loss.detach()))
            sums.append(gradients(model))

        without, with_kernels = counted(passes)
        found[layers] = without.num_kernels, with_kernels.num_kernels
        assert losses[1] == pytest.approx(losses[0], rel=0.01)
        for parameter, gradient in sums[0].items():
            assert distance(sums[1][parameter], gradient) < 0.05, parameter
    assert tuple(two - one for two, one in zip(found[2], found[1], strict=True)) == (before, after)


def per_number(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """(kernels, bytes per number of the last input) of a pass and of its gradients."""
    inputs = tuple(part.detach().requires_grad_() for part in inputs)
    with kernels.counted() as forward:
        found = function(*inputs)
    weights = [torch.ones_like(part) for part in found]
    with kernels.counted() as backward:
        torch.autograd.grad(found, inputs, weights)
    size = inputs[-1].numel()
    return (
        (forward.num_kernels, round(forward.bytes_moved / size)),
        (backward.num_kernels, round(backward.bytes_moved / size)),
    )


def test_bytes_of_swiglu() -> None:
    """Per number of gate and up together, which are twice those of the result."""
    x = torch.randn(16, 2048, device=CUDA, dtype=torch.bfloat16)
    with without_layers():
        assert per_number(lambda x: (swiglu(x),), x) == ((2, 5), (4, 11))
    assert per_number(lambda x: (swiglu(x),), x) == ((1, 3), (1, 5))


def test_bytes_of_rotary_heads() -> None:
    """12 query heads and two key-value heads of the same product."""
    qkv = torch.randn(1, 16, 16 * 64, device=CUDA, dtype=torch.bfloat16)
    rotary = rotary_tables(torch.arange(16, device=CUDA)[None], 64, 1e4, None, torch.bfloat16)
    with without_layers():
        assert per_number(lambda x: split_heads(x, rotary, 12, 2), qkv) == ((3, 12), (7, 24))
    assert per_number(lambda x: split_heads(x, rotary, 12, 2), qkv) == ((1, 4), (1, 4))


@pytest.mark.parametrize(
    ("kind", "stream", "before", "after"),
    [
        ("rms", torch.bfloat16, ((2, 10), (2, 12)), ((1, 8), (2, 8))),
        ("layer", torch.bfloat16, ((3, 14), (2, 12)), ((1, 8), (2, 9))),
        ("rms", torch.float32, ((3, 24), (4, 36)), ((1, 12), (2, 17))),
        ("layer", torch.float32, ((4, 32), (4, 36)), ((1, 12), (2, 17))),
    ],
    ids=str,
)
def test_bytes_of_a_norm_of_a_sum(
    kind: str,
    stream: torch.dtype,
    before: tuple[tuple[int, int], ...],
    after: tuple[tuple[int, int], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream in fp32 is under autocast, where the norm is rounded for the product that follows.

    PyTorch's LayerNorm is one kernel less on a GPU than on the fake device.
    """
    monkeypatch.setattr(gpu_layers, "NORM_PROGRAMS", 1)  # as many rows per program as in a long pass
    norm = make_norm(shape(norm=kind, hidden_size=1024), 1024).to(CUDA, stream)
    x, branch = (torch.randn(32, 1024, device=CUDA, dtype=dtype) for dtype in (stream, torch.bfloat16))

    def passes(x: Tensor, branch: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16, enabled=stream == torch.float32):
            total, normed = add_norm(x, branch, norm)
            return total, normed.to(torch.bfloat16)

    with without_layers():
        found = per_number(passes, x, branch)
    assert (found, per_number(passes, x, branch)) == (before, after)
