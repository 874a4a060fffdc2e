"""Copies between CPU memory and a device.

Shape letters: B batch, T tokens, D model width, C chosen positions.
"""

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from CPU memory to the device without waiting; one already on the device is returned as it is.

    Copies to a GPU go through pinned memory. A copy from other memory begins only when everything queued before it is
    done, and the CPU waits for it.
    """
    is_copied = values.is_cpu and device.type == "cuda"
    return values.pin_memory().to(device, non_blocking=True) if is_copied else values.to(device)


def at_positions(values_BTD: Tensor, selected_BT: Tensor) -> Tensor:
    """Returns `values_BTD[selected_BT]`, [C, D]. With the mask in CPU memory, the CPU need not wait for a GPU."""
    if selected_BT.device == values_BTD.device:
        return values_BTD[selected_BT]
    places_C = upload(selected_BT.flatten().nonzero()[:, 0], values_BTD.device)
    return values_BTD.flatten(0, 1).index_select(0, places_C)


def spread(values_C: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns [B, T] with the values where the mask (in CPU memory) is True, row by row, and 0 elsewhere."""
    places_C = upload(mask_BT.flatten().nonzero()[:, 0], values_C.device)
    return values_C.new_zeros(mask_BT.numel()).scatter(0, places_C, values_C).view(mask_BT.shape)


def host_bytes(num_bytes: int, *, pinned: bool) -> Tensor:
    """Returns zeros [num_bytes] uint8 in CPU memory, for copies to and from a GPU; `pinned` needs a GPU.

    PyTorch rounds pinned memory up to a power of two (2.1 GB take 4) and keeps it for later requests when it is freed.
    This function locks ordinary pages instead, as many as are needed, and releases them when they are freed.

    Raises: RuntimeError if the system does not allow so much locked memory.
    """
    cudart = torch.cuda.cudart() if pinned else None
    if cudart is None or not num_bytes:  # a device without CUDA's library has its own allocator
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages alive
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
