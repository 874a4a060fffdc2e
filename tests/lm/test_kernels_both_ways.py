"""Runs the kernels' tests once more in each other way that the compiler can be made to take on this CPU.

`native/emulated_tiles.h` emulates a matrix unit. Narrower vectors are those of lesser CPUs: AVX2, and 128 bits as SSE
and NEON have them.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.native.kernels import library

HERE = Path(__file__).parent
TESTS = ("test_attention_kernel.py", "test_linear.py", "test_decoding.py")
EMULATED = f"-include {HERE / 'native' / 'emulated_tiles.h'}"
NO_AMX = "-mno-amx-tile -mno-amx-bf16 -mno-amx-int8"


def other_ways() -> dict[str, str]:
    """The compiler's flags for each way but the one that this CPU takes."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {}
    found = torch.cpu.get_capabilities()
    ways = {"128 bits": f"{NO_AMX} -mno-avx"}
    if found.get("avx512_f"):
        ways["AVX2"] = f"{NO_AMX} -mno-avx512f"  # takes everything that needs it along
    return ways | ({"no matrix unit": NO_AMX} if found.get("amx_bf16") else {"a matrix unit": EMULATED})


def variants() -> list[Any]:
    """CI takes the way in which the products are other code, without the tests of whole steps; the rest is nightly.

    The compiler takes half as long without most optimisations, and as long as all these tests with them.
    """
    found = []
    for name, flags in other_ways().items():
        if "matrix unit" in name:
            found.append(pytest.param(f"{flags} -O1", TESTS[:2], id=f"{name}, products"))
        found.append(pytest.param(flags, TESTS, id=name, marks=pytest.mark.nightly))
    return found


@pytest.mark.long
@pytest.mark.skipif(library() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("flags", "tests"), variants())
def test_the_kernels_pass_their_tests_in_another_way(flags: str, tests: Sequence[str], tmp_path: Path) -> None:
    environment = {**os.environ, "CXXFLAGS": flags, "XDG_CACHE_HOME": str(tmp_path)}
    files = [str(HERE / name) for name in tests]
    command = [sys.executable, "-m", "pytest", "-m", "not long", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-4000:]
    assert list(tmp_path.glob("heed/kernels-*.so")), "nothing was compiled"
