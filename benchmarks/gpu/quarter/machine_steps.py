"""The step `environment`: versions, limits of the machine, and the rates that shares of the hardware refer to."""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu.ceiling import copy_rate
from benchmarks.gpu.quarter.context import GIB, Context, device_seconds
from training.internals import host_bytes

PACKAGES = (
    "torch", "triton", "numpy", "transformers", "accelerate", "deepspeed", "ray", "pydantic", "sqlalchemy", "datasets",
    "tokenizers",
)  # fmt: skip
COPIED_BYTES = 2 * GIB


def environment(ctx: Context) -> None:
    ctx.note(
        python=platform.python_version(),
        cuda=str(torch.version.cuda),
        packages={name: _version(name) for name in PACKAGES},
        gpu=_output("nvidia-smi", "--query-gpu=name,memory.total,driver_version,clocks.sm", "--format=csv,noheader"),
        cpu=_output("sh", "-c", "lscpu | grep -E 'Model name|^CPU\\(s\\)'"),
        compiler=_output("sh", "-c", "g++ --version | head -1"),
        shm=_output("df", "-h", "/dev/shm"),
        locked=_output("sh", "-c", "ulimit -l"),
        memory=_output("sh", "-c", "free -g | head -2"),
        interfaces=os.listdir("/sys/class/net"),
        commit=os.environ.get("HEED_CODE_VERSION", "unknown"),
        data_sheet=ctx.hardware.name,
    )
    if ctx.on_gpu:
        _measure_rates(ctx)
        with ctx.attempt("pinning"):
            _measure_pinning(ctx)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _output(*command: str) -> str:
    """Returns what a command prints, or why it printed nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return (done.stdout or done.stderr).strip()[:600]
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__


def _measure_rates(ctx: Context) -> None:
    """Notes bytes per second of copies, FLOP/s of a large bf16 product, and the time of a kernel launch."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=ctx.device) for _ in range(2))
    small = torch.zeros(8, device=ctx.device)
    ctx.note(
        copy_bytes_per_second=copy_rate(COPIED_BYTES, ctx.device),
        matmul_flops=2 * 8192**3 / device_seconds(lambda: a @ b, 20),
        launch_microseconds=1e6 * _host_seconds(ctx, lambda: small.add_(1), 2000),
    )
    pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(GIB, dtype=torch.uint8, device=ctx.device)
    ctx.note(
        to_device=GIB / device_seconds(lambda: on_device.copy_(pinned, non_blocking=True), 5),
        to_host=GIB / device_seconds(lambda: pinned.copy_(on_device, non_blocking=True), 5),
    )


def _measure_pinning(ctx: Context) -> None:
    started = time.perf_counter()
    held = host_bytes(2 * GIB, pinned=True)
    ctx.note(pin_gib_per_second=2 / (time.perf_counter() - started), is_pinned=held.is_pinned())


def _host_seconds(ctx: Context, work: Callable[[], object], repeats: int) -> float:
    """Returns the CPU's seconds per call, for work that takes the device less time."""
    started = ctx.now()
    for _ in range(repeats):
        work()
    taken = time.perf_counter() - started
    ctx.now()
    return taken / repeats
