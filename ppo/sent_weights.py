"""Weights on their way from learners to generators: a chunk at a time, so that nobody holds them all once more."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

CHUNK_BYTES = 1 << 28  # large enough that calls cost nothing, small beside any model that needs a GPU
SUMMED_AT_ONCE = 1 << 22  # numbers; a sum takes 8 bytes for each

Packed = tuple[str, NDArray[np.uint8], torch.dtype, tuple[int, ...]]  # name, bytes, type, shape


@dataclass(frozen=True)
class SentWeights:
    """Some of the weights, and the sum of their bit patterns. Tied weights are sent once."""

    weights: Mapping[str, Tensor]
    checksum: int

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> "SentWeights":
        return cls(weights, checksum_of(weights))

    def __reduce__(self) -> tuple[Any, ...]:
        """As NumPy arrays, whose bytes Ray keeps outside the pickle: one copy to store, none to read. Tensors would be
        pickled byte by byte.
        """
        packed = [
            (name, _on_host(tensor).reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))
            for name, tensor in self.weights.items()
        ]
        return _unpacked, (packed, self.checksum)


def _on_host(tensor: Tensor) -> Tensor:
    """The tensor in CPU memory, pinned where it comes from a GPU: copies into other memory are several times slower."""
    if tensor.device.type == "cpu":
        return tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach())


def _unpacked(packed: Sequence[Packed], checksum: int) -> SentWeights:
    with warnings.catch_warnings():  # arrays in the object store cannot be written to; receivers only read them
        warnings.filterwarnings("ignore", message=".*not writable.*")
        weights = {name: torch.from_numpy(data).view(dtype).view(shape) for name, data, dtype, shape in packed}
    return SentWeights(weights, checksum)


def chunks(tensors: Iterable[tuple[str, Tensor]], chunk_bytes: int = CHUNK_BYTES) -> Iterator[dict[str, Tensor]]:
    """Tensors in order, in chunks that end once they have `chunk_bytes`: alike wherever shapes and types are."""
    chunk, size = dict[str, Tensor](), 0
    for name, tensor in tensors:
        chunk[name] = tensor
        size += tensor.nbytes
        if size >= chunk_bytes:
            yield chunk
            chunk, size = {}, 0
    if chunk:
        yield chunk


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones once; not copied."""
    held = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in held}


def take(model: nn.Module, sent: Iterable[SentWeights]) -> None:
    """Copy the weights into a model; comparing checksums proves that all of them arrived."""
    held = held_tensors(model)
    for chunk in sent:
        own = {name: held.pop(name) for name in chunk.weights}
        for name, tensor in chunk.weights.items():
            own[name].copy_(tensor)
        require_same(chunk.checksum, own)
    assert not held, f"no weights of {sorted(held)} have arrived"


def require_same(checksum: int, weights: Mapping[str, Tensor]) -> None:
    held = checksum_of(weights)
    assert checksum == held, (
        f"the generator holds {', '.join(weights)} with checksum {held}; the learner's have {checksum}"
    )


def checksum_of(weights: Mapping[str, Tensor]) -> int:
    """Sum of the bit patterns of all weights."""
    integers = {2: torch.int16, 4: torch.int32}
    sums = [
        part.view(integers[part.element_size()]).sum(dtype=torch.int64)
        for tensor in weights.values()
        for part in tensor.contiguous().view(-1).split(SUMMED_AT_ONCE)
    ]
    return int(torch.stack(sums).sum())
