"""CPU memory for copies to and from a GPU, locked in place (pinned) where the system allows it."""

import mmap
import resource
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from training.notices import say

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_refused = False  # whether this process has said that memory could not be pinned


def host_bytes(num_bytes: int, *, pinned: bool) -> Tensor:
    """Returns zeros [num_bytes] uint8 in CPU memory, for copies to and from a GPU; `pinned` needs a GPU.

    PyTorch rounds pinned memory up to a power of two (2.1 GB take 4) and keeps it for later requests when it is freed.
    This function locks ordinary pages instead, as many as are needed, and releases them when they are freed. If the
    system does not allow so much locked memory, the pages stay unlocked, which is slower, and one notice says so.
    """
    cudart = torch.cuda.cudart() if pinned else None
    if cudart is None or not num_bytes:  # a device without CUDA's library has its own allocator
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages alive
    address = held.data_ptr()
    error = int(cudart.cudaHostRegister(address, num_bytes, PORTABLE))
    if error:
        _note_refusal(num_bytes, error)
    else:
        pages.unlock = lambda: cudart.cudaHostUnregister(address)
    return held


def _note_refusal(num_bytes: int, error: int) -> None:
    """Say once per process that memory could not be pinned, and clear CUDA's error."""
    global _refused
    with suppress(RuntimeError):  # CUDA reports the refusal again after the next kernel; let it be this one
        torch.ones(1, device="cuda")
    if _refused:
        return
    _refused = True
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**30:.2f} GiB"
    say(
        f"{num_bytes / 2**30:.2f} GiB of CPU memory could not be pinned (CUDA error {error}; `ulimit -l` is {allowed}):"
        " copies between it and the GPU are slower"
    )


class _Pages(mmap.mmap):
    """Anonymous memory, unlocked before it is released."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()
