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
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return cpu_name(text) or platform.processor() or platform.machine()


def cpu_name(cpuinfo: str) -> str:
    """Returns the first processor's name from Linux's /proc/cpuinfo; "" if there is none.

    It includes AMD's generation, because virtual machines hide the rest of the name, and generations multiply bf16 at
    very different rates.
    """
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", "")
    if fields.get("vendor_id") != "AuthenticAMD":
        return name
    generation = _zen(int(fields["cpu family"]), int(fields["model"]))
    return f"{name} ({generation})" if generation else name


def _zen(family: int, model: int) -> str:
    """Returns AMD's generation, as Linux numbers it (arch/x86/kernel/cpu/amd.c, bsp_init_amd); "" for others."""
    if family == 0x1A:
        return "Zen 5"
    if family != 0x19:
        return ""
    return "Zen 4" if model >> 4 in (0x1, 0x6, 0x7, 0xA) else "Zen 3"
