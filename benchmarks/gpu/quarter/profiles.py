"""Where a GPU's time goes, by kind of kernel."""

import time
from collections import Counter
from collections.abc import Callable

from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.quarter.context import Context

# Parts of kernels' names; the first kind that matches counts.
KINDS = (
    ("attention", ("fmha", "flash", "_attend_kernel", "_merge_kernel")),
    ("product", ("gemm", "cutlass", "nvjet", "cublas", "wgmma", "splitk")),
    ("attention", ("attention",)),
    ("optimizer", ("adam", "multi_tensor", "l2norm", "foreach")),
    ("norm", ("norm", "rms")),
    ("sort, scan, search", ("scan", "search", "sort", "topk", "cumsum")),
    ("index", ("index", "gather", "scatter", "embedding")),
    ("softmax, logsumexp", ("softmax", "logsumexp")),
    ("copy, fill, cast", ("copy", "memcpy", "memset", "fill", "cat")),
    ("reduce", ("reduce",)),
    ("triton", ("triton",)),
)
NUM_LONGEST = 14  # kernels that are noted by name


def kind_of(kernel: str) -> str:
    low = kernel.lower()
    return next((kind for kind, words in KINDS if any(word in low for word in words)), "elementwise")


def note_profile(ctx: Context, work: Callable[[], object], prefix: str) -> None:
    """Notes the GPU's time by kind of kernel, the number of kernels, the share of busy time, and the longest kernels.

    Without a GPU there is nothing to note.
    """
    if ctx.on_gpu:
        with ctx.attempt(f"{prefix}_profile"):
            _profile(ctx, work, prefix)


def _profile(ctx: Context, work: Callable[[], object], prefix: str) -> None:
    ctx.now()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        started = time.perf_counter()
        work()
        taken = ctx.now() - started
    kernels = [event for event in found.events() or [] if is_kernel(event)]
    kinds, names = Counter[str](), Counter[str]()  # milliseconds
    for event in kernels:
        milliseconds = event.time_range.elapsed_us() / 1000
        kinds[kind_of(event.name)] += milliseconds
        names[event.name[:90]] += milliseconds
    figures = {
        "kernels": len(kernels),
        "busy_share": sum(kinds.values()) / 1000 / taken,
        "ms_by_kind": dict(kinds.most_common()),
        "longest_ms": dict(names.most_common(NUM_LONGEST)),
    }
    ctx.note(**{f"{prefix}_{name}": value for name, value in figures.items()})


def is_kernel(event: FunctionEvent) -> bool:
    return event.device_type == DeviceType.CUDA
