"""The layers of a transformer other than attention: linear maps, the head, norms, the MLP.

Functions with more than one implementation are `Replaceable`: the code here is the equation in plain PyTorch, and
`lm.native.install` replaces it with kernels on CPUs and GPUs.

Shape letters: B batch, T tokens, D model width, M MLP width, C positions, V vocabulary, P padded vocabulary,
E experts, S pairs of a token and its expert, F outputs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from lm.config import ModelConfig

ALIGNED_ROWS = 64  # a head's row multiple on a GPU: 128 bytes in bf16
CHUNK_LOGITS = 2**28  # of one chunk of positions on a GPU: half a GB in bf16
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Replaceable(Generic[Arguments, Result]):
    """A function in plain PyTorch, and other implementations for the arguments that they accept.

    A replacement returns the same numbers up to rounding. `lm.native.install` adds them.
    """

    def __init__(self, plain: Callable[Arguments, Result]) -> None:
        self.plain = plain
        self._replacements: list[tuple[Callable[Arguments, bool], Callable[Arguments, Result]]] = []
        update_wrapper(self, plain)

    def replace_where(self, accepts: Callable[Arguments, bool], implementation: Callable[Arguments, Result]) -> None:
        """Use `implementation` for arguments that it `accepts`. If several accept them, the first one added is used."""
        self._replacements.append((accepts, implementation))

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        for accepts, implementation in self._replacements:
            if accepts(*args, **kwargs):
                return implementation(*args, **kwargs)
        return self.plain(*args, **kwargs)


# Runs a function whose backward pass computes it again. Dropout draws from keys, so no generator's state is kept: that
# would take time in each block, and a CUDA graph could not record it.
recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class Linear(nn.Linear):
    """x Wᵀ + b."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, _copy_of(self.weight, x), None if self.bias is None else _copy_of(self.bias, x))


class Fp32Linear(nn.Linear):
    """x Wᵀ + b in fp32, from operands of any dtype. For heads whose scores would tie if they were rounded to bf16.

    In bf16, scores between 4 and 8 are 1/32 apart.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())


@Replaceable
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b."""
    return F.linear(x, weight, bias)


# fp32 tensors by their bf16 copies, while `cache_weight_casts` is active.
_rounded: ContextVar[dict[Tensor, Tensor] | None] = ContextVar("rounded", default=None)


@contextmanager
def cache_weight_casts() -> Iterator[None]:
    """Caches each weight's bf16 cast across passes. Use it while weights are fixed."""
    if _rounded.get() is not None:
        yield
        return
    token = _rounded.set({})
    try:
        yield
    finally:
        _rounded.reset(token)


def cast_weight(weight: Tensor) -> Tensor:
    """Returns the weight in bf16; inside `cache_weight_casts`, the cached copy. Compiled blocks cache none: a lookup by
    weight would compile each block again.
    """
    known = None if torch.compiler.is_compiling() else _rounded.get()
    if known is None:
        return weight.bfloat16()
    if weight not in known:
        known[weight] = weight.bfloat16()
    return known[weight]


# bf16 leaves by the fp32 weights that they stand for, inside `read_copies`.
_copies: ContextVar[Mapping[Tensor, Tensor] | None] = ContextVar("copies", default=None)


@contextmanager
def read_copies(copies: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let products in bf16 read `copies` of their weights, which then get the gradients in place of the weights."""
    token = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(token)


def _copy_of(weight: Tensor, x: Tensor) -> Tensor:
    """Returns the copy to read of a weight or bias. Compiled blocks round weights in kernels that they need anyway."""
    copies = None if torch.compiler.is_compiling() else _copies.get()
    if not copies or compute_dtype(x) != torch.bfloat16:
        return weight
    return copies.get(weight, weight)


def trained_products(model: nn.Module) -> list[nn.Parameter]:
    """Returns the trained weights and biases that only `Linear` reads; an embedding shared with a map is none."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    maps = [module for module in model.modules() if type(module) is Linear and id(module.weight) not in tables]
    found = {id(p): p for module in maps for p in module.parameters(recurse=False) if p.requires_grad}
    return list(found.values())


def round_products(model: nn.Module) -> None:
    """Store frozen weights in bf16 if autocast would round them at every use. Results have the same bits."""
    for parameter in rounded_weights(model):
        parameter.data = parameter.data.bfloat16()


def rounded_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields frozen weights that only bf16 products use: no embedding shared with a head, no head in fp32."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        is_product = isinstance(module, nn.Linear | ExpertMaps) and not isinstance(module, Fp32Linear)
        if is_product and id(module.weight) not in tables:
            yield from (p for p in module.parameters(recurse=False) if not p.requires_grad)


class Head(Linear):
    """The head over the vocabulary, x Wᵀ + b, [..., V]. Its products have aligned rows on GPUs.

    cuBLAS reads and writes several numbers of a bf16 matrix at a time only if its rows begin at multiples of 16 bytes.
    Rows of 50,257 logits do not, so all three products of the head would use slower kernels. On GPUs the head therefore
    multiplies by a copy of its weight, padded with rows of 0 to a multiple of `row_multiple`, and returns a view of the
    logits without the padding. Weights, checkpoints and files are not padded. What it gains has not been measured.

    `scaling` divides the logits (Granite); a `cap` c then makes them c tanh(z / c) (Gemma 2), 0 = z.
    """

    row_multiple = 1

    def __init__(self, width: int, rows: int, bias: bool = True, *, scaling: float = 1.0, cap: float = 0.0) -> None:
        super().__init__(width, rows, bias)
        self.scaling, self.cap = scaling, cap

    @property
    def is_product(self) -> bool:
        """Whether logits are x Wᵀ + b itself."""
        return self.scaling == 1 and not self.cap

    def forward(
        self, x: Tensor, reduce: Callable[[Tensor, Tensor], Tensor] | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """With `reduce`, returns reduce(logits, targets), one number per position of x, as `targets` has them.

        A GPU then holds no more than `CHUNK_LOGITS` logits at a time: the backward pass computes each chunk's logits
        again. This takes one more product, and memory for one chunk instead of for all positions. The head makes the
        chunks itself, because under ZeRO-3 all ranks must call a module equally often.
        """
        if reduce is None:
            return self._adjusted(x)
        assert targets is not None, "a function of logits and targets, without targets"

        def reduced(x_CD: Tensor, targets_C: Tensor) -> Tensor:
            return reduce(self._adjusted(x_CD), targets_C)

        size = max(1, CHUNK_LOGITS // len(self.weight))
        if not x.is_cuda or targets.numel() <= size:
            return reduced(x, targets)
        run = partial(recomputed, reduced) if torch.is_grad_enabled() else reduced
        chunks = zip(x.flatten(0, -2).split(size), targets.flatten().split(size), strict=True)
        return torch.cat([run(x_CD, targets_C) for x_CD, targets_C in chunks]).view(targets.shape)

    def _adjusted(self, x: Tensor) -> Tensor:
        logits = self._logits(x)
        scaled = logits if self.scaling == 1 else logits / self.scaling
        return self.cap * (scaled / self.cap).tanh() if self.cap else scaled

    def _logits(self, x: Tensor) -> Tensor:
        V = len(self.weight)
        if V % self.row_multiple == 0:
            return linear(x, self.weight, self.bias)
        P, dtype = -(-V // self.row_multiple) * self.row_multiple, compute_dtype(x)
        weight_PD, bias_P = (part if part is None else pad_rows(part, P, dtype) for part in (self.weight, self.bias))
        assert weight_PD is not None
        return F.linear(x, weight_PD, bias_P)[..., :V]


def align_heads(model: nn.Module, device: torch.device) -> None:
    """Align the rows of the products of a model's heads if `device` is a GPU.

    Models that are compared bit by bit, such as a policy and its reference, need the same alignment.
    """
    for module in model.modules():
        if isinstance(module, Head) and device.type == "cuda":
            module.row_multiple = ALIGNED_ROWS


def padded_rows(logits_CV: Tensor) -> Tensor:
    """Returns the padded logits [C, P] behind a head's logits [C, V], or `logits_CV` itself if there is no padding.

    A gradient for the padded logits goes into the head's product as it is; one for the view would be copied.
    """
    whole, (C, V), (P, step) = logits_CV._base, logits_CV.shape, logits_CV.stride()
    if whole is None or P <= V or step != 1 or logits_CV.storage_offset():
        return logits_CV
    is_padded = whole.is_contiguous() and whole.shape[-1] == P and whole.numel() == C * P
    return whole.view(C, P) if is_padded else logits_CV


def pad_rows(values: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Cast to `dtype` and append rows of 0 up to `num_rows`."""
    return _PadRows.apply(values, num_rows, dtype)  # type: ignore[no-untyped-call]


class _PadRows(torch.autograd.Function):
    """Rounds and pads in one pass; the backward pass only drops the padding's rows and casts."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
        ctx.like = (len(values), values.dtype)
        padded = values.new_empty(num_rows, *values.shape[1:], dtype=dtype)
        padded[: len(values)] = values
        padded[len(values) :] = 0
        return padded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        num_rows, dtype = ctx.like
        return gradient[:num_rows].to(dtype), None, None


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of a matrix product with x: autocast's if that is enabled, else x's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x as `dtype`, for the result of an autograd Function's forward.

    torch 2.11 gives a compiled Function no gradient, silently, if two operations of its forward return the tensor that
    it returns: one in place, or a cast to the dtype that the tensor has (pytorch/pytorch issue 180642).
    """
    return x if x.dtype == dtype else x.to(dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, computed in fp32 (arXiv 1910.07467, eq. 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # A matrix product follows, so under autocast the result may as well be rounded for it.
        return rms_norm(x, self.weight, self.eps, compute_dtype(x))


@Replaceable
def rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight as `dtype`, [..., D]."""
    return _RMSNorm.apply(x, weight_D, eps, dtype)  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with half the passes over memory that autograd would take.

    With n = x / rms(x):  dx = (g·w - n · mean(g·w·n)) / rms(x),  dw = Σ g·n.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = x.float()
        inverse_rms = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, inverse_rms, weight)
        return as_dtype(wide * inverse_rms * weight, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, inverse_rms, weight = ctx.saved_tensors
        normed, wide = x.float() * inverse_rms, gradient.float()
        product = wide * normed
        weight_gradient = product.sum(dim=tuple(range(product.dim() - 1)))
        mean = (product @ weight.float()).unsqueeze(-1) / normed.shape[-1]
        x_gradient = torch.addcmul(wide * weight, normed, mean, value=-1).mul_(inverse_rms)
        return x_gradient.to(x.dtype), weight_gradient.to(weight.dtype), None, None


def _is_fused_kernel_there() -> bool:
    """True from torch 2.9 on; before, the operator of this name had another signature."""
    found = getattr(torch.ops.aten, "_fused_rms_norm", None)
    return found is not None and "int[] normalized_shape" in str(found.default._schema)


IS_FUSED = _is_fused_kernel_there()


def takes_fused_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> bool:
    """Whether the fused kernel supports this norm: on a GPU, with x and weight of the same dtype."""
    return IS_FUSED and x.is_cuda and x.dtype == weight_D.dtype


def fused_rms_norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute `rms_norm` with PyTorch's fused kernels for GPUs.

    They take one pass over memory forward and two backward; the equation written out takes eight forward and nine to
    thirteen backward. The kernel computes in fp32, and its result has x's dtype. Under autocast that is fp32, so
    rounding the result takes one more pass.
    """
    normed: Tensor = torch.ops.aten._fused_rms_norm(x, weight_D.shape, weight_D, eps)[0]
    return normed.to(dtype)


@Replaceable
def add_norm(x: Tensor, branch: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns x + branch and its norm, [..., D] each."""
    total = x + branch
    return total, norm(total)


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """Returns the config's kind of norm over `width` numbers."""
    return RMSNorm(width, config.norm_eps) if config.norm == "rms" else nn.LayerNorm(width, config.norm_eps)


class MLP(nn.Module):
    """down(activation(up(x))); `up` of SwiGLU and GEGLU holds the gate's rows too."""

    def __init__(self, config: ModelConfig, width: int = 0) -> None:
        """`width` 0 is the config's."""
        super().__init__()
        M = width or config.intermediate_size
        self.activation = GATED.get(config.mlp) or ACTIVATIONS[config.mlp]
        self.up = Linear(config.hidden_size, M * (2 if config.is_gated else 1), bias=config.mlp_bias)
        self.down = Linear(M, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BTD)))


class ExpertMaps(nn.Module):
    """One linear map per expert, [E · F, D] and biases [E · F]: x W_eᵀ + b_e for the rows of expert e."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_experts * out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts * out_features)) if bias else None

    def forward(self, x_SD: Tensor, ends_E: Tensor, order_S: Tensor) -> Tensor:
        """Returns [S, F]. The rows of expert e end before row `ends_E[e]`; `order_S` has each row's pair, token by
        token, which adapters need to know whose tokens these are.
        """
        y_SF = grouped_linear(x_SD, self.weight, ends_E)
        if self.bias is None:
            return y_SF
        return _WithBiases.apply(y_SF, as_computed(self.bias, y_SF.dtype), ends_E)  # type: ignore[no-untyped-call]


def grouped_linear(x_SD: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    """x W_eᵀ, [S, F], by expert: its rows end before row `ends_E[e]`, and its matrix is in weight [E · F, D]."""
    dtype = compute_dtype(x_SD)
    return _Grouped.apply(x_SD.to(dtype), as_computed(weight, dtype), ends_E)  # type: ignore[no-untyped-call]


def as_computed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a weight in the dtype that products compute in; see `cast_weight`."""
    return weight if weight.dtype == dtype else cast_weight(weight)


class _Grouped(torch.autograd.Function):
    """x W_eᵀ by expert. Saves the weight itself: a view of it would keep what ZeRO-3 has gathered until the backward
    pass.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x_SD: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_SD, weight, ends_E)
        return F.grouped_mm(x_SD, weight.unflatten(0, (len(ends_E), -1)).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, gradient_SF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_SD, weight, ends_E = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        gradient_SF, weight_EFD = gradient_SF.contiguous(), weight.unflatten(0, (len(ends_E), -1))
        of_x = F.grouped_mm(gradient_SF, weight_EFD, offs=ends_E) if needs_x else None
        of_weight = F.grouped_mm(gradient_SF.T, x_SD, offs=ends_E).flatten(0, 1) if needs_weight else None
        return of_x, of_weight, None


class _WithBiases(torch.autograd.Function):
    """y + b_e by expert. A grouped product with ones adds up the gradients of b, always in the same order."""

    @staticmethod
    def forward(ctx: FunctionCtx, y_SF: Tensor, bias: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(ends_E)
        rows_S = torch.arange(len(y_SF), dtype=ends_E.dtype, device=ends_E.device)
        experts_S = torch.searchsorted(ends_E, rows_S, right=True).clamp(max=len(ends_E) - 1)
        return y_SF + bias.view(len(ends_E), -1)[experts_S]

    @staticmethod
    def backward(ctx: Any, gradient_SF: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (ends_E,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return gradient_SF, None, None
        gradient_SF = gradient_SF.contiguous()
        ones = gradient_SF.new_ones(len(gradient_SF), 8)  # PyTorch's grouped products need rows of 16 bytes
        return gradient_SF, F.grouped_mm(gradient_SF.T, ones, offs=ends_E)[:, :, 0].flatten(), None


@Replaceable
def swiglu(gate_and_up: Tensor) -> Tensor:
    """silu(gate) · up, [..., M], of gate and up concatenated, [..., 2M] (arXiv 2002.05202)."""
    return _SwiGLU.apply(gate_and_up)  # type: ignore[no-untyped-call]


class _SwiGLU(torch.autograd.Function):
    """Saves only its input for the gradient: two elementwise passes forward, four backward.

    With s = sigmoid(gate):  d up = g · gate · s,  d gate = g · up · s · (1 + gate · (1 - s)).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        silu = F.silu(gate)
        # In place saves a temporary tensor, which the compiler does without; compiled, see `as_dtype`.
        return silu * up if torch.compiler.is_compiling() else silu.mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        if torch.compiler.is_compiling():  # the compiler fuses this, and does not support `out`
            gate, up = gate_and_up.chunk(2, dim=-1)
            return torch.cat([torch.ops.aten.silu_backward(gradient * up, gate), gradient * F.silu(gate)], dim=-1)
        result = torch.empty_like(gate_and_up)
        (gate, up), (of_gate, of_up) = gate_and_up.chunk(2, dim=-1), result.chunk(2, dim=-1)
        # Each half is computed in place, which saves a temporary tensor of its size and a concatenation.
        torch.mul(gradient, up, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        torch.ops.aten.silu.out(gate, out=of_up)
        of_up.mul_(gradient)
        return result


def geglu(gate_and_up: Tensor) -> Tensor:
    """gelu(gate) · up, [..., M], with GELU's approximation by tanh (arXiv 2002.05202)."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate_and_up: Tensor) -> Tensor:
    """(up + 1) · gate · sigmoid(1.702 gate), [..., M], of gate ≤ 7 and |up| ≤ 7 (gpt-oss, arXiv 2508.10925)."""
    return _ClampedSwiGLU.apply(gate_and_up)  # type: ignore[no-untyped-call]


class _ClampedSwiGLU(torch.autograd.Function):
    """Saves only its input. With s = sigmoid(1.702 gate), where nothing is clamped:  d up = g · gate · s,
    d gate = g · (up + 1) · s · (1 + 1.702 gate · (1 - s)).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        gate = gate.clamp(max=7.0)
        return (up.clamp(-7.0, 7.0) + 1) * gate * (1.702 * gate).sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, dim=-1)
        is_free, kept = gate <= 7.0, gate.clamp(max=7.0)
        s = (1.702 * kept).sigmoid()
        of_gate = gradient * (up.clamp(-7.0, 7.0) + 1) * s * (1 + 1.702 * kept * (1 - s)) * is_free
        return torch.cat([of_gate, gradient * kept * s * (up.abs() <= 7.0)], dim=-1)


GATED: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": swiglu, "clamped_swiglu": clamped_swiglu, "geglu": geglu}


class _SquaredReLU(torch.autograd.Function):
    """relu(x)², saving only relu(x) for the gradient 2·relu(x)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (gradient * positive).mul_(2)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,  # of the gate
    "geglu": partial(F.gelu, approximate="tanh"),
    "relu2": _SquaredReLU.apply,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
