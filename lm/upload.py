"""Copies from CPU memory to a device for which nothing waits, and positions that the CPU chooses.

Shape letters: B batch, T tokens, D model width, C chosen positions.
"""

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A tensor in CPU memory, on the device; one that is on the device already, as it is.

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
