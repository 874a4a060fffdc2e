"""Tensors that wait in CPU memory while something else needs the device."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from lm.transfer import host_bytes


class Offload:
    """Moves what lies behind tensors to CPU memory and back. Tensors and their views are the same objects afterwards.

    The CPU memory, pinned where the tensors are on a GPU, is kept for the next time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []  # each with its bytes in CPU memory
        self._spare: dict[int, list[Tensor]] = defaultdict(list)  # CPU memory in use by nothing, by its size in bytes

    def send_away(self, tensors: Iterable[Tensor]) -> None:
        """Free the device's memory of those that are there. Nobody may touch them until `bring_back`."""
        there = [tensor for tensor in tensors if tensor.device.type == self.device.type]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in there}
        for storage in storages.values():
            spare = self._spare[storage.nbytes()]
            host = spare.pop() if spare else self._empty_host(storage.nbytes())
            host.copy_(self._bytes(storage), non_blocking=True)
            self._away.append((storage, host))
        self._finish_copies()
        for storage, _ in self._away:
            storage.resize_(0)

    def bring_back(self) -> None:
        """Undo `send_away`, if it was called."""
        for storage, host in self._away:
            storage.resize_(host.nbytes)
            self._bytes(storage).copy_(host, non_blocking=True)
        self._finish_copies()
        for _, host in self._away:
            self._spare[host.nbytes].append(host)
        self._away.clear()

    @property
    def hosts(self) -> list[Tensor]:
        """The CPU memory in use and kept."""
        return [host for _, host in self._away] + [host for spare in self._spare.values() for host in spare]

    def _bytes(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def _empty_host(self, num_bytes: int) -> Tensor:
        return host_bytes(num_bytes, pinned=self.device.type == "cuda")

    def _finish_copies(self) -> None:
        if self.device.type == "cuda" and self._away:
            torch.cuda.synchronize(self.device)
