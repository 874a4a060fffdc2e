"""Seconds of a stage: floating-point operations over a share of the hardware's peak, and for sampling the weights and
the cache read once a token."""

import math
from dataclasses import dataclass

from lm.config import ModelConfig
from lm.inspection import cache_bytes_per_token, flops_per_source_token, flops_per_token
from planning.hardware import Hardware
from planning.memory import Counts, Layout
from planning.sampling import GENERATION_ROWS


@dataclass(frozen=True)
class Times:
    """Of one model on ranks of this hardware, which reach `share_of_peak`."""

    model: ModelConfig
    layout: Layout
    hardware: Hardware
    share_of_peak: float

    def forward_flops(self, seq_len: int, head_share: float) -> float:
        """Floating-point operations of a forward pass, a token on average; the head for that share of the tokens."""
        # A causal token has half the row behind it on average; on a CPU the whole table is computed, as encoders do.
        is_half = self.model.kind == "decoder" and self.layout.is_gpu
        context = (seq_len + 1) // 2 if is_half else seq_len
        flops = float(flops_per_token(self.model, context))
        if self.model.kind == "encoder-decoder":
            flops += flops_per_source_token(self.model, context)
        has_head = self.model.kind != "encoder"
        return flops - (1 - head_share) * has_head * 2 * self.model.vocab_size * self.model.hidden_size

    def passes(self, counts: Counts) -> float:
        """A training step in forward passes: the backward is two, less what leads to frozen blocks."""
        return 1 + 2 * counts.trained_layers / (self.model.num_hidden_layers + self.model.num_encoder_layers)

    def compute_seconds(self, flops: float) -> float:
        """Shared out among all ranks."""
        return flops / (self.layout.ranks * self.hardware.flops * self.share_of_peak)

    def sampling_seconds(self, parameters: int, rows: int, seq_len: int, response_tokens: int) -> float:
        """One rank's: each token of each turn of rows reads all weights and the cache; prompts are computed at once."""
        hardware, c = self.hardware, self.layout.compute_bytes
        turns = math.ceil(rows / GENERATION_ROWS)
        cache = cache_bytes_per_token(self.model, c) * min(rows, GENERATION_ROWS) * seq_len
        read = turns * response_tokens * (c * parameters + cache) / hardware.bytes_per_second
        computed = rows * seq_len * self.forward_flops(seq_len, 1.0) / hardware.flops
        return (read + computed) / self.share_of_peak
