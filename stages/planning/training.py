"""Memory for training a model, part by part.

P parameters, p of them trained; N ranks; c bytes per number in the compute dtype, w bytes per weight (4, or 2 with ZeRO
in bf16; without ZeRO, autocast keeps fp32 weights). Which ZeRO stage shards what is from Rajbhandari et al. (arXiv
1910.02054, section 3); what this code and DeepSpeed hold in addition was measured (docs/plan.md).
"""

from lm.config import ModelConfig
from lm.inspection import Pass, block_bytes, ends_bytes, gradient_bytes
from lm.logprobs import PART_NUMBERS
from lm.weights import MAX_FILE_BYTES
from stages.planning.memory import MAX_LIVE, Counts, Layout, Memory, casts_of

# In elements: the largest bucket of training/zero.py (not imported here, since that takes seconds), and DeepSpeed's
# default (deepspeed/runtime/zero/config.py), which training/zero.py does not change.
REDUCE_BUCKET = 500_000_000
PREFETCH_BUCKET = 50_000_000


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

    On a GPU, `lm.logprobs` adds an fp32 copy (unless they are fp32) and the softmax, for some positions at a time.
    """
    part = min(num_logits, PART_NUMBERS["cuda"]) if layout.is_gpu else 0
    held = num_logits * layout.compute_bytes * (2 if with_gradient else 1)
    return held + 4 * part * (2 if layout.is_bf16 else 1)


def _backward_of_block(config: ModelConfig, of: Pass, layout: Layout) -> int:
    """Returns the bytes that the backward pass of a block adds. If blocks are recomputed, that is all their activations
    except the input."""
    if not layout.recomputes:
        return gradient_bytes(config, of)
    kept = block_bytes(config, of, cross_attention=config.kind == "encoder-decoder")
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
    return {part: size for part, size in (held | copy).items() if part not in _moved_parts(layout)}


def host_states(counts: Counts, layout: Layout) -> dict[str, int]:
    """Returns the bytes of CPU memory that training on a GPU needs: what is offloaded, and the copy from which a
    checkpoint is written.
    """
    if not layout.is_gpu:
        return {}
    on_device = Layout(layout.ranks, layout.zero_stage, layout.is_bf16, is_gpu=True)
    moved = {part: size for part, size in states(counts, on_device).items() if part in _moved_parts(layout)}
    return {**moved, "copy for checkpoints": checkpoint_copy(counts, layout)}


def checkpoint_copy(counts: Counts, layout: Layout) -> int:
    """Returns the bytes of this rank's shard of fp32 weights and moments."""
    return (4 * counts.trained + _moments(counts)) // layout.ranks


def _moments(counts: Counts) -> int:
    return 8 * (counts.trained - counts.by_muon) + 4 * counts.by_muon


def _moved_parts(layout: Layout) -> set[str]:
    moved = {"fp32 masters", "moments", "gradients"} if layout.is_offloaded("optimizer") else set[str]()
    return moved | ({"weights"} if layout.is_offloaded("parameters") else set())


def training_phases(
    config: ModelConfig, counts: Counts, layout: Layout, of: Pass, num_logits: int, num_micro_batches: int
) -> dict[str, dict[str, int]]:
    """Returns what a training step adds to `states`, by phase. `num_logits` is counted positions times vocabulary, or
    the number of scores.

    The backward pass peaks near its start, while all activations exist: together with the logits and their gradient,
    or with the latter and the gradient of the head's weights, or with the gradients inside the last block. Gradients of
    earlier micro-batches add to each of these.
    """
    p, N, w, stage = counts.trained, layout.ranks, layout.weight_bytes, layout.zero_stage
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
    buffers = 2 if layout.is_gpu else 1  # one is filled while the other is reduced
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
    if stage == 0:
        phases["step"] = {"gradients": 4 * p if N == 1 else 0}
    elif stage == 1:
        phases["reduce"] = {"gradients": w * p, "reduce bucket": buffers * w * bucket}
        phases["step"] = {"gradients": w * p, "fp32 gradients": 4 * p // N}
    elif stage == 2:
        # The bucket is reduced through a copy; this rank keeps its own part.
        rest = w * max(0, p - bucket) // N
        phases["reduce"] = {**before, "reduce bucket": (buffers + 1) * w * bucket, "gradients of this rank": rest}
        phases["step"] = {"gradients": w * p // N, "fp32 gradients": 4 * p // N}
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
    """Returns the CPU memory in which rank 0 gathers the weights of one file, and the tensor that no longer fits it."""
    one_file = MAX_FILE_BYTES + 2 * 4 * counts.largest
    return {"fp32 weights to be saved": min(4 * counts.total, one_file)} if layout.is_gpu else {}
