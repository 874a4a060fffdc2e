"""Runs the kernels' tests once more in each other way that the compiler can be made to take on this CPU.

`native/emulated_tiles.h` emulates a matrix unit, and HEED_TESTS_BF16 multiplies bf16 where the CPU has no instruction
for it. Narrower vectors are those of lesser CPUs: AVX2, and 128 bits as SSE and NEON have them.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm.native.build import library, multiplies_bf16

HERE = Path(__file__).parent
TESTS = ("test_attention_kernel.py", "test_linear.py", "test_decoding.py")
CAPABILITIES = torch.cpu.get_capabilities()
BF16 = "-DHEED_TESTS_BF16"
EMULATED = f"-include {HERE / 'native' / 'emulated_tiles.h'}"
NO_AVX512 = "-mno-avx512f"  # takes everything that needs it along
NO_AMX = "-mno-amx-tile -mno-amx-bf16 -mno-amx-int8"


def other_ways() -> dict[str, str]:
    """The compiler's flags for each way but the one that this CPU takes."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {"bf16 without an instruction": BF16}
    ways = {"128 bits": f"{NO_AMX} -mno-avx {BF16}"}
    if not multiplies_bf16():
        return ways | {"bf16 without an instruction": BF16, "a matrix unit": f"{BF16} {EMULATED}"}
    unit = {"no matrix unit": NO_AMX} if CAPABILITIES.get("amx_bf16") else {"a matrix unit": EMULATED}
    return ways | unit | {"AVX2": f"{NO_AMX} {NO_AVX512} {BF16}"}


@pytest.mark.long
@pytest.mark.skipif(library() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("flags", other_ways().values(), ids=other_ways())
def test_the_kernels_pass_their_tests_in_another_way(flags: str, tmp_path: Path) -> None:
    environment = {**os.environ, "CXXFLAGS": flags, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / name) for name in TESTS)]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-4000:]
    assert list(tmp_path.glob("heed/kernels-*.so")), "nothing was compiled"
