"""Keeps forward passes that an iteration's first update would otherwise repeat.

The passes that compute log-probs and values read the same tokens as the first update, in the same rows, with the same
weights. So the update reuses their outputs and activations, and the results are the same bits. A rank keeps as many
passes as fit in `stages.planning.ppo.KEPT_BYTES`, and `heed plan` counts them.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ppo.config import PPOConfig
from ppo.rollout import Rollout, Share, pass_slices
from stages.planning.memory import Counts, KeptPass, Layout, count, forward_pass, own_logits
from stages.planning.ppo import KEPT_BYTES, keeps_passes
from training.engine import Engine
from training.packing import padded_tokens, row_width


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


@dataclass(frozen=True)
class TrainedModel:
    """What determines the size of a model's kept passes. Only a policy has logits."""

    engine: Engine[Any]
    counts: Counts
    layout: Layout
    has_logits: bool

    def largest_of(self, repeated: Repeated) -> KeptPass:
        config = self.engine.module.config
        rows = -(-repeated.padded_tokens // repeated.row_width)
        of = forward_pass(self.layout, rows, repeated.row_width, is_trained=True)
        num_logits = repeated.response_tokens * config.vocab_size if self.has_logits else 0
        return KeptPass(config, self.counts, self.layout, of, own_logits(config, of, num_logits))


class KeptPasses:
    """A rank's kept passes by model, until an update takes them."""

    def __init__(self, models: Mapping[str, TrainedModel]) -> None:
        """`models` are the models that keep passes, by name."""
        self._models, self._bytes = models, dict[str, int]()
        self._passes: dict[str, deque[tuple[Rollout, Tensor]]] = {}

    @classmethod
    def of(cls, config: PPOConfig, engines: Mapping[str, Engine[Any]]) -> Self:
        """Keep passes of the engines "policy" and "value", or of neither if the config rules it out."""
        policy = engines["policy"]
        layout = Layout(
            policy.world_size,
            policy.config.zero_stage,
            is_bf16=policy.config.resolved_precision() == "bf16",
            is_gpu=policy.device.type == "cuda",
            recomputes=policy.config.checkpoint_activations,
            sequence_ranks=policy.config.sequence_parallel_size,
        )
        can_keep = keeps_passes(layout, config.memory, has_ptx=config.ptx_rows > 0, shares_body=config.shared_body)
        models = dict[str, TrainedModel]()
        for name, engine in engines.items():
            shape, is_value = engine.module.config, name == "value"
            if can_keep and engine.runs_ahead:
                counts = count(shape, engine.optimizer_config, num_scores=int(is_value), lora=config.lora)
                models[name] = TrainedModel(engine, counts, layout, has_logits=not is_value)
        return cls(models)

    def reserve(self, model: str, repeated: Repeated) -> int:
        """Reserve memory for repeated passes, in addition to what other models keep. Returns how many may be kept."""
        if model not in self._models or not repeated.num_passes:
            return 0
        others = sum(size for name, size in self._bytes.items() if name != model)
        largest = self._models[model].largest_of(repeated)
        num_kept = largest.num_kept(repeated.num_passes, KEPT_BYTES - others)
        self._bytes[model] = num_kept * largest.num_bytes
        return num_kept

    def put(self, model: str, parts: Sequence[Rollout], outputs: Sequence[Tensor]) -> None:
        """Keep passes over `parts`; each output comes with its autograd graph."""
        self._passes[model] = deque(zip(parts, outputs, strict=True))

    def take(self, model: str) -> "Taken":
        """Returns the model's passes and stops keeping them."""
        self._bytes.pop(model, None)
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
