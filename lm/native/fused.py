"""The residual stream and its norms in one pass over memory, on a CPU.

A block ends by adding its last branch to the stream, and the next one begins by reading the stream for its norm. Here
the addition waits for that norm, and one kernel does both. Each number is computed and rounded as in `lm.block`.
"""

from torch import Tensor, nn

from lm.block import Block, BlockInputs
from lm.native.operators import add_rms_norm, runs
from lm.norms import RMSNorm, compute_dtype


def accepts(
    blocks: nn.ModuleList, final_norm: nn.Module, x_BTD: Tensor, inputs: BlockInputs, recompute: bool = False
) -> bool:
    """Whether the blocks' norms come first and are RMSNorm; recomputed blocks must each end with their own sum."""
    return isinstance(final_norm, RMSNorm) and runs(x_BTD, final_norm.weight) and not recompute


def run_blocks(
    blocks: nn.ModuleList, final_norm: nn.Module, x_BTD: Tensor, inputs: BlockInputs, recompute: bool = False
) -> Tensor:
    """`lm.block.run_blocks`."""
    branch_BTD: Tensor | None = None
    for layer, block in enumerate(blocks):
        assert isinstance(block, Block), type(block)
        x_BTD, branch_BTD = _run_block(block, x_BTD, branch_BTD, inputs, layer)
    return add_norm(x_BTD, branch_BTD, final_norm)[1]


def _run_block(
    block: Block, x_BTD: Tensor, branch_BTD: Tensor | None, inputs: BlockInputs, layer: int
) -> tuple[Tensor, Tensor]:
    """The stream and the branch to be added to it next, from the same of the block before."""
    x_BTD, normed_BTD = add_norm(x_BTD, branch_BTD, block.attention_norm)
    branch_BTD = block.attend(normed_BTD, inputs, layer)
    if block.cross_norm is not None:
        x_BTD, normed_BTD = add_norm(x_BTD, branch_BTD, block.cross_norm)
        branch_BTD = block.attend_to_encoder(normed_BTD, inputs, layer)
    x_BTD, normed_BTD = add_norm(x_BTD, branch_BTD, block.mlp_norm)
    return x_BTD, block.transform(normed_BTD, inputs, layer)


def add_norm(x_BTD: Tensor, branch_BTD: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x + branch, if there is one, and its norm."""
    if branch_BTD is None:
        return x_BTD, norm(x_BTD)
    if isinstance(norm, RMSNorm) and branch_BTD.dtype == compute_dtype(x_BTD) and runs(x_BTD, branch_BTD, norm.weight):
        total_BTD, normed_BTD, _ = add_rms_norm(x_BTD, branch_BTD, norm.weight, norm.eps)
        return total_BTD, normed_BTD
    x_BTD = x_BTD + branch_BTD
    return x_BTD, norm(x_BTD)
