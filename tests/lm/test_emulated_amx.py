"""The AMX kernels on a CPU without AMX: their tests again, on a matrix unit that `native/emulated_tiles.h` emulates."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm.native.build import has_matrix_unit, library

HERE = Path(__file__).parent
TESTS = ("test_attention_kernel.py", "test_linear.py", "test_decoding.py")


def has_avx512_bf16() -> bool:
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


@pytest.mark.skipif(library() is None or not has_avx512_bf16(), reason="needs a C++ compiler and AVX-512 BF16")
@pytest.mark.skipif(has_matrix_unit(), reason="this CPU has AMX: the tests themselves run")
def test_the_kernels_pass_their_tests_on_an_emulated_matrix_unit(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "CXXFLAGS": f"-include {HERE / 'native' / 'emulated_tiles.h'}",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / name) for name in TESTS)]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-4000:]
