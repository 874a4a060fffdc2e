"""The moving average of the policy's weights, which one may export instead of the last weights."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from training.state import SavedState, State, state_of, whole_tensors


class MovingAverage:
    """average ← decay · average + (1 - decay) · weights, once per iteration. Tied weights are held once."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.weights = _copies(weights)

    def advance(self, weights: Mapping[str, Tensor]) -> None:
        for name, average in self._distinct().items():
            average.lerp_(weights[name].to(average.dtype), 1 - self.decay)

    def state(self, rank: int, num_ranks: int) -> State:
        """This rank's share, for a checkpoint."""
        return state_of([shard.share(rank, num_ranks) for shard in whole_tensors(self._distinct().items())])

    def load(self, folder: Path) -> None:
        held = SavedState(folder)
        for shard in whole_tensors(self._distinct().items()):
            shard.restore(held)

    def _distinct(self) -> dict[str, Tensor]:
        """Each tensor by the first of its names."""
        first: dict[int, str] = {}
        for name, tensor in self.weights.items():
            first.setdefault(id(tensor), name)
        return {name: self.weights[name] for name in first.values()}


def _copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each tensor; tied weights share one copy under all their names."""
    copied: dict[int, Tensor] = {}
    for tensor in weights.values():
        if tensor.data_ptr() not in copied:
            copied[tensor.data_ptr()] = tensor.clone()
    return {name: copied[tensor.data_ptr()] for name, tensor in weights.items()}
