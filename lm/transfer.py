"""Copies between CPU memory and a device.

Shape letters: B batch, T tokens, D model width, C chosen positions.
"""

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A tensor in CPU memory, on the device; one that is on the device already, as it is. Nothing waits for the copy.

    It goes to a GPU from pinned memory: a copy from other memory begins when all that was queued before it is done, and
    the CPU waits for it.
    """
    is_copied = values.is_cpu and device.type == "cuda"
    return values.pin_memory().to(device, non_blocking=True) if is_copied else values.to(device)


def at_positions(values_BTD: Tensor, selected_BT: Tensor) -> Tensor:
    """`values_BTD[selected_BT]`, [C, D]. With the mask in CPU memory no GPU has to be asked how many are True."""
    if selected_BT.device == values_BTD.device:
        return values_BTD[selected_BT]
    places_C = upload(selected_BT.flatten().nonzero()[:, 0], values_BTD.device)
    return values_BTD.flatten(0, 1).index_select(0, places_C)


def spread(values_C: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T] with the values where the mask, in CPU memory, is True, row by row; 0 elsewhere."""
    places_C = upload(mask_BT.flatten().nonzero()[:, 0], values_C.device)
    return values_C.new_zeros(mask_BT.numel()).scatter(0, places_C, values_C).view(mask_BT.shape)


def host_bytes(num_bytes: int, *, pinned: bool) -> Tensor:
    """Zeros [num_bytes] uint8 in CPU memory that a GPU copies to and from; `pinned` needs a GPU.

    PyTorch's pinned memory is rounded up to a power of two, and kept for later requests when it is freed: 2.1 GB take
    4. Here ordinary pages are locked and released, exactly as many as are asked for.

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


class _Pages(mmap.mmap):
    """Anonymous memory, unlocked before it is released."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()
