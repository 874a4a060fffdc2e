"""How long work takes on a rank's hardware.

On a GPU, a pass takes the time of its matrix products at a share of the peak, plus the time in which its other
kernels read and write, but at least as long as the CPU needs to launch its kernels. If DDP and ZeRO send while they
compute, only the time by which sending takes longer counts. On a CPU, products count, and in sampling what is read.

Kernels and bytes were counted with the current code on the fake CUDA device; `tests/fake_cuda/on_device_times.py`
checks the counts.

Letters: D width, M MLP width, H head dim, N heads, G key-value heads, c bytes per number.
"""

import math
from dataclasses import dataclass

from lm.config import ModelConfig
from lm.inspection import cache_bytes_per_token, flops_per_source_token, flops_per_token
from stages.planning.hardware import Hardware
from stages.planning.memory import GENERATION_ROWS, Counts, Layout, node_copies

# Assumed, like the share of the memory's bandwidth, until they are measured on a GPU. Kernels are counted without
# `lm.native.gpu_layers`, which launches about half as many.
LAUNCH_SECONDS = 6e-6  # of CPU time per kernel of a pass
REPLAYED_SECONDS = 3e-6  # of GPU time per kernel that reads little, in a recorded step
BLOCK_KERNELS = (17, 43)  # of a block's forward and backward pass
STEP_KERNELS = (17, 30)  # of a decoding step: per block, and outside the blocks with the draw
BANDWIDTH_SHARE = 0.8  # of the memory's peak, reached by kernels that read and write much
LINK_SHARE = 0.8  # of NVLink's and the network's peak, reached by NCCL (nccl-tests on A100: 240 of 300 GB/s)
EXCHANGE_SECONDS = 10e-6  # least time of a small collective among a node's GPUs
STEP_BYTES = 28  # that AdamW reads and writes per trained number: weight, two moments and gradient in fp32
# Numbers that fused kernels (lm.native.gpu) read and write per logit: forward, backward, and to draw a token.
LOGIT_NUMBERS = (1, 2, 3)


@dataclass(frozen=True)
class Times:
    """Times of one model on ranks whose products reach the fraction `share_of_peak` of this hardware's peak."""

    model: ModelConfig
    layout: Layout
    hardware: Hardware
    share_of_peak: float

    @property
    def num_layers(self) -> int:
        return self.model.num_hidden_layers + self.model.num_encoder_layers

    def forward_flops(self, seq_len: int, head_share: float) -> float:
        """Returns a forward pass's FLOPs per token; the head is computed for the fraction `head_share` of tokens."""
        # A causal token attends to half the row on average. On a CPU all pairs are computed, as for encoders.
        is_half = self.model.kind == "decoder" and self.layout.is_gpu
        context = (seq_len + 1) // 2 if is_half else seq_len
        flops = float(flops_per_token(self.model, context))
        if self.model.kind == "encoder-decoder":
            flops += flops_per_source_token(self.model, context)
        has_head = self.model.kind != "encoder"
        return flops - (1 - head_share) * has_head * 2 * self.model.vocab_size * self.model.hidden_size

    def forward_seconds(self, tokens: float, seq_len: int, head_share: float) -> float:
        """Returns the seconds of one rank's pass over `tokens`, in rows of `seq_len`."""
        return self._pass(tokens, self.forward_flops(seq_len, head_share), head_share, is_backward=False)

    def backward_seconds(self, counts: Counts, tokens: float, seq_len: int, head_share: float) -> float:
        """Returns the seconds of the backward pass, which stops at frozen blocks. It computes two products per forward
        product, but only one through frozen maps with adapters, whose weights get no gradient. Recomputed blocks run
        forward again.
        """
        share = counts.trained_layers / self.num_layers
        flops = self.forward_flops(seq_len, head_share)
        seconds = share * self._pass(tokens, (1 if counts.ranks else 2) * flops, head_share, is_backward=True)
        return seconds + self.layout.recomputes * share * self.forward_seconds(tokens, seq_len, 0.0)

    def _pass(self, tokens: float, flops: float, head_share: float, *, is_backward: bool) -> float:
        computed = tokens * flops / (self.hardware.flops * self.share_of_peak)
        if not self.layout.is_gpu:
            return computed
        logits = LOGIT_NUMBERS[is_backward] * self.layout.compute_bytes * head_share * self.model.vocab_size
        moved = tokens * (self.num_layers * self._bytes_per_token(is_backward=is_backward) + logits)
        launched = LAUNCH_SECONDS * self.num_layers * BLOCK_KERNELS[is_backward]
        return max(launched, computed + self._memory_seconds(moved)) + self._exchanged(tokens)

    def _bytes_per_token(self, *, is_backward: bool) -> float:
        """Returns what a block reads and writes per token outside its products and attention, in bf16: norms, the
        activation, rotary positions, additions. Autocast's fp32 stream adds to it.
        """
        model, is_gated = self.model, self.model.is_gated
        turned = (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
        turned *= model.positions == "rotary"
        in_fp32 = model.hidden_size * self.layout.is_autocast
        if is_backward:
            inner = (22 if is_gated else 6) * model.intermediate_size
            return self.layout.compute_bytes / 2 * (inner + 50 * model.hidden_size + 18 * turned) + 48 * in_fp32
        inner = (10 if is_gated else 4) * model.intermediate_size
        return self.layout.compute_bytes / 2 * (inner + 26 * model.hidden_size + 14 * turned) + 28 * in_fp32

    def _memory_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.hardware.bytes_per_second * BANDWIDTH_SHARE)

    def _exchanged(self, tokens: float) -> float:
        """Returns the seconds of four all-to-alls per layer, if the GPUs of a node share each row's tokens."""
        model, ranks = self.model, self.layout.sequence_ranks
        numbers = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
        sent = tokens * numbers * self.layout.compute_bytes * (ranks - 1) / ranks
        return self.num_layers * (4 * EXCHANGE_SECONDS * (ranks > 1) + self._link_seconds(sent))

    def _link_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.hardware.link_bytes_per_second * LINK_SHARE) if self.layout.is_gpu else 0.0

    def gather_seconds(self, num_bytes: float, *, in_node: bool = False) -> float:
        """Returns the seconds in which all ranks gather `num_bytes` from the part that each has, or reduce and scatter
        as many. Between nodes, NCCL's rings use the network cards of all of a node's GPUs.
        """
        layout, hardware = self.layout, self.hardware
        per_node = layout.ranks_per_node or layout.ranks
        ranks = per_node if in_node else layout.ranks
        if not layout.is_gpu or ranks == 1:
            return 0.0
        rate = hardware.link_bytes_per_second
        if ranks > per_node:
            rate = min(rate, per_node * hardware.network_bytes_per_second)
        return num_bytes * (ranks - 1) / ranks / (rate * LINK_SHARE)

    def scoring_seconds(self, counts: Counts, num_passes: int, forward: float) -> float:
        """Returns the seconds of passes without gradients through a model in training, `forward` seconds each.

        ZeRO-3 gathers the weights in each pass. In the first one after a step, it gathers over all ranks even if nodes
        keep a copy.
        """
        first, later = (self._weights_seconds(counts, is_first=is_first) for is_first in (True, False))
        return max(forward, first) + (num_passes - 1) * max(forward, later)

    def _weights_seconds(self, counts: Counts, *, is_first: bool) -> float:
        if self.layout.zero_stage < 3:
            return 0.0
        in_node = not is_first and node_copies(counts.total, self.layout) > 1
        return self.gather_seconds(self.layout.weight_bytes * counts.total, in_node=in_node)

    def step_seconds(self, counts: Counts, tokens: float, pass_tokens: int, seq_len: int, head_share: float) -> float:
        """Returns the seconds of one optimizer step over `tokens` per rank, in passes of up to `pass_tokens` of them.

        Backward passes hide the communication during them: ZeRO-2 and 3 reduce gradients in each, DDP and ZeRO-1 in the
        last one, and ZeRO-3 gathers the weights again. Nothing hides the gather of weights with which ZeRO-1 and 2 end
        a step.
        """
        layout = self.layout
        num_passes = max(1, math.ceil(tokens / pass_tokens))
        forward = self.forward_seconds(tokens / num_passes, seq_len, head_share)
        backward = self.backward_seconds(counts, tokens / num_passes, seq_len, head_share)
        gradients = self.gather_seconds(layout.weight_bytes * counts.trained)
        updated = STEP_BYTES * counts.trained / (layout.ranks if layout.zero_stage else 1)
        step = self._memory_seconds(updated) if layout.is_gpu else 0.0
        if layout.zero_stage == 3:
            sent = gradients + self._weights_seconds(counts, is_first=False)
            return step + self.scoring_seconds(counts, num_passes, forward) + num_passes * max(backward, sent)
        num_reducing = num_passes if layout.zero_stage == 2 else 1
        exposed = num_reducing * max(0.0, 2 * gradients - backward)  # DeepSpeed's buckets are all-reduced too
        gathered = gradients if layout.zero_stage else 0.0
        return step + num_passes * (forward + backward) + exposed + gathered

    def sampling_seconds(
        self, parameters: int, rows: int, seq_len: int, response_tokens: int, tensor_parallel: int = 1
    ) -> float:
        """Returns the seconds in which each rank samples `rows` responses; `tensor_parallel` ranks sample theirs
        together, each with its part of the weights and heads.

        For each token, a batch of rows reads all weights and the cache. On a GPU, a step computes while it reads, each
        kernel adds its least time, and two all-reduces per layer add up the parts.
        """
        layout, hardware, c = self.layout, self.hardware, self.layout.compute_bytes
        parts, rows = tensor_parallel, rows * tensor_parallel
        steps, at_once = math.ceil(rows / GENERATION_ROWS) * response_tokens, min(rows, GENERATION_ROWS)
        cache = cache_bytes_per_token(self.model, c) * at_once * seq_len
        flops = self.forward_flops(seq_len, 1.0) / (hardware.flops * self.share_of_peak * parts)
        if not layout.is_gpu:
            read = steps * (c * parameters + cache) / (hardware.bytes_per_second * self.share_of_peak)
            return read + rows * seq_len * flops
        prompts = rows * (seq_len - response_tokens) * flops
        read = self._memory_seconds((c * parameters + cache) / parts)
        drawn = self._memory_seconds(LOGIT_NUMBERS[2] * c * at_once * self.model.vocab_size)
        kernels = REPLAYED_SECONDS * (STEP_KERNELS[0] * self.num_layers + STEP_KERNELS[1])
        added = self._link_seconds(2 * (parts - 1) / parts * at_once * self.model.hidden_size * c)
        reduced = 2 * self.num_layers * (EXCHANGE_SECONDS + added) if parts > 1 else 0.0
        return prompts + steps * (kernels + max(read, at_once * flops) + drawn + reduced)

    def sync_seconds(self, size: int, *, is_apart: bool) -> float:
        """Returns the seconds in which generators get `size` bytes of new weights: gathered from ZeRO-3's shards, and
        copied on the same GPU or, if they have GPUs of their own, broadcast by one of the learners.
        """
        if not self.layout.is_gpu:
            return 0.0
        gathered = self.gather_seconds(size) if self.layout.zero_stage == 3 else 0.0
        rate = min(self.hardware.link_bytes_per_second, self.hardware.network_bytes_per_second) * LINK_SHARE
        return gathered + (size / rate if is_apart else self._memory_seconds(2 * size))
