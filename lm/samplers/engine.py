"""The protocol of sampling engines: the weights sent to them, and how far their log-probs may be from the learner's, no
more than rounding.

PPO uses engines through this protocol alone, and `heed verify-sampler` tests it. Weights travel from learners to
generators in chunks, so that no process holds a second copy of them all.
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lm.config import Precision
from lm.generation import Generated, Limits

CHUNK_BYTES = 1 << 28  # large enough to make calls negligible, small compared with any model that needs a GPU
NAMED = 8  # tensors that a message names
DIGESTED_AT_ONCE = 1 << 21  # numbers; a digest takes 16 bytes for each
_SPREAD = -7046029254386353131  # 2^64 / golden ratio as int64; its multiples spread over all bits

Packed = tuple[str, NDArray[np.uint8], torch.dtype, tuple[int, ...]]  # name, bytes, type, shape


@dataclass(frozen=True)
class SentWeights:
    """Some of the weights, and the digest of each. Tied weights are sent once. If `weights` are a rank's parts of them,
    `part_digests` are those of the parts, and `digests` those of the whole weights.
    """

    weights: Mapping[str, Tensor]
    digests: Mapping[str, int]
    part_digests: Mapping[str, int] | None = None

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


# Limit of the mean |difference| of log-probs per √(layers + HEAD_LAYERS), in nats per token: 2.5 times what SmolLM2
# needs in bf16, and 70 times what it needs in fp32 on CPUs, since other engines may sum in another order
# (`max_difference`).
ROUNDING: dict[Precision, float] = {"fp32": 1e-4, "bf16": 4.5 * 2**-8}
HEAD_LAYERS = 8
# Over tokens from π_sampler, the mean ratio π_learner / π_sampler is 1 up to rounding. It may be off by
# MAX_RATIO_ERROR, or by MAX_STANDARD_ERRORS of its standard errors if that is more: a few unlikely tokens can move it.
MAX_RATIO_ERROR = 0.02
MAX_STANDARD_ERRORS = 4.0
# One broken rank of many hardly moves the mean over all tokens, so each response is also checked separately. Its mean
# difference may be RESPONSE_FACTOR times the limit. Below STEADY_TOKENS tokens, where the mean is less steady, the
# limit is higher by a factor of the square root of STEADY_TOKENS / tokens.
STEADY_TOKENS = 16
RESPONSE_FACTOR = 4


class SamplingEngine(Protocol):
    """Samples from a copy of a language model, and receives its weights after every update.

    Temperature is the only option: an engine that also cuts the distribution (top_p, top_k) samples from another policy
    than the one whose log-probs it reports, and every probability ratio is off by the mass it kept.
    """

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, max_new_tokens: Limits, temperature: float
    ) -> Generated:
        """Sample one response per prompt, from its seed or one made of all seeds, up to and including an end token.

        The log-probs are those of the distribution that was sampled from, softmax(logits / temperature) over the whole
        vocabulary, in nats.
        """
        ...

    def receive(self, sent: Iterable[SentWeights]) -> None:
        """Replace all weights, and forget everything that was computed with the old ones, such as prompts' keys.

        Names, shapes and types are those of `slots`.
        Raises: AssertionError naming the tensors that did not arrive.
        """
        ...

    @property
    def digests(self) -> Mapping[str, int]:
        """The digest of each weight received last, or loaded (`lm.samplers.engine.digests_of`)."""
        ...

    def slots(self) -> Iterator[Mapping[str, Tensor]]:
        """Yields the memory of the weights that it receives, chunk by chunk (`chunks` of whole weights); a broadcast
        writes into this memory.
        """
        ...

    def sleep(self) -> None:
        """Release the memory of weights and caches until `wake`."""
        ...

    def wake(self) -> None:
        """Allocate memory again, if asleep. The weights then have no values: call `receive` before `sample`."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


LoadEngine = Callable[[Path, Precision], SamplingEngine]  # loads the model in a folder, to compute in a precision


def max_difference(precision: Precision, num_layers: int) -> float:
    """Returns how far rounding may take sampler and learner apart: mean |difference| of log-probs, in nats per token.

    The variance of a log-prob's error is that of the head plus that of the layers. A layer rounds the residual stream
    when it adds to it; these errors are independent, so their variances add up. The head rounds the logits, whose error
    does not depend on depth: in bf16, logits of 16 to 32, as trained models have, are multiples of 1/8. Measured as
    docs/samplers.md says, the head counts as much as `HEAD_LAYERS` layers.
    """
    return ROUNDING[precision] * math.sqrt(num_layers + HEAD_LAYERS)


@dataclass(frozen=True)
class Agreement:
    """How well the log-probs of sampled tokens agree. Differences are log π_learner - log π_sampler, in nats."""

    difference: float  # mean of the absolute values
    ratio: float  # mean of π_learner / π_sampler
    ratio_error: float  # standard error of `ratio`
    worst_response: float  # largest mean absolute difference of a response, times min(1, (tokens / STEADY_TOKENS)^½)

    @classmethod
    def of(cls, difference_C: Tensor, lengths: Sequence[int]) -> Self:
        """Measures agreement from each token's difference, response after response, and the responses' lengths."""
        ratio_C = difference_C.exp()
        by_response = [
            float(part.abs().mean()) * min(1.0, (len(part) / STEADY_TOKENS) ** 0.5)
            for part in difference_C.split(list(lengths))
            if len(part)
        ]
        return cls(
            float(difference_C.abs().mean()),
            float(ratio_C.mean()),
            float(ratio_C.std(correction=0)) / len(difference_C) ** 0.5,
            max(by_response, key=lambda value: math.inf if math.isnan(value) else value, default=0.0),
        )

    def holds(self, most: float) -> bool:
        """Returns whether both are the same policy, up to rounding of `most` nats per token (`max_difference`).

        NaN counts as a difference.
        """
        return (
            self.difference <= most
            and self.worst_response <= RESPONSE_FACTOR * most
            and abs(self.ratio - 1) <= max(MAX_RATIO_ERROR, MAX_STANDARD_ERRORS * self.ratio_error)
        )
