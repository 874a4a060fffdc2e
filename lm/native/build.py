"""Compiles the C++ in this folder for this machine's CPU when it is first needed, and caches the result on disk.

The flags in CXXFLAGS are added to its own; CXX names the compiler.
"""

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / f"{name}.cpp" for name in ("kernels", "attention", "weight_gradient", "decoder"))
HEADERS = tuple(FOLDER / f"{name}.h" for name in ("numbers", "vectors", "tiles", "pack", "decoder", "decode_attention"))
# Sums may be taken in vectors only where the source says so; nothing is assumed about infinities and NaN.
FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fPIC", *(["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []),
)  # fmt: skip
COMPILERS = ("c++", "g++", "clang++")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels; None, with a warning that says why, where they cannot be compiled: plain PyTorch is used then."""
    try:
        return ctypes.CDLL(str(compiled(cache_folder())))
    except (OSError, subprocess.CalledProcessError) as error:
        cause = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        warnings.warn(f"lm/native was not compiled, so work on a CPU is slower: {cause}", RuntimeWarning, stacklevel=2)
        return None


def cache_folder() -> Path:
    """Where compiled kernels are cached: $XDG_CACHE_HOME/heed, by default ~/.cache/heed.

    Raises: FileNotFoundError without either, for example for a user without HOME and without an entry in passwd.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "heed"
    try:
        return Path.home() / ".cache" / "heed"
    except RuntimeError:
        raise FileNotFoundError("there is no home folder to keep it in; set HOME or XDG_CACHE_HOME") from None


def compiled(folder: Path) -> Path:
    """The shared library in `folder` for these sources, flags and CPU, compiled unless it exists.

    Processes that start at the same time each compile it, and the last one's file stays.
    Raises: OSError without a compiler or a folder to write to; CalledProcessError with the compiler's output.
    """
    texts = [path.read_text(encoding="utf-8") for path in (*HEADERS, *SOURCES)]
    flags = [*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    key = hashlib.sha256("\0".join([*texts, *flags, _cpu()]).encode()).hexdigest()
    target = folder / f"kernels-{key[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            objects = [Path(own) / f"{source.stem}.o" for source in SOURCES]
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda source, made: _compile([*flags, "-c", str(source)], made), SOURCES, objects))
            made = Path(own) / target.name
            _compile([*flags, "-shared", *map(str, objects)], made)
            made.replace(target)
    return target


def _compile(arguments: Sequence[str], made: Path) -> None:
    subprocess.run([_compiler(), *arguments, "-o", str(made)], check=True, capture_output=True, text=True)


def _compiler() -> str:
    asked = os.environ.get("CXX")
    found = next((path for path in map(shutil.which, [asked] if asked else COMPILERS) if path), None)
    if found is None:
        raise FileNotFoundError(f"no C++ compiler was found; {asked or ', '.join(COMPILERS)} was looked for")
    return found


def _cpu() -> str:
    """Identifies this CPU among those that may share the folder, since a missing instruction would end the process."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.platform()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
