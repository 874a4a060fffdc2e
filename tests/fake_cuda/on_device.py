"""What Heed does on a GPU, counted: kernels, host syncs, uploads and bytes. Run by test_fake_cuda.py."""

import pytest
import torch

from lm.native import operators  # noqa: F401  (registers the CPU's operators)
from tests.fake_cuda import kernels, runtime

CUDA = torch.device("cuda")


def test_the_device_counts() -> None:
    """A product and a sum: two kernels, no sync until a number is read; its memory is what CUDA would allocate."""
    x = torch.ones(100, 10, device=CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with kernels.counted() as counts:
        y = (x @ x.T).sum()
    assert counts.num_syncs == 0
    assert counts.num_kernels == 2
    assert torch.cuda.max_memory_allocated() - before == 100 * 100 * 4 // 512 * 512 + 512 + 512
    with kernels.counted() as counts:
        assert float(y) == 100 * 100 * 10
        x[x[:, 0] > 0]
        x.cpu()
        torch.ones(3).to(CUDA)
    assert sorted(what for what, _ in counts.syncs) == ["_local_scalar_dense", "copy to the CPU", "nonzero"]
    assert counts.uploads.total() == 1


def test_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=CUDA) + torch.ones(3)
    with pytest.raises(RuntimeError, match="a CPU's kernel"):
        torch.ops.heed.rms_norm(torch.ones(3, 4, device=CUDA), torch.ones(4, device=CUDA), 1e-5, False)


def test_a_graph_replays_on_its_memory_and_takes_no_sync() -> None:
    x = torch.ones(3, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = (x * 2).sum() + 1
    x.fill_(5.0)
    graph.replay()
    assert total.item() == 31
    with pytest.raises(RuntimeError, match="stream is capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        total.item()
    assert runtime.CUDAGraph.num_captures >= 1
