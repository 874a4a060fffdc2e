"""What the Triton kernels save, counted on the fake device with Triton's interpreter. Run by test_fake_cuda.py.

A launch of a Triton kernel counts as one kernel, and its bytes are those of its arguments.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.attention import KVCache
from lm.decoding import FixedSteps, decode
from lm.generation import generate
from lm.layers import add_norm, make_norm, swiglu
from lm.native import gpu_attention, gpu_layers
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
        patch.setattr(gpu_attention, "DTYPES", ())
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
    [("llama", 17, 9), ("qwen", 17, 9), ("qwen3", 20, 9), ("mistral", 17, 9), ("gpt2", 14, 9)],
)
def test_kernels_of_a_layer_and_token(name: str, before: int, after: int) -> None:
    """The difference between models of four and of two layers; and the logits are the same."""
    found: dict[int, tuple[int, int]] = {}
    for layers in (2, 4):
        config = {**SHAPES, "qwen": QWEN}[name].model_copy(update={"num_hidden_layers": layers})
        _, model = pair(config, torch.bfloat16)
        columns_B, logits = torch.arange(3, 11, device=CUDA), []

        def step(model: torch.nn.Module = model, logits: list[Tensor] = logits) -> None:
            with torch.inference_mode():
                cache = KVCache.empty(model.config, 8, 40, like=model.head.weight)
                logits.append(decode(model, 7 + columns_B, columns_B, cache, 40))

        found[layers] = tuple(counts.num_kernels for counts in counted(step))
        assert distance(logits[1].float(), logits[0].float()) < 0.02
    assert tuple((four - two) / 2 for four, two in zip(found[4], found[2], strict=True)) == (before, after)


def test_rows_with_more_keys_than_one_split_take_one_kernel_more() -> None:
    _, model = pair(QWEN.model_copy(update={"max_position_embeddings": 600}), torch.bfloat16)
    columns_B = torch.tensor([3, 290], device=CUDA)
    cache = KVCache.empty(model.config, 2, 300, like=model.head.weight)
    with torch.inference_mode(), kernels.counted() as counts:
        decode(model, columns_B, columns_B, cache, 300)
    assert counts.kernels["_attend_kernel"] == counts.kernels["_merge_kernel"] == 2


def test_recorded_steps_draw_the_same_tokens() -> None:
    """Kernels are replayed on the same memory: eager and recorded steps give the same bits."""
    _, model = pair(QWEN, torch.float32)
    found = [
        generate(
            model, prompts(6, 9), max_new_tokens=4, end_ids=(), choice=Choice(), seeds=range(6), max_rows=4, steps=steps
        )
        for steps in ("eager", FixedSteps(model))
    ]
    assert found[0] == found[1]
    with without_layers():
        plain = generate(
            model, prompts(6, 9), max_new_tokens=4, end_ids=(), choice=Choice(), seeds=range(6), max_rows=4
        )
    assert found[0].responses == plain.responses


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen", "gpt2"])
@pytest.mark.parametrize("stream", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_of_a_training_pass(name: str, stream: torch.dtype) -> None:
    """Forward and backward, of a layer: the difference between models of four and of two layers."""
    found: dict[int, list[kernels.Counts]] = {}
    for layers in (2, 4):
        config = {**SHAPES, "qwen": QWEN}[name].model_copy(update={"num_hidden_layers": layers})
        _, model = pair(config, stream)
        losses, grown = [], []

        def passes(
            model: torch.nn.Module = model, losses: list[float] = losses, grown: list[dict[str, Tensor]] = grown
        ) -> None:
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=stream == torch.float32):
                loss, _ = PackedObjective(ROWS).loss(model, np.arange(len(ROWS)), CUDA)
            loss.backward()
            losses.append(float(loss))
            grown.append({name: gradient.clone() for name, gradient in gradients(model).items()})

        found[layers] = list(counted(passes))
        assert losses[1] == pytest.approx(losses[0], rel=0.01)
        for parameter, gradient in grown[0].items():
            assert distance(grown[1][parameter].float(), gradient.float()) < 0.05, parameter
    per_layer = [four.kernels - two.kernels for four, two in zip(found[4], found[2], strict=True)]
    moved = [four.bytes_moved - two.bytes_moved for four, two in zip(found[4], found[2], strict=True)]
    print(name, stream, [sum(c.values()) / 2 for c in per_layer], moved, per_layer)


def test_bytes_of_swiglu_and_of_a_norm_of_a_sum() -> None:
    x = torch.randn(64, 1024, device=CUDA, dtype=torch.bfloat16)
    assert x.numel()
