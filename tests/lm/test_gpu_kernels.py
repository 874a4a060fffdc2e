"""Tests the Triton kernels without a GPU: in Triton's interpreter, and by compiling them for GPUs.

Both run in separate processes, since PyTorch behaves differently where it finds Triton.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real.packages import unpacked

ROOT = Path(__file__).parents[2]
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lm.native import gpu, gpu_layers

HEADS = "{0} {0} {0} {0} {0} {0} *fp32 *fp32 *i64 i32 i32 i32 i32 fp32 i32 i32 i32 i32 i32 i32"
ATTENTION = "{0} {0} {0} *i64 {0} *fp32 *fp32 i32 i32 i32 fp32 i32 i32 i32 i32 i32 {0}"
NORM = dict(CENTERS=True, BLOCK=1024)
SPLIT = dict(SPLIT=gpu.SPLIT, QUERIES=16)
KERNELS = [
    (gpu._logprobs_kernel, "{0} *i64 *fp32 *fp32 i32 i32 fp32", dict(BLOCK=gpu.BLOCK)),
    (gpu._gradient_kernel, "{0} *i64 *fp32 *fp32 i32 i32 i32 fp32", dict(BLOCK=gpu.BLOCK)),
    (gpu._sample_kernel, "{0} *fp32 *i64 *fp32 i32 i32 fp32", dict(BLOCK=gpu.BLOCK)),
    (gpu_layers._norm_kernel, "{0} *bf16 *fp32 *fp32 {0} *bf16 *fp32 *fp32 i32 fp32",
     dict(ADDS=True, SHIFTS=True, **NORM)),
    (gpu_layers._norm_backward_kernel, "*bf16 {0} {0} *fp32 *fp32 *fp32 {0} *bf16 *fp32 i32 i32",
     dict(CARRIES=True, NARROWS=True, SHIFTS=True, **NORM)),
    (gpu_layers._sum_kernel, "*fp32 {0} i32 i32", dict(ROWS=gpu_layers.SUM_ROWS, BLOCK=gpu_layers.SUM_COLUMNS)),
    (gpu_layers._swiglu_kernel, "{0} {0} i32", dict(BLOCK=gpu_layers.MLP_BLOCK)),
    (gpu_layers._swiglu_backward_kernel, "{0} {0} {0} i32", dict(BLOCK=gpu_layers.MLP_BLOCK)),
    (gpu_layers._heads_kernel, HEADS, dict(JOINS=False, ROTATES=True, NORMS=True, CACHES=True, HEADS=16, BLOCK=32)),
    (gpu_layers._heads_kernel, HEADS, dict(JOINS=True, ROTATES=True, NORMS=False, CACHES=False, HEADS=16, BLOCK=64)),
    (gpu._attend_kernel, ATTENTION, dict(SINKS=True, SPLITS=True, BLOCK=64, HEAD=64, **SPLIT)),
    (gpu._attend_kernel, ATTENTION, dict(SINKS=True, SPLITS=False, BLOCK=32, HEAD=256, **SPLIT)),
    (gpu._merge_kernel, "*fp32 *fp32 *i64 {0} i32 i32 i32 i32 i32 {0}", dict(SINKS=True, SPLIT=gpu.SPLIT, HEAD=64)),
]
MOST_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that one program may use
for kernel, types, constants in KERNELS:
    for capability, floats in ((80, "*bf16"), (90, "*bf16"), (90, "*fp32"), (100, "*bf16")):
        types_of = types.format(floats).split() + ["constexpr"] * len(constants)
        signature = dict(zip(kernel.arg_names, types_of, strict=True))
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature, constexprs=places)
        found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        assert found.asm["cubin"], (kernel, capability)
        assert found.metadata.shared <= MOST_SHARED[capability], (kernel, capability, found.metadata.shared)
        print("compiled", kernel.arg_names[0], capability, floats)
"""
NUM_COMPILED = 13 * 4


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(unpacked("triton==3.7.1"))])}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment | variables, capture_output=True, text=True,
        timeout=550, check=False,
    )  # fmt: skip


def test_the_triton_kernels_pass_their_tests_in_the_interpreter() -> None:
    tests = [f"tests/lm/native/{name}.py" for name in ("gpu_kernels", "gpu_layers", "gpu_attention")]
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-4000:]


@pytest.mark.nightly
def test_the_triton_kernels_compile_for_gpus(tmp_path: Path) -> None:
    done = run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("compiled") == NUM_COMPILED
