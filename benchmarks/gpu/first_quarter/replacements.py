"""The step `kernels`: every function that has another implementation on this device, next to its plain one.

A model of few layers is trained and sampled from, and the largest arguments of each `Replaceable` are kept. Both
implementations then get copies of them. Kernels that are added to `lm.native` are thus compared without a change here.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.first_quarter.context import QWEN, Context, Drawn, device_seconds, shape
from benchmarks.speed.own import NO_END
from lm.generation import generate
from lm.layers import Replaceable
from lm.model import LanguageModel
from lm.sampling import Choice, token_logprobs
from lm.source import load

NUM_LAYERS = 2
MOST_APART = 0.02  # how far a result computed in bf16 may be from the plain one, as a share of its norm
LEAST_EQUAL = 0.98  # the share of whole numbers, such as drawn tokens, that must be equal
Implementation = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a replaced function, with the arguments as they were before it."""

    name: str
    plain: Implementation
    replacement: Implementation
    arguments: tuple[Any, ...]
    has_gradient: bool
    size: int  # numbers in the arguments

    def copies(self) -> tuple[Any, ...]:
        """Returns the arguments with tensors of their own, which share memory where the originals did."""
        return tuple(_copied(self.arguments, {}, self.has_gradient))


def kernels(ctx: Context) -> None:
    """Notes, per function, how far a kernel's results and gradients are from the plain ones, and the time of both."""
    calls = recorded(ctx)
    ctx.note(functions=sorted({call.name for call in calls}))
    for call in calls:
        name = f"{call.name}{'_trained' if call.has_gradient else ''}"
        with ctx.attempt(name):
            results = [_results(call, run) for run in (call.replacement, call.plain)]
            ctx.note(**{name: {"kernel": call.replacement.__qualname__, **compared(*results)}})
            if ctx.on_gpu:
                seconds = [_seconds(call, run) for run in (call.replacement, call.plain)]
                ctx.note(**{f"{name}_us": [1e6 * taken for taken in seconds], f"{name}_gain": seconds[1] / seconds[0]})


def recorded(ctx: Context) -> list[Call]:
    """Returns the largest call of each replaced function: with gradients from a training step in bf16 under autocast,
    and without from sampling in bf16.
    """
    model_shape = shape(QWEN, tiny=ctx.tiny, num_hidden_layers=NUM_LAYERS)
    rows, num_tokens = (2, 16) if ctx.tiny else (4, 512)
    found = dict[tuple[str, bool], Call]()
    original = Replaceable.__call__

    def spy(function: Any, *args: Any, **kwargs: Any) -> Any:
        in_order = inspect.signature(function.plain).bind(*args, **kwargs).args
        _record(found, function, in_order)
        return original(function, *in_order)

    model = load(Drawn(partial(LanguageModel, model_shape), ctx.device), ctx.device)
    tokens_BT = torch.randint(3, model_shape.vocab_size, (rows, num_tokens), device=ctx.device)
    with mock.patch.object(Replaceable, "__call__", spy):
        with torch.autocast(ctx.device.type, torch.bfloat16):
            token_logprobs(model(tokens_BT[:, :-1]), tokens_BT[:, 1:]).sum().backward()
        model.zero_grad(set_to_none=True)
        prompts = tokens_BT.tolist() * (1 if ctx.tiny else 32)
        generate(
            model.to(torch.bfloat16).eval(), prompts, max_new_tokens=3, end_ids=NO_END, choice=Choice(),
            seeds=range(len(prompts)), max_rows=len(prompts), steps="eager",
        )  # fmt: skip
    return list(found.values())


def _record(found: dict[tuple[str, bool], Call], function: Any, args: tuple[Any, ...]) -> None:
    chosen = next((run for accepts, run in function._replacements if accepts(*args)), None)
    has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(args))
    name, size = function.plain.__qualname__, sum(tensor.numel() for tensor in _tensors(args))
    known = found.get((name, has_gradient))
    if chosen is not None and (known is None or size > known.size):
        kept = tuple(_copied(args, {}, has_gradient))
        found[name, has_gradient] = Call(name, function.plain, chosen, kept, has_gradient, size)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _copied(values: Sequence[Any], memory: dict[int, Any], has_gradient: bool) -> Iterator[Any]:
    """Yields the values with copies of tensors, without the graph that made them. Modules and caches are shared."""
    for value in values:
        if isinstance(value, Tensor):
            yield copy.deepcopy(value.detach(), memory).requires_grad_(has_gradient and value.requires_grad)
        elif isinstance(value, list | tuple):
            yield type(value)(_copied(value, memory, has_gradient))
        else:
            yield value


def _results(call: Call, run: Implementation) -> list[Tensor]:
    """Returns what a call computes: its results, the arguments that it wrote into, and the arguments' gradients."""
    arguments = call.copies()
    with torch.inference_mode(not call.has_gradient), torch.autocast(_device(call), torch.bfloat16, call.has_gradient):
        outputs = list(_tensors([run(*arguments)]))
        written = [copy.deepcopy(tensor.detach()) for tensor in _tensors(arguments)]
        kept = [tensor.detach().clone() for tensor in outputs]
    learning = [tensor for tensor in outputs if tensor.requires_grad]
    if learning:
        device = learning[0].device
        generator = torch.Generator(device).manual_seed(0)
        gradients = [torch.randn(tensor.shape, generator=generator, device=device) for tensor in learning]
        torch.autograd.backward(learning, [g.to(x.dtype) for g, x in zip(gradients, learning, strict=True)])
    return [*kept, *written, *(tensor.grad for tensor in _tensors(arguments) if tensor.grad is not None)]


def compared(found: Sequence[Tensor], plain: Sequence[Tensor]) -> dict[str, float]:
    """Returns the largest relative difference of real results, and the smallest share of equal whole numbers.

    Raises: AssertionError if they differ by more than rounding.
    """
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in plain], "results have other shapes"
    apart, equal = 0.0, 1.0
    for ours, theirs in zip(found, plain, strict=True):
        if not theirs.is_floating_point():
            equal = min(equal, float((ours == theirs).float().mean()))
            continue
        finite = torch.isfinite(theirs)  # masks hold -inf
        assert torch.equal(finite, torch.isfinite(ours)), "a number is finite in one result alone"
        ours, theirs = (torch.where(finite, tensor, 0).double() for tensor in (ours, theirs))
        share = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
        assert share <= MOST_APART, f"a result of {list(ours.shape)} differs by {share:.2g} of its norm"
        apart = max(apart, share)
    assert equal >= LEAST_EQUAL, f"only {equal:.2%} of a result's whole numbers are equal"
    return {"apart": apart, "equal_share": equal}


def _seconds(call: Call, run: Implementation) -> float:
    """Returns the GPU's seconds of a forward pass, and of its backward pass if the call had gradients."""
    arguments = call.copies()

    def work() -> None:
        outputs = [tensor for tensor in _tensors([run(*arguments)]) if tensor.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
        for tensor in _tensors(arguments):
            tensor.grad = None

    with torch.inference_mode(not call.has_gradient), torch.autocast(_device(call), torch.bfloat16, call.has_gradient):
        return device_seconds(work, 20)


def _device(call: Call) -> str:
    return next(_tensors(call.arguments)).device.type
