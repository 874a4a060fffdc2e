"""Memory of a rank, part by part: a model's parameter counts, the layout of the work, and what each phase adds, for
ranks that train, sample or score, and for PPO's, which may do all three.

P parameters, p of them trained; N ranks; c bytes per number in the compute dtype, w bytes per weight (4, or 2 with ZeRO
in bf16; without ZeRO, autocast keeps fp32 weights). What each ZeRO stage shards is from Rajbhandari et al. (arXiv
1910.02054, section 3). What this code and DeepSpeed hold in addition was measured (docs/plan.md). Sampling adds the
key-value cache, one step's logits, and the prefill of prompts.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

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
from lm.samplers.draws import AT_ONCE
from lm.sampling import LOGITS_AT_ONCE, PART_NUMBERS
from lm.source import on_meta
from lm.tensor_parallel import config_of_part, parameters_of_part
from lm.transfer import MAX_ROWS, MAX_TOKENS
from lm.weights import MAX_FILE_BYTES, PRETRAINED
from training.config import OptimizerConfig, ranks_sharing_weights

# DeepSpeed's defaults for ZeRO-3 (deepspeed/runtime/zero/config.py), in numbers: the largest tensor that is gathered
# once and stays whole, and the most that is gathered at a time.
KEPT_WHOLE = 100_000
MAX_LIVE = 1_000_000_000
# In elements: the largest bucket of `training.distributed` (not imported here: that takes seconds), and DeepSpeed's
# default (deepspeed/runtime/zero/config.py), which Heed does not change.
REDUCE_BUCKET = 500_000_000
PREFETCH_BUCKET = 50_000_000

GENERATION_ROWS = 128  # lm.generation.generate's max_rows
NODE_COPY = "copy of the weights on each node"
CPU_COPY = "weights as the CPU reads them"  # while it samples
LOGIT_BYTES = 12  # per logit: fp32, divided by the temperature, and exponentiated for the normaliser

# Of PPO.
CHUNK_BYTES = 1 << 28  # lm.samplers.engine: a chunk ends once it has this many
DIGESTED_AT_ONCE = 1 << 21  # likewise: elements hashed at once, 16 bytes each
GENERATE, SYNC = "generate", "sync"  # phases in which a generator holds weights
ARRIVING = "weights on their way"
VALUES = "values"  # the phase in which the value function scores samples
MEASURE = "measure"  # the phase in which policy, reference and value function measure samples on their shared body
REFERENCE, REWARD = "score by the reference", "score by the reward model"
Parts = Mapping[str, int]
Mode = Literal["fast", "balanced", "small"]


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
    """Returns the pass of one micro-batch. Without ZeRO, autocast leaves the residual stream in fp32.

    Only models in training (`is_trained`) split rows among ranks.

    On a GPU, attention is fused for every layout of rows (`lm.attention`).
    """
    is_tiled = not layout.is_gpu and library() is not None  # assumes that the ranks have a compiler if this machine has
    split_among = layout.sequence_ranks if is_trained else 1
    return Pass(
        rows, seq_len, layout.compute_bytes, layout.weight_bytes, layout.is_gpu, dropout > 0, is_tiled, split_among
    )


def own_logits(config: ModelConfig, of: Pass, num_logits: int) -> int:
    """Returns the most of a micro-batch's logits that one rank has. If rows are split, all counted positions may be in
    one rank's slice.
    """
    return num_logits if of.split_among == 1 else min(num_logits, of.num_tokens * config.vocab_size)


def logits_at_once(config: ModelConfig, num_logits: int, layout: Layout) -> int:
    """Returns how many of a pass's logits a rank holds at a time to compute log-probs: a decoder's head makes chunks on
    a GPU (`lm.layers.Head`).
    """
    makes_chunks = layout.is_gpu and config.kind == "decoder"
    return min(num_logits, layers.CHUNK_LOGITS) if makes_chunks else num_logits


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
    num_logits = logits_at_once(config, own_logits(config, of, num_logits), layout)
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


def rows_of_a_pass(seq_len: int) -> int:
    """Returns the rows of a pass without gradients, batched as in `lm.transfer`."""
    return max(1, min(MAX_ROWS, MAX_TOKENS // seq_len))


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
    rows = rows_of_a_pass(seq_len)
    logits = min(rows * response_tokens * config.vocab_size, LOGITS_AT_ONCE["cuda" if layout.is_gpu else "cpu"])
    head = 4 * config.vocab_size * config.hidden_size if layout.is_gpu else 0
    a_pass = forward_bytes(config, forward_pass(layout, rows, seq_len))
    return {"a pass, or logits": max(a_pass, LOGIT_BYTES * logits), "head in fp32": head}


@dataclass(frozen=True)
class PPOModels:
    """Shapes and parameter counts. The reference has the policy's shape, the value function the reward model's.

    `value_counts` is None without a value function, `reward_counts` if the reward does not come from a model.
    """

    policy: ModelConfig
    critic: ModelConfig
    policy_counts: Counts
    value_counts: Counts | None
    reward_counts: Counts | None
    teachers: tuple[tuple[ModelConfig, Counts], ...] = ()
    judges: tuple[tuple[ModelConfig, Counts], ...] = ()


@dataclass(frozen=True)
class PPOWork:
    """A rank's work in one iteration."""

    policy_pass: Pass  # one micro-batch of prompts with responses, through the policy
    critic_pass: Pass  # the same micro-batch through the critic
    scoring_pass: Pass  # through the critic without gradients, for values and scores
    num_logits: int  # per micro-batch
    rollout_rows: int  # responses that a rank samples
    prompt_tokens: int  # of each
    response_tokens: int  # of each
    num_micro_batches: int
    mode: Mode = "fast"  # ppo.memory
    team_size: int = 1  # ranks that sample together: ppo.sampler.tensor_parallel_size
    has_average: bool = True
    shares_body: bool = False  # ppo.lora.shared_body
    gpu_bytes: int = 0  # memory of a GPU, which limits the rows sampled at once; 0 = no limit
    engine_bytes: int = 0  # that vLLM takes of a GPU, whatever it needs; 0 = Heed's sampler


def learner(models: PPOModels, layout: Layout, work: PPOWork) -> Memory:
    """Returns the memory of a learner: policy and value function in training, and its shard of the moving average.

    The average is in CPU memory unless the mode is `fast`. Weights are sent to generators one whole tensor at a time.
    """
    policy, c = models.policy_counts, layout.compute_bytes
    held, host, phases = dict[str, int](), dict[str, int](), dict[str, Parts]()
    trained = [("policy", models.policy, policy, work.policy_pass, work.num_logits)]
    value = models.value_counts
    if value is not None:
        trained.append(("value", models.critic, on_body(value) if work.shares_body else value, work.critic_pass, 0))
    for name, config, counts, of, logits in trained:
        held |= {f"{name}: {part}": size for part, size in states(counts, layout).items()}
        host |= {f"{name}: {part}": size for part, size in host_states(counts, layout).items()}
        training = training_phases(config, counts, layout, of, logits, work.num_micro_batches)
        phases |= {f"{name} {phase}": parts for phase, parts in training.items()}
    if work.shares_body:
        phases |= _shared_phases(models, layout, work)
    else:
        if value is not None:
            phases[VALUES] = scoring_phase(models.critic, value, layout, work.scoring_pass)
        if policy.ranks:  # the reference is then the policy without its adapters
            num_logits = own_logits(models.policy, work.policy_pass, work.num_logits)
            num_logits = logits_at_once(models.policy, num_logits, layout)
            logits = logit_bytes(num_logits, layout, with_gradient=False)
            head = casts_of(policy, layout) + logits  # of the frozen body, only the head's table is rounded in passes
            phases[REFERENCE] = {"a pass, or logits": max(forward_bytes(models.policy, work.policy_pass), head)}
    average = 4 * policy.trained // layout.ranks if work.has_average else 0
    (held if work.mode == "fast" or not layout.is_gpu else host)["moving average"] = average
    (host if layout.is_gpu else held)["copy of the average for checkpoints"] = average
    # Tensors are copied if they have to be gathered or rounded for the generator; otherwise they are sent in place.
    is_copied = layout.zero_stage == 3 or (layout.is_bf16 and (layout.is_autocast or policy.ranks > 0))
    chunk = min(CHUNK_BYTES + 2 * c * policy.largest, c * (policy.total if is_copied else policy.adapted))
    merging = 3 * 4 * policy.largest_adapted  # a map, its addition and their sum, in fp32
    digest = 16 * min(DIGESTED_AT_ONCE, policy.largest)
    phases[SYNC] = {ARRIVING: chunk + max(merging, digest)}
    return Memory(held, phases, host, weights_to_save(policy, layout))


def on_body(counts: Counts) -> Counts:
    """Returns the counts of a model whose frozen weights belong to another model."""
    return replace(counts, total=counts.trained, linear=counts.linear - counts.rounded, rounded=0)


def _shared_phases(models: PPOModels, layout: Layout, work: PPOWork) -> dict[str, Parts]:
    """Returns the phases without gradients on a shared body: policy, reference and value function read one batch
    together, and the reward model reads another.
    """
    num_readers = 2 if models.value_counts is None else 3
    rows = replace(work.policy_pass, rows=num_readers * work.policy_pass.rows)
    hidden = rows.num_tokens * models.policy.hidden_size * rows.compute_bytes
    logits = hidden + logit_bytes(work.num_logits, layout, with_gradient=False)
    # The test of draws copies some of the logits, and holds their log-probabilities and probabilities in fp32. On a
    # CPU it takes at most 90 MB, which are not counted.
    draws = (layout.compute_bytes + 8) * min(work.num_logits, AT_ONCE) if layout.is_gpu else 0
    head = casts_of(models.policy_counts, layout) + logits + draws
    together = {"a pass of all readers, or logits": max(forward_bytes(models.policy, rows), head)}
    return {MEASURE: together, REWARD: {"a pass": forward_bytes(models.critic, work.scoring_pass)}}


def generator(models: PPOModels, layout: Layout, work: PPOWork, other_bytes: int = 0) -> Memory:
    """Returns the memory of a generator: weights in the compute dtype, and sampling. Other roles hold `other_bytes`.

    In a team, a rank has the cache and the activations of its own heads, but whole logits. Whole tensors arrive in
    chunks, and are then cut. vLLM fills all that it may take with its cache as it starts, and sleeps when Heed's
    generator would leave the GPU.
    """
    policy, size, config, phases = models.policy_counts, work.team_size, models.policy, dict[str, Parts]()
    P = policy.total - (policy.trained if policy.ranks else 0)  # it receives merged weights
    if size > 1:
        arriving = min(CHUNK_BYTES + 2 * layout.compute_bytes * policy.largest, layout.compute_bytes * P)
        phases[SYNC] = {ARRIVING: arriving, "a rank's parts of them": arriving // size}
        P, config = parameters_of_part(config, size), config_of_part(config, size)
    weights = layout.compute_bytes * P
    if work.engine_bytes:
        held = {"generator": weights, "vLLM's cache and work space": max(0, work.engine_bytes - weights)}
        if weights > work.engine_bytes:  # the weights need a GPU of which they are vLLM's part
            held["part of the GPU that vLLM leaves to others"] = weights * work.gpu_bytes // work.engine_bytes - weights
        return Memory(held, {GENERATE: {}, **phases})
    rows, seq_len = min(GENERATION_ROWS, work.rollout_rows * size), work.prompt_tokens + work.response_tokens
    rows = rows_at_once(config, layout, work.gpu_bytes - other_bytes - weights if work.gpu_bytes else 0, rows, seq_len)
    phases[GENERATE] = phase = sampling_phase(config, layout, P, rows, work.prompt_tokens, work.response_tokens)
    if size > 1 and not layout.is_bf16:
        phase.pop(CPU_COPY, None)  # Heed's decoding kernels are for a whole model
    return Memory({"generator": weights}, phases)


def scorer(models: PPOModels, layout: Layout, work: PPOWork) -> Memory:
    """Returns the memory of a scorer: the reference, the teachers, the reward model and the judges, which run one after
    the other.

    `fast` holds all. The other modes shard them in CPU memory and gather the one that runs, whole or layer by layer.
    """
    if work.shares_body:
        assert models.reward_counts is not None, "a body is shared with a reward model"
        return Memory({"reward model's adapter": layout.weight_bytes * models.reward_counts.trained}, {})
    readers = {f"teacher {number}": teacher for number, teacher in enumerate(models.teachers, 1)}
    if not models.policy_counts.ranks:
        readers["reference"] = (models.policy, models.policy_counts)
    frozen = dict[str, tuple[ModelConfig, Counts, int, Pass, int]]()
    for name, (config, counts) in readers.items():
        shared = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
        num_logits = work.num_logits * config.vocab_size // models.policy.vocab_size
        num_logits = logits_at_once(config, num_logits, layout)
        logits = logit_bytes(num_logits, layout, with_gradient=False)
        frozen[name] = (config, counts, shared, work.policy_pass, logits)
    if models.reward_counts is not None:
        frozen["reward model"] = (models.critic, models.reward_counts, 0, work.scoring_pass, 0)
    held, host, phases = dict[str, int](), dict[str, int](), dict[str, Parts]()
    for name, (config, counts, in_fp32, split, more) in frozen.items():
        of = replace(split, split_among=1)  # a frozen model reads whole rows
        size = _frozen_bytes(counts.total, counts.linear - in_fp32, layout)
        needed = max(forward_bytes(config, of), more)
        passes = {"a pass": needed}
        if work.mode == "fast":
            held[name] = size
        elif layout.is_gpu:
            host[f"share of the {name}"] = size // layout.ranks
        else:
            held[f"share of the {name}"] = size // layout.ranks
        if work.mode == "balanced":
            # The ranks gather it before the passes, from shards on the device or through gloo into a copy.
            gathering = 0 if layout.ranks == 1 else size // layout.ranks if layout.is_gpu else size
            passes = {"a pass, or a share": max(needed, gathering), name: size}
        elif work.mode == "small":
            outside = counts.total - config.num_hidden_layers * counts.block
            layer = _frozen_bytes(counts.layer, counts.layer, layout)
            in_matrices = counts.linear - in_fp32 - config.num_hidden_layers * counts.block
            passes |= {
                f"{name} outside its layers": _frozen_bytes(outside, max(0, in_matrices), layout),
                "one of its layers": layer,
            }
        phases[f"score by the {name}"] = passes
    for number, (config, counts) in enumerate(models.judges, 1):
        name = f"judge {number}" if len(models.judges) > 1 else "judge"
        # It computes in the types of `lm.source`: bf16 on a GPU, otherwise fp32.
        size = 2 if layout.is_gpu else 4
        held[name] = size * counts.total
        width = min(config.max_position_embeddings, MAX_TOKENS)
        of = replace(work.scoring_pass, compute_bytes=size, stream_bytes=size, split_among=1)
        of = replace(of, rows=min(MAX_ROWS, MAX_TOKENS // width), seq_len=width)
        phases[f"score by the {name}"] = {"a pass": forward_bytes(config, of)}
    return Memory(held, phases, host)


def _frozen_bytes(total: int, in_products: int, layout: Layout) -> int:
    """Returns the bytes of a frozen model. With autocast, weights of linear layers are bf16 and the rest is fp32,
    including an embedding table that the head shares.
    """
    return 4 * total - 2 * in_products if layout.is_autocast else layout.compute_bytes * total


def ppo_memory(models: PPOModels, layout: Layout, work: PPOWork) -> Memory:
    """Returns the memory of a colocated rank, which has all roles."""
    learning, scoring = learner(models, layout, work), scorer(models, layout, work)
    other_roles = {**learning.held, **scoring.held}
    is_away = work.mode == "small" and layout.is_gpu
    sampling = generator(
        models, layout, work, sum(size for part, size in other_roles.items() if not (is_away and _moves(part)))
    )
    phases = {**learning.phases, **sampling.phases, **scoring.phases}
    phases[SYNC] = {**sampling.phases.get(SYNC, {}), **learning.phases[SYNC]}
    held = {**learning.held, **sampling.held, **scoring.held}
    host = {**learning.host, **scoring.host}
    if work.mode != "fast":  # the generator holds weights only from the sync until it has sampled
        phases = _only_in(phases, {part: held.pop(part) for part in sampling.held}, (GENERATE, SYNC))
    if work.mode == "small":  # in CPU memory from before sampling until the next update
        away = {part: held.pop(part) for part in list(held) if _moves(part)}
        (host if layout.is_gpu else held).update({f"{part}, while others work": size for part, size in away.items()})
        others = (GENERATE, VALUES, MEASURE, REFERENCE, REWARD, *scoring.phases)
        phases = _only_in(phases, away, tuple(name for name in phases if name not in others))
    return Memory(held, phases, host, learning.host_once)


def _moves(part: str) -> bool:
    """Returns whether the mode "small" moves a part to CPU memory."""
    return part.endswith((": moments", ": fp32 masters"))


def _only_in(phases: Mapping[str, Parts], parts: Parts, names: tuple[str, ...]) -> dict[str, Parts]:
    """Adds `parts` to the phases with these names."""
    return {name: {**before, **(parts if name in names else {})} for name, before in phases.items()}
