"""Tests the Triton kernels without a GPU: in Triton's interpreter, and by compiling them for GPUs.

Both run in separate processes, since PyTorch behaves differently where it finds Triton.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.real.packages import unpacked

ROOT = Path(__file__).parents[2]
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lm.native import gpu

KERNELS = {
    gpu._logprobs_kernel: "{} *i64 *fp32 *fp32 i32 i32 fp32 constexpr",
    gpu._gradient_kernel: "{} *i64 *fp32 *fp32 i32 i32 i32 fp32 constexpr",
    gpu._sample_kernel: "{} *fp32 *i64 *fp32 i32 i32 fp32 constexpr",
}
for capability in (80, 90, 100):
    for kernel, types in KERNELS.items():
        for logits in ("*fp32", "*bf16"):
            signature = dict(zip(kernel.arg_names, types.format(logits).split(), strict=True))
            source = ASTSource(kernel, signature, constexprs={(len(signature) - 1,): gpu.BLOCK})
            found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
            assert found.asm["cubin"], (kernel, capability)
            print("compiled", kernel.arg_names[0], capability, logits)
"""


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(unpacked("triton==3.7.1"))])}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment | variables, capture_output=True, text=True,
        timeout=550, check=False,
    )  # fmt: skip


def test_the_triton_kernels_pass_their_tests_in_the_interpreter() -> None:
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/lm/native/gpu_kernels.py")
    done = run(*tests, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-4000:]


def test_the_triton_kernels_compile_for_gpus(tmp_path: Path) -> None:
    done = run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("compiled") == 3 * 3 * 2
