"""What the Triton kernels save, counted on the fake device with Triton's interpreter. Run by test_fake_cuda.py."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from lm.attention import KVCache
from lm.config import ModelConfig
from lm.decoding import FixedSteps, decode
from lm.generation import generate
from lm.layers import add_norm, make_norm, swiglu
from lm.model import LanguageModel
from lm.native import gpu_attention, gpu_layers
from lm.sampling import Choice
from tests.fake_cuda import kernels
from tests.gpu.models import SHAPES, pair, prompts, shape, tokens
from training.objectives import PackedObjective
from training.packing import pack

CUDA = torch.device("cuda")
QWEN = shape(attention_bias="qkv")


@contextmanager
def without_kernels() -> Iterator[None]:
    """What a GPU ran before: PyTorch's operations, apart from log-probs and draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_layers, "takes", lambda *_: False)
        patch.setattr(gpu_attention, "DTYPES", ())
        yield


def before_and_after(run: object) -> list[kernels.Counts]:
    found = []
    with without_kernels(), kernels.counted() as counts:
        run()  # type: ignore[operator]
    found.append(counts)
    with kernels.counted() as counts:
        run()  # type: ignore[operator]
    return [*found, counts]
