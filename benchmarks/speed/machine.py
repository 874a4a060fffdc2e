"""Describes the machine that a benchmark ran on."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch


def describe() -> dict[str, str | int | bool]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "amx_bf16": bool(torch.cpu.get_capabilities().get("amx_bf16", False)),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or platform.machine())
