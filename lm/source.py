"""A model before it is in memory: its modules, its tensors one at a time, and loading them.

A consumer stores each tensor and releases it, so that memory never holds a second copy of the model, nor a full copy on
a rank that keeps a shard of each tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lm.model import initial_weights

AnyModel = TypeVar("AnyModel", bound=nn.Module)
AnyModel_co = TypeVar("AnyModel_co", bound=nn.Module, covariant=True)


class ModelSource(Protocol[AnyModel_co]):
    """Where a model comes from, such as a folder or a seed."""

    @property
    def build(self) -> Callable[[], AnyModel_co]:
        """Makes the modules on the current default device; their values are placeholders."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and fp32 value of every parameter (tied ones once, as `named_parameters` names them) and buffer.

        They come in the order of `named_parameters` and `named_buffers`.
        Raises: ValueError for a file that does not fit, before the first tensor.
        """
        ...


Rows = Mapping[str, range]  # consecutive rows by tensor name; range(1) is all of a tensor with a single number


class PartialSource(ModelSource[AnyModel_co], Protocol[AnyModel_co]):
    """A source that can be read in part."""

    def tensors(self, rows: Rows | None = None) -> Iterator[tuple[str, Tensor]]:
        """Like `ModelSource.tensors`; with `rows`, yields and reads only those."""
        ...


@dataclass(frozen=True)
class RandomInit(Generic[AnyModel]):
    """A model with weights drawn from `seed` by the table of `lm.model.init_weights`; buffers are 0."""

    build: Callable[[], AnyModel]
    seed: int

    def tensors(self, rows: Rows | None = None) -> Iterator[tuple[str, Tensor]]:
        model = on_meta(self.build)
        for name, tensor in initial_weights(model, self.seed):  # each draw depends on those before it
            if rows is None or name in rows:
                yield name, rows_of(tensor, rows[name] if rows else None)
        for name, buffer in model.named_buffers():
            if rows is None or name in rows:
                yield name, rows_of(torch.zeros(buffer.shape), rows[name] if rows else None)


def rows_of(tensor: Tensor, rows: range | None) -> Tensor:
    """Returns some rows of a tensor, or all."""
    return tensor if rows is None or not tensor.dim() else tensor[rows.start : rows.stop]


class _NoInit(TorchFunctionMode):
    """Skips `torch.nn.init`, which draws nothing on the meta device but takes a second to import TorchDynamo."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def on_meta(build: Callable[[], AnyModel]) -> AnyModel:
    """Builds a model on the meta device: shapes without values."""
    with torch.device("meta"), _NoInit():
        return build()


def load(
    source: ModelSource[AnyModel], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> AnyModel:
    """Load the whole model onto `device`, its parameters in `dtype`.

    Parameters that a source shares with a model in memory keep a lower precision than fp32 if they have one. Buffers
    stay fp32, because a score's bias would lose digits in all scores alike. Each tensor goes to the device as the
    source yields it, so the peak is one copy of the model on the device and one tensor in CPU memory.
    """
    if torch.device(device).type == "cpu":
        device = "cpu"  # "cpu:0" would copy every tensor
    model = on_meta(source.build)
    buffers = {name for name, _ in model.named_buffers()}
    held = {
        name: t.to(device, dtype if t.dtype == torch.float32 and name not in buffers else t.dtype)
        for name, t in source.tensors()
    }
    model.load_state_dict(held, strict=False, assign=True)
    if (tie := getattr(model, "tie", None)) is not None:
        tie()
    missing = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    assert not missing, f"the source of a {type(model).__name__} has no {missing}"
    return model


def load_for_inference(source: ModelSource[AnyModel], dtype: torch.dtype | None = None) -> AnyModel:
    """Load a model onto `inference_device`, without dropout or gradients, its parameters in `dtype` (default:
    `inference_dtype`).

    Scoring, sampling and chat outside of training load their models here. This is the one place that decides the
    device and dtype of a model that is not being trained. The stages' own ranks compute on the engine's device in the
    engine's precision.
    Raises: ValueError as for the source.
    """
    return load(source, inference_device(), dtype or inference_dtype()).eval().requires_grad_(False)


def inference_device() -> torch.device:
    """Returns this process's GPU, or the CPU if it sees none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inference_dtype() -> torch.dtype:
    """Returns bf16 on GPUs that support it natively, else fp32."""
    is_fast = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_fast else torch.float32
