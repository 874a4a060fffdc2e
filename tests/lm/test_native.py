"""The CPU's kernels against the same equations in PyTorch's operations, in double precision."""

import ctypes
import fcntl
import math
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention import split_heads
from lm.layers import RMSNorm, add_norm
from lm.native import kernels as ops
from lm.native import operators
from lm.positions import rotary_tables
from lm.progress import progress_noted
from lm.sampling import Choice

pytestmark = pytest.mark.skipif(ops.library() is None, reason="needs a C++ compiler")

TYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 2e-6}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-3}}


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, **CLOSE[found.dtype])


def differentiated(f: Callable[..., Tensor], gradient: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Returns the value in double precision, and the gradients of the inputs."""
    wide = [x.double().requires_grad_() for x in inputs]
    y = f(*wide)
    return y.detach(), *torch.autograd.grad(y, wide, gradient.double())


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


# Odd sizes leave a remainder after the vectors; the last size is large enough for threads.
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 7, 33), (700, 400)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("out", TYPES)
def test_rms_norm_and_its_gradients(shape: tuple[int, ...], dtype: torch.dtype, out: torch.dtype) -> None:
    x, gradient = drawn(*shape, dtype=dtype) * 3, drawn(*shape, dtype=out, seed=1)
    weight = drawn(shape[-1], dtype=torch.float32, seed=2)
    y, inverse = ops.rms_norm(x, weight, 1e-5, out)
    x_gradient, weight_gradient = ops.rms_norm_backward(gradient, x, weight, inverse)
    expected = differentiated(norm, gradient, x, weight)
    assert (y.dtype, x_gradient.dtype, weight_gradient.dtype) == (out, dtype, torch.float32)
    check(y, expected[0])
    check(x_gradient, expected[1])
    torch.testing.assert_close(weight_gradient.double(), expected[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 5), (2, 7, 33), (700, 400)])
@pytest.mark.parametrize(
    ("stream", "narrow"), [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2]
)
def test_a_stream_and_its_norm_are_what_they_are_apart(
    shape: tuple[int, ...], stream: torch.dtype, narrow: torch.dtype
) -> None:
    """Bit for bit: the sum, its norm, and the gradients through both."""

    def apart(x: Tensor, branch: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        total = x + branch
        return total, norm(total)

    def passed(add: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        norm = RMSNorm(shape[-1], 1e-5)
        x, branch = (drawn(*shape, dtype=dtype, seed=1).requires_grad_() for dtype in (stream, narrow))
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow == torch.bfloat16):
            found = add(x, branch, norm)
        gradients = [drawn(*shape, dtype=part.dtype, seed=2) for part in found]
        return [*found, *torch.autograd.grad(found, [x, branch, norm.weight], gradients)]

    assert all(torch.equal(a, b) for a, b in zip(passed(add_norm), passed(apart), strict=True))


@pytest.mark.parametrize("shape", [(1, 2), (3, 10), (2, 7, 66), (700, 800)])
@pytest.mark.parametrize("dtype", TYPES)
def test_swiglu_and_its_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = drawn(*shape, dtype=dtype) * 4
    gradient = drawn(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=1)
    expected = differentiated(swiglu, gradient, x)
    check(ops.swiglu(x), expected[0])
    check(ops.swiglu_backward(gradient, x), expected[1])


def test_swiglu_of_gates_beyond_the_range_of_exponentials() -> None:
    gates = torch.tensor([-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30, -math.inf])
    x = torch.stack([gates, torch.ones(8)], dim=-1)
    torch.testing.assert_close(ops.swiglu(x)[:7, 0], F.silu(gates)[:7])
    assert not ops.swiglu(x)[7].isfinite()
    assert ops.swiglu(torch.tensor([[math.nan, 1.0], [1.0, math.nan]])).isnan().all()
    gradient = ops.swiglu_backward(torch.ones(7, 1), x[:7])
    torch.testing.assert_close(gradient, differentiated(swiglu, torch.ones(7, 1), x[:7])[1].float(), equal_nan=True)


def test_exponentials_are_right_to_the_last_places() -> None:
    """Two tokens whose logits differ by d: the log-probability of the first is -ln(1 + e^-d)."""
    differences = torch.linspace(-80, 80, 20_001)
    logits = torch.stack([torch.zeros_like(differences), -differences], dim=-1)
    found, _ = ops.token_logprobs(logits, torch.zeros(len(logits), dtype=torch.int64), 1.0)
    torch.testing.assert_close(found.double(), -F.softplus(-differences.double()), rtol=3e-7, atol=1.3e-7)


@pytest.mark.parametrize("sizes", [(1, 1, 2, 2, 2), (2, 5, 4, 2, 6), (3, 17, 6, 3, 64)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("is_rotary", [True, False])
def test_heads_and_their_gradient(sizes: tuple[int, ...], dtype: torch.dtype, is_rotary: bool) -> None:
    B, T, N, G, H = sizes
    qkv = drawn(B, T, (N + 2 * G) * H, dtype=dtype).requires_grad_()
    positions = torch.arange(T).expand(B, T) + torch.arange(B)[:, None]
    tables = rotary_tables(positions, H, 10_000.0, None, dtype) if is_rotary else None
    found = split_heads(qkv, tables, N, G)
    wide = qkv.detach().double().requires_grad_()
    expected = split_heads(wide, None if tables is None else (tables[0].double(), tables[1].double()), N, G)
    gradients = [drawn(*part.shape, dtype=dtype, seed=seed) for seed, part in enumerate(found)]
    for part, wanted in zip(found, expected, strict=True):
        check(part, wanted)
    (back,) = torch.autograd.grad(found, qkv, gradients)
    (wanted,) = torch.autograd.grad(expected, wide, [gradient.double() for gradient in gradients])
    check(back, wanted)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 1000)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_log_probabilities_and_their_gradient(shape: tuple[int, int], dtype: torch.dtype, temperature: float) -> None:
    logits, gradient = drawn(*shape, dtype=dtype) * 5, drawn(shape[0], dtype=torch.float32, seed=1)
    tokens = torch.arange(shape[0]) % shape[1]
    logprobs, totals = ops.token_logprobs(logits, tokens, temperature)

    def naive(x: Tensor) -> Tensor:
        return torch.log_softmax(x / temperature, dim=-1).gather(-1, tokens[:, None])[:, 0]

    expected = differentiated(naive, gradient, logits)
    check(logprobs, expected[0])
    check(ops.token_logprobs_backward(gradient, logits, tokens, totals, temperature), expected[1])


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    for token in (-1, 5):
        with pytest.raises(IndexError, match="0 to 4"):
            ops.token_logprobs(torch.zeros(1, 5), torch.tensor([token]), 1.0)
    assert len(ops.token_logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 1.0)[0]) == 0


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 300])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_invert_the_cumulative_sum(num_tokens: int, dtype: torch.dtype, temperature: float) -> None:
    logits = drawn(400, num_tokens, dtype=dtype) * 2
    uniforms = torch.rand(400, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = ops.sample(logits, uniforms, temperature)
    wide = torch.log_softmax(logits.double() / temperature, dim=-1)
    expected = torch.searchsorted(wide.exp().cumsum(dim=-1), uniforms.double()[:, None], right=True)[:, 0]
    assert torch.equal(tokens, expected.clamp(max=num_tokens - 1))
    check(logprobs, wide.gather(-1, tokens[:, None])[:, 0])
    twin, _ = Choice(temperature, top_k=num_tokens + 1).draw(logits, uniforms)  # top_k uses PyTorch's code
    assert torch.equal(tokens, twin)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_a_token_without_probability_is_never_drawn(uniform: float) -> None:
    for possible in ([0], [70], [129], [3, 64, 100], [63, 128]):
        logits = torch.full((1, 130), -math.inf)
        logits[0, possible] = 0.0
        token, logprob = ops.sample(logits, torch.tensor([uniform]), 1.0)
        assert int(token) == possible[int(uniform * len(possible))]
        assert float(logprob) == pytest.approx(-math.log(len(possible)))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, weight = drawn(1200, 256, dtype=torch.float32), drawn(256, dtype=torch.float32)

    def everything() -> list[Tensor]:
        y, inverse = ops.rms_norm(x, weight, 1e-5, torch.float32)
        logprobs = ops.token_logprobs(x, torch.arange(1200) % 256, 1.0)
        return [
            y, *ops.add_rms_norm_backward(x, y, y, weight, inverse), ops.swiglu(x), *logprobs,
            *ops.sample(x, x[:, 0].sigmoid().contiguous(), 1.0),
        ]  # fmt: skip

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = everything()
        torch.set_num_threads(3)
        together = everything()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_other_types_and_layouts_take_pytorch_s_way() -> None:
    x = drawn(4, 6, dtype=torch.float32)
    assert operators.runs(x)
    assert not operators.runs(x.T)
    assert not operators.runs(x.double())
    assert not operators.runs(x.to("meta"))
    norm_of_six = RMSNorm(6, 1e-5)
    torch.testing.assert_close(norm_of_six(x.T.contiguous().T), norm_of_six(x))


@pytest.mark.long
def test_compiling_is_done_once_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXXFLAGS", "-O0")  # in a fifth of the time
    made = ops.compiled(tmp_path / "kept")
    assert ctypes.CDLL(str(made)).rms_norm
    assert sorted((tmp_path / "kept").iterdir()) == [made, tmp_path / "kept" / "kernels.lock"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert ops.compiled(tmp_path / "kept") == made
    with pytest.raises(FileNotFoundError, match="no-such-compiler"):
        ops.compiled(tmp_path / "other")


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_the_work_goes_on_and_says_why(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="slower"):
        assert ops.library.__wrapped__() is None
    monkeypatch.setattr(operators, "library", lambda: None)
    assert not operators.runs(torch.ones(2))
    torch.testing.assert_close(RMSNorm(2, 0.0)(torch.ones(1, 2)), torch.ones(1, 2))


def test_without_a_home_the_work_goes_on_and_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may have neither HOME nor an entry in passwd."""

    def no_entry(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    with pytest.raises(RuntimeError):
        Path.home()
    with pytest.warns(RuntimeWarning, match=r"slower: there is no home folder .* set HOME or XDG_CACHE_HOME"):
        assert ops.library.__wrapped__() is None


COMPILER = """#!/bin/sh
echo start >> {folder}/log
until [ -e {folder}/gate ]; do sleep 0.01; done
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo made > "$2"; shift; done
echo end >> {folder}/log
"""
COMPILES = """
import sys; from pathlib import Path; from lm.native.kernels import compiled
print("ready", flush=True); compiled(Path(sys.argv[1]))
"""
NUM_STARTS = len(ops.SOURCES) + 1  # and the linker


class Compiler:
    """Stands in for a compiler: logs its starts and ends, and ends once `open` was called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "compiler"
        self.path.write_text(COMPILER.format(folder=folder))
        self.path.chmod(0o755)

    def open(self) -> None:
        (self.folder / "gate").touch()

    @property
    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().split() if path.exists() else []

    def compiling(self, cache: Path) -> "subprocess.Popen[bytes]":
        """Starts another process, which wants the kernels as soon as its first line can be read."""
        return subprocess.Popen([sys.executable, "-c", COMPILES, str(cache)], stdout=subprocess.PIPE)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ops, "library", ops.library.__wrapped__)  # this process already has the real kernels
    return made


def until(is_so: Callable[[], bool]) -> None:
    """Waits for another process or thread; the test's own time limit ends a wait in vain."""
    while not is_so():
        time.sleep(0.01)


def test_processes_of_a_host_compile_once(compiler: Compiler, tmp_path: Path) -> None:
    processes = [compiler.compiling(tmp_path / "cache") for _ in range(2)]
    assert [process.stdout.readline() for process in processes if process.stdout] == [b"ready\n"] * 2
    until(lambda: len(compiler.log) >= len(ops.SOURCES))
    compiler.open()
    assert [process.wait() for process in processes] == [0, 0]
    assert compiler.log.count("start") == NUM_STARTS


def test_what_a_killed_process_leaves_is_removed_and_does_no_harm(compiler: Compiler, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = compiler.compiling(cache)
    until(lambda: len(compiler.log) == len(ops.SOURCES))
    first.kill()
    first.wait()
    assert (cache / "unfinished").is_dir()
    second = compiler.compiling(cache)
    compiler.open()  # the first one's compilers still run, and write into the same folder until they end
    assert second.wait() == 0
    assert compiler.log[: 2 * len(ops.SOURCES)].count("end") == len(ops.SOURCES), "two compiled at once"
    assert compiler.log.count("start") == len(ops.SOURCES) + NUM_STARTS
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".so"]


def test_progress_is_noted_while_this_or_another_process_compiles(compiler: Compiler, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    with (cache / "kernels.lock").open("w") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before, done = progress_noted(), pool.submit(ops.compiled, cache)
        until(lambda: progress_noted() > before + 1)  # waits
        assert not compiler.log
        fcntl.flock(lock, fcntl.LOCK_UN)
        until(lambda: len(compiler.log) == len(ops.SOURCES))
        before = progress_noted()
        until(lambda: progress_noted() > before)  # compiles
        compiler.open()
        assert done.result().exists()


def test_a_host_says_whether_it_has_kernels_and_why_not(compiler: Compiler) -> None:
    assert ops.host_without_kernels() == socket.gethostname()
    compiler.open()
    assert ops.prepare().startswith(f"{socket.gethostname()}: lm/native was not compiled, so work on a CPU is slower:")
    assert ops.host_without_kernels() == ""
