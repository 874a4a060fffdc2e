"""The inputs of memory estimates (a model's parameter counts, the layout of the work), and their result."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lm.block import Block
from lm.config import ModelConfig
from lm.inspection import Pass
from lm.layers import rounded_weights
from lm.lora import LoRAConfig, adapted_maps, add_adapters
from lm.model import ScalarModel, freeze_all_but_last
from lm.native.kernels import library
from lm.source import on_meta
from lm.weights import PRETRAINED
from training.config import OptimizerConfig

# DeepSpeed's defaults for ZeRO-3 (deepspeed/runtime/zero/config.py): a tensor of at most so many numbers is gathered
# once and stays whole, and at most so many numbers are gathered at a time.
KEPT_WHOLE = 100_000
MAX_LIVE = 1_000_000_000


@dataclass(frozen=True)
class Layout:
    """How the work is split and computed.

    `offload` names the parts that a GPU keeps in CPU memory; with `recomputes` the backward pass computes each block's
    activations again.
    """

    ranks: int
    zero_stage: int
    is_bf16: bool
    is_gpu: bool
    offload: tuple[str, ...] = ()
    recomputes: bool = False

    def is_offloaded(self, part: str) -> bool:
        """Returns whether a part is in CPU memory. Without a GPU there is nowhere to offload to."""
        return self.is_gpu and part in self.offload

    @property
    def compute_bytes(self) -> int:
        return 2 if self.is_bf16 else 4

    @property
    def weight_bytes(self) -> int:
        return 2 if self.is_bf16 and self.zero_stage else 4

    @property
    def is_autocast(self) -> bool:
        return self.is_bf16 and not self.zero_stage


@dataclass(frozen=True)
class Counts:
    """Parameter counts of a model with its optimizer."""

    total: int
    linear: int  # in linear layers
    trained: int
    by_muon: int  # trained by Muon
    trained_layers: int  # blocks, not parameters
    largest: int  # of the largest tensor
    largest_trained: int
    block: int  # of a block's attention and MLP
    layer: int  # of the larger of these two
    kept_whole: int  # of all tensors that ZeRO-3 does not shard
    rounded: int = 0  # frozen and in products alone, so without ZeRO held as those round them
    adapted: int = 0  # of all maps with an adapter
    largest_adapted: int = 0
    ranks: int = 0  # of a block's adapters: what they make of a token between A and B


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank needs: `held` throughout, and in addition during each phase. Phases do not overlap.

    On GPUs, `host` is the node's CPU memory that each rank needs, and `host_once` what rank 0 needs in addition.
    """

    held: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    host: Mapping[str, int] = field(default_factory=dict)
    host_once: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + sum(self.phases[self.peak_phase].values())

    def host_bytes(self, num_ranks: int) -> int:
        """Returns the CPU memory of the node that holds rank 0 and `num_ranks` ranks in total."""
        return num_ranks * sum(self.host.values()) + sum(self.host_once.values())


def count(
    config: ModelConfig, optimizer: OptimizerConfig, *, num_scores: int = 0, lora: LoRAConfig | None = None
) -> Counts:
    """Counts parameters on the meta device, with the same weights frozen as in training.

    With `num_scores` the model has that many scores instead of a language-model head.

    Raises: ValueError if `optimizer.trained_layers` exceeds the number of layers.
    """
    labels = [str(number) for number in range(num_scores)]
    is_scalar = labels and config.kind == "decoder"

    def build() -> nn.Module:
        model = ScalarModel(config, labels=labels) if is_scalar else PRETRAINED[config.kind](config)
        return model if lora is None else add_adapters(model, lora)

    model = on_meta(build)
    num_layers = config.num_hidden_layers + config.num_encoder_layers
    if optimizer.trained_layers is not None:
        freeze_all_but_last(model, optimizer.trained_layers)
        num_layers = optimizer.trained_layers
    named = dict(model.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    muon = [p for name, p in trained.items() if ".blocks." in name and p.dim() == 2]
    linear = {m.weight: m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)}
    first = next(module for module in model.modules() if isinstance(module, Block))
    layers = [sum(p.numel() for p in part.parameters()) for part in (first.attention, first.mlp)]
    return Counts(
        total=sum(p.numel() for p in named.values()),
        linear=sum(linear.values()),
        trained=sum(p.numel() for p in trained.values()),
        by_muon=sum(p.numel() for p in muon) if optimizer.kind == "muon" else 0,
        trained_layers=num_layers,
        largest=max(p.numel() for p in named.values()),
        largest_trained=max((p.numel() for p in trained.values()), default=0),
        block=sum(layers),
        layer=max(layers),
        kept_whole=sum(p.numel() for p in named.values() if p.numel() <= KEPT_WHOLE),
        rounded=sum(p.numel() for p in rounded_weights(model)),
        adapted=sum(m.weight.numel() for m in adapted_maps(model).values()),
        largest_adapted=max((m.weight.numel() for m in adapted_maps(model).values()), default=0),
        ranks=sum(len(m.lora_a) for m in adapted_maps(first).values()),
    )


def casts_of(counts: Counts, layout: Layout) -> int:
    """Returns the bytes of the bf16 copies of weights in products that autocast makes; those held in bf16 need none."""
    return 2 * (counts.linear - counts.rounded) if layout.is_autocast else 0


def forward_pass(layout: Layout, rows: int, seq_len: int, *, dropout: float = 0.0) -> Pass:
    """Returns the pass of one micro-batch. Without ZeRO, autocast leaves the residual stream in fp32.

    On a GPU, attention is fused for every layout of rows (`lm.attention`).
    """
    is_tiled = not layout.is_gpu and library() is not None  # assumes that the ranks have a compiler if this machine has
    return Pass(rows, seq_len, layout.compute_bytes, layout.weight_bytes, layout.is_gpu, dropout > 0, is_tiled)
