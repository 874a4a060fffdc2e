"""`engine.deterministic`: kernels on GPUs that give the same bits every time. On CPUs all of Heed's do."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic


@contextmanager
def deterministic_kernels(is_on: bool) -> Iterator[None]:
    """Around forward, backward and step: PyTorch's deterministic algorithms, where there is a GPU and `is_on`.

    Gradients of attention, embeddings and chosen positions are then added in a fixed order, and an operation that has
    no such kernel raises RuntimeError. Passes without gradients need it not: none of their kernels adds in an order
    that varies.
    """
    if not (is_on and torch.cuda.is_available()):
        yield
        return
    # Read at the first product of the process; without it PyTorch refuses products here.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings: Any = torch.utils.deterministic
    was_on, was_filled = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # a pass over every new tensor, and none is read unset
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)
        settings.fill_uninitialized_memory = was_filled
