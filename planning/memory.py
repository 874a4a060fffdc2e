"""What a rank holds, part by part: pure functions of a shape, an optimizer, and how the work is laid out.

P parameters of which p are trained, N ranks, c bytes of a number in a product, w of a weight (4, but 2 under ZeRO in
bf16: without ZeRO autocast keeps fp32 weights). The split by ZeRO stage is Rajbhandari et al. (arXiv 1910.02054,
section 3); what this code and DeepSpeed hold beside it was measured (docs/plan.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lm.activations import LOGIT_BYTES, Pass, block_bytes, ends_bytes
from lm.config import ModelConfig
from lm.inspection import cache_bytes_per_token
from lm.model import ScalarModel, freeze_all_but_last
from lm.native.build import has_matrix_unit
from lm.source import on_meta
from lm.weights import PRETRAINED
from training.config import OptimizerConfig

# DeepSpeed's defaults, in numbers (deepspeed/runtime/zero/config.py); training/engine.py leaves them as they are.
REDUCE_BUCKET = 500_000_000
PREFETCH_BUCKET = 50_000_000
MAX_LIVE = 1_000_000_000
GENERATION_ROWS = 128  # lm.generation.generate's max_rows


@dataclass(frozen=True)
class Layout:
    """How the work is split and computed. `offload` is what lies in the CPU's memory beside a GPU, `recomputes` whether
    backward passes compute blocks again.
    """

    ranks: int
    zero_stage: int
    is_bf16: bool
    is_gpu: bool
    offload: tuple[str, ...] = ()
    recomputes: bool = False

    def is_offloaded(self, part: str) -> bool:
        """On a machine without a GPU there is no other memory to go to."""
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

    def bucket(self, size: int, numbers: int) -> int:
        """Numbers of a buffer of `size` that `numbers` pass through: on a CPU pages never written take no memory."""
        return size if self.is_gpu else min(size, numbers)


@dataclass(frozen=True)
class Counts:
    """Parameters of a model under an optimizer: all, those in linear maps, trained, and trained by Muon; blocks that
    are trained.
    """

    total: int
    linear: int
    trained: int
    by_muon: int
    trained_layers: int


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank: what is `held` throughout, and what each phase adds; phases do not overlap."""

    held: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + sum(self.phases[self.peak_phase].values())


def count(config: ModelConfig, optimizer: OptimizerConfig, *, num_scores: int = 0) -> Counts:
    """Counted on the meta device, frozen as the engine freezes. `num_scores` in place of the head; 0 leaves it.

    Raises: ValueError for more trained layers than there are.
    """
    labels = [str(number) for number in range(num_scores)]
    is_scalar = labels and config.kind == "decoder"
    model: nn.Module = on_meta(
        lambda: ScalarModel(config, labels=labels) if is_scalar else PRETRAINED[config.kind](config)
    )
    num_layers = config.num_hidden_layers + config.num_encoder_layers
    if optimizer.trained_layers is not None:
        freeze_all_but_last(model, optimizer.trained_layers)
        num_layers = optimizer.trained_layers
    named = dict(model.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    muon = [p for name, p in trained.items() if ".blocks." in name and p.dim() == 2]
    linear = {m.weight: m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)}
    return Counts(
        total=sum(p.numel() for p in named.values()),
        linear=sum(linear.values()),
        trained=sum(p.numel() for p in trained.values()),
        by_muon=sum(p.numel() for p in muon) if optimizer.kind == "muon" else 0,
        trained_layers=num_layers,
    )


def forward_pass(
    config: ModelConfig, layout: Layout, rows: int, seq_len: int, *, is_packed: bool = False, dropout: float = 0.0
) -> Pass:
    """The pass of one micro-batch; without ZeRO autocast leaves the residual stream in fp32.

    Packed rows, bands and encoders need a mask, which PyTorch's fused kernels do not take together with grouped keys.
    """
    is_banded = any(0 < window < seq_len for window in config.sliding_window)
    has_mask = is_packed or is_banded or config.kind != "decoder"
    is_fused = layout.is_gpu and (not has_mask or config.num_key_value_heads == config.num_attention_heads)
    is_tiled = layout.is_bf16 and not layout.is_gpu and has_matrix_unit()  # as where this runs
    return Pass(rows, seq_len, layout.compute_bytes, layout.weight_bytes, is_fused, dropout > 0, is_tiled)


def activation_bytes(config: ModelConfig, of: Pass, counts: Counts, layout: Layout) -> int:
    """What one micro-batch keeps for its backward; frozen blocks in front keep nothing. Autocast keeps bf16 copies of
    all weights that multiply.
    """
    in_decoder = min(counts.trained_layers, config.num_hidden_layers)
    cross_attention = config.kind == "encoder-decoder"
    if layout.recomputes:  # the input of every trained block, and all of one block at a time
        inputs = counts.trained_layers * of.num_tokens * config.hidden_size * of.stream_bytes
        kept = inputs + block_bytes(config, of, cross_attention=cross_attention) + ends_bytes(config, of)
        return kept + (2 * counts.linear if layout.is_autocast else 0)
    kept = in_decoder * block_bytes(config, of, cross_attention=cross_attention) + ends_bytes(config, of)
    if counts.trained_layers > in_decoder:
        kept += (counts.trained_layers - in_decoder) * block_bytes(config, of) + ends_bytes(config, of)
    return kept + (2 * counts.linear if layout.is_autocast else 0)


def states(counts: Counts, layout: Layout) -> dict[str, int]:
    """What a model under training holds between steps: weights, fp32 masters, AdamW's two moments (Muon's one), the
    buffers that gradients are summed in, and the copy of this rank's part that a checkpoint is written from, which
    lies in the CPU's memory.

    Without ZeRO several ranks hold the gradients in DDP's buckets, which stay between steps.
    """
    p, N, w = counts.trained, layout.ranks, layout.weight_bytes
    if layout.zero_stage == 0:
        moments = 8 * (p - counts.by_muon) + 4 * counts.by_muon
        copy = {} if layout.is_gpu else {"copy for checkpoints": (4 * p + moments) // N}
        buckets = {"gradients in DDP's buckets": 4 * p} if N > 1 else {}
        return {"weights": 4 * counts.total, "moments": moments, **buckets, **copy}
    held = {"weights": w * counts.total, "fp32 masters": 4 * p // N, "moments": 8 * p // N}
    if layout.zero_stage == 3:
        held |= {"weights": w * counts.total // N, "gradients": w * p // N}
        held["reduce bucket"] = w * layout.bucket(REDUCE_BUCKET, p)
    if not layout.is_gpu:
        held["copy for checkpoints"] = 12 * p // N
    gone = {"fp32 masters", "moments", "gradients"} if layout.is_offloaded("optimizer") else set[str]()
    gone |= {"weights"} if layout.is_offloaded("parameters") else set[str]()
    return {part: size for part, size in held.items() if part not in gone}


def training_phases(
    config: ModelConfig, counts: Counts, layout: Layout, of: Pass, num_logits: int, num_micro_batches: int
) -> dict[str, dict[str, int]]:
    """What a training step adds to `states`, by phase. `num_logits`: counted positions times vocabulary, or scores.

    At the turn from forward to backward all activations are there and the logits' gradient; in the backward a layer's
    gradients are as large as what it kept. Gradients of earlier micro-batches lie beside both.
    """
    p, N, w, stage = counts.trained, layout.ranks, layout.weight_bytes, layout.zero_stage
    # Of the gradients; ZeRO-3's and those in DDP's buckets are among the states.
    share = {0: p if N == 1 else 0, 1: p, 2: p // N, 3: 0}[stage]
    turn = {
        "activations": activation_bytes(config, of, counts, layout),
        "logits and gradients of one layer": max(LOGIT_BYTES * num_logits, block_bytes(config, of)),
    }
    gathered = (MAX_LIVE, PREFETCH_BUCKET) if stage == 3 else ()
    live = {"gathered weights": w * sum(min(size, counts.total) for size in gathered)} if gathered else {}
    before = {"gradients": w * share} if num_micro_batches > 1 and share else {}
    phases = {"backward": {**turn, **live, **before}}
    bucket = layout.bucket(REDUCE_BUCKET, p)
    if stage == 0:
        phases["step"] = {"gradients": 4 * share}
    elif stage == 1:
        phases["reduce"] = {"gradients": w * p, "reduce bucket": w * bucket}
        phases["step"] = {"gradients": w * p, "fp32 gradients": 4 * p // N}
    elif stage == 2:
        # The bucket is reduced by way of a copy; what this rank owns of it is kept.
        rest = w * max(0, p - bucket) // N
        phases["reduce"] = {**before, "reduce bucket": 2 * w * bucket, "gradients of this rank": rest}
        phases["step"] = {"gradients": w * p // N, "fp32 gradients": 4 * p // N}
    else:
        phases["step"] = {"fp32 gradients": 4 * min(p // N, MAX_LIVE)}
    return phases


def training_memory(
    config: ModelConfig, counts: Counts, layout: Layout, of: Pass, num_logits: int, num_micro_batches: int
) -> Memory:
    """A stage that trains one model."""
    phases = training_phases(config, counts, layout, of, num_logits, num_micro_batches)
    return Memory(states(counts, layout), phases)


def sampling_phase(config: ModelConfig, layout: Layout, num_parameters: int, rows: int, seq_len: int) -> dict[str, int]:
    """Generation of so many rows at once: the cache, which is allocated once, fp32 logits and what is drawn from them,
    and on a CPU in bf16 the weights once more, as its matrix unit reads them.
    """
    cache = cache_bytes_per_token(config, layout.compute_bytes) * rows * seq_len
    held = {"key-value cache": cache, "logits": 12 * rows * config.vocab_size}
    if layout.is_bf16 and not layout.is_gpu:
        held["weights as the CPU reads them"] = 2 * num_parameters
    return held


def ppo_memory(
    config: ModelConfig,
    policy: Counts,
    value: Counts,
    reward: Counts,
    layout: Layout,
    of: Pass,
    num_logits: int,
    rollout_rows: int,
    num_micro_batches: int,
) -> Memory:
    """A colocated worker: policy and value function under training; reference, reward model, the generator's copy and
    the moving average whole on every rank. Gathered weights go to every rank's device when they are synchronised.

    `of` is one micro-batch of prompts with their responses; `rollout_rows` are a rank's responses of an iteration.
    """
    c, P = layout.compute_bytes, policy.total
    tied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0

    def frozen(counts: Counts, shared: int) -> int:
        """Beside autocast matrices are bf16 and the rest, the table that a head shares too, is fp32."""
        return 4 * counts.total - 2 * (counts.linear - shared) if layout.is_autocast else c * counts.total

    held = {f"policy: {name}": size for name, size in states(policy, layout).items()}
    held |= {f"value: {name}": size for name, size in states(value, layout).items()}
    held |= {
        "reference": frozen(policy, tied),
        "reward model": frozen(reward, 0),
        "generator": c * P,
        "moving average": 4 * P,
    }
    if not layout.is_gpu:
        held["copy of the average for checkpoints"] = 4 * P // layout.ranks
    phases = {"generate": sampling_phase(config, layout, P, min(GENERATION_ROWS, rollout_rows), of.seq_len)}
    for name, counts, numbers in (("policy", policy, num_logits), ("value", value, 0)):
        found = training_phases(config, counts, layout, of, numbers, num_micro_batches)
        phases |= {f"{name} {phase}": parts for phase, parts in found.items()}
    whole = 4 * P if layout.zero_stage else 0
    phases["sync"] = {"whole fp32 weights": whole, "their copy for the checksum": 2 * P if layout.is_bf16 else 0}
    return Memory(held, phases)
