"""Runs the kernels' tests once more the other way: by the matrix unit that `native/emulated_tiles.h` emulates where the
CPU has none, and by vectors where it has one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm.native.build import multiplies_bf16

HERE = Path(__file__).parent
TESTS = ("test_attention_kernel.py", "test_linear.py", "test_decoding.py")


EMULATED = f"-include {HERE / 'native' / 'emulated_tiles.h'}"


@pytest.mark.long
@pytest.mark.skipif(not multiplies_bf16(), reason="needs a C++ compiler and AVX-512 BF16")
def test_the_kernels_pass_their_tests_the_other_way(tmp_path: Path) -> None:
    has_unit = torch.cpu.get_capabilities().get("amx_bf16", False)
    environment = {
        **os.environ,
        "CXXFLAGS": "-mno-amx-bf16" if has_unit else EMULATED,
        "XDG_CACHE_HOME": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(HERE / name) for name in TESTS)]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-4000:]
