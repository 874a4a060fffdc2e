"""Memory of a rank, part by part: a model's parameter counts, the layout of the work, and what each phase adds.

P parameters, p of them trained; N ranks; c bytes per number in the compute dtype, w bytes per weight (4, or 2 with ZeRO
in bf16; without ZeRO, autocast keeps fp32 weights). What each ZeRO stage shards is from Rajbhandari et al. (arXiv
1910.02054, section 3). What this code and DeepSpeed hold in addition was measured (docs/plan.md). Sampling adds the
key-value cache, one step's logits, and the prefill of prompts.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from lm import layers
from lm.block import Block
from lm.config import ModelConfig
from lm.decoding import PROMPT_TOKENS, rows_in
from lm.inspection import (
    Pass,
    block_bytes,
    cache_bytes_per_token,
    ends_bytes,
    exchanged_numbers,
    forward_bytes,
    gradient_bytes,
)
from lm.layers import rounded_weights
from lm.lora import LoRAConfig, adapted_maps, add_adapters
from lm.model import ScalarModel, freeze_all_but_last
from lm.native.decoder import what_a_decoder_misses
from lm.native.kernels import library
from lm.sampling import LOGITS_AT_ONCE, PART_NUMBERS
from lm.source import on_meta
from lm.transfer import MAX_ROWS, MAX_TOKENS
from lm.weights import MAX_FILE_BYTES, PRETRAINED
from training.config import BatchConfig, OptimizerConfig, ranks_sharing_weights
from training.packing import bucket

# In numbers. Those of ZeRO-3 are DeepSpeed's defaults (deepspeed/runtime/zero/config.py).
KEPT_WHOLE = 100_000  # the largest tensor that ZeRO-3 gathers once and keeps whole
MAX_LIVE, PREFETCH_BUCKET = 1_000_000_000, 50_000_000  # the most that it gathers at a time, and fetches ahead
REDUCE_BUCKET = 500_000_000  # the largest of `training.distributed` (not imported here: that takes seconds)
GENERATION_ROWS = 128  # lm.generation.generate's max_rows
RESERVED_BYTES = 5 * (1 << 30) // 2  # of a GPU: CUDA's context, NCCL's buffers, cuBLAS's workspaces (1.5 to 2.5 GiB)
NODE_COPY = "copy of the weights on each node"
CPU_COPY = "weights as the CPU reads them"  # while it samples
LOGIT_BYTES = 12  # per logit: fp32, divided by the temperature, and exponentiated for the normaliser


@dataclass(frozen=True)
class Layout:
    """How the work is split and computed.

    `offload` names the parts that a GPU keeps in CPU memory. With `recomputes`, the backward pass recomputes each
    block's activations. A node has `ranks_per_node`, 0 = all. A copy of ZeRO-3's weights on each of several nodes may
    take `node_weights_limit` bytes of a rank. Groups of `sequence_ranks` ranks split each row's tokens, and share their
    part of a batch.
    """

    ranks: int
    zero_stage: int
    is_bf16: bool
    is_gpu: bool
    offload: tuple[str, ...] = ()
    recomputes: bool = False
    ranks_per_node: int = 0
    node_weights_limit: int = 0
    sequence_ranks: int = 1

    @property
    def shares(self) -> int:
        """Parts that a batch is split into."""
        return self.ranks // self.sequence_ranks

    @property
    def numbers(self) -> dict[str, int]:
        """What a plan shows next to the number of ranks."""
        return {"ranks that split a row": self.sequence_ranks} if self.sequence_ranks > 1 else {}

    def packed_width(self, num_tokens: int) -> int:
        """Returns the row width, with padding, into which `training.packing` packs a sequence of `num_tokens`."""
        return bucket(num_tokens) if self.is_gpu else num_tokens

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
    rounded: int = 0  # frozen and used only in matrix products, so held rounded without ZeRO
    adapted: int = 0  # of all maps with an adapter
    largest_adapted: int = 0
    ranks: int = 0  # sum over a block's adapters: numbers per token between A and B


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank needs: `held` throughout, and `phases` in addition during each phase. Phases do not overlap.

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


@functools.lru_cache(maxsize=256)  # building a model without memory takes a large one 0.1 s
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
    """Returns the bytes of autocast's bf16 copies of weights in matrix products; weights held in bf16 need none."""
    return 2 * (counts.linear - counts.rounded) if layout.is_autocast else 0


def forward_pass(layout: Layout, rows: int, seq_len: int, *, dropout: float = 0.0, is_trained: bool = False) -> Pass:
    """Returns the pass of one micro-batch. Only models in training (`is_trained`) split rows among ranks.

    Without ZeRO, autocast leaves the residual stream in fp32. On a GPU, attention is fused (`lm.attention`).
    """
    is_tiled = not layout.is_gpu and library() is not None  # assumes that the ranks have a compiler if this machine has
    split_among = layout.sequence_ranks if is_trained else 1
    return Pass(
        rows, seq_len, layout.compute_bytes, layout.weight_bytes, layout.is_gpu, dropout > 0, is_tiled, split_among
    )


def held_logits(config: ModelConfig, layout: Layout, of: Pass, num_logits: int) -> int:
    """Returns how many of a micro-batch's logits one rank holds at a time to compute log-probs.

    If rows are split, all counted positions may be in one rank's slice. On a GPU, a decoder's head makes chunks
    (`lm.layers.Head`).
    """
    own = num_logits if of.split_among == 1 else min(num_logits, of.num_tokens * config.vocab_size)
    return min(own, layers.CHUNK_LOGITS) if layout.is_gpu and config.kind == "decoder" else own


def activation_bytes(config: ModelConfig, of: Pass, counts: Counts, layout: Layout) -> int:
    """Returns the bytes that one micro-batch keeps for its backward pass.

    Frozen blocks before the first trained one keep nothing. Autocast keeps bf16 copies of all weights of linear layers.
    """
    in_decoder = min(counts.trained_layers, config.num_hidden_layers)
    cross_attention = config.kind == "encoder-decoder"
    casts = casts_of(counts, layout)
    low = of.num_tokens * counts.ranks * of.compute_bytes  # of a block's adapters
    if layout.recomputes:  # the input of every trained block
        inputs = counts.trained_layers * of.num_tokens * config.hidden_size * of.stream_bytes
        return inputs + ends_bytes(config, of) + casts
    kept = in_decoder * block_bytes(config, of, cross_attention=cross_attention) + ends_bytes(config, of)
    if counts.trained_layers > in_decoder:
        kept += (counts.trained_layers - in_decoder) * block_bytes(config, of) + ends_bytes(config, of)
    return kept + counts.trained_layers * low + casts


def logit_bytes(num_logits: int, layout: Layout, *, with_gradient: bool) -> int:
    """Returns the bytes of the logits at counted positions and of their gradient, both in the compute dtype.

    On a GPU, `lm.sampling` adds an fp32 copy (unless they are fp32) and the softmax, for some positions at a time.
    """
    part = min(num_logits, PART_NUMBERS["cuda"]) if layout.is_gpu else 0
    held = num_logits * layout.compute_bytes * (2 if with_gradient else 1)
    return held + 4 * part * (2 if layout.is_bf16 else 1)


def _backward_of_block(config: ModelConfig, of: Pass, layout: Layout) -> int:
    """Returns the bytes that the backward pass of a block adds. If blocks are recomputed, that is all their activations
    except the input. Ranks that split rows exchange gradients, with a buffer to send and one to receive."""
    exchange = 2 * layout.compute_bytes * of.num_tokens * exchanged_numbers(config, of)
    if not layout.recomputes:
        return gradient_bytes(config, of) + exchange
    kept = exchange + block_bytes(config, of, cross_attention=config.kind == "encoder-decoder")
    return gradient_bytes(config, of) + kept - of.num_tokens * config.hidden_size * of.stream_bytes


def states(counts: Counts, layout: Layout) -> dict[str, int]:
    """Returns the bytes held between steps: weights, fp32 masters, AdamW's two moments (Muon's one), gradient buffers,
    and on a CPU the copy from which this rank's part of a checkpoint is written.

    Without ZeRO, several ranks keep gradients in DDP's buckets between steps.
    """
    p, N, w = counts.trained, layout.ranks, layout.weight_bytes
    copy = {} if layout.is_gpu else {"copy for checkpoints": checkpoint_copy(counts, layout)}
    if layout.zero_stage == 0:
        buckets = {"gradients in DDP's buckets": 4 * p} if N > 1 else {}
        rounded = 2 * counts.rounded if layout.is_autocast else 0
        return {"weights": 4 * counts.total - rounded, "moments": _moments(counts), **buckets, **copy}
    held = {"weights": w * counts.total, "fp32 masters": 4 * p // N, "moments": 8 * p // N}
    if layout.zero_stage == 3:
        held |= {"weights": w * counts.total // N, "gradients": w * p // N}
        held["reduce bucket"] = w * min(REDUCE_BUCKET, counts.trained)
        held["small weights, whole"] = w * counts.kept_whole
        if (sharing := node_copies(counts.total, layout)) > 1:
            held[NODE_COPY] = w * counts.total // sharing
    return {part: size for part, size in (held | copy).items() if part not in _moved_parts(layout)}


def node_copies(num_parameters: int, layout: Layout) -> int:
    """Returns how many ranks of a node share a second copy of ZeRO-3's weights; 1 = there is none."""
    weights = layout.weight_bytes * num_parameters
    return ranks_sharing_weights(weights, layout.ranks, layout.ranks_per_node, layout.node_weights_limit)


def host_states(counts: Counts, layout: Layout) -> dict[str, int]:
    """Returns the bytes of CPU memory that training on a GPU needs: what is offloaded, and the copy from which a
    checkpoint is written.
    """
    if not layout.is_gpu:
        return {}
    moved = {
        part: size for part, size in states(counts, replace(layout, offload=())).items() if part in _moved_parts(layout)
    }
    return {**moved, "copy for checkpoints": checkpoint_copy(counts, layout)}


def checkpoint_copy(counts: Counts, layout: Layout) -> int:
    """Returns the bytes of this rank's shard of fp32 weights and moments."""
    return (4 * counts.trained + _moments(counts)) // layout.ranks


def _moments(counts: Counts) -> int:
    return 8 * (counts.trained - counts.by_muon) + 4 * counts.by_muon


def _moved_parts(layout: Layout) -> set[str]:
    moved = {"fp32 masters", "moments", "gradients"} if layout.is_offloaded("optimizer") else set[str]()
    return moved | ({"weights", NODE_COPY} if layout.is_offloaded("parameters") else set())


def training_phases(
    config: ModelConfig, counts: Counts, layout: Layout, of: Pass, num_logits: int, num_micro_batches: int
) -> dict[str, dict[str, int]]:
    """Returns what a training step adds to `states`, by phase. `num_logits` is counted positions times vocabulary, or
    the number of scores, in all slices of the rows.

    The backward pass peaks near its start, while all activations exist: together with the logits and their gradient,
    or with the latter and the gradient of the head's weights, or with the gradients inside the last block. Gradients of
    earlier micro-batches add to each of these.
    """
    p, N, w, stage = counts.trained, layout.ranks, layout.weight_bytes, layout.zero_stage
    num_logits = held_logits(config, layout, of, num_logits)
    # Gradients that accumulate in the backward pass. ZeRO-3's are among the states; DDP's buckets get only those of the
    # last micro-batch.
    share = {0: p, 1: p, 2: p // N, 3: 0}[stage]
    before = {"gradients": w * share} if num_micro_batches > 1 and share else {}
    head = layout.compute_bytes * num_logits + (w * counts.largest_trained if before and num_logits else 0)
    turn = {
        "activations": activation_bytes(config, of, counts, layout),
        "logits, or a block's backward": max(
            logit_bytes(num_logits, layout, with_gradient=True), head, _backward_of_block(config, of, layout)
        ),
    }
    bucket = min(REDUCE_BUCKET, counts.trained)
    buffers = 2 if layout.is_gpu else 1  # one buffer is filled while the other is reduced
    live = {"reduce bucket": buffers * w * bucket} if stage in (1, 2) else {}
    if stage == 3:
        # The backward pass reaches the embedding last; a head that shares its table needs that at once.
        is_shared = bool(num_logits) and config.tie_word_embeddings
        later = 0 if is_shared else config.vocab_size * config.hidden_size
        live = {
            "gathered weights": w * min(MAX_LIVE + PREFETCH_BUCKET, counts.total - counts.kept_whole - later),
            "gradients being reduced": w * min(bucket, p) // N,
        }
    phases = {"backward": {**turn, **live, **before}}
    # In bf16, ZeRO 1 and 2 join this rank's gradients in one tensor, and only then make the fp32 ones from it.
    joined = {"gradients of this rank, joined": w * p // N} if layout.is_bf16 else {}
    if stage == 0:
        phases["step"] = {"gradients": 4 * p if N == 1 else 0}
    elif stage == 1:
        phases["reduce"] = {"gradients": w * p, "reduce bucket": buffers * w * bucket}
        phases["step"] = {"gradients": w * p, **joined, "fp32 gradients": 4 * p // N}
    elif stage == 2:
        # The bucket is reduced in a copy, of which this rank keeps its own part.
        rest = w * max(0, p - bucket) // N
        phases["reduce"] = {**before, "reduce bucket": (buffers + 1) * w * bucket, "gradients of this rank": rest}
        phases["step"] = {"gradients": w * p // N, **joined, "fp32 gradients": 4 * p // N}
    else:
        phases["step"] = {"fp32 gradients": 4 * min(p // N, MAX_LIVE)}
    return phases


def training_memory(
    config: ModelConfig, counts: Counts, layout: Layout, of: Pass, num_logits: int, num_micro_batches: int
) -> Memory:
    """Returns the memory of a stage that trains one model."""
    phases = training_phases(config, counts, layout, of, num_logits, num_micro_batches)
    return Memory(states(counts, layout), phases, host_states(counts, layout), weights_to_save(counts, layout))


def weights_to_save(counts: Counts, layout: Layout) -> dict[str, int]:
    """Returns the CPU memory in which rank 0 gathers the weights of one file and the tensor that no longer fits it."""
    one_file = MAX_FILE_BYTES + 2 * 4 * counts.largest
    return {"fp32 weights to be saved": min(4 * counts.total, one_file)} if layout.is_gpu else {}


def rows_at_once(config: ModelConfig, layout: Layout, free: int, rows: int, seq_len: int) -> int:
    """Returns how many rows generation runs at once in `free` bytes. On a GPU it runs fewer instead of failing."""
    if not layout.is_gpu or free <= 0:
        return rows
    return rows_in(free, config, layout.compute_bytes, rows, seq_len)


def scoring_phase(config: ModelConfig, counts: Counts, layout: Layout, of: Pass) -> dict[str, int]:
    """Returns the bytes for scoring with a model in training, with weights that ZeRO-3 gathers or autocast casts."""
    parts = {"a pass": forward_bytes(config, of)}
    if layout.zero_stage == 3:
        parts["gathered weights"] = layout.weight_bytes * min(MAX_LIVE, counts.total - counts.kept_whole)
    if layout.is_autocast:
        parts["weights in bf16"] = casts_of(counts, layout)
    return parts


def sampling_phase(
    config: ModelConfig, layout: Layout, num_parameters: int, rows: int, prompt_tokens: int, response_tokens: int
) -> dict[str, int]:
    """Returns the bytes for generating `rows` responses at once.

    The cache is allocated once. Prefill (on a GPU a few thousand tokens at a time, on a CPU all of them) and drawing
    (logits and fp32 probabilities) do not overlap, so the larger counts. On a CPU, the weights exist a second time, in
    the layout of its kernels, unless they are in fp32 and of a shape that the kernels do not support.
    """
    c, prompts = layout.compute_bytes, rows
    if layout.is_gpu:
        prompts = min(rows, -(-PROMPT_TOKENS // prompt_tokens))
    prompt_pass = forward_bytes(config, forward_pass(layout, prompts, prompt_tokens))
    drawing = (2 * c + 12) * rows * config.vocab_size
    held = {
        "key-value cache": cache_bytes_per_token(config, c) * rows * (prompt_tokens + response_tokens),
        "prompts being read, or logits": max(prompt_pass, drawing),
    }
    if not layout.is_gpu and (layout.is_bf16 or not what_a_decoder_misses(config, torch.float32)):
        held[CPU_COPY] = c * num_parameters
    return held


def measuring_phase(config: ModelConfig, layout: Layout, seq_len: int, response_tokens: int) -> dict[str, int]:
    """Returns the bytes for log-probs and scores of samples without gradients.

    A pass has as many rows as `lm.transfer` allows, logits are computed for some positions at a time, and on a GPU the
    head's weights are in fp32.
    """
    rows = max(1, min(MAX_ROWS, MAX_TOKENS // seq_len))
    logits = min(rows * response_tokens * config.vocab_size, LOGITS_AT_ONCE["cuda" if layout.is_gpu else "cpu"])
    head = 4 * config.vocab_size * config.hidden_size if layout.is_gpu else 0
    a_pass = forward_bytes(config, forward_pass(layout, rows, seq_len))
    return {"a pass, or logits": max(a_pass, LOGIT_BYTES * logits), "head in fp32": head}


def rows_and_passes(batch: BatchConfig, num_ranks: int, width: int, rows_per_unit: int = 1) -> tuple[int, int]:
    """Return the rows per pass of one rank, and the passes per rank and step, if all rows are this wide."""
    if batch.micro_batch_size:
        return batch.micro_batch_size * rows_per_unit, batch.num_micro_batches(num_ranks)
    units = max(1, batch.micro_batch_tokens // (rows_per_unit * width))
    return units * rows_per_unit, math.ceil(batch.num_micro_batches(num_ranks) / units)


def scoring_rows(batch: BatchConfig, width: int, rows_per_unit: int = 1) -> int:
    """Return the rows per pass without gradients, for log-probabilities that no update compares with its own."""
    tokens = batch.forward_tokens or batch.micro_batch_tokens
    units = max(1, tokens // (rows_per_unit * width)) if tokens else batch.micro_batch_size
    return units * rows_per_unit
