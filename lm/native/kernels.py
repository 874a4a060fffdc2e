"""The C++ kernels as functions of tensors, compiled for this machine's CPU when first needed and cached on disk.

CXX names the compiler, and the flags in CXXFLAGS are added to Heed's own.
`lm.native.operators` registers the functions with PyTorch. They take contiguous tensors in CPU memory. What each
computes is defined by its twin in plain PyTorch, where the model uses it.

Shape letters: R rows, D width, M MLP width, B batch, T tokens, S keys, N heads, G key-value heads, H head dim,
V vocabulary, F outputs of a product.
"""

import ctypes
import fcntl
import functools
import hashlib
import math
import os
import platform
import shlex
import shutil
import socket
import subprocess
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from ctypes import c_bool, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.progress import note_progress

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / f"{name}.cpp" for name in ("kernels", "attention", "weight_gradient", "decoder"))
HEADERS = tuple(FOLDER / f"{name}.h" for name in ("numbers", "vectors", "tiles", "pack", "decoder", "decode_attention"))
# Sums are vectorised only where the source says so; nothing is assumed about infinities and NaN.
FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fPIC", *(["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []),
)  # fmt: skip
COMPILERS = ("c++", "g++", "clang++")
MOST_NOTES = 600  # one per second; a compiler that takes longer than this counts as stuck

# What each C function takes: p pointer, b bool (whether the pointer before it is bf16), i int64, f float.
# `tests/lm/test_native.py` compares this with the declarations in C++.
ARGUMENTS = {
    "rms_norm": "pbppbppbpiif",
    "rms_norm_backward": "pbpbpbpppppii",
    "swiglu": "pbpii",
    "swiglu_backward": "ppbpii",
    "split_heads": "pbpppppiiiiib",
    "token_logprobs": "pbpppiif",
    "token_logprobs_backward": "ppbpppiif",
    "sample": "pbpfppii",
    "weight_gradient": "pppiii",
    "dropout": "pbppiiif",
    "attend": "pbpppippiiiiiif",
    "attend_backward": "pbppppppipppiiiiiif",
}
_KINDS = {"p": c_void_p, "b": c_bool, "i": c_int64, "f": c_float}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the kernels. If they cannot be compiled, warns why and returns None; plain PyTorch is used then."""
    try:
        return ctypes.CDLL(str(compiled(cache_folder())))
    except (OSError, subprocess.CalledProcessError) as error:
        cause = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        warnings.warn(f"lm/native was not compiled, so work on a CPU is slower: {cause}", RuntimeWarning, stacklevel=2)
        return None


def cache_folder() -> Path:
    """Returns where compiled kernels are cached: $XDG_CACHE_HOME/heed, by default ~/.cache/heed.

    Raises: FileNotFoundError without either, for example for a user without HOME and without an entry in passwd.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "heed"
    try:
        return Path.home() / ".cache" / "heed"
    except RuntimeError:
        raise FileNotFoundError("there is no home folder to keep it in; set HOME or XDG_CACHE_HOME") from None


def host_without_kernels() -> str:
    """Returns this host's name if its kernels are still to be compiled; "" otherwise."""
    try:
        return "" if _target(cache_folder()).exists() else socket.gethostname()
    except FileNotFoundError:  # nothing can be kept; `library` says so
        return ""


def prepare() -> str:
    """Load the kernels, and compile them if needed. Returns a line with the host and why they are missing, or ""."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        library()
    return "".join(f"{socket.gethostname()}: {warning.message}" for warning in said)


def compiled(folder: Path) -> Path:
    """Returns the shared library in `folder` for these sources, flags and CPU, and compiles it unless it exists.

    One process compiles, the others wait for it; both note progress. What a killed one leaves, the next one removes.
    Raises: OSError without a compiler or a folder to write to; CalledProcessError with the compiler's output.
    """
    target = _target(folder)
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor() as pool:
            making = pool.submit(_make, target)
            for _ in range(MOST_NOTES):
                note_progress()
                if wait([making], timeout=1.0).done:
                    break
            making.result()
    return target


def _target(folder: Path) -> Path:
    texts = [path.read_text(encoding="utf-8") for path in (*HEADERS, *SOURCES)]
    key = hashlib.sha256("\0".join([*texts, *_flags(), _cpu()]).encode()).hexdigest()
    return folder / f"kernels-{key[:16]}.so"


def _flags() -> list[str]:
    return [*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]


def _make(target: Path) -> None:
    """Compile under a lock, which the compilers inherit: they may outlive this process, and write until they end."""
    own = target.with_name("unfinished")

    def compile_(arguments: Sequence[str], made: Path) -> None:
        command = [_compiler(), *_flags(), *arguments, "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, pass_fds=[lock.fileno()])

    with target.with_name("kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        try:
            objects = [own / f"{source.stem}.o" for source in SOURCES]
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda source, made: compile_(["-c", str(source)], made), SOURCES, objects))
            compile_(["-shared", *map(str, objects)], own / target.name)
            (own / target.name).replace(target)
        finally:
            shutil.rmtree(own)


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


def _call(name: str, *arguments: Any) -> None:
    function = getattr(library(), name)
    if function.argtypes is None:
        function.argtypes, function.restype = [_KINDS[letter] for letter in ARGUMENTS[name]], None
    function(*arguments)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _is_bf16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x²) + eps) · weight as `dtype`, and 1 / sqrt(...) [R] in fp32; any leading dimensions work."""
    return _norm(x, None, weight_D, eps, x, dtype)


def add_rms_norm(x: Tensor, branch: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x + branch in x's dtype, and what `rms_norm` returns for that sum in the branch's dtype."""
    total = torch.empty_like(x)
    return total, *_norm(x, branch, weight_D, eps, total, branch.dtype)


def _norm(
    x: Tensor, branch: Tensor | None, weight_D: Tensor, eps: float, total: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    D = x.shape[-1]
    y, inverse_R = torch.empty_like(x, dtype=dtype), torch.empty(x.numel() // D)
    _call(
        "rms_norm", x.data_ptr(), _is_bf16(x), _address(branch), weight_D.data_ptr(), _is_bf16(weight_D),
        total.data_ptr(), y.data_ptr(), _is_bf16(y), inverse_R.data_ptr(), len(inverse_R), D, eps,
    )  # fmt: skip
    return y, inverse_R


def rms_norm_backward(gradient: Tensor, x: Tensor, weight_D: Tensor, inverse_R: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x, in its dtype, and of the weight, in fp32."""
    x_gradient, _, weight_gradient_D = _norm_backward(gradient, None, x, weight_D, inverse_R, has_branch=False)
    return x_gradient, weight_gradient_D


def add_rms_norm_backward(
    gradient: Tensor, carried: Tensor | None, total: Tensor, weight_D: Tensor, inverse_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x and of the branch, each in its dtype, and of the weight, in fp32.

    `carried` is the gradient that reaches the sum x + branch other than through its norm.
    """
    x_gradient, branch_gradient, weight_gradient_D = _norm_backward(
        gradient, carried, total, weight_D, inverse_R, has_branch=True
    )
    assert branch_gradient is not None
    return x_gradient, branch_gradient, weight_gradient_D


def _norm_backward(
    gradient: Tensor, carried: Tensor | None, x: Tensor, weight_D: Tensor, inverse_R: Tensor, *, has_branch: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    x_gradient, weight_gradient_D = torch.empty_like(x), torch.empty(weight_D.shape)
    branch_gradient = torch.empty_like(gradient) if has_branch else None
    _call(
        "rms_norm_backward", gradient.data_ptr(), _is_bf16(gradient), x.data_ptr(), _is_bf16(x), weight_D.data_ptr(),
        _is_bf16(weight_D), inverse_R.data_ptr(), _address(carried), x_gradient.data_ptr(), _address(branch_gradient),
        weight_gradient_D.data_ptr(), len(inverse_R), x.shape[-1],
    )  # fmt: skip
    return x_gradient, branch_gradient, weight_gradient_D


def swiglu(x: Tensor) -> Tensor:
    """silu(first half) · second half of the last dimension."""
    M = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], M)
    _call("swiglu", x.data_ptr(), _is_bf16(x), y.data_ptr(), x.numel() // (2 * M), M)
    return y


def swiglu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    M = x.shape[-1] // 2
    x_gradient = torch.empty_like(x)
    _call(
        "swiglu_backward",
        gradient.data_ptr(),
        x.data_ptr(),
        _is_bf16(x),
        x_gradient.data_ptr(),
        x.numel() // (2 * M),
        M,
    )
    return x_gradient


def dropout(x: Tensor, keys: Tensor, threshold: int, scale: float) -> Tensor:
    """Returns x · scale, with 0 where the 16 bits that a row's key draws for a column are below the threshold."""
    y, D = torch.empty_like(x), x.shape[-1]
    _call(
        "dropout", x.data_ptr(), _is_bf16(x), keys.data_ptr(), y.data_ptr(), keys.numel(), D, threshold, scale
    )  # fmt: skip
    return y


def split_heads(
    qkv_BTE: Tensor, cos: Tensor | None, sin: Tensor | None, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split one product's output into q [B, N, T, H], k and v [B, G, T, H]; rotate q and k if there are tables."""
    B, T, E = qkv_BTE.shape
    N, G = num_heads, num_kv_heads
    H = E // (N + 2 * G)
    q, k, v = qkv_BTE.new_empty(B, N, T, H), qkv_BTE.new_empty(B, G, T, H), qkv_BTE.new_empty(B, G, T, H)
    _split(qkv_BTE, cos, sin, q, k, v, back=False)
    return q, k, v


def join_heads(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Returns the gradient of `split_heads`' input from those of its results, with the transposed rotation."""
    B, N, T, H = q.shape
    qkv_BTE = q.new_empty(B, T, (N + 2 * k.shape[1]) * H)
    _split(qkv_BTE, cos, sin, q, k, v, back=True)
    return qkv_BTE


def _split(qkv: Tensor, cos: Tensor | None, sin: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *, back: bool) -> None:
    B, N, T, H = q.shape
    _call(
        "split_heads", qkv.data_ptr(), _is_bf16(qkv), _address(cos), _address(sin), q.data_ptr(), k.data_ptr(),
        v.data_ptr(), B, T, N, k.shape[1], H, back,
    )  # fmt: skip


def weight_gradient(gradient_RF: Tensor, x_RD: Tensor) -> Tensor:
    """gradientᵀ x of contiguous bf16 numbers, [F, D] in fp32."""
    (R, F), D = gradient_RF.shape, x_RD.shape[1]
    if not R:
        return torch.zeros(F, D)
    out_FD = torch.empty(F, D)
    _call("weight_gradient", gradient_RF.data_ptr(), x_RD.data_ptr(), out_FD.data_ptr(), R, F, D)
    return out_FD


def fp32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b in fp32, by oneDNN, which refuses empty operands."""
    if not (x.numel() and weight.numel()):
        return torch.nn.functional.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def attend(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask_BTS: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax(Q Kᵀ / √H) V as [B, T, N, H], and each query's ln Σ exp(scores) [B, N, T] in fp32; all contiguous.

    `mask_BTS` (or [1, T, S]) True = may attend; None = causal, T = S. Scores and their softmax are fp32.
    """
    B, N, T, H = q_BNTH.shape
    y_BTNH, totals_BNT = q_BNTH.new_empty(B, T, N, H), torch.empty(B, N, T)
    _call(
        "attend", q_BNTH.data_ptr(), _is_bf16(q_BNTH), k_BGSH.data_ptr(), v_BGSH.data_ptr(), *_mask(mask_BTS),
        y_BTNH.data_ptr(), totals_BNT.data_ptr(), *_attention_sizes(q_BNTH, k_BGSH),
    )  # fmt: skip
    return y_BTNH, totals_BNT


def attend_backward(
    gradient_BTNH: Tensor,
    q_BNTH: Tensor,
    k_BGSH: Tensor,
    v_BGSH: Tensor,
    y_BTNH: Tensor,
    totals_BNT: Tensor,
    mask_BTS: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, with the same layouts."""
    gradients = torch.empty_like(q_BNTH), torch.empty_like(k_BGSH), torch.empty_like(v_BGSH)
    _call(
        "attend_backward", gradient_BTNH.data_ptr(), _is_bf16(q_BNTH), q_BNTH.data_ptr(), k_BGSH.data_ptr(),
        v_BGSH.data_ptr(), y_BTNH.data_ptr(), totals_BNT.data_ptr(), *_mask(mask_BTS),
        *(x.data_ptr() for x in gradients), *_attention_sizes(q_BNTH, k_BGSH),
    )  # fmt: skip
    return gradients


def _mask(mask_BTS: Tensor | None) -> tuple[int | None, int]:
    """Returns the mask's address, and the number of elements from one row's mask to the next (0: they share one)."""
    if mask_BTS is None:
        return None, 0
    return mask_BTS.data_ptr(), mask_BTS[0].numel() if len(mask_BTS) > 1 else 0


def _attention_sizes(q_BNTH: Tensor, k_BGSH: Tensor) -> tuple[int | float, ...]:
    B, N, T, H = q_BNTH.shape
    G, S = k_BGSH.shape[1:3]
    return B, T, S, N, G, H, 1 / math.sqrt(H)


def token_logprobs(logits_RV: Tensor, tokens_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at the tokens, and ln Σ exp(logits / temperature): [R] each, fp32.

    Raises: IndexError for a token outside the vocabulary.
    """
    R, V = logits_RV.shape
    if R and not 0 <= int(tokens_R.min()) <= int(tokens_R.max()) < V:
        raise IndexError(f"tokens run from {int(tokens_R.min())} to {int(tokens_R.max())}; 0 to {V - 1} were expected")
    logprobs_R, totals_R = torch.empty(R), torch.empty(R)
    _call(
        "token_logprobs", logits_RV.data_ptr(), _is_bf16(logits_RV), tokens_R.data_ptr(), logprobs_R.data_ptr(),
        totals_R.data_ptr(), R, V, 1 / temperature,
    )  # fmt: skip
    return logprobs_R, totals_R


def token_logprobs_backward(
    gradient_R: Tensor, logits_RV: Tensor, tokens_R: Tensor, totals_R: Tensor, temperature: float
) -> Tensor:
    R, V = logits_RV.shape
    logits_gradient_RV = torch.empty_like(logits_RV)
    _call(
        "token_logprobs_backward", gradient_R.data_ptr(), logits_RV.data_ptr(), _is_bf16(logits_RV),
        tokens_R.data_ptr(), totals_R.data_ptr(), logits_gradient_RV.data_ptr(), R, V, 1 / temperature,
    )  # fmt: skip
    return logits_gradient_RV


def sample(logits_RV: Tensor, uniforms_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw a token of softmax(logits / temperature) per uniform number, and return its log-probability: [R] each."""
    R, V = logits_RV.shape
    tokens_R, logprobs_R = torch.empty(R, dtype=torch.int64), torch.empty(R)
    _call(
        "sample", logits_RV.data_ptr(), _is_bf16(logits_RV), uniforms_R.data_ptr(), 1 / temperature,
        tokens_R.data_ptr(), logprobs_R.data_ptr(), R, V,
    )  # fmt: skip
    return tokens_R, logprobs_R
