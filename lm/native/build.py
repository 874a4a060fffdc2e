"""The C++ beside this file, compiled for this machine's CPU when it is first needed, and kept for the next process."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / f"{name}.cpp" for name in ("kernels", "attention", "products", "decoder"))
HEADERS = tuple(FOLDER / f"{name}.h" for name in ("numbers", "tiles", "panels"))
# Sums may be taken in vectors only where the source says so; nothing is assumed about infinities and NaN.
FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fPIC", "-shared", *(["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []),
)  # fmt: skip
COMPILERS = ("c++", "g++", "clang++")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels; None, with a warning that says why, where they cannot be compiled: PyTorch's passes serve then."""
    try:
        return ctypes.CDLL(str(compiled(cache_folder())))
    except (OSError, subprocess.CalledProcessError) as error:
        cause = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        warnings.warn(f"lm/native was not compiled, so work on a CPU is slower: {cause}", RuntimeWarning, stacklevel=2)
        return None


@functools.cache
def has_matrix_unit() -> bool:
    """Whether kernels for a CPU's matrix unit (Intel AMX) run here: there is one, and the system lets it be used."""
    loaded = library()
    if loaded is None:
        return False
    loaded.matrix_unit_runs.restype = ctypes.c_bool
    return bool(loaded.matrix_unit_runs())


def cache_folder() -> Path:
    """Where compiled kernels are kept between processes: $XDG_CACHE_HOME/heed, by default ~/.cache/heed.

    Raises: FileNotFoundError where there is neither, as for a user without HOME and without an entry in passwd.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "heed"
    try:
        return Path.home() / ".cache" / "heed"
    except RuntimeError:
        raise FileNotFoundError("there is no home folder to keep it in; set HOME or XDG_CACHE_HOME") from None


def compiled(folder: Path) -> Path:
    """The shared library of these sources, these flags and this CPU in `folder`, compiled unless it is there.

    Processes that compile at the same time do so each for itself, and the last one's file stays.
    Errors: OSError without a compiler or a folder to write to, CalledProcessError with the compiler's words.
    """
    texts = [path.read_text(encoding="utf-8") for path in (*HEADERS, *SOURCES)]
    flags = [*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    key = hashlib.sha256("\0".join([*texts, *flags, _cpu()]).encode()).hexdigest()
    target = folder / f"kernels-{key[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / target.name
            command = [_compiler(), *flags, *map(str, SOURCES), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.replace(target)
    return target


def _compiler() -> str:
    asked = os.environ.get("CXX")
    found = next((path for path in map(shutil.which, [asked] if asked else COMPILERS) if path), None)
    if found is None:
        raise FileNotFoundError(f"no C++ compiler was found; {asked or ', '.join(COMPILERS)} was looked for")
    return found


def _cpu() -> str:
    """What tells this CPU from others that may share the folder: one that lacks an instruction would stop at it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.platform()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
