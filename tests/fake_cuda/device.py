"""A fake CUDA device for the CPU build of PyTorch: tensors on "cuda" whose numbers are computed by the CPU's kernels.

Whatever Heed would run on a GPU runs here with real numbers: devices are checked in every operation, host syncs,
transfers and kernels are counted, memory is measured as the caching allocator counts it, and CUDA graphs are recorded
and replayed. Leaves out: time, the kernels' own rounding, several devices, and NCCL.

`preload` goes before `import torch`, `install` after it, and both into a process of their own: they change PyTorch.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")


def torch_folder() -> Path:
    found = importlib.util.find_spec("torch")  # without importing it
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def compiled() -> Path:
    """The shared library of device.cpp for this PyTorch, compiled unless it is cached."""
    torch = torch_folder()
    version = (torch / "version.py").read_text(encoding="utf-8")
    key = hashlib.sha256("\0".join([SOURCE.read_text(encoding="utf-8"), version, *FLAGS]).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "heed"
    target = folder / f"fake-cuda-{key[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
        includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / target.name
            command = [compiler, *FLAGS, *includes, str(SOURCE), "-o", str(made)]
            libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
            done = subprocess.run([*command, *libraries], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            made.replace(target)
    return target


def preload() -> None:
    """Register the device. PyTorch asks once whether there is one, at its import."""
    lib = torch_folder() / "lib"
    for path in (lib / "libc10.so", lib / "libtorch_cpu.so", lib / "libtorch.so", compiled()):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
