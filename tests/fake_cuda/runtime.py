"""`torch.cuda` of the fake device: streams that do everything at once, graphs that are replayed, memory that counts."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.fake_cuda import attention, kernels

TOTAL_BYTES = 80 * 2**30
NAME = "Fake H100"


class Stream:
    """The only stream, under however many names."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.stream_id, self.cuda_stream = kernels.CUDA, 0, 0

    def wait_stream(self, _stream: object) -> None:
        return None

    wait_event = record_event = wait_stream

    def synchronize(self) -> None:
        kernels.note_sync("Stream.synchronize")


class Event:
    """A moment."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = 0.0

    def record(self, _stream: object = None) -> None:
        self.seconds = time.perf_counter()

    def wait(self, _stream: object = None) -> None:
        return None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        kernels.note_sync("Event.synchronize")

    def elapsed_time(self, later: "Event") -> float:
        return (later.seconds - self.seconds) * 1000


class CUDAGraph:
    """Kernels recorded on their memory."""

    num_captures = 0  # of all graphs

    def __init__(self, *_: Any, **__: Any) -> None:
        self.steps: list[Callable[[], object]] = []
        self._capture: Any = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        self._capture = kernels.recorded()
        self.steps = self._capture.__enter__()

    def capture_end(self) -> None:
        self._capture.__exit__(None, None, None)
        CUDAGraph.num_captures += 1

    def replay(self) -> None:
        kernels.note_kernel("graph", [])  # one launch, of whatever is in it
        with torch.no_grad():
            for step in self.steps:
                step()

    def reset(self) -> None:
        self.steps = []

    def pool(self) -> tuple[int, int]:
        return (0, 0)


@contextlib.contextmanager
def graph(cuda_graph: CUDAGraph, *_: Any, **__: Any) -> Iterator[None]:
    kernels.note_sync("torch.cuda.graph")  # it synchronises, and empties the allocator's cache
    cuda_graph.capture_begin()
    try:
        yield
    finally:
        cuda_graph.capture_end()


@contextlib.contextmanager
def stream(_stream: object) -> Iterator[None]:
    yield


@contextlib.contextmanager
def device(_device: object) -> Iterator[None]:
    yield


def live_bytes(*_: Any) -> int:
    return int(torch.ops.fake_cuda.live_bytes())


def peak_bytes(*_: Any) -> int:
    return int(torch.ops.fake_cuda.peak_bytes())


def reset_peak(*_: Any) -> None:
    torch.ops.fake_cuda.reset_peak()


def nothing(*_: Any, **__: Any) -> None:
    return None


REPLACED: dict[str, Any] = {
    "_lazy_init": nothing,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": nothing,
    "is_bf16_supported": lambda *_, **__: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": nothing,
    "device": device,
    "synchronize": lambda *_: kernels.note_sync("torch.cuda.synchronize"),
    "empty_cache": nothing,
    "ipc_collect": nothing,
    "manual_seed": nothing,
    "manual_seed_all": nothing,
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": nothing,
    "is_current_stream_capturing": kernels.is_capturing,
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": CUDAGraph,
    "graph": graph,
    "graph_pool_handle": lambda: (0, 0),
    "stream": stream,
    "current_stream": Stream,
    "default_stream": Stream,
    "mem_get_info": lambda *_: (TOTAL_BYTES - live_bytes(), TOTAL_BYTES),
    "memory_allocated": live_bytes,
    "memory_reserved": live_bytes,
    "max_memory_allocated": peak_bytes,
    "max_memory_reserved": peak_bytes,
    "reset_peak_memory_stats": reset_peak,
    "get_device_name": lambda *_: NAME,
    "get_device_capability": lambda *_: (9, 0),
    "get_device_properties": lambda *_: SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=TOTAL_BYTES, multi_processor_count=132
    ),
}


def init_process_group(backend: str | None = None, **options: Any) -> None:
    """There is no NCCL; a group of one rank needs none."""
    _init_process_group("gloo" if backend == "nccl" else backend, **options)


_init_process_group = torch.distributed.init_process_group


def resize_storage(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
    """PyTorch's own knows a GPU's storages only where it was built for GPUs."""
    if storage.device.type != "cuda":
        return _resize_storage(storage, num_bytes)
    torch.ops.fake_cuda.resize_storage(torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage), num_bytes)
    return storage


_resize_storage = torch.UntypedStorage.resize_


def install() -> None:
    """After `device.preload` and `import torch`: `torch.cuda` and the kernels of its device."""
    import torch._dynamo  # an optimizer imports it, and it looks through torch.cuda at its import

    kernels.register()
    attention.register()
    if os.environ.get("TRITON_INTERPRET") == "1":
        kernels.interpret_triton()
    for name, value in REPLACED.items():
        # A function for each name: `torch.compile` has a rule per function.
        setattr(torch.cuda, name, value if isinstance(value, type) else partial(value))
    torch.UntypedStorage.resize_ = resize_storage  # type: ignore[method-assign]
    setattr(torch.distributed, "init_process_group", init_process_group)  # noqa: B010
