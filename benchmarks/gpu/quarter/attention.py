"""The step `packed_attention`: the two operators with which PyTorch attends over packed rows.

Shape letters: L packed tokens, N heads, G key-value heads, H head dim.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.quarter.context import Context, device_seconds
from lm.attention import flash_varlen

# Query heads, key-value heads and head dim of the models that are measured.
HEADS = {"0.5B": (14, 2, 64), "8B": (32, 8, 128)}
TOKENS, SEQUENCE = 16_384, 256  # in a pass, and in each of its sequences
REPEATS = 30
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def packed_attention(ctx: Context) -> None:
    """Notes per operator the CPU's microseconds until a call has returned, the GPU's for forward and backward, and how
    far the results of the two are apart, as a share of the norm.
    """
    number, sequence = (64, 16) if ctx.tiny else (TOKENS, SEQUENCE)
    starts = torch.arange(0, number + 1, sequence, dtype=torch.int32, device=ctx.device)
    for name, (N, G, H) in HEADS.items():
        shapes = [(number, heads, H) for heads in (N, G, G)]
        inputs = [torch.randn(shape, device=ctx.device, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
        found = dict[str, Tensor]()
        for operator, attend in operators(starts, sequence, N // G).items():
            with ctx.attempt(f"{name}_{operator}"):
                found[operator] = attend(*inputs).detach()
                measure(ctx, f"{name}_{operator}", attend, inputs)
        if len(found) == 2:
            ours, other = (tensor.float() for tensor in found.values())
            ctx.note(**{f"{name}_apart": float((ours - other).norm() / ours.norm())})


def operators(starts: Tensor, longest: int, group: int) -> dict[str, Attention]:
    """Returns causal attention by the C++ operator, as the learners call it, and by PyTorch's `varlen_attn` above it.

    A device without them has one of plain PyTorch instead, for rehearsals.
    """
    if starts.device.type != "cuda":
        return {"plain": lambda q, k, v: plain(q, k, v, longest)}
    from torch.nn.attention.varlen import varlen_attn

    def custom(q_LNH: Tensor, k_LGH: Tensor, v_LGH: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k_LGH, v_LGH))
        y = varlen_attn(q_LNH, k, v, starts, starts, longest, longest, window_size=(-1, 0))
        assert isinstance(y, Tensor)
        return y

    def native(q_LNH: Tensor, k_LGH: Tensor, v_LGH: Tensor) -> Tensor:
        return flash_varlen(q_LNH, k_LGH, v_LGH, starts, longest, (-1, 0))

    return {"varlen_attn": custom, "aten": native}


def plain(q_LNH: Tensor, k_LGH: Tensor, v_LGH: Tensor, longest: int) -> Tensor:
    q, k, v = (x.unflatten(0, (-1, longest)).transpose(1, 2) for x in (q_LNH, k_LGH, v_LGH))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(0, 1)


def measure(ctx: Context, name: str, attend: Attention, inputs: list[Tensor]) -> None:
    gradient = torch.ones_like(inputs[0])

    def both() -> None:
        torch.autograd.backward(attend(*inputs), gradient)

    both()
    started = ctx.now()
    for _ in range(REPEATS):
        attend(*inputs)
    ctx.note(**{f"{name}_enqueued_us": 1e6 * (time.perf_counter() - started) / REPEATS})
    ctx.now()
    if ctx.on_gpu:
        forward = device_seconds(lambda: attend(*inputs), REPEATS)
        ctx.note(
            **{
                f"{name}_forward_us": 1e6 * forward,
                f"{name}_backward_us": 1e6 * (device_seconds(both, REPEATS) - forward),
            }
        )
