"""Memory for copies to and from a GPU is locked in place if the system allows it, and unlocked when it is released."""

import mmap
import resource

import pytest
import torch

from training import internals
from training.internals import host_bytes
from training.notices import speaking_through

TWO_GIB_AND_A_BIT = 2**31 + 5


class Recorder:
    """Stands in for CUDA's runtime library: records which ranges are locked."""

    error = 0

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:
        self.locked[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: recorder)
    return recorder


def test_exactly_what_is_asked_for_is_locked(cudart: Recorder) -> None:
    held = host_bytes(TWO_GIB_AND_A_BIT, pinned=True)  # untouched pages take no memory
    assert cudart.locked == {held.data_ptr(): TWO_GIB_AND_A_BIT}
    assert held.data_ptr() % mmap.PAGESIZE == 0
    assert len(held) == TWO_GIB_AND_A_BIT


def test_it_is_unlocked_once_its_last_view_is_gone(cudart: Recorder) -> None:
    held = host_bytes(64, pinned=True)
    view = held[8:16].view(torch.float32)
    view.fill_(3.0)
    del held
    assert len(cudart.locked) == 1
    assert view.tolist() == [3.0, 3.0]
    del view
    assert not cudart.locked


def test_memory_that_cannot_be_locked_is_used_unlocked_and_said_once(
    cudart: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart.error = 801
    monkeypatch.setattr(internals, "_refused", False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**23, 2**23))
    next_kernels = list[str]()

    def ones(_: int, *, device: str) -> None:  # as the next kernel on a GPU
        next_kernels.append(device)
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch, "ones", ones)
    said = list[str]()
    with speaking_through(said.append):
        first, second = (host_bytes(2**29, pinned=True) for _ in range(2))
    assert next_kernels == ["cuda", "cuda"]
    first[:3] = 7
    assert (first[:4].tolist(), second[:4].tolist(), len(first)) == ([7, 7, 7, 0], [0] * 4, 2**29)
    assert said == [
        "0.50 GiB of CPU memory could not be pinned (CUDA error 801; `ulimit -l` is 0.01 GiB): copies between it and"
        " the GPU are slower"
    ]
    cudart.locked.clear()  # what was refused is not unlocked
    del first, second
    assert not cudart.locked


def test_without_a_gpu_nothing_is_locked(cudart: Recorder) -> None:
    assert host_bytes(3, pinned=False).tolist() == [0, 0, 0]
    assert not cudart.locked
