"""Where a GPU's time goes, by kind of kernel; and the step `attention`: the rate of each attention kernel.

Shape letters: B batch, T query tokens, S key tokens, N heads, G key-value heads, H head dim.
"""

import math
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.first_quarter.context import Context, device_seconds
from lm.attention import Mask, attend, packed_mask, scores_bias

# Parts of kernels' names; the first kind that matches counts.
KINDS = (
    ("attention", ("fmha", "flash", "_attend_kernel", "_merge_kernel")),
    ("product", ("gemm", "cutlass", "nvjet", "cublas", "wgmma", "splitk")),
    ("attention", ("attention",)),
    ("optimizer", ("adam", "multi_tensor", "l2norm", "foreach")),
    ("norm", ("norm", "rms")),
    ("sort, scan, search", ("scan", "search", "sort", "topk", "cumsum")),
    ("index", ("index", "gather", "scatter", "embedding")),
    ("softmax, logsumexp", ("softmax", "logsumexp")),
    ("copy, fill, cast", ("copy", "memcpy", "memset", "fill", "cat")),
    ("reduce", ("reduce",)),
    ("triton", ("triton",)),
)
NUM_LONGEST = 14  # kernels that are noted by name
# Query heads, key-value heads and head dim of the models that are measured.
HEADS = {"0.5B": (14, 2, 64), "8B": (32, 8, 128), "1.3B": (16, 16, 128)}
NUM_SEQUENCES = 4  # in a packed row


def kind_of(kernel: str) -> str:
    low = kernel.lower()
    return next((kind for kind, words in KINDS if any(word in low for word in words)), "elementwise")


def note_profile(ctx: Context, work: Callable[[], object], prefix: str) -> None:
    """Notes the GPU's time by kind of kernel, the number of kernels, the share of busy time, and the longest kernels.

    Without a GPU there is nothing to note.
    """
    if ctx.on_gpu:
        with ctx.attempt(f"{prefix}_profile"):
            _profile(ctx, work, prefix)


def _profile(ctx: Context, work: Callable[[], object], prefix: str) -> None:
    ctx.now()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        started = time.perf_counter()
        work()
        taken = ctx.now() - started
    kernels = [event for event in found.events() or [] if is_kernel(event)]
    kinds, names = Counter[str](), Counter[str]()  # milliseconds
    for event in kernels:
        milliseconds = event.time_range.elapsed_us() / 1000
        kinds[kind_of(event.name)] += milliseconds
        names[event.name[:90]] += milliseconds
    figures = {
        "kernels": len(kernels),
        "busy_share": sum(kinds.values()) / 1000 / taken,
        "ms_by_kind": dict(kinds.most_common()),
        "longest_ms": dict(names.most_common(NUM_LONGEST)),
    }
    ctx.note(**{f"{prefix}_{name}": value for name, value in figures.items()})


def is_kernel(event: FunctionEvent) -> bool:
    return event.device_type == DeviceType.CUDA


def attention(ctx: Context) -> None:
    """Notes the FLOP/s of attention over whole and packed rows, and the bytes per second of a decoding step."""
    B, T = (2, 32) if ctx.tiny else (8, 1024)
    rows = torch.arange(NUM_SEQUENCES, device="cpu").repeat_interleave(T // NUM_SEQUENCES).expand(B, T).contiguous()
    for name, heads in HEADS.items():
        with ctx.attempt(f"{name}_causal"):
            _measure_rows(ctx, f"{name}_causal", heads, (B, T), None, 0.5)
        if ctx.on_gpu:
            with ctx.attempt(f"{name}_packed"):
                mask = packed_mask(rows, ctx.device, causal=True)
                _measure_rows(ctx, f"{name}_packed", heads, (B, T), mask, 0.5 / NUM_SEQUENCES)
        with ctx.attempt(f"{name}_decode"), torch.inference_mode():
            _measure_decoding(ctx, f"{name}_decode", heads)


def _measure_rows(
    ctx: Context, name: str, heads: tuple[int, int, int], shape: tuple[int, int], mask: Mask, seen: float
) -> None:
    """Notes the rates of a kernel over rows. `seen` is the share of all pairs of tokens that the mask leaves."""
    (N, G, H), (B, T) = heads, shape
    q_BNTH, k_BGTH, v_BGTH = (
        torch.randn(B, number, T, H, device=ctx.device, dtype=torch.bfloat16).requires_grad_() for number in (N, G, G)
    )
    gradient_BNTH = torch.randn_like(attend(q_BNTH, k_BGTH, v_BGTH, mask))
    if not ctx.on_gpu:
        attend(q_BNTH, k_BGTH, v_BGTH, mask).backward(gradient_BNTH)
        return
    forward = device_seconds(lambda: attend(q_BNTH, k_BGTH, v_BGTH, mask), 20)
    both = device_seconds(lambda: attend(q_BNTH, k_BGTH, v_BGTH, mask).backward(gradient_BNTH), 20)
    tflops = 4 * B * N * H * T * T * seen / 1e12
    ctx.note(
        **{
            f"{name}_forward_tflops": tflops / forward,
            f"{name}_backward_tflops": 2.5 * tflops / (both - forward),  # five products for the forward pass's two
        }
    )


def _measure_decoding(ctx: Context, name: str, heads: tuple[int, int, int]) -> None:
    """Notes bytes of keys and values per second, for one query per sequence over a cache; also with two products."""
    (N, G, H), (B, S) = heads, (2, 32) if ctx.tiny else (128, 1024)
    q_BN1H = torch.randn(B, N, 1, H, device=ctx.device, dtype=torch.bfloat16)
    cache = torch.randn(2, B, G, S + 64, H, device=ctx.device, dtype=torch.bfloat16)
    k_BGSH, v_BGSH = cache[:, :, :, :S]
    mask_B1S = torch.ones(B, 1, S, dtype=torch.bool, device=ctx.device)
    if not ctx.on_gpu:
        attend(q_BN1H, k_BGSH, v_BGSH, mask_B1S)
        return
    bias_B1S = scores_bias(mask_B1S, q_BN1H)
    num_bytes = 2 * 2 * k_BGSH.numel()
    ctx.note(
        **{f"{name}_bytes_per_second": num_bytes / device_seconds(lambda: attend(q_BN1H, k_BGSH, v_BGSH, bias_B1S), 30)}
    )
    rows_BGNH = q_BN1H.reshape(B, G, N // G, H)
    seconds = device_seconds(lambda: _two_products(rows_BGNH, k_BGSH, v_BGSH, bias_B1S[:, None]), 30)
    ctx.note(**{f"{name}_two_products": num_bytes / seconds})
    note_profile(ctx, lambda: attend(q_BN1H, k_BGSH, v_BGSH, bias_B1S), name)


def _two_products(q_BGNH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, bias_B11S: Tensor) -> Tensor:
    scores_BGNS = q_BGNH @ k_BGSH.transpose(-1, -2) / math.sqrt(q_BGNH.shape[-1]) + bias_B11S
    return scores_BGNS.softmax(-1) @ v_BGSH
