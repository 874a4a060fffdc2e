"""The device that is measured: its name and versions, its clock, its memory."""

import platform
import shutil
import subprocess
import time

import torch


def describe(device: torch.device) -> dict[str, str]:
    """Returns the names and versions that a measurement depends on."""
    found = {"device": "a CPU", "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(device),
            "driver": driver_version(),
            "cuda": str(torch.version.cuda),
        }
    return found


def driver_version() -> str:
    """Returns NVIDIA's driver version, or "unknown" if its tool is not available."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split("\n")[0].strip() or "unknown"


def now(device: torch.device) -> float:
    """Returns the wall time in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_bytes(device: torch.device) -> int:
    """Returns the peak memory of all tensors since the process began; 0 on a CPU, where it is not counted."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
