"""Memory per rank, as an upper bound: of a stage that trains one model, of sampling, and of PPO's roles.

P parameters, p of them trained; N ranks; c bytes per number in the compute dtype, w bytes per weight (4, or 2 with ZeRO
in bf16; without ZeRO, autocast keeps fp32 weights). What each ZeRO stage shards is from Rajbhandari et al. (arXiv
1910.02054, section 3), `lm.inspection` counts activations, and what DeepSpeed and this code hold in addition was
measured (docs/plan.md). Where several things do not exist at the same time, the largest counts.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from lm import layers
from lm.block import Block
from lm.cache import state_bytes
from lm.config import ModelConfig
from lm.decoding import PROMPT_TOKENS, rows_in
from lm.delta import chunk_bytes
from lm.generation import SAMPLED_AT_ONCE
from lm.inspection import Pass, block_bytes, cache_bytes_per_token, ends_bytes, exchanged_numbers, forward_bytes
from lm.layers import ExpertMaps, rounded_weights
from lm.lora import LoRAConfig, add_adapters
from lm.model import ScalarModel, freeze_all_but_last
from lm.native.kernels import library
from lm.samplers.draws import AT_ONCE, TESTED
from lm.samplers.heed_engine import KEPT_SHARE
from lm.sampling import LOGITS_AT_ONCE, PART_NUMBERS
from lm.source import on_meta
from lm.tensor_parallel import config_of_part, parameters_of_part
from lm.transfer import MAX_ROWS, MAX_TOKENS
from lm.weights import MAX_FILE_BYTES, PRETRAINED
from training.config import BatchConfig, OptimizerConfig, ranks_sharing_weights
from training.optimizers import muon_matrices
from training.packing import bucket

# In numbers. Those of ZeRO-3 are DeepSpeed's defaults (deepspeed/runtime/zero/config.py).
KEPT_WHOLE = 100_000  # the largest tensor that ZeRO-3 gathers once and keeps whole
MAX_LIVE, PREFETCH_BUCKET = 1_000_000_000, 50_000_000  # the most that it gathers at a time, and fetches ahead
REDUCE_BUCKET = 500_000_000  # the largest of `training.distributed` (not imported here: that takes seconds)
CHUNK_BYTES = 1 << 28  # lm.samplers.engine: a chunk of weights ends once it has this many
HASHED_AT_ONCE = 1 << 21  # likewise: elements, 16 bytes each
RESERVED_BYTES = 5 * (1 << 30) // 2  # of a GPU: CUDA's context, NCCL's buffers, cuBLAS's workspaces (1.5 to 2.5 GiB)
FROZEN = OptimizerConfig(learning_rate=1.0)  # for counting parameters that no optimizer trains
Mode = Literal["fast", "balanced", "small"]  # ppo.memory
Parts = dict[str, int]  # bytes by name
PRODUCTS = (nn.Linear, ExpertMaps)  # modules whose weights are matrices
CACHE = "key-value cache"
NEEDED_ROWS = 128  # responses whose cache a sampler needs; more run at once where memory is free


@dataclass(frozen=True)
class Layout:
    """How the work is split and computed.

    `offload` names the parts that a GPU keeps in CPU memory. With `recomputes`, the backward pass recomputes each
    block's activations. A node has `ranks_per_node`, 0 = all. A copy of ZeRO-3's weights on each of several nodes may
    take `node_weights_limit` bytes of a rank. Groups of `sequence_ranks` ranks split each row's tokens. With `records`
    training passes keep what they write to (`training.recording`).
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
    records: bool = False

    @property
    def shares(self) -> int:
        """Parts that a batch is split into."""
        return self.ranks // self.sequence_ranks

    def packed_width(self, num_tokens: int) -> int:
        """Returns the row width, with padding, into which `training.packing` packs a sequence of `num_tokens`."""
        return bucket(num_tokens) if self.is_gpu else num_tokens

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
    """A model's shape and parameter counts, with its optimizer."""

    config: ModelConfig
    total: int
    linear: int  # in linear layers
    rounded: int  # frozen and used only in matrix products, so held rounded without ZeRO
    trained: int
    moments: int  # AdamW's two per trained parameter, Muon's one
    trained_layers: int  # blocks, not parameters
    largest: int  # of the largest tensor
    block: int  # of the largest block's attention and MLP
    blocks: int  # of all blocks' attention and MLP
    kept_whole: int  # of all tensors that ZeRO-3 does not shard
    has_adapters: bool


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank needs: `held` throughout, and `phases` in addition during each phase. Phases do not overlap.

    On GPUs, `host` is the node's CPU memory that each rank needs, and `host_once` what rank 0 needs in addition.
    """

    held: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    host: Mapping[str, int] = field(default_factory=dict)
    host_once: int = 0
    sampled_at_once: int = 0  # responses, if it samples

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + sum(self.phases[self.peak_phase].values())

    def host_bytes(self, num_ranks: int) -> int:
        """Returns the CPU memory of the node that holds rank 0 and `num_ranks` ranks in total."""
        return num_ranks * sum(self.host.values()) + self.host_once


@functools.lru_cache(maxsize=256)  # building a model without memory takes a large one 0.1 s
def count(
    config: ModelConfig, optimizer: OptimizerConfig = FROZEN, *, num_scores: int = 0, lora: LoRAConfig | None = None
) -> Counts:
    """Counts parameters on the meta device, with the same weights frozen as in training.

    With `num_scores` the model has that many scores instead of a language-model head.

    Raises: ValueError if `optimizer.trained_layers` exceeds the number of layers.
    """
    labels = [str(number) for number in range(num_scores)]

    def build() -> nn.Module:
        is_scalar = labels and config.kind == "decoder"
        model = ScalarModel(config, labels=labels) if is_scalar else PRETRAINED[config.kind](config)
        return model if lora is None else add_adapters(model, lora)

    model = on_meta(build)
    num_layers = config.num_hidden_layers + config.num_encoder_layers
    if optimizer.trained_layers is not None:
        freeze_all_but_last(model, optimizer.trained_layers)
        num_layers = optimizer.trained_layers
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    by_muon = muon_matrices(trained) if optimizer.kind == "muon" else []
    num_trained = sum(sizes[name] for name in trained)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    in_blocks = [sum(p.numel() for part in (b.attention, b.mlp) for p in part.parameters()) for b in blocks]
    return Counts(
        config,
        total=sum(sizes.values()),
        linear=sum({m.weight: m.weight.numel() for m in model.modules() if isinstance(m, PRODUCTS)}.values()),
        rounded=sum(p.numel() for p in rounded_weights(model)),
        trained=num_trained,
        moments=2 * num_trained - sum(sizes[name] for name in by_muon),
        trained_layers=num_layers,
        largest=max(sizes.values()),
        block=max(in_blocks),
        blocks=sum(in_blocks),
        kept_whole=sum(size for size in sizes.values() if size <= KEPT_WHOLE),
        has_adapters=lora is not None,
    )


def states(counts: Counts, layout: Layout) -> tuple[Parts, Parts]:
    """Returns what training holds between steps, on the device and in CPU memory, with the copies that checkpoints
    are written from. Without ZeRO, several ranks keep gradients in DDP's buckets, and autocast keeps rounded weights.
    """
    p, N, w = counts.trained, layout.ranks, layout.weight_bytes
    parts = {"weights": w * counts.total, "fp32 masters": 4 * p // N, "moments": 8 * p // N}
    if layout.zero_stage == 0:
        rounded = 2 * (counts.linear - 2 * counts.rounded) if layout.is_autocast else 0
        parts = {"weights": 4 * counts.total + rounded, "moments": 4 * counts.moments}
        parts |= {"gradients in DDP's buckets": 4 * p} if N > 1 else {}
    elif layout.zero_stage == 3:
        parts |= {"weights": w * counts.total // N, "gradients": w * p // N}
        parts |= {"reduce bucket": w * min(REDUCE_BUCKET, p), "small weights, whole": w * counts.kept_whole}
        whole = w * counts.total  # a second copy on each node, of which each of its ranks has a part
        sharing = ranks_sharing_weights(whole, N, layout.ranks_per_node, layout.node_weights_limit)
        parts |= {"weights of the node": whole // sharing} if sharing > 1 else {}
    moved = {"optimizer": ("fp32 masters", "moments", "gradients"), "parameters": ("weights", "weights of the node")}
    away = {part for name in layout.offload for part in moved[name]} if layout.is_gpu else set[str]()
    held = {part: size for part, size in parts.items() if part not in away}
    host = {part: size for part, size in parts.items() if part in away}
    (host if layout.is_gpu else held)["copy for checkpoints"] = 4 * (p + counts.moments) // N
    return held, host


def forward_pass(layout: Layout, rows: int, seq_len: int, *, dropout: float = 0.0, is_trained: bool = False) -> Pass:
    """Returns the pass of one micro-batch. Only models in training (`is_trained`) split rows among ranks.

    Without ZeRO, autocast leaves the residual stream in fp32. On a GPU, attention is fused (`lm.attention`).
    """
    is_tiled = not layout.is_gpu and library() is not None  # assumes that the ranks have a compiler if this machine has
    split_among = layout.sequence_ranks if is_trained else 1
    return Pass(
        rows, seq_len, layout.compute_bytes, layout.weight_bytes, layout.is_gpu, dropout > 0, is_tiled, split_among
    )


def logit_bytes(config: ModelConfig, layout: Layout, of: Pass, num_logits: int, *, with_gradient: bool) -> int:
    """Returns the bytes of a pass's logits, and of their gradient. On a GPU, a decoder's head makes them in chunks
    (`lm.layers.Head`), and `lm.sampling` adds an fp32 copy and the softmax for some positions at a time.
    """
    held = min(num_logits, of.num_tokens * config.vocab_size)
    if layout.is_gpu and config.kind == "decoder":
        held = min(held, layers.CHUNK_LOGITS)
    part = min(held, PART_NUMBERS["cuda"]) if layout.is_gpu else 0
    copies = 1 + with_gradient + (config.final_logit_softcapping > 0)  # tanh keeps what it returns
    return copies * layout.compute_bytes * held + (8 if layout.is_bf16 else 4) * part


def training_phase(counts: Counts, layout: Layout, of: Pass, num_logits: int, num_micro_batches: int) -> Parts:
    """Returns what an optimizer step adds to `states` at its peak. `num_logits` is counted positions times vocabulary,
    in all slices of the rows; 0 for a model that gives scores.

    The backward pass peaks near its start, while all activations exist: with the logits, or with the gradients inside a
    block, which are at most as large as what the block keeps. Frozen blocks before the first trained one keep nothing.
    Then gradients are reduced; in bf16, ZeRO 1 and 2 join those of a rank and then make fp32 ones from them.
    """
    config, stage, p, N, w = counts.config, layout.zero_stage, counts.trained, layout.ranks, layout.weight_bytes
    is_double = config.kind == "encoder-decoder"
    block, plain = (block_bytes(config, of, cross_attention=is_cross) for is_cross in (is_double, False))
    kept = min(counts.trained_layers, config.num_hidden_layers) * block
    kept += max(0, counts.trained_layers - config.num_hidden_layers) * plain
    inside = block + 2 * of.compute_bytes * of.num_tokens * exchanged_numbers(config, of)
    inside += of.num_tokens * chunk_bytes(config)
    if layout.recomputes:
        kept, inside = counts.trained_layers * of.num_tokens * config.hidden_size * of.stream_bytes, block + inside
    gradients = {0: 4 * p, 1: w * p, 2: w * p // N, 3: 0}[stage]
    before = 0 if num_micro_batches == 1 else gradients  # of earlier micro-batches, to which that of the head is added
    logits, own = (logit_bytes(config, layout, of, num_logits, with_gradient=both) for both in (True, False))
    own += w * min(counts.largest, p) if before and num_logits else 0
    backward = {
        "activations": kept + (1 + is_double) * ends_bytes(config, of),
        "logits, or a block's backward": max(logits, own, inside),
    }
    bucket, num_buckets = w * min(REDUCE_BUCKET, p), 2 if layout.is_gpu else 1  # one is filled while another is reduced
    step = {"fp32 gradients": (4 + w * layout.is_bf16) * p // N, "gradients": gradients}
    backward["gradients"] = before
    if stage == 0:  # DDP's buckets are among the states
        step = {"gradients": gradients if N == 1 else 0}
    elif stage == 3:
        live = min(MAX_LIVE + PREFETCH_BUCKET, counts.total - counts.kept_whole)
        backward["gathered weights, and gradients being reduced"] = w * live + bucket // N
        step = {"fp32 gradients": 4 * min(p // N, MAX_LIVE)}
    else:
        backward["reduce bucket"] = num_buckets * bucket
        if stage == 2:  # a bucket is reduced in a copy
            num_buckets, gradients = num_buckets + 1, gradients + before
        reduction = {"gradients": gradients, "reduce bucket": num_buckets * bucket}
        step = max(step, reduction, key=lambda parts: sum(parts.values()))
    return max(backward, step, key=lambda parts: sum(parts.values()))


def scoring_phase(counts: Counts, layout: Layout, of: Pass, num_logits: int = 0) -> Parts:
    """Returns the bytes of a pass without gradients of a model in training, whose weights ZeRO-3 gathers."""
    logits = logit_bytes(counts.config, layout, of, num_logits, with_gradient=False)
    live = min(MAX_LIVE, counts.total - counts.kept_whole) if layout.zero_stage == 3 else 0
    return {"a pass, or logits": max(forward_bytes(counts.config, of), logits), "gathered": layout.weight_bytes * live}


def training_memory(counts: Counts, layout: Layout, of: Pass, num_logits: int, num_micro_batches: int) -> Memory:
    """Returns the memory of a stage that trains one model."""
    held, host = states(counts, layout)
    phases = {"train": training_phase(counts, layout, of, num_logits, num_micro_batches)}
    if layout.records:
        held |= training_phase(counts, layout, of, num_logits, max(2, num_micro_batches))
        phases = {"train": {}, "evaluate": scoring_phase(counts, layout, of, num_logits)}
    return Memory(held, phases, host, saved_bytes(counts, layout))


def saved_bytes(counts: Counts, layout: Layout) -> int:
    """Returns the CPU memory in which rank 0 gathers the weights of one file, and the first tensor of the next."""
    return min(4 * counts.total, MAX_FILE_BYTES + 2 * 4 * counts.largest) if layout.is_gpu else 0


def sampling_phase(
    config: ModelConfig, layout: Layout, num_parameters: int, rows: int, prompt_tokens: int, response_tokens: int
) -> Parts:
    """Returns the bytes for generating `rows` responses at once.

    Prefill (on a GPU a few thousand tokens at a time, on a CPU all of them) and drawing (logits and fp32 probabilities)
    do not overlap. On a CPU, the weights exist a second time, in the layout of its kernels.
    """
    c, prompts = layout.compute_bytes, min(rows, -(-PROMPT_TOKENS // prompt_tokens)) if layout.is_gpu else rows
    prompt_pass = forward_bytes(config, forward_pass(layout, prompts, prompt_tokens))
    return {
        CACHE: rows * (cache_bytes_per_token(config, c) * (prompt_tokens + response_tokens) + state_bytes(config, c)),
        "prompts being read, or logits": max(prompt_pass, (2 * c + 12) * rows * config.vocab_size),
        **({} if layout.is_gpu else {"weights as the CPU reads them": c * num_parameters}),
    }


def rows_at_once(config: ModelConfig, layout: Layout, free: int, rows: int, seq_len: int, most: int = 0) -> int:
    """Returns how many of `rows` generation runs at once in `free` bytes. On a GPU it runs fewer instead of failing."""
    is_limited = layout.is_gpu and free > 0
    rows = min(rows, most or SAMPLED_AT_ONCE["cuda" if layout.is_gpu else "cpu"])
    return rows_in(free, config, layout.compute_bytes, rows, seq_len) if is_limited else rows


def measuring_phase(config: ModelConfig, layout: Layout, seq_len: int, response_tokens: int) -> Parts:
    """Returns the bytes for log-probs and scores of samples without gradients (`lm.transfer`).

    Logits are in fp32, divided by the temperature, and exponentiated for the normaliser, some positions at a time. On a
    GPU, so are the head's weights.
    """
    rows = max(1, min(MAX_ROWS, MAX_TOKENS // seq_len))
    logits = min(rows * response_tokens * config.vocab_size, LOGITS_AT_ONCE["cuda" if layout.is_gpu else "cpu"])
    head = 4 * config.vocab_size * config.hidden_size if layout.is_gpu else 0
    a_pass = forward_bytes(config, forward_pass(layout, rows, seq_len))
    return {"a pass, or logits": max(a_pass, 3 * 4 * logits), "head in fp32": head}


def rows_and_passes(batch: BatchConfig, num_ranks: int, width: int, rows_per_unit: int = 1) -> tuple[int, int]:
    """Returns the rows per pass of one rank, and the passes per rank and step, if all rows are this wide."""
    if batch.micro_batch_size:
        return batch.micro_batch_size * rows_per_unit, batch.num_micro_batches(num_ranks)
    units = max(1, batch.micro_batch_tokens // (rows_per_unit * width))
    return units * rows_per_unit, math.ceil(batch.num_micro_batches(num_ranks) / units)


def scoring_rows(batch: BatchConfig, width: int, rows_per_unit: int = 1) -> int:
    """Returns the rows per pass without gradients, for log-probabilities that no update compares with its own."""
    tokens = batch.forward_tokens or batch.micro_batch_tokens
    units = max(1, tokens // (rows_per_unit * width)) if tokens else batch.micro_batch_size
    return units * rows_per_unit


# --- PPO -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PPOModels:
    """The models. The reference has the policy's shape. `value` is None without a value function, `reward` if the
    reward does not come from a model.
    """

    policy: Counts
    value: Counts | None
    reward: Counts | None
    teachers: tuple[Counts, ...] = ()
    judges: tuple[Counts, ...] = ()


@dataclass(frozen=True)
class PPOWork:
    """A rank's work in one iteration."""

    trained: Pass  # one micro-batch of prompts with responses, and its pretraining rows
    scored: Pass  # without gradients, for values and scores
    num_logits: int  # per micro-batch
    rollout_rows: int  # responses that a rank samples
    prompt_tokens: int  # of each
    response_tokens: int  # of each
    num_micro_batches: int
    mode: Mode = "fast"
    team_size: int = 1  # ranks that sample together: ppo.sampler.tensor_parallel_size
    has_average: bool = True
    shares_body: bool = False  # ppo.lora.shared_body
    gpu_bytes: int = 0  # memory of a GPU, which limits the rows sampled at once; 0 = no limit
    engine_share: float = 0.0  # of a GPU, that vLLM takes; 0 = Heed's sampler
    max_rows: int = 0  # ppo.sampler.max_rows
    sends_apart: bool = False  # whether generators have ranks of their own, to which weights are broadcast


def learner(models: PPOModels, layout: Layout, work: PPOWork) -> Memory:
    """Returns the memory of a learner: policy and value function in training, and its shard of the moving average.

    The average is in CPU memory unless the mode is `fast`. Weights are sent to generators in chunks.
    """
    policy, value = models.policy, models.value
    if value is not None and work.shares_body:  # its frozen weights are the policy's
        value = replace(value, total=value.trained, linear=value.linear - value.rounded, rounded=0)
    held, host, phases = Parts(), Parts(), dict[str, Parts]()
    for name, counts in {"policy": policy, "value": value}.items():
        if counts is not None:
            here, away = states(counts, layout)
            held |= {f"{name}: {part}": size for part, size in here.items()}
            host |= {f"{name}: {part}": size for part, size in away.items()}
            logits = work.num_logits if name == "policy" else 0
            of_step = training_phase(counts, layout, work.trained, logits, work.num_micro_batches + layout.records)
            phases[name] = {} if layout.records else of_step
            held |= {f"{name}: recorded {part}": size for part, size in of_step.items()} if layout.records else {}
    if work.shares_body:  # policy, reference and value function read one batch together
        phases["measure"] = scoring_phase(
            policy, layout, replace(work.trained, rows=3 * work.trained.rows), work.num_logits
        )
        phases["score by the reward model"] = scoring_phase(policy, layout, work.scored)
    else:
        if value is not None:
            phases["values"] = scoring_phase(value, layout, work.scored)
        if policy.has_adapters:  # the reference is then the policy without them
            phases["score by the reference"] = scoring_phase(policy, layout, work.trained, work.num_logits)
    if layout.is_gpu:  # the logits joined, and the log-probs, probabilities and products of these in fp32
        tested = min(TESTED["cuda"], work.rollout_rows * work.response_tokens * policy.config.vocab_size)
        kept = layout.compute_bytes * tested
        phases["test of draws"] = {"tested logits": kept, "bets": kept + 16 * min(tested, AT_ONCE["cuda"])}
        _keep_tested_logits(phases)
    average = 4 * policy.trained // layout.ranks if work.has_average else 0
    (held if work.mode == "fast" or not layout.is_gpu else host)["moving average"] = average
    (host if layout.is_gpu else held)["copy of the average for checkpoints"] = average
    # Next to a chunk there are the weights that ZeRO-3 gathers at once, and the bytes that are broadcast.
    copies = 1 + (layout.zero_stage == 3) + work.sends_apart
    phases["sync"] = {"weights on their way": copies * _arriving_bytes(policy, layout)}
    return Memory(held, phases, host, saved_bytes(policy, layout))


def _keep_tested_logits(phases: dict[str, Parts]) -> None:
    """Add the logits that a learner keeps for the test of draws to the phases before it, if there is that test."""
    for name, parts in phases.items() if "test of draws" in phases else ():
        if name == "measure" or name.startswith("score by"):
            parts["tested logits"] = phases["test of draws"]["tested logits"]


def _arriving_bytes(policy: Counts, layout: Layout) -> int:
    """Returns the bytes of a chunk of weights, each merged with its adapter in fp32, and hashed."""
    copies = layout.compute_bytes * (2 if policy.has_adapters else 1)
    hashed = 16 * min(HASHED_AT_ONCE, policy.largest)
    return min(CHUNK_BYTES + 2 * copies * policy.largest, copies * policy.total) + hashed


def generator(models: PPOModels, layout: Layout, work: PPOWork, other_bytes: int = 0) -> Memory:
    """Returns the memory of a generator: weights in the compute dtype, and sampling. Other roles hold `other_bytes`.

    In a team, a rank has the cache and the activations of its own heads, but whole logits. Tensors arrive in chunks:
    whole tensors, which are then cut, or in a broadcast only the rank's parts. vLLM's cache fills all the memory that
    vLLM may take.
    """
    policy, size, c = models.policy, work.team_size, layout.compute_bytes
    config, P, phases = policy.config, policy.total, dict[str, Parts]()
    if policy.has_adapters:  # it receives merged weights
        P -= policy.trained
    if size > 1:
        arriving = _arriving_bytes(policy, layout)
        phases["sync"] = {"weights on their way": arriving, "a rank's parts of them": arriving // size}
        P, config = parameters_of_part(config, size), config_of_part(config, size)
    rows, seq_len = work.rollout_rows * size, work.prompt_tokens + work.response_tokens
    if work.engine_share:  # if the weights are larger than its share, the GPU would have to be larger
        least = round(work.engine_share * work.gpu_bytes)
        held = {"vLLM": least if c * P <= least else round(c * P / work.engine_share)}
        rows = min(rows, work.max_rows or SAMPLED_AT_ONCE["cuda"])
        return Memory(held, {"generate": {}, **phases}, sampled_at_once=rows)
    free = work.gpu_bytes - RESERVED_BYTES - other_bytes - c * P if work.gpu_bytes else 0
    rows = rows_at_once(config, layout, free, rows, seq_len, work.max_rows)
    needed = min(rows, NEEDED_ROWS)
    phases["generate"] = sampling_phase(config, layout, P, needed, work.prompt_tokens, work.response_tokens)
    return Memory({"generator": c * P}, phases, sampled_at_once=rows)


def scorer(models: PPOModels, layout: Layout, work: PPOWork) -> Memory:
    """Returns the memory of a scorer: reference, teachers, reward model and judges, which read whole rows one after the
    other.

    `fast` holds all. The other modes shard them in CPU memory and gather the one that runs, whole or block by block.
    Judges are always held, in bf16 on a GPU and otherwise in fp32 (`lm.source`).
    """
    if work.shares_body:
        assert models.reward is not None, "a body is shared with a reward model"
        return Memory({"reward model's adapter": layout.weight_bytes * models.reward.trained}, {})
    held, host, phases = Parts(), Parts(), dict[str, Parts]()
    readers = {f"teacher {number}": teacher for number, teacher in enumerate(models.teachers, 1)}
    readers |= {} if models.policy.has_adapters else {"reference": models.policy}
    readers |= {} if models.reward is None else {"reward model": models.reward}
    for name, counts in readers.items():
        config, of = counts.config, work.scored if name == "reward model" else work.trained
        logits = 0 if name == "reward model" else of.num_tokens * config.vocab_size
        logits = min(logits, work.num_logits * config.vocab_size // models.policy.config.vocab_size)
        whole = replace(of, split_among=1)
        a_pass = max(forward_bytes(config, whole), logit_bytes(config, layout, whole, logits, with_gradient=False))
        # Autocast keeps what is outside the blocks in fp32, such as an embedding that is also the head.
        in_blocks, wide = counts.blocks, 4 if layout.is_autocast else layout.compute_bytes
        outside, size = wide * (counts.total - in_blocks), layout.compute_bytes * in_blocks
        size += outside
        phases[f"score by the {name}"] = phase = {"a pass": a_pass}
        if work.mode == "fast":
            held[name] = size
            continue
        (host if layout.is_gpu else held)[f"share of the {name}"] = size // layout.ranks
        if work.mode == "small":
            phase |= {f"{name} outside its blocks": outside, "one of its blocks": layout.compute_bytes * counts.block}
        else:  # gathered before the passes, from shards on the device, or through gloo into a copy
            gathering = 0 if layout.ranks == 1 else size // layout.ranks if layout.is_gpu else size
            phase |= {"a pass": max(a_pass, gathering), name: size}
    c = 2 if layout.is_gpu else 4
    for number, judge in enumerate(models.judges, 1):
        width = min(judge.config.max_position_embeddings, MAX_TOKENS)
        rows = min(MAX_ROWS, MAX_TOKENS // width)
        read = replace(work.scored, rows=rows, seq_len=width, compute_bytes=c, stream_bytes=c, split_among=1)
        held[f"judge {number}"] = c * judge.total
        phases[f"score by judge {number}"] = {"a pass": forward_bytes(judge.config, read)}
    return Memory(held, phases or {"score": {}}, host)  # a reward that is no model takes none of a rank's memory


def ppo_memory(models: PPOModels, layout: Layout, work: PPOWork) -> Memory:
    """Returns the memory of a colocated rank, which has all roles."""
    learning, scoring = learner(models, layout, work), scorer(models, layout, work)
    held, host = {**learning.held, **scoring.held}, {**learning.host, **scoring.host}
    phases = {name: dict(parts) for name, parts in {**learning.phases, **scoring.phases}.items()}
    _keep_tested_logits(phases)
    if work.mode == "small":  # masters and moments are on the device from the first update until the next sampling
        away = {part: held.pop(part) for part in list(held) if part.endswith((": moments", ": fp32 masters"))}
        (host if layout.is_gpu else held).update({f"{part}, while others work": size for part, size in away.items()})
        for name in ("policy", "value", "sync"):
            phases.get(name, {}).update(away)
    sampling = generator(models, layout, work, sum(held.values()))
    phases["generate"] = dict(sampling.phases["generate"])
    phases["sync"] |= sampling.phases.get("sync", {})
    if work.mode == "fast":
        held |= sampling.held
        rows = sampling.sampled_at_once
        cache = phases["generate"].get(CACHE, 0) * rows // max(1, min(rows, NEEDED_ROWS))
        if layout.is_gpu and 0 < cache <= KEPT_SHARE * work.gpu_bytes:  # kept with the recorded steps
            held[CACHE] = cache
            del phases["generate"][CACHE]
    else:  # the generator holds weights only from the sync until it has sampled
        phases["generate"] |= sampling.held
        phases["sync"] |= sampling.held
    return Memory(held, phases, host, learning.host_once, sampling.sampled_at_once)
