"""Kernels and bytes of a block on the fake device against the constants of `heed plan`. Run by test_fake_cuda.py."""

from collections import Counter

import pytest
import torch

from heed.jobs.estimate import BLOCK_KERNELS, GPUS, Times
from heed.jobs.memory import Layout
from lm.config import ModelConfig
from tests.fake_cuda import kernels
from tests.gpu.models import SHAPES, pair

TOKENS = 2 * 128
PRODUCTS = ("mm", "attention")  # parts of the names of kernels that the plan counts as products
CASTS = 6  # bytes per weight that autocast reads and writes in every pass here; a stage keeps its casts


def counted(config: ModelConfig, *, is_autocast: bool) -> list[tuple[int, Counter[str]]]:
    """Returns kernels and bytes of a forward and a backward pass."""
    model = pair(config, torch.float32 if is_autocast else torch.bfloat16)[1]
    tokens = torch.randint(0, config.vocab_size, (2, TOKENS // 2)).to("cuda")
    with kernels.counted() as forward, torch.autocast("cuda", torch.bfloat16, enabled=is_autocast):
        logits = model(tokens)
    gradient = torch.ones_like(logits)
    with kernels.counted() as backward:
        logits.backward(gradient)
    return [(counts.num_kernels, counts.bytes_by_kernel) for counts in (forward, backward)]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_block_launches_and_moves_what_is_planned(name: str, is_autocast: bool) -> None:
    config = SHAPES[name].model_copy(update={"max_position_embeddings": TOKENS, "num_hidden_layers": 1})
    one, two = (
        counted(config.model_copy(update={"num_hidden_layers": layers}), is_autocast=is_autocast) for layers in (1, 2)
    )
    layout = Layout(1, 0 if is_autocast else 1, is_bf16=True, is_gpu=True)
    times = Times(config, layout, GPUS["h100"], 0.65)
    head_dims = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    maps = 3 if config.mlp == "swiglu" else 2
    weights = config.hidden_size * (maps * config.intermediate_size + head_dims)
    num_kernels = 0
    for (few, before), (more, after), is_backward in zip(one, two, (False, True), strict=True):
        num_kernels += more - few
        moved = sum(after[kernel] - before[kernel] for kernel in after if not any(part in kernel for part in PRODUCTS))
        moved -= CASTS * weights * is_autocast
        assert moved / TOKENS == pytest.approx(times._bytes_per_token(is_backward=is_backward), rel=0.2)
    # A step adds those that accumulate gradients; autocast's casts are kept from one micro-batch to the next.
    assert 0.4 * sum(BLOCK_KERNELS) < num_kernels <= 1.1 * sum(BLOCK_KERNELS)
