"""Counts the bytes of all tensors in a process's CPU memory, by phase. It is exact, unlike the size of the process.

The process must start with the variables of `environment()` (live_bytes.cpp).
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")


@dataclass(frozen=True)
class Phase:
    """Bytes of all tensors before a phase, at its peak, and after it."""

    before: int
    peak: int
    after: int

    @property
    def growth(self) -> int:
        return self.peak - self.before


def environment(folder: Path) -> dict[str, str]:
    """Returns the variables for a process whose tensors are counted; compiles the counter into `folder`.

    Raises: FileNotFoundError if there is no compiler, CalledProcessError if it fails.
    """
    library = folder / "live_bytes.so"
    if not library.exists():
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-fPIC", "-shared", str(SOURCE), "-o"]
        subprocess.run([*command, str(library), "-ldl"], check=True, capture_output=True)
    return {"LD_PRELOAD": str(library)}


class LiveBytes:
    """Records phases by name, in the order in which they ended; a repeated phase keeps its last figures.

    Raises: AttributeError in a process without the counter.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.live_bytes.restype = self._library.peak_bytes.restype = ctypes.c_int64
        self.phases: dict[str, Phase] = {}

    @property
    def now(self) -> int:
        return int(self._library.live_bytes())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Phases do not nest."""
        before = self.now
        self._library.reset_peak()
        yield
        self.phases[name] = Phase(before, int(self._library.peak_bytes()), self.now)
