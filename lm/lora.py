"""LoRA: trained low-rank additions to the linear maps of a frozen model (Hu et al., arXiv 2106.09685).

    y = x Wᵀ + (alpha / rank) (x Aᵀ) Bᵀ

A map that holds several of the published layout (q, k and v; gate and up) has an A of its own for each, as PEFT has. So
an adapter is written in PEFT's layout, and `merged` adds it to the weights, after which nothing shows that it was one.

Shape letters: ... any, D inputs, F outputs, r rank, P parts of a fused map.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import Tensor, nn

from files.atomic import write_json
from lm.config import ModelConfig
from lm.families import family_of
from lm.linear import Linear
from lm.source import ModelSource, on_meta

TARGETS = {"attention": ("attention.qkv", "attention.out"), "mlp": ("mlp.up", "mlp.down")}
DOWN, UP = "lora_a", "lora_b"  # A and B, as parameters of a map
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's files

AnyModel = TypeVar("AnyModel", bound=nn.Module)


class LoRAConfig(BaseModel):
    """Which maps get an adapter, and of what size. Few numbers suffice: rank 1 to 32 in reinforcement learning, more
    for much data in SFT, at about ten times the learning rate of full tuning (Schulman et al. 2025, "LoRA Without
    Regret", thinkingmachines.ai/blog/lora).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(ge=1, description="Rank of each addition.")
    alpha: float = Field(gt=0, description="The addition is scaled by alpha / rank.")
    targets: Literal["all", "attention", "mlp"] = Field(default="all", description="The blocks' maps that are adapted.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def modules(self) -> tuple[str, ...]:
        """The adapted maps of a block, by Heed's names."""
        return TARGETS["attention"] + TARGETS["mlp"] if self.targets == "all" else TARGETS[self.targets]


class LoRALinear(Linear):
    """A frozen map and its addition. `part_rows` are the outputs of each of the maps that it holds; they sum to F."""

    def __init__(self, frozen: nn.Linear, config: LoRAConfig, part_rows: tuple[int, ...]) -> None:
        super().__init__(frozen.in_features, frozen.out_features, bias=frozen.bias is not None)
        assert sum(part_rows) == frozen.out_features, f"{part_rows} rows of {frozen.out_features}"
        self.part_rows, self.rank, self.scale = part_rows, config.rank, config.scale
        self.lora_a = nn.Parameter(torch.empty(len(part_rows) * config.rank, frozen.in_features))
        self.lora_b = nn.Parameter(torch.empty(frozen.out_features, config.rank))
        self.is_off = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.is_off:
            return y
        low_Pr = F.linear(x, self.lora_a).unflatten(-1, (len(self.part_rows), self.rank))
        parts = [
            F.linear(low_Pr[..., part, :], rows) for part, rows in enumerate(self.lora_b.split(self.part_rows, dim=0))
        ]
        return y + self.scale * torch.cat(parts, dim=-1)


def add_adapters(model: AnyModel, config: LoRAConfig) -> AnyModel:
    """Replace the targets among the blocks' maps. All else is frozen, an untied head and norms included."""
    shape = model.config
    assert isinstance(shape, ModelConfig)
    model.requires_grad_(False)
    for name, module in [*model.named_modules()]:
        parent, _, last = name.rpartition(".")
        if isinstance(module, nn.Linear) and ".blocks." in name and name.endswith(config.modules):
            adapted = LoRALinear(module, config, _part_rows(shape, name, module.out_features))
            adapted.weight.requires_grad_(False)
            if adapted.bias is not None:
                adapted.bias.requires_grad_(False)
            setattr(model.get_submodule(parent), last, adapted)
    return model


def _part_rows(shape: ModelConfig, name: str, num_rows: int) -> tuple[int, ...]:
    parts = family_of(shape, "language").stored(shape, f"{name}.weight").parts
    return tuple(num_rows if rows is None else rows for rows in parts.values())


@dataclass(frozen=True)
class WithAdapters(Generic[AnyModel]):
    """A model with new adapters: A is drawn from `seed` as PEFT draws it, U(±1/√D); B is 0, so the model is the same
    as without.
    """

    frozen: ModelSource[AnyModel]
    config: LoRAConfig
    seed: int

    def build(self) -> AnyModel:
        return add_adapters(self.frozen.build(), self.config)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        generator, frozen = torch.Generator().manual_seed(self.seed), self.frozen.tensors()
        model = on_meta(self.build)
        for name, parameter in model.named_parameters():
            if name.endswith(f".{DOWN}"):
                bound = 1 / math.sqrt(parameter.shape[1])
                yield name, torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            elif name.endswith(f".{UP}"):
                yield name, torch.zeros(parameter.shape)
            else:
                found, tensor = next(frozen)
                assert found == name, f"{found} came where {name} was expected"
                yield name, tensor
                del tensor
        yield from frozen  # buffers


def merged(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights without adapters, their additions in the maps: W + (alpha / rank) B A, in fp32.

    `weights` are those of a model with or without adapters, in the order of its parameters. At most one map is held
    back, until its A and B have come.
    """
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    held: dict[str, Tensor] = {}
    for name, tensor in weights:
        owner, _, kind = name.rpartition(".")
        if owner not in adapted:
            yield name, tensor
            continue
        held[kind] = tensor
        if {"weight", DOWN, UP} <= held.keys() and (adapted[owner].bias is None or "bias" in held):
            yield f"{owner}.weight", held["weight"].float() + addition(adapted[owner], held[DOWN], held[UP])
            if "bias" in held:
                yield f"{owner}.bias", held["bias"]
            held = {}


def addition(module: LoRALinear, down: Tensor, up: Tensor) -> Tensor:
    """(alpha / rank) B A of a fused map, [F, D], in fp32."""
    downs = down.float().split(module.rank)
    ups = up.float().split(module.part_rows)
    return module.scale * torch.cat([b @ a for a, b in zip(downs, ups, strict=True)])


def kept_adapters(weights: Iterable[tuple[str, Tensor]], kept: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights as they are; `kept` gets those of adapters."""
    for name, tensor in weights:
        if name.endswith((f".{DOWN}", f".{UP}")):
            kept[name] = tensor
        yield name, tensor


def save_adapter(folder: Path, model: nn.Module, config: LoRAConfig, found: Mapping[str, Tensor], base: str) -> None:
    """Write an adapter in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

    `found` are the adapters of `model` by name; `base` names the model that they belong to.
    """
    folder.mkdir(exist_ok=True)
    shape = model.config
    assert isinstance(shape, ModelConfig)
    stored, adapted, others = dict[str, Tensor](), set[str](), set[str]()
    for name, module in model.named_modules():
        if ".blocks." not in name or not isinstance(module, nn.Linear):
            continue
        place = family_of(shape, "language").stored(shape, f"{name}.weight")
        layers = [theirs.removesuffix(".weight") for theirs in place.parts]
        if not isinstance(module, LoRALinear):
            others.update(layers)
            continue
        adapted.update(layers)
        downs, ups = found[f"{name}.{DOWN}"].split(module.rank), found[f"{name}.{UP}"].split(module.part_rows)
        for layer, down, up in zip(layers, downs, ups, strict=True):
            stored[f"base_model.model.{layer}.lora_A.weight"] = down.detach().contiguous()
            stored[f"base_model.model.{layer}.lora_B.weight"] = up.detach().contiguous()
    save_file(stored, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    is_transposed = family_of(shape, "language").stored(shape, "decoder.blocks.0.mlp.up.weight").transposed
    write_json(folder / ADAPTER_CONFIG, _peft_config(config, _endings(adapted, others), base, transposed=is_transposed))


def _endings(adapted: set[str], others: set[str]) -> list[str]:
    """The shortest ends of names by which PEFT finds the adapted maps and no others."""
    taken = {name.rpartition(".")[2] for name in others}

    def ending(name: str) -> str:
        *_, outer, inner = name.split(".")
        return f"{outer}.{inner}" if inner in taken else inner

    return sorted({ending(name) for name in adapted})


def _peft_config(config: LoRAConfig, modules: list[str], base: str, *, transposed: bool) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": modules,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": transposed,
        "use_rslora": False,
        "inference_mode": True,
    }
