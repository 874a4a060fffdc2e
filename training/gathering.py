"""Whole tensors from the shards that ranks hold, one tensor at a time: no rank needs room for two copies of a model."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
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

    def state_dict(
        self,
        module: nn.Module,
        own: Mapping[str, Tensor],
        originals: Iterable[tuple[str, Tensor]],
        *,
        on_main_alone: bool,
    ) -> dict[str, Tensor]:
        """All tensors of `module` by all their names, tied ones held once: trained weights from `own` shards, frozen
        ones from `originals`, of which no rank holds fp32 shards. With `on_main_alone` on the CPU, and {} elsewhere.
        """
        keep = self._rank == MAIN or not on_main_alone
        device = torch.device("cpu") if on_main_alone else self._device
        parameters, whole = dict(module.named_parameters()), dict[str, Tensor]()
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                found = self.whole(name, parameter, own.get(name), on_main_alone=on_main_alone)
                if found is not None:
                    whole[name] = found.to(device)
        if not keep:
            return {}
        frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        if frozen:
            whole |= {name: tensor.detach().to(device) for name, tensor in originals if name in frozen}
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        buffers = {name: buffer.detach().to(device) for name, buffer in module.named_buffers()}
        tied = module.named_parameters(remove_duplicate=False)
        return buffers | {name: whole[name_of[id(parameter)]] for name, parameter in tied}


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
