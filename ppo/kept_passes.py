"""Keeps forward passes that an iteration's first update would otherwise repeat.

The passes that compute log-probs and values read the same tokens as the first update, in the same rows, with the same
weights. So the update reuses their outputs and activations, and the results are the same bits. A rank on a CPU keeps
as many passes as fit in `KEPT_BYTES`. On a GPU, kept passes get the memory that an iteration without them left free.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lm.inspection import Pass, block_bytes, ends_bytes
from lm.model import count_parameters
from lm.native.kernels import library
from ppo.config import PPOConfig
from ppo.rollout import Rollout, Share, pass_slices
from training.engine import Engine
from training.packing import padded_tokens, row_width

KEPT_BYTES = 4 << 30  # of a CPU rank's memory, for passes of policy and value function together
USABLE = 0.9  # of the memory that a rank can have on its GPU; the rest covers fragments and what grows later


@dataclass(frozen=True)
class Repeated:
    """How many passes the next update repeats, and their size. They come before all other passes.

    All ranks have the same number of them and keep the same number, so sizes are those of the largest pass of any rank.
    """

    num_passes: int = 0
    padded_tokens: int = 0
    row_width: int = 1  # tokens
    response_tokens: int = 0

    @classmethod
    def of(cls, rollout: Rollout, shares: Sequence[Share], num_passes: int) -> Self:
        """Describe the first `num_passes` passes of each rank's share."""
        passes = [share.rows[own] for share in shares for own in pass_slices(share.pass_sizes)[:num_passes]]
        lengths = [rollout.num_tokens_B[rows] for rows in passes]
        return cls(
            num_passes,
            max(padded_tokens(row_lengths.tolist()) for row_lengths in lengths),
            max(row_width(row_lengths.numpy()) for row_lengths in lengths),
            max(int(rollout.num_written_B[rows].sum()) for rows in passes),
        )


NOT_REPEATED = Repeated()  # no update follows with the same weights


def keeps_passes(config: PPOConfig, policy: Engine[Any]) -> bool:
    """Returns whether learners keep passes: without ZeRO, if `ppo.memory` is "fast".

    DeepSpeed pairs each forward with the next backward, and recomputed blocks would keep little and save nothing. On a
    shared body, the passes that measure are not those that learn. Without Heed's kernels for CPUs, autocast adds up the
    gradients of the policy loss and of a pretraining loss in bf16 if both passes use the same bf16 copy of a weight, so
    separate passes would give different bits. On a GPU, passes with and without gradients may round differently, and
    free memory decides how many are kept, so none is with `engine.deterministic`.
    """
    is_cpu = policy.device.type == "cpu"
    if policy.config.deterministic and not is_cpu:
        return False
    has_kernels = is_cpu and library() is not None
    adds_up_in_bf16 = policy.config.resolved_precision() == "bf16" and config.ptx_rows > 0 and not has_kernels
    return policy.runs_ahead and not adds_up_in_bf16 and config.memory == "fast" and not config.shared_body


class KeptPasses:
    """A rank's kept passes of each model, "policy" and "value", until an update takes them."""

    def __init__(self, config: PPOConfig, engines: Mapping[str, Engine[Any]]) -> None:
        """Keep passes of all `engines`, or of none if `keeps_passes` rules it out."""
        self.engines = engines if keeps_passes(config, engines["policy"]) else {}
        self._bytes, self._updated, self._peak = dict[str, int](), set[str](), 0
        self._passes: dict[str, deque[tuple[Rollout, Tensor]]] = {}

    def pass_bytes(self, model: str, repeated: Repeated) -> int:
        """Returns a bound on the bytes that one of the repeated passes keeps: the activations of all blocks, though
        frozen ones keep less, and the policy's logits.
        """
        config, engine = self.engines[model].module.config, self.engines[model].config
        size = 2 if engine.resolved_precision() == "bf16" else 4
        rows = -(-repeated.padded_tokens // repeated.row_width)
        of = Pass(
            rows,
            repeated.row_width,
            compute_bytes=size,
            stream_bytes=4,
            is_fused=self._is_on_gpu,
            has_dropout=False,
            is_tiled=not self._is_on_gpu and library() is not None,
            split_among=engine.sequence_parallel_size,
        )
        logits = size * repeated.response_tokens * config.vocab_size if model == "policy" else 0
        return config.num_hidden_layers * block_bytes(config, of) + ends_bytes(config, of) + logits

    def reserve(self, model: str, repeated: Repeated) -> int:
        """Reserve memory for repeated passes, in addition to what other models keep. Returns how many may be kept, the
        same number on all ranks; on GPUs a collective call.
        """
        if model not in self.engines or not repeated.num_passes:
            return 0
        of_pass = self.pass_bytes(model, repeated)
        free = self._room(of_pass) - sum(size for name, size in self._bytes.items() if name != model)
        num_kept = max(0, min(repeated.num_passes, free // of_pass))
        if self._is_on_gpu:
            num_kept = min(self.engines[model].gather(num_kept))
        self._bytes[model] = num_kept * of_pass
        return num_kept

    @property
    def _is_on_gpu(self) -> bool:
        return self.engines["policy"].device.type == "cuda"

    def _room(self, pass_bytes: int) -> int:
        """Returns the bytes of kept passes that a rank has room for.

        On a GPU that is what its process could have in addition to its peak, which must contain an update of each
        model, less the bf16 weights that kept passes refer to, and one pass, as far as passes have grown since.
        """
        if not self._is_on_gpu:
            return KEPT_BYTES
        if self._updated < self.engines.keys():
            return 0
        self._peak = self._peak or torch.cuda.max_memory_allocated()
        can_have = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        weights = 2 * sum(count_parameters([engine.module]) for engine in self.engines.values())
        return int(USABLE * can_have) - self._peak - weights - pass_bytes

    def put(self, model: str, parts: Sequence[Rollout], outputs: Sequence[Tensor]) -> None:
        """Keep passes over `parts`; each output comes with its autograd graph."""
        self._passes[model] = deque(zip(parts, outputs, strict=True))

    def take(self, model: str) -> "Taken":
        """Returns the model's passes and stops keeping them."""
        self._bytes.pop(model, None)
        self._updated.add(model)
        return Taken(self._passes.pop(model, deque()))


class Taken:
    """Kept passes during an update, which uses and frees them one by one."""

    def __init__(self, passes: deque[tuple[Rollout, Tensor]]) -> None:
        self._passes = passes

    def next(self, part: Rollout) -> Tensor | None:
        """Returns the output [B, R] of the kept pass over `part`; None once no pass is left."""
        if not self._passes:
            return None
        read, output = self._passes.popleft()
        assert torch.equal(read.tokens_BT, part.tokens_BT), "an update reads other responses than were measured first"
        return output
