"""Kernels of the fake device: every operation on CUDA tensors goes to the CPU over the same memory, and is counted."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

ROOT = os.getcwd()
CUDA = torch.device("cuda", 0)
# Operations whose result decides on the CPU what happens next: the CPU waits until the GPU has done all before.
READS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "bincount"})
# No kernel is launched for these.
VIEWS = frozenset({"unfold", "view_as_real", "view_as_complex", "is_pinned", "_has_compatible_shallow_copy_type"})

# Operations with a kernel on a GPU, which the CPU's build of PyTorch composes of others.
FUSED = (
    "_fused_rms_norm", "silu_backward", "silu_backward.grad_input",
    # Of many tensors: one here, where a GPU launches one per 320 blocks of 65,536 numbers.
    "_foreach_copy_", "_foreach_add_.List", "_foreach_add_.Scalar", "_foreach_norm.Scalar", "_foreach_mul_.Tensor",
    "_foreach_zero_",
)  # fmt: skip

# Operations that the CPU has no kernel for, by name.
OWN: dict[str, Callable[..., Any]] = {}


@dataclass
class Counts:
    """What happened while this was open. `syncs` and `uploads` are by (what, file:line) of Heed's own code.

    A sync is whatever makes the CPU wait for the GPU: a number read, a size that depends on values, a copy back. An
    upload is a copy from pageable memory, for which the GPU's queue waits too.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    syncs: Counter[tuple[str, str]] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    bytes_by_kernel: Counter[str] = field(default_factory=Counter)
    attention: Counter[str] = field(default_factory=Counter)

    @property
    def num_kernels(self) -> int:
        return self.kernels.total()

    @property
    def bytes_moved(self) -> int:
        return self.bytes_by_kernel.total()

    @property
    def num_syncs(self) -> int:
        return self.syncs.total()


_open: list[Counts] = []
_recording: list[Callable[[], object]] | None = None  # of the CUDA graph being captured
_before: list[tuple[Tensor, Tensor]] = []  # memory that kernels of a capture write to, and what was in it


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    counts = Counts()
    _open.append(counts)
    try:
        yield counts
    finally:
        _open.remove(counts)


@contextlib.contextmanager
def recorded() -> Iterator[list[Callable[[], object]]]:
    """Kernels are kept as functions that run them again on the same memory, as in a CUDA graph. A capture runs none:
    what they have written to memory from before it is undone.
    """
    global _recording
    assert _recording is None, "a capture inside a capture"
    kept: list[Callable[[], object]] = []
    _recording = kept
    try:
        yield kept
    finally:
        _recording = None
        for memory, content in reversed(_before):
            memory.copy_(content)
        _before.clear()


def note_writes(memory: Iterable[Tensor]) -> None:
    """Keep what a capture will restore; call it before the kernel runs."""
    if is_capturing():
        _before.extend((tensor, tensor.clone()) for tensor in memory if tensor.numel())  # an empty `out` may grow


def is_capturing() -> bool:
    return _recording is not None


def record(kernel: Callable[[], object]) -> None:
    """Keep it for the graph that is being captured, if one is."""
    if _recording is not None:
        _recording.append(kernel)


def place() -> str:
    """File and line of the innermost frame of Heed's own code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and "site-packages" not in name and "fake_cuda" not in name:
            return f"{os.path.relpath(name, ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "PyTorch"


def note_sync(what: str) -> None:
    """Raises: RuntimeError, as CUDA does, in a capture."""
    if is_capturing():
        raise RuntimeError(f"operation not permitted when stream is capturing: {what} at {place()}")
    for counts in _open:
        counts.syncs[what, place()] += 1


def note_kernel(name: str, tensors: list[Tensor]) -> None:
    for counts in _open:
        counts.kernels[name] += 1
        counts.bytes_by_kernel[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def note_attention(kernel: str) -> None:
    for counts in _open:
        counts.attention[kernel] += 1


def on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def host_view(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same memory; an empty one that may grow where there is none."""
    if tensor.untyped_storage().nbytes() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.ops.fake_cuda.host_view(tensor)


def run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation on CUDA tensors, by the CPU's kernel. Raises: RuntimeError for a tensor on another device."""
    name = operation.name().removeprefix("aten::")
    short = name.partition(".")[0]
    args = _numbers_as_tensors(operation, args)
    flat, spec = tree_flatten((args, kwargs))
    _check_devices(name, short, flat)
    if short in READS or (short in ("index_put_", "_index_put_impl_") and _by_mask(args)):
        note_sync(short)
    views = {id(value): host_view(value) for value in flat if on_device(value)}
    host = [views[id(value)] if on_device(value) else _on_cpu(value) for value in flat]
    originals = {id(views[id(value)]): value for value in flat if on_device(value)}
    host_args, host_kwargs = tree_unflatten(host, spec)
    shapes = {key: view.shape for key, view in views.items()}
    if "flash_attention" in short:
        note_attention("varlen" if "backward" not in short else "varlen backward")
    converted = _converted(short, flat, kwargs)
    note_writes(_written(operation, host_args, host_kwargs))
    operation = OWN.get(short, operation)
    result = operation(*host_args, **host_kwargs)
    del converted
    grown = list[tuple[Tensor, Tensor]]()
    for value in flat:  # what the CPU has made larger, such as an empty `out`
        if on_device(value) and (views[id(value)].shape != shapes[id(value)] or _is_apart(value, views[id(value)])):
            _grow(value, views[id(value)])
            grown.append((host_view(value), views[id(value)]))
    made: list[Tensor] = []
    results = tree_map(lambda part: _on_cuda(part, originals, made), result)
    if short not in VIEWS:
        note_kernel(short, [value for value in flat if on_device(value)] + made)
        held = [host_view(tensor) for tensor in made] if is_capturing() else []
        record(lambda: _again(operation, host_args, host_kwargs, originals, held, grown))
    return results


def _written(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to, as its schema says."""
    arguments = operation._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    found = [given[a.name] for a in arguments if a.alias_info and a.alias_info.is_write and a.name in given]
    return [part for part in tree_flatten(found)[0] if isinstance(part, Tensor)]


def _converted(short: str, values: list[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The copy that PyTorch makes of numbers that are summed as another type, unless bf16 is summed as fp32."""
    dtype = kwargs.get("dtype")
    if short != "sum" or dtype in (None, values[0].dtype) or (dtype == torch.float32 and values[0].itemsize == 2):
        return None
    return torch.empty(values[0].shape, dtype=dtype, device=CUDA)


def _numbers_as_tensors(operation: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A number that takes a tensor's place reaches a fallback as Python's own."""
    kinds = [str(argument.type) for argument in operation._schema.arguments]
    return tuple(
        torch.tensor(value) if kind == "Tensor" and isinstance(value, bool | int | float) else value
        for value, kind in zip(args, kinds, strict=False)
    )


def _check_devices(name: str, short: str, values: list[Any]) -> None:
    """Numbers (tensors without dimensions) may be on the CPU, and so may indices."""
    if short.startswith("heed::"):
        raise RuntimeError(f"{name}, a CPU's kernel, was given CUDA tensors at {place()}")
    others = [v for v in values if isinstance(v, Tensor) and v.device.type != "cuda" and v.dim() > 0]
    if others and short not in ("index", "index_put_", "_index_put_impl_"):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} got {[v.device.type for v in others]} of shape"
            f" {[tuple(v.shape) for v in others]} next to cuda:0 at {place()}"
        )
    if others:
        for counts in _open:
            counts.uploads[place()] += 1


def _by_mask(args: tuple[Any, ...]) -> bool:
    """Whether an index is a mask, whose true entries have to be counted; a number put there needs no count."""
    indices = [index for index in args[1] if isinstance(index, Tensor)]
    is_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    return is_mask and not (len(args) > 2 and args[2].numel() == 1)


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _is_apart(value: Tensor, view: Tensor) -> bool:
    return view.numel() > 0 and value.untyped_storage().nbytes() == 0


def _grow(value: Tensor, view: Tensor) -> None:
    value.resize_(view.shape)
    host_view(value).copy_(view)


def _on_cuda(part: Any, originals: dict[int, Tensor], made: list[Tensor]) -> Any:
    """A result as a CUDA tensor: the argument itself, a view of one, or a tensor of its own."""
    if not isinstance(part, Tensor):
        return part
    if id(part) in originals:
        return originals[id(part)]
    for original in originals.values():
        storage = original.untyped_storage()
        if part.numel() and storage.nbytes() and part.untyped_storage().data_ptr() == storage.data_ptr():
            return original.as_strided(part.shape, part.stride(), part.storage_offset())
    new = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=CUDA)
    if part.numel():
        host_view(new).copy_(part)
    made.append(new)
    return new


def _again(
    operation: Any, args: Any, kwargs: Any, originals: dict[int, Tensor], outputs: list[Tensor],
    grown: list[tuple[Tensor, Tensor]],
) -> None:  # fmt: skip
    result = operation(*args, **kwargs)
    for memory, written in grown:
        memory.copy_(written)
    new = [part for part in tree_flatten(result)[0] if isinstance(part, Tensor) and id(part) not in originals]
    for output, part in zip(outputs, new, strict=True):
        output.copy_(part)


def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`target.copy_(source)` where one of them is on the device."""
    is_read, is_upload = not on_device(target), not on_device(source)
    if is_read and not (non_blocking and target.is_pinned()):
        note_sync("copy to the CPU")
    if is_upload and source.dim() > 0 and not (non_blocking and source.is_pinned()):
        if is_capturing():
            raise RuntimeError(f"operation not permitted when stream is capturing: copy from the CPU at {place()}")
        for counts in _open:
            counts.uploads[place()] += 1
    to = host_view(target) if on_device(target) else target
    of = host_view(source) if on_device(source) else source
    note_writes([to])
    to.copy_(of)
    note_kernel("copy_", [target, source])
    record(lambda: to.copy_(of))
    return target


def rms_norm_backward(
    gradient: Tensor, x: Tensor, _shape: list[int], rstd: Tensor, weight: Tensor, _mask: list[bool]
) -> tuple[Tensor, Tensor]:
    """`aten::_fused_rms_norm_backward`: dx = (g·w - n · mean(g·w·n)) / rms(x) and dw = Σ g·n with n = x / rms(x)."""
    normed, wide = x.float() * rstd.float(), gradient.float()
    scaled = wide * weight.float()
    x_gradient = (scaled - normed * (scaled * normed).mean(dim=-1, keepdim=True)) * rstd.float()
    return x_gradient.to(x.dtype), (wide * normed).flatten(0, -2).sum(dim=0).to(weight.dtype)


PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


def product(operation: Any, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
    """A matrix product, of bf16 with sums in fp32, as a GPU has them. CPUs without bf16 take long for one in bf16."""
    dtype = args[-1].dtype
    if dtype == torch.bfloat16:
        args = tuple(part.float() if isinstance(part, Tensor) else part for part in args)
    result: Tensor = operation(*args, **kwargs).to(dtype)
    return result if out is None else out.copy_(result)


def interpret_triton() -> None:
    """Run Triton's kernels in its interpreter, on the CPU's memory; each launch is one kernel."""
    from triton.runtime.interpreter import GridExecutor

    from tests.lm.native import triton_interpreter  # noqa: F401 - bf16

    interpret = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        host = [host_view(arg) if on_device(arg) else arg for arg in args]
        note_writes(arg for arg in host if isinstance(arg, Tensor))
        interpret(self, *host, **kwargs)
        note_kernel(self.fn.__name__, list({arg.data_ptr(): arg for arg in args if on_device(arg)}.values()))
        record(lambda: interpret(self, *host, **kwargs))

    GridExecutor.__call__ = launch


_libraries: list[Any] = []


def register() -> None:
    """Make these the kernels of PyTorch's CUDA device."""
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(run, "CUDA")
    aten.impl("copy_", copy, "CUDA")
    for name in FUSED:
        packet, _, overload = name.partition(".")
        aten.impl(name, partial(run, getattr(getattr(torch.ops.aten, packet), overload or "default")), "CUDA")
    OWN["_fused_rms_norm_backward"] = rms_norm_backward
    OWN.update({name: partial(product, getattr(torch.ops.aten, name).default) for name in PRODUCTS})
    _libraries.extend([everything, aten])
