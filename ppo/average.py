"""The moving average of the policy's weights, which one may export instead of the last weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.checkpoint import ParamShard, SavedState, State, state_of
from training.engine import Engine


class MovingAverage:
    """average ← decay · average + (1 - decay) · weights, once per iteration, of the trained weights in fp32.

    Each rank holds the average of its own shard of the weights: next to it, or in CPU memory with `on_cpu`. A decay of
    0 makes the average the last weights; then nothing is held.
    """

    def __init__(self, engine: Engine[Any], decay: float, *, on_cpu: bool = False) -> None:
        self.engine, self.decay = engine, decay
        self._device = torch.device("cpu") if on_cpu else None
        self.shards: dict[str, ParamShard] = {}
        for shard in engine.shards() if decay else ():
            held = shard.view(shard.storage).to(self._device, torch.float32, copy=True)
            self.shards[shard.name] = ParamShard(shard.name, shard.offset, held, 0, shard.length, {})

    def advance(self) -> None:
        """Take a step towards the weights."""
        for shard in self.engine.shards() if self.decay else ():
            average = self.shards[shard.name].storage
            average.lerp_(shard.view(shard.storage).to(average.device), 1 - self.decay)

    def weights_for_file(self) -> Iterator[tuple[str, Tensor]]:
        """As `Engine.weights_for_file`, of the averaged weights."""
        own = {name: shard.storage for name, shard in self.shards.items()}
        return self.engine.weights_for_file(own if self.decay else None)

    def state(self) -> State:
        """This rank's part, for a checkpoint; not copied."""
        return state_of([*self.shards.values()])

    def load(self, folder: Path) -> None:
        if self.decay:
            saved = SavedState(folder)
            for shard in self.shards.values():
                shard.restore(saved)
