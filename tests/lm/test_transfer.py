"""Memory for copies to and from a GPU is locked in place, and unlocked when it is released."""

import mmap

import pytest
import torch

from lm.transfer import host_bytes

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


def test_memory_that_cannot_be_locked_is_an_error(cudart: Recorder) -> None:
    cudart.error = 2
    with pytest.raises(RuntimeError, match=r"64 bytes of CPU memory cannot be pinned: CUDA error 2; see `ulimit -l`"):
        host_bytes(64, pinned=True)


def test_without_a_gpu_nothing_is_locked(cudart: Recorder) -> None:
    assert host_bytes(3, pinned=False).tolist() == [0, 0, 0]
    assert not cudart.locked
