"""Estimates seconds: floating-point operations at a fraction of the hardware's peak; for sampling, also the bytes of
weights and cache, which are read once per token."""

import math
from dataclasses import dataclass

from lm.config import ModelConfig
from lm.inspection import cache_bytes_per_token, flops_per_source_token, flops_per_token
from stages.planning.hardware import Hardware
from stages.planning.memory import Counts, Layout
from stages.planning.sampling import GENERATION_ROWS


@dataclass(frozen=True)
class Times:
    """Times of one model on ranks of this hardware, which reach the fraction `share_of_peak` of its peak."""

    model: ModelConfig
    layout: Layout
    hardware: Hardware
    share_of_peak: float

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

    def passes(self, counts: Counts) -> float:
        """Returns a training step's cost in forward passes. A backward pass counts as two, without frozen blocks; one
        through frozen maps with adapters computes no gradients of the maps' weights, and counts as one.
        """
        backward, num_layers = 1 if counts.ranks else 2, self.model.num_hidden_layers + self.model.num_encoder_layers
        return 1 + backward * counts.trained_layers / num_layers

    def compute_seconds(self, flops: float) -> float:
        """Returns the seconds that all ranks together need for `flops`."""
        return flops / (self.layout.ranks * self.hardware.flops * self.share_of_peak)

    def sampling_seconds(self, parameters: int, rows: int, seq_len: int, response_tokens: int) -> float:
        """Returns one rank's seconds. Each token of each batch of rows reads all weights and the cache."""
        hardware, c = self.hardware, self.layout.compute_bytes
        turns = math.ceil(rows / GENERATION_ROWS)
        cache = cache_bytes_per_token(self.model, c) * min(rows, GENERATION_ROWS) * seq_len
        read = turns * response_tokens * (c * parameters + cache) / hardware.bytes_per_second
        computed = rows * seq_len * self.forward_flops(seq_len, 1.0) / hardware.flops
        return (read + computed) / self.share_of_peak
