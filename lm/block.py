"""A transformer block, as in the papers, and passes through all blocks: plain, or compiled by `torch.compile`.

Shape letters: B batch, T query tokens, S key tokens, D model width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, nn

from lm.attention import Attention, CrossAttention, Mask, times
from lm.cache import CrossAttentionCache, PassCache
from lm.config import ModelConfig
from lm.delta import GatedDeltaNet
from lm.dropout import Dropout, site_offset
from lm.experts import Mixture, PassRoutes, Seen
from lm.layers import MLP, Replaceable, make_norm, recomputed
from lm.native.operators import prepare_for_compile
from lm.positions import Rotary
from lm.sequence_parallel import SplitRows

BRANCHES = 3  # at most, per block; each has its own dropout site
BACKEND = "inductor"  # of `torch.compile`


@dataclass(frozen=True)
class BlockInputs:
    """Inputs that the blocks of one pass share; `masks` and `rotary` have an entry per layer. Linear layers read
    `positions_BT`.

    `dropout_keys_BT` are the tokens' keys (`lm.dropout.Dropout`).
    """

    masks: Sequence[Mask]
    rotary: Sequence[Rotary | None]
    cache: PassCache | None = None
    cross_cache: CrossAttentionCache | None = None
    dropout_keys_BT: Tensor | None = None
    split: SplitRows | None = None  # of rows of which each rank of a group has a slice
    seen: Seen | None = None  # the tokens from which routers learn
    positions_BTD: Tensor | None = None  # added to the input of every block but the first, whose input has them
    query_scale: Tensor | None = None  # a factor on each token's queries, [B, 1, T, 1]
    routes: PassRoutes | None = None
    positions_BT: Tensor | None = None


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), as from GPT-2 on.

    With `cross_attention`, x + cross(norm(x)) between them attends to an encoder. Dropout applies to each branch. The
    config may norm the branches' outputs, in addition to their inputs or instead: x + norm(attention(x)). With
    `has_experts` the MLP is a mixture; if it `is_linear`, a gated delta rule is in the place of attention.
    """

    def __init__(
        self,
        config: ModelConfig,
        dropout: float,
        *,
        cross_attention: bool = False,
        has_experts: bool = False,
        is_linear: bool = False,
    ) -> None:
        super().__init__()
        norm = partial(make_norm, config, config.hidden_size)
        norms_inputs = config.norm_place != "output"
        self.attention_norm = norm() if norms_inputs else nn.Identity()
        self.attention = GatedDeltaNet(config) if is_linear else Attention(config)
        self.attention_output_norm = norm() if config.norms_outputs else nn.Identity()
        self.cross_norm = norm() if cross_attention else None
        self.cross = CrossAttention(config) if cross_attention else None
        self.mlp_norm = norm() if norms_inputs else nn.Identity()
        self.mlp = Mixture(config) if has_experts else MLP(config)
        self.mlp_output_norm = norm() if config.norms_outputs else nn.Identity()
        self.dropout = Dropout(dropout)
        self.multiplier = config.residual_multiplier

    def forward(self, x_BTD: Tensor, inputs: BlockInputs, layer: int) -> Tensor:
        x_BTD = x_BTD + self.attend(self.attention_norm(x_BTD), inputs, layer)
        if self.cross_norm is not None:
            x_BTD = x_BTD + self.attend_to_encoder(self.cross_norm(x_BTD), inputs, layer)
        return x_BTD + self.transform(self.mlp_norm(x_BTD), inputs, layer)

    def attend(self, x_BTD: Tensor, inputs: BlockInputs, layer: int) -> Tensor:
        if isinstance(self.attention, GatedDeltaNet):
            assert inputs.positions_BT is not None, "linear layers need positions, which tell where sequences start"
            y_BTD = self.attention(x_BTD, inputs.positions_BT, inputs.cache, layer)
        else:
            y_BTD = self.attention(
                x_BTD, inputs.rotary[layer], inputs.masks[layer], inputs.cache, layer, inputs.split, inputs.query_scale
            )
        return self._branch(self.attention_output_norm(y_BTD), inputs, 1 + BRANCHES * layer)

    def attend_to_encoder(self, x_BTD: Tensor, inputs: BlockInputs, layer: int) -> Tensor:
        assert self.cross is not None, "this block has no cross-attention"
        y_BTD = self.cross(x_BTD, inputs.cross_cache, layer)
        return self._branch(y_BTD, inputs, 2 + BRANCHES * layer)

    def transform(self, x_BTD: Tensor, inputs: BlockInputs, layer: int) -> Tensor:
        is_mixture = isinstance(self.mlp, Mixture)
        y_BTD = self.mlp(x_BTD, layer, inputs.seen, inputs.routes) if is_mixture else self.mlp(x_BTD)
        return self._branch(self.mlp_output_norm(y_BTD), inputs, 3 + BRANCHES * layer)

    def _branch(self, y_BTD: Tensor, inputs: BlockInputs, site: int) -> Tensor:
        return times(self.dropout(y_BTD, inputs.dropout_keys_BT, site), self.multiplier)


class PostNormBlock(Block):
    """norm(x + attention(x)), then norm(x + mlp(x)), as Vaswani et al. (arXiv 1706.03762, section 3.1)."""

    def forward(self, x_BTD: Tensor, inputs: BlockInputs, layer: int) -> Tensor:
        x_BTD = self.attention_norm(x_BTD + self.attend(x_BTD, inputs, layer))
        if self.cross_norm is not None:
            x_BTD = self.cross_norm(x_BTD + self.attend_to_encoder(x_BTD, inputs, layer))
        return self.mlp_norm(x_BTD + self.transform(x_BTD, inputs, layer))


@Replaceable
def run_blocks(
    blocks: nn.ModuleList, final_norm: nn.Module, x_BTD: Tensor, inputs: BlockInputs, recompute: bool = False
) -> Tensor:
    """Run all blocks in order, then the final norm. With `recompute` the forward pass saves only each block's input,
    and the backward pass runs the block again.
    """
    for layer, block in enumerate(blocks):
        x_BTD = _with_positions(x_BTD, inputs, layer)
        run = partial(recomputed, block) if recompute else block
        x_BTD = run(x_BTD, inputs, layer)
    return final_norm(x_BTD)


def _with_positions(x_BTD: Tensor, inputs: BlockInputs, layer: int) -> Tensor:
    return x_BTD if layer == 0 or inputs.positions_BTD is None else x_BTD + inputs.positions_BTD


def run_compiled_blocks(blocks: nn.ModuleList, x_BTD: Tensor, inputs: BlockInputs, *, recompute: bool) -> Tensor:
    """Run all blocks in order, without the final norm, for training passes (`engine.compile_blocks`).

    `recompute` is as for `run_blocks`. All blocks of a model share one graph; weights, mask and dropout keys, which
    differ between blocks, are its inputs. A second row length compiles one more graph, for all lengths. Steps of
    generation are recorded instead (`lm.decoding`), and a decoder that attends to an encoder is not compiled. On a GPU,
    norms, SwiGLU, rotary positions and the residual stream become a few kernels.
    """
    run = _compiled(BACKEND)
    for layer, block in enumerate(blocks):
        x_BTD, own = _with_positions(x_BTD, inputs, layer), _of_layer(inputs, layer)
        x_BTD = recomputed(run, block, x_BTD, own) if recompute else run(block, x_BTD, own)
    return x_BTD


@cache
def _compiled(backend: str) -> Callable[[nn.Module, Tensor, BlockInputs], Tensor]:
    prepare_for_compile()
    return torch.compile(_run_block, backend=backend)


def _run_block(block: nn.Module, x_BTD: Tensor, inputs: BlockInputs) -> Tensor:
    y_BTD: Tensor = block(x_BTD, inputs, 0)
    return y_BTD


def _of_layer(inputs: BlockInputs, layer: int) -> BlockInputs:
    """Returns inputs with which layer 0 computes what `layer` does with `inputs`, so all layers share a graph."""
    assert inputs.cache is None, "a cache has an entry per layer"
    assert inputs.cross_cache is None, "a cache has an entry per layer"
    keys_BT = inputs.dropout_keys_BT
    own_keys_BT = None if keys_BT is None else keys_BT + site_offset(BRANCHES * layer)
    return replace(
        inputs,
        masks=(inputs.masks[layer],),
        rotary=(inputs.rotary[layer],),
        dropout_keys_BT=own_keys_BT,
        positions_BTD=None,
    )
