"""Blocks compiled by `torch.compile`, for training passes (`engine.compile_blocks`).

All blocks of a model share one graph: what differs between them, weights, mask and dropout's keys, is given to it. A
second length of rows makes one more, for all lengths. Steps of generation are recorded instead (`lm.graphs`), and a
decoder that attends to an encoder stays as it is. On a GPU norms, SwiGLU, rotary positions and the residual stream
become a few kernels. Not yet measured on a GPU.

Shape letters: B batch, T tokens, D model width.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm.block import BRANCHES, BlockInputs
from lm.dropout import site_offset
from lm.native.operators import prepare_for_compile

BACKEND = "inductor"


def run_compiled_blocks(blocks: nn.ModuleList, x_BTD: Tensor, inputs: BlockInputs, *, recompute: bool) -> Tensor:
    """All blocks in order, without the final norm; `recompute` as for `lm.block.run_blocks`."""
    run = _compiled(BACKEND)
    for layer, block in enumerate(blocks):
        own = _of_layer(inputs, layer)
        x_BTD = checkpoint(run, block, x_BTD, own, use_reentrant=False) if recompute else run(block, x_BTD, own)
    return x_BTD


@cache
def _compiled(backend: str) -> Callable[[nn.Module, Tensor, BlockInputs], Tensor]:
    prepare_for_compile()
    return torch.compile(_run_block, backend=backend)


def _run_block(block: nn.Module, x_BTD: Tensor, inputs: BlockInputs) -> Tensor:
    y_BTD: Tensor = block(x_BTD, inputs, 0)
    return y_BTD


def _of_layer(inputs: BlockInputs, layer: int) -> BlockInputs:
    """The inputs for which the first layer computes what this one does of those given: a graph names no layer."""
    assert inputs.cache is None, "a cache has an entry per layer"
    assert inputs.cross_cache is None, "a cache has an entry per layer"
    keys_BT = inputs.dropout_keys_BT
    own_keys_BT = None if keys_BT is None else keys_BT + site_offset(BRANCHES * layer)
    return replace(inputs, masks=(inputs.masks[layer],), dropout_keys_BT=own_keys_BT)
