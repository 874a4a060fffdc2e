"""Weights on their way from learners to generators, in chunks, so that no process holds a second copy of them all."""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

CHUNK_BYTES = 1 << 28  # large enough to make calls negligible, small compared with any model that needs a GPU
NAMED = 8  # tensors that a message names
DIGESTED_AT_ONCE = 1 << 21  # numbers; a digest takes 16 bytes for each
_SPREAD = -7046029254386353131  # 2^64 / golden ratio as int64; its multiples spread over all bits

Packed = tuple[str, NDArray[np.uint8], torch.dtype, tuple[int, ...]]  # name, bytes, type, shape


@dataclass(frozen=True)
class SentWeights:
    """Some of the weights, and the digest of each. Tied weights are sent once."""

    weights: Mapping[str, Tensor]
    digests: Mapping[str, int]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> "SentWeights":
        return cls(weights, digests_of(weights))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle NumPy arrays, whose bytes Ray keeps outside the pickle: one copy to store, none to read. Tensors would
        be pickled byte by byte.
        """
        packed = [
            (name, _on_host(tensor).reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))
            for name, tensor in self.weights.items()
        ]
        return _unpacked, (packed, self.digests)


def _on_host(tensor: Tensor) -> Tensor:
    """Returns the tensor in CPU memory, pinned if it comes from a GPU: unpinned copies are several times slower."""
    if tensor.device.type == "cpu":
        return tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach())


def _unpacked(packed: Sequence[Packed], digests: Mapping[str, int]) -> SentWeights:
    with warnings.catch_warnings():  # arrays in the object store cannot be written to; receivers only read them
        warnings.filterwarnings("ignore", message=".*not writable.*")
        weights = {name: torch.from_numpy(data).view(dtype).view(shape) for name, data, dtype, shape in packed}
    return SentWeights(weights, digests)


def chunks(tensors: Iterable[tuple[str, Tensor]], chunk_bytes: int = CHUNK_BYTES) -> Iterator[dict[str, Tensor]]:
    """Yields tensors in order, in chunks that end once they have `chunk_bytes`; only shapes and dtypes decide."""
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
    """Returns parameters and buffers by name, tied ones once, without copying."""
    held = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in held}


def take(model: nn.Module, sent: Iterable[SentWeights]) -> None:
    """Copy the weights into a model; comparing digests proves that all of them arrived."""
    held = held_tensors(model)
    for chunk in sent:
        own = {name: held.pop(name) for name in chunk.weights}
        for name, tensor in chunk.weights.items():
            if tensor.data_ptr() != own[name].data_ptr():  # if equal, a broadcast has written into the model itself
                own[name].copy_(tensor)
        require_same(chunk.digests, own)
    assert not held, f"no weights of {sorted(held)} have arrived"


def noted(sent: Iterable[SentWeights], digests: dict[str, int]) -> Iterator[SentWeights]:
    """Passes chunks on unchanged, and adds the digest of each tensor to `digests`."""
    for chunk in sent:
        digests.update(chunk.digests)
        yield chunk


def require_same(digests: Mapping[str, int], weights: Mapping[str, Tensor]) -> None:
    """Check that a generator's weights are those that were sent, and name the ones that are not."""
    held = digests_of(weights)
    other = [name for name in weights if held[name] != digests[name]]
    if other:
        found, sent = (shown(digest[other[0]]) for digest in (held, digests))
        named = ", ".join(other[:NAMED]) + ", ..." * (len(other) > NAMED)
        raise AssertionError(
            f"the generator's {other[0]} has digest {found} where the learner's has {sent};"
            f" {len(other)} of {len(held)} tensors differ: {named}"
        )


def digests_of(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns a digest of each tensor: Σ bits_i (i c | 1) modulo 2^64.

    Because each place has its own odd factor, changing one number or swapping two changes the digest.
    """
    found = [_digest(tensor.contiguous().view(-1)) for tensor in weights.values()]
    return dict(zip(weights, torch.stack(found).tolist(), strict=True))


def whole_digest(digests: Mapping[str, int]) -> int:
    """Returns a signed 64-bit number that identifies the weights: all tensors and their names."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return int.from_bytes(hashlib.sha256(lines.encode()).digest()[:8], "big", signed=True)


def shown(digest: int) -> str:
    """Formats a digest as in files and messages: 16 hexadecimal digits."""
    return f"{digest % 2**64:016x}"


def _digest(flat: Tensor) -> Tensor:
    bits = flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])
    digest = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, len(bits), DIGESTED_AT_ONCE):
        part = bits[first : first + DIGESTED_AT_ONCE].to(torch.int64)
        places = torch.arange(first, first + len(part), device=flat.device)
        digest += part.mul_(places.mul_(_SPREAD).bitwise_or_(1)).sum()
    return digest
