"""LoRA: trained low-rank additions to the linear maps of a frozen model (Hu et al., arXiv 2106.09685).

    y = x Wᵀ + scale (x Aᵀ) Bᵀ

A fused map, which holds several maps of the published layout (q, k and v; gate and up), has an A, a B and a scale for
each of them, as in PEFT; so has each expert, for gate and up together. So adapters are read and written in PEFT's
layout (`lm.adapters`). `merged` adds them to the weights, which then look like those of any other model.

Shape letters: R rows, D inputs, F outputs, P ranks of all parts of a fused map together, E experts, S pairs of a token
and its expert.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn.functional import pad

from lm.config import ModelConfig
from lm.families import family_of
from lm.families.family import Stored
from lm.layers import ExpertMaps, Linear, as_computed, compute_dtype, grouped_linear, linear
from lm.source import ModelSource, on_meta
from lm.weights import PURPOSES

TARGETS = {
    "attention": (
        *("attention.qkv", "attention.out", "cross.query", "cross.key_value", "cross.out"),
        *("attention.qkvz", "attention.gates"),
        *("qkv.query_latent", "qkv.query", "qkv.latent", "qkv.key_value"),
    ),
    "mlp": ("mlp.up", "mlp.down", "shared.up", "shared.down"),
}
TARGETS["all"] = TARGETS["attention"] + TARGETS["mlp"]
TARGETS["experts"] = (*TARGETS["all"], "experts.up", "experts.down")
DOWN, UP = "lora_a", "lora_b"  # A and B, as parameters of a map
BODY = ("encoder.", "decoder.", "head.", "transform.", "transform_norm.")  # frozen; all other heads are new

AnyModel = TypeVar("AnyModel", bound=nn.Module)


class LoRAConfig(BaseModel):
    """Which maps get an adapter, and of what size.

    The defaults follow Schulman et al. 2025, "LoRA Without Regret" (thinkingmachines.ai/blog/lora): all linear maps,
    alpha 32, and a learning rate of ten times that of full tuning. There, reinforcement learning reached full tuning
    with ranks from 1 on; SFT on much data needs more than 16.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", title="LoRA")

    rank: int = Field(default=16, ge=1, description="Rank of each addition.")
    alpha: float = Field(default=32.0, gt=0, description="Additions are scaled by alpha / rank.")
    targets: Literal["all", "attention", "mlp", "experts"] = Field(
        default="all",
        description='The blocks\' maps that are adapted. "all": those of attention, MLPs and shared experts;'
        ' "experts": these and the maps of each expert. Routers never are.',
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def modules(self) -> tuple[str, ...]:
        """The adapted maps of a block, by Heed's names."""
        return TARGETS[self.targets]


class LoRALinear(Linear):
    """A frozen map with a low-rank addition.

    `part_rows` has the number of outputs of each map that it holds, F in total, and `scales` has their scales. All
    parts have room for the same rank. A part with a lower rank, or without an adapter, is padded with rows of A and
    columns of B that are 0. Their gradients are 0 too, so they stay 0.
    """

    def __init__(self, frozen: nn.Linear, part_rows: Sequence[int], rank: int, scales: Sequence[float]) -> None:
        super().__init__(frozen.in_features, frozen.out_features, bias=frozen.bias is not None)
        assert sum(part_rows) == frozen.out_features, f"{part_rows} rows of {frozen.out_features}"
        assert len(scales) == len(part_rows), f"{len(scales)} scales of {len(part_rows)} maps"
        self.part_rows, self.rank, self.scales = tuple(part_rows), rank, tuple(scales)
        self.lora_a = nn.Parameter(torch.empty(len(part_rows) * rank, frozen.in_features))
        self.lora_b = nn.Parameter(torch.empty(frozen.out_features, rank))
        self.is_off = False
        self.readers: Sequence[Any] = ()  # in a joint pass, one per equal part of the batch (`read_by`)
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        rows_RD = x.flatten(0, -2)
        y_RF = super().forward(rows_RD)
        if self.readers:
            parts = len(self.readers)
            for reader, y, reader_rows in zip(self.readers, y_RF.chunk(parts), rows_RD.chunk(parts), strict=True):
                if reader is not None:
                    reader.add_to(y, reader_rows)
        elif not self.is_off:
            self.add_to(y_RF, rows_RD)
        return y_RF.view(*x.shape[:-1], -1)

    def add_to(self, y_RF: Tensor, x_RD: Tensor) -> None:
        """y ← y + scale (x Aᵀ) Bᵀ in place. One product computes all parts: their B are blocks of one matrix."""
        low_RP = linear(x_RD, self.lora_a, None)
        blocks = [scale * rows for scale, rows in zip(self.scales, self.lora_b.split(self.part_rows), strict=True)]
        up_FP = blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)
        y_RF.addmm_(low_RP, up_FP.to(y_RF.dtype).T)

    def addition(self, down: Tensor, up: Tensor) -> Tensor:
        """Returns scale B A, [F, D], in fp32, for these values of A and B."""
        parts = zip(self.scales, up.float().split(self.part_rows), down.float().split(self.rank), strict=True)
        return torch.cat([scale * (b @ a) for scale, b, a in parts])


class LoRAExperts(ExpertMaps):
    """Frozen maps of experts, each with a low-rank addition: A [E · rank, D] and B [E · F, rank]."""

    def __init__(self, frozen: ExpertMaps, rank: int, scale: float) -> None:
        E, D, F = frozen.num_experts, frozen.in_features, frozen.out_features
        super().__init__(E, D, F, bias=frozen.bias is not None)
        self.requires_grad_(False)
        self.rank, self.scale, self.is_off = rank, scale, False
        self.readers: Sequence[Any] = ()  # as of `LoRALinear`
        self.lora_a = nn.Parameter(torch.empty(E * rank, D))
        self.lora_b = nn.Parameter(torch.empty(E * F, rank))

    def forward(self, x_SD: Tensor, ends_E: Tensor, order_S: Tensor) -> Tensor:
        y_SF = super().forward(x_SD, ends_E, order_S)
        for number, reader in enumerate(self.readers):
            if reader is not None:
                is_own_S = order_S * len(self.readers) // len(order_S) == number
                y_SF = y_SF + torch.where(is_own_S.unsqueeze(1), reader.added(x_SD, ends_E), 0.0)
        return y_SF if self.readers or self.is_off else y_SF + self.added(x_SD, ends_E)

    def added(self, x_SD: Tensor, ends_E: Tensor) -> Tensor:
        """Returns scale (x A_eᵀ) B_eᵀ, [S, F]."""
        padding, dtype = -self.rank % 8, compute_dtype(x_SD)  # PyTorch's grouped products need rows of 16 bytes
        a, b = as_computed(self.lora_a, dtype), as_computed(self.lora_b, dtype)
        down = pad(a.unflatten(0, (self.num_experts, -1)), (0, 0, 0, padding)).flatten(0, 1)
        low_SP = self.scale * grouped_linear(x_SD, down, ends_E)
        return grouped_linear(low_SP, pad(b, (0, padding)), ends_E)

    def addition(self, down: Tensor, up: Tensor) -> Tensor:
        """Returns scale B A, [E · F, D], in fp32, for these values of A and B."""
        a_ErD, b_EFr = (part.float().unflatten(0, (self.num_experts, -1)) for part in (down, up))
        return self.scale * (b_EFr @ a_ErD).flatten(0, 1)


def adapted_maps(model: nn.Module) -> dict[str, LoRALinear | LoRAExperts]:
    """Returns the maps with adapters, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear | LoRAExperts)}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside this context, passes use the frozen model alone. It is a policy's reference, bit for bit."""
    maps = [*adapted_maps(model).values()]
    for module in maps:
        module.is_off = True
    try:
        yield
    finally:
        for module in maps:
            module.is_off = False


@contextmanager
def read_by(model: nn.Module, readers: Sequence[nn.Module | None]) -> Iterator[None]:
    """Inside this context, each pass computes several models with adapters on the same frozen body.

    The batch has one equal part per reader, and each part gets its reader's additions (None: the body alone). A map
    without an adapter in `model` must have none in any reader.
    """
    maps = adapted_maps(model)
    known = [{} if reader is None else adapted_maps(reader) for reader in readers]
    assert all(reader.keys() <= maps.keys() for reader in known), (
        "a reader has adapters where the model that is run has none"
    )
    for name, module in maps.items():
        module.readers = [reader.get(name) for reader in known]
    try:
        yield
    finally:
        for module in maps.values():
            module.readers = ()


def linear_maps(model: nn.Module) -> Iterator[tuple[str, nn.Linear | ExpertMaps, Stored]]:
    """Yields the blocks' linear maps, which may have adapters, and where the published layout stores their weights."""
    shape = model.config
    assert isinstance(shape, ModelConfig)
    family = family_of(shape, PURPOSES[type(model)])
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | ExpertMaps) and ".blocks." in name:
            yield name, module, family.stored(shape, f"{name}.weight")


def part_rows(module: nn.Linear, parts: Mapping[str, int | None]) -> tuple[int, ...]:
    """Returns the number of outputs of each part of a fused map (`lm.families.Stored.parts`)."""
    return tuple(module.out_features if rows is None else rows for rows in parts.values())


def add_adapters(model: AnyModel, config: LoRAConfig) -> AnyModel:
    """Put adapters on the targets. Pretrained weights are frozen; new heads (a score, a classifier) are trained.

    Raises: ValueError if the model has none of the targets.
    """
    freeze_body(model)
    if not (targets := [found for found in linear_maps(model) if found[0].endswith(config.modules)]):
        raise ValueError("lora.targets is 'mlp', but all MLPs are mixtures of experts; 'experts' was expected")
    if config.targets == "experts" and not any(isinstance(module, ExpertMaps) for _, module, _ in targets):
        raise ValueError("lora.targets is 'experts', but the model has none; 'all' was expected")
    for name, module, place in targets:
        if isinstance(module, ExpertMaps):
            replace_map(model, name, LoRAExperts(module, config.rank, config.scale))
            continue
        rows = part_rows(module, place.parts)
        replace_map(model, name, LoRALinear(module, rows, config.rank, [config.scale] * len(rows)))
    return model


def freeze_body(model: nn.Module) -> None:
    """Freeze everything but new heads."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(BODY))


def replace_map(model: nn.Module, name: str, module: LoRALinear | LoRAExperts) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


@dataclass(frozen=True)
class WithAdapters(Generic[AnyModel]):
    """A model with new adapters. A is drawn from `seed` as PEFT draws it, U(±1/√D); B is 0, so at first they do not
    change what the model computes.
    """

    frozen: ModelSource[AnyModel]
    config: LoRAConfig
    seed: int

    def build(self) -> AnyModel:
        return add_adapters(self.frozen.build(), self.config)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)

        def drawn(name: str, shape: torch.Size) -> Tensor:
            if name.endswith(f".{UP}"):
                return torch.zeros(shape)
            bound = 1 / math.sqrt(shape[1])
            return torch.empty(shape).uniform_(-bound, bound, generator=generator)

        model = on_meta(self.build)
        adapters = ((n, drawn(n, p.shape)) for n, p in model.named_parameters() if is_adapter(n))
        yield from interleaved(model, self.frozen.tensors(), adapters)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.endswith((f".{DOWN}", f".{UP}"))


def interleaved(
    model: nn.Module, frozen: Iterator[tuple[str, Tensor]], adapters: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Combine frozen tensors and adapters, each in order, into the order of the model's parameters; buffers last."""
    for name, _ in model.named_parameters():
        found, tensor = next(adapters if is_adapter(name) else frozen)
        assert found == name, f"{found} came where {name} was expected"
        yield name, tensor
        del tensor  # before the next one is read
    yield from frozen  # buffers


def merged(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights with adapters merged into the maps: W + scale B A, in fp32.

    `weights` are those of `model`, with or without adapters, in the order of its parameters. At most one map waits in
    memory for its A and B.
    """
    maps = adapted_maps(model)
    held: dict[str, Tensor] = {}
    for name, tensor in weights:
        owner, _, kind = name.rpartition(".")
        if owner not in maps:
            yield name, tensor
            continue
        held[kind], module = tensor, maps[owner]
        if {"weight", DOWN, UP} <= held.keys() and (module.bias is None or "bias" in held):
            yield f"{owner}.weight", held["weight"].float() + module.addition(held[DOWN], held[UP])
            if "bias" in held:
                yield f"{owner}.bias", held["bias"]
            held = {}
        del tensor  # before the next one is gathered


def kept_adapters(weights: Iterable[tuple[str, Tensor]], kept: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields all weights, and puts those of adapters and new heads, which an adapter's file holds, into `kept`."""
    for name, tensor in weights:
        if is_adapter(name) or not name.startswith(BODY):
            kept[name] = tensor
        yield name, tensor
        del tensor  # before the next one is gathered
