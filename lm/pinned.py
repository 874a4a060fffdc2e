"""CPU memory that a GPU copies to and from: exactly as much as is asked for.

PyTorch's pinned memory is rounded up to a power of two, and kept for later requests when it is freed: 2.1 GB take 4.
Here ordinary pages are locked and released.
"""

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class _Pages(mmap.mmap):
    """Anonymous memory, unlocked before it is released."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def host_bytes(num_bytes: int, *, pinned: bool) -> Tensor:
    """Zeros [num_bytes] uint8 in CPU memory; `pinned` needs a GPU.

    Raises: RuntimeError if the system does not let so much memory be locked.
    """
    cudart = torch.cuda.cudart() if pinned else None
    if cudart is None or not num_bytes:  # a device without CUDA's library has an allocator of its own
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages
    address = held.data_ptr()
    error = int(cudart.cudaHostRegister(address, num_bytes, PORTABLE))
    if error:
        raise RuntimeError(f"{num_bytes} bytes of CPU memory cannot be pinned: CUDA error {error}; see `ulimit -l`")
    pages.unlock = lambda: cudart.cudaHostUnregister(address)
    return held
