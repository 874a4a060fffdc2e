"""Whole tensors from the shards that ranks hold, one tensor at a time: no rank needs room for two copies of a model."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lm.progress import note_progress
from training.internals import full_shape, zero3_shard
from training.state import ParamShard

MAIN = 0  # the rank that writes files

# Returns every rank's value, by rank; a collective call.
Exchange = Callable[[Any], list[Any]]


class Gatherer:
    """Gathers fp32 tensors of which each rank holds some consecutive numbers, laid out as in `shards`.

    Making one and gathering are collective calls. `device` is the one that ranks exchange tensors on.
    """

    def __init__(self, shards: Iterable[ParamShard], rank: int, device: torch.device, exchange: Exchange) -> None:
        self._rank, self._device = rank, device
        own = {shard.name: (shard.offset, shard.length) for shard in shards if shard.length}
        self._ranges: dict[str, list[tuple[int, int, int]]] = defaultdict(list)  # (rank, first number, length)
        for owner, held in enumerate(exchange(own)):
            for name, (offset, length) in held.items():
                self._ranges[name].append((owner, offset, length))

    def whole(self, name: str, parameter: nn.Parameter, own: Tensor | None, *, on_main_alone: bool) -> Tensor | None:
        """The whole tensor from all ranks' `own` shards of it [n]; None on ranks that do not keep it."""
        note_progress()
        shape = full_shape(parameter)
        if on_main_alone and self._rank != MAIN:
            if own is not None:
                _exchanged([dist.P2POp(dist.isend, own.to(self._device).contiguous(), MAIN)])
            return None
        whole = torch.empty(shape, dtype=torch.float32, device=self._device)
        parts = [(owner, whole.view(-1).narrow(0, first, length)) for owner, first, length in self._ranges[name]]
        for owner, part in parts:
            if owner == self._rank:
                assert own is not None, f"this rank holds {len(part)} numbers of {name}; they were not given"
                part.copy_(own)
        if on_main_alone:
            _exchanged([dist.P2POp(dist.irecv, part, owner) for owner, part in parts if owner != self._rank])
        else:
            for owner, part in parts:
                dist.broadcast(part, owner)
        return whole

    def tensors(
        self,
        module: nn.Module,
        own: Mapping[str, Tensor],
        originals: Iterable[tuple[str, Tensor]],
        *,
        on_main_alone: bool,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `module` one at a time, tied ones once: trained weights from `own` shards, frozen ones
        from `originals`, of which no rank holds fp32 shards. With `on_main_alone` on the CPU, and none elsewhere.

        `originals` come in the order of `named_parameters`.
        """
        keep = self._rank == MAIN or not on_main_alone
        device = torch.device("cpu") if on_main_alone else self._device
        frozen = iter(originals)
        for name, parameter in module.named_parameters():
            found: Tensor | None = None
            if parameter.requires_grad:
                found = self.whole(name, parameter, own.get(name), on_main_alone=on_main_alone)
            elif keep:
                found = next(tensor for original, tensor in frozen if original == name).detach()
            if found is not None:
                found = found.to(device)
                yield name, found
            del found  # before the next one is gathered
        if keep:
            yield from ((name, buffer.detach().to(device)) for name, buffer in module.named_buffers())


def _exchanged(operations: list[dist.P2POp]) -> None:
    """Wait for transfers between pairs of ranks; as one batch, NCCL needs no connection of its own for each pair."""
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def whole_zero3_weight(
    parameter: nn.Parameter, rank: int, num_ranks: int, device: torch.device, *, on_main_alone: bool
) -> Tensor | None:
    """A parameter as ZeRO-3's passes use it, whole on `device`; None on ranks that do not keep it. Collective."""
    note_progress()
    shard, shape = zero3_shard(parameter).to(device), full_shape(parameter)
    if on_main_alone and rank != MAIN:
        dist.gather(shard, dst=MAIN)
        return None
    padded = torch.empty(num_ranks * len(shard), dtype=shard.dtype, device=device)
    if on_main_alone:
        dist.gather(shard, list(padded.chunk(num_ranks)), dst=MAIN)
    else:
        dist.all_gather_into_tensor(padded, shard)
    return padded[: torch.Size(shape).numel()].view(shape)
