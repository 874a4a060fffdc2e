"""Broadcast of weights from the first learner to all generators: NCCL between GPUs, gloo between CPUs."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SENDER = 0  # the rank that sends; all others receive


class WeightBroadcast:
    """One rank's end of a process group that is separate from the one that the learners train in.

    All `num_ranks` construct theirs at the same time, with the address of a free port on the sender's machine. All of
    them make each call together, with tensors of the same names, shapes and types.

    Raises:
        RuntimeError: a peer is gone or takes longer than `timeout_seconds`.
    """

    def __init__(
        self, host: str, port: int, rank: int, num_ranks: int, *, device: torch.device, timeout_seconds: float
    ) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        self.rank, self.device = rank, device
        store = dist.TCPStore(host, port, num_ranks, is_master=rank == SENDER, timeout=timeout)  # type: ignore[attr-defined]
        self._group: Any  # PyTorch's stubs leave out the methods of backends
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, num_ranks, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, num_ranks, timeout)

    def send(self, weights: Mapping[str, Tensor], digests: Mapping[str, int]) -> None:
        """Send some weights. On a GPU this returns when the transfer is queued; later work on them waits for it."""
        assert self.rank == SENDER, f"rank {self.rank} sends; rank {SENDER} was expected"
        self._exchange(weights)
        in_order = [digests[name] for name in sorted(weights)]
        self._exchange({"digests": torch.tensor(in_order, device=self.device)})

    def receive(self, weights: Mapping[str, Tensor]) -> dict[str, int]:
        """Write the weights sent into `weights`, in place. Returns the sender's digest of each."""
        self._exchange(weights)
        digests = torch.zeros(len(weights), dtype=torch.int64, device=self.device)
        self._exchange({"digests": digests})
        return dict(zip(sorted(weights), digests.tolist(), strict=True))

    def _exchange(self, weights: Mapping[str, Tensor]) -> None:
        # As bytes, since not every backend knows every type; by name, since ZeRO gives them in another order.
        works = [self._group.broadcast(weights[name].view(torch.uint8), SENDER) for name in sorted(weights)]
        for work in works:
            work.wait()
