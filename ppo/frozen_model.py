"""Models that stay fixed: their weights are on the device throughout, or only while they are used (`ppo.memory`).

In the second case each rank keeps a share of the weights in CPU memory, pinned where there is a GPU. The ranks gather
them whole for all passes of a call, or one layer at a time within each pass.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lm.attention import Attention
from lm.layers import MLP
from lm.progress import note_progress
from lm.source import PartialSource, on_meta
from lm.transfer import host_bytes

AnyModule = TypeVar("AnyModule", bound=nn.Module)
AnyModule_co = TypeVar("AnyModule_co", bound=nn.Module, covariant=True)

ALIGNMENT = 256  # bytes; a weight starts at a multiple of it, as if it had been allocated by itself


class FrozenModel(Protocol[AnyModule_co]):
    @property
    def module(self) -> AnyModule_co:
        """The model. Its weights may be on the meta device outside of `in_use`."""
        ...

    def in_use(self) -> AbstractContextManager[object]:
        """Around passes. If weights are sharded, all ranks enter it together and make the same number of passes."""
        ...

    def most_passes(self, num_passes: int) -> int:
        """How many passes a rank has to make that needs so many; call it in use."""
        ...


@dataclass(frozen=True)
class HeldModel(Generic[AnyModule]):
    """A model whose weights stay on the device."""

    module: AnyModule

    def in_use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def most_passes(self, num_passes: int) -> int:
        return num_passes


class ShardedModel(Generic[AnyModule]):
    """A model of which each rank keeps a share in CPU memory. RANK and WORLD_SIZE name the ranks.

    Each rank reads, tensor by tensor, the rows of which it keeps some bytes: together the ranks read the model once,
    and none ever holds it whole in CPU memory. `set_types` sets the types of the weights of a model without values.
    With `by_layer`, attention and MLP of each block are on the device only while they compute, else all weights are
    there while in use.
    """

    def __init__(
        self,
        source: PartialSource[AnyModule],
        set_types: Callable[[nn.Module], object],
        device: torch.device,
        timeout_seconds: float,
        *,
        by_layer: bool,
    ) -> None:
        self.module = on_meta(source.build).eval().requires_grad_(False)
        set_types(self.module)
        self._timeout_seconds = timeout_seconds
        layers = {name: m for name, m in self.module.named_modules() if by_layer and isinstance(m, Attention | MLP)}
        self._rest, *self._layers = _bundles(self.module, ["", *layers], device)
        for layer, bundle in zip(layers.values(), self._layers, strict=True):
            layer.register_forward_pre_hook(lambda _module, _args, bundle=bundle: bundle.bring())
            layer.register_forward_hook(lambda _module, _args, _out, bundle=bundle: bundle.drop(), always_call=True)
        by_name = {name: bundle for bundle in self.bundles for name in bundle.weights}
        own = {name: rows for name, bundle in by_name.items() if (rows := bundle.own_rows(name))}
        for name, tensor in source.tensors(own):
            note_progress()
            by_name[name].keep(name, tensor, own.pop(name))
        assert not own, f"the source of a {type(self.module).__name__} has no {sorted(own)}"

    @property
    def bundles(self) -> list["_Bundle"]:
        return [self._rest, *self._layers]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        if self._rest.num_ranks > 1 and not dist.is_initialized():  # on ranks that train nothing
            backend = "nccl" if self._rest.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=self._timeout_seconds))
        self._rest.bring()
        try:
            yield
        finally:
            self._rest.drop()

    def most_passes(self, num_passes: int) -> int:
        """The most that any rank needs: layers are gathered in every pass."""
        if self._rest.num_ranks == 1:
            return num_passes
        most = torch.tensor(num_passes, device=self._rest.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)


@dataclass(frozen=True)
class _Weight:
    """A weight without values, its first byte in the bundle, and the modules' attributes that refer to it."""

    placeholder: Tensor
    start: int
    places: list[tuple[nn.Module, str]] = field(default_factory=list)  # several for a tied weight

    @property
    def row_bytes(self) -> int:
        return self.placeholder.nbytes // (len(self.placeholder) if self.placeholder.dim() else 1)

    def put(self, tensor: Tensor) -> None:
        for module, attribute in self.places:
            setattr(module, attribute, tensor)


class _Bundle:
    """Weights that come and go together: `share` has this rank's part of their bytes."""

    def __init__(self, weights: Mapping[str, _Weight], num_bytes: int, device: torch.device) -> None:
        self.weights, self.device = weights, device
        self.rank, self.num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        size = _rounded_up(-(-num_bytes // self.num_ranks))
        self.share = host_bytes(size, pinned=device.type == "cuda")

    def own_rows(self, name: str) -> range:
        """The rows of a weight of which this rank keeps some bytes."""
        weight, own = self.weights[name], self._own_bytes(name)
        size = weight.row_bytes
        return range((own.start - weight.start) // size, -(-(own.stop - weight.start) // size)) if own else range(0)

    def keep(self, name: str, tensor: Tensor, rows: range) -> None:
        """Keep this rank's part of a weight, out of these rows of it."""
        weight, own, first = self.weights[name], self._own_bytes(name), self.rank * len(self.share)
        data = tensor.to(weight.placeholder.dtype).contiguous().reshape(-1).view(torch.uint8)
        start = weight.start + rows.start * weight.row_bytes
        self.share[own.start - first : own.stop - first] = data[own.start - start : own.stop - start]

    def _own_bytes(self, name: str) -> range:
        """The bytes of the bundle that are of this weight and in this rank's share."""
        weight, first = self.weights[name], self.rank * len(self.share)
        end = min(weight.start + weight.placeholder.nbytes, first + len(self.share))
        return range(max(weight.start, first), end)

    def bring(self) -> None:
        """Gather the weights on the device; a collective call."""
        whole = self.share.to(self.device, non_blocking=True, copy=self.num_ranks == 1)
        if self.num_ranks > 1:
            part, whole = whole, torch.empty(len(whole) * self.num_ranks, dtype=torch.uint8, device=self.device)
            dist.all_gather_into_tensor(whole, part)
        for weight in self.weights.values():
            shape, dtype = weight.placeholder.shape, weight.placeholder.dtype
            tensor = whole[weight.start : weight.start + weight.placeholder.nbytes].view(dtype).view(shape)
            is_parameter = isinstance(weight.placeholder, nn.Parameter)
            weight.put(nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)

    def drop(self) -> None:
        for weight in self.weights.values():
            weight.put(weight.placeholder)


def _bundles(model: nn.Module, prefixes: list[str], device: torch.device) -> list[_Bundle]:
    """A bundle for each prefix of names; a weight belongs to the longest that fits, and "" fits all."""
    weights: list[dict[str, _Weight]] = [{} for _ in prefixes]
    sizes = [0] * len(prefixes)
    known: dict[int, _Weight] = {}
    for module_name, module in model.named_modules():
        for attribute, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            name = f"{module_name}.{attribute}" if module_name else attribute
            if id(tensor) not in known:
                fitting = (i for i, prefix in enumerate(prefixes) if not prefix or name.startswith(f"{prefix}."))
                at = max(fitting, key=lambda i: len(prefixes[i]))
                known[id(tensor)] = weights[at][name] = _Weight(tensor, sizes[at])
                sizes[at] += _rounded_up(tensor.nbytes)
            known[id(tensor)].places.append((module, attribute))
    return [_Bundle(found, size, device) for found, size in zip(weights, sizes, strict=True)]


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
