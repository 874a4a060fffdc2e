"""Adapters in PEFT's files: `adapter_config.json` and `adapter_model.safetensors`."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from files.atomic import write_json
from lm.config import ModelConfig
from lm.families import family_of
from lm.hub import ADAPTER_CONFIG, hub_name
from lm.lora import (
    DOWN,
    UP,
    LoRAConfig,
    LoRALinear,
    adapted_maps,
    freeze_body,
    interleaved,
    is_adapter,
    kept_adapters,
    linear_maps,
    merged,
    part_rows,
    replace_map,
)
from lm.source import ModelSource, on_meta
from lm.tokenizer import Tokenizer, read_json
from lm.weights import PURPOSES, Model, save_model

AnyModel = TypeVar("AnyModel", bound=nn.Module)
ADAPTER = "adapter"  # folder, next to the merged model's
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # before the base's own names
A, B = ".lora_A.weight", ".lora_B.weight"  # after them
FROZEN = ("encoder.", "decoder.", "transform.", "transform_norm.")  # what an adapter's files never have whole
TASKS = {"language": "CAUSAL_LM", "translate": "SEQ_2_SEQ_LM", "score": "SEQ_CLS", "sequence": "SEQ_CLS"}


def save_trained(
    folder: Path,
    plain: Model,
    network: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    tokenizer: Tokenizer,
    lora: LoRAConfig | None,
    base: Path,
    *,
    name: str = "model",
) -> None:
    """Write a trained model into folder/name. One with adapters is merged, and folder/adapter has them by themselves.

    `plain` is the model without adapters; `network` is what was trained, whose `weights` come in its order. `base` is
    the model that was adapted.
    """
    if lora is None:
        save_model(folder / name, plain, weights, tokenizer)
        return
    kept = dict[str, Tensor]()
    save_model(folder / name, plain, merged(network, kept_adapters(weights, kept)), tokenizer)
    save_adapter(folder / ADAPTER, plain, network, kept, lora, base)


def save_adapter(
    folder: Path, plain: Model, network: nn.Module, kept: Mapping[str, Tensor], lora: LoRAConfig, base: Path
) -> None:
    """Write an adapter. `kept` are the values of A, B and new heads by name; the rest as in `save_trained`."""
    folder.mkdir(exist_ok=True)
    stored, adapted, others, is_transposed = dict[str, Tensor](), set[str](), set[str](), False
    purpose = PURPOSES[type(plain)]
    family = family_of(plain.config, purpose)
    for name, module, place in linear_maps(network):
        layers = [theirs.removesuffix(".weight") for theirs in place.parts]
        if not isinstance(module, LoRALinear):
            others.update(layers)
            continue
        adapted.update(layers)
        is_transposed |= place.transposed
        downs, ups = kept[f"{name}.{DOWN}"].split(module.rank), kept[f"{name}.{UP}"].split(module.part_rows)
        for layer, down, up in zip(layers, downs, ups, strict=True):
            stored[f"{PREFIX}{layer}{A}"] = down.detach().contiguous()
            stored[f"{PREFIX}{layer}{B}"] = up.detach().contiguous()
    heads = set[str]()
    own_names = dict(plain.named_parameters())
    for name, tensor in kept.items():
        if name in own_names:
            (theirs,) = family.stored(plain.config, name).parts
            heads.add(theirs.rpartition(".")[0])
            stored[f"{PREFIX}{theirs}"] = tensor.detach().contiguous()
    save_file(stored, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": TASKS[purpose],
        "base_model_name_or_path": hub_name(base) or str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": _endings(adapted, others),
        "modules_to_save": sorted(heads) or None,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": is_transposed,
        "use_rslora": False,
        "inference_mode": True,
    }
    write_json(folder / ADAPTER_CONFIG, config)


def _endings(adapted: set[str], others: set[str]) -> list[str]:
    """The shortest ends of names by which PEFT finds the adapted maps and no others."""
    taken = {name.rpartition(".")[2] for name in others}

    def ending(name: str) -> str:
        *_, outer, inner = name.split(".")
        return f"{outer}.{inner}" if inner in taken else inner

    return sorted({ending(name) for name in adapted})


# Fields of adapter_config.json that are read, or that change nothing once an adapter is trained. PEFT has many more,
# whose meaning Heed does not compute: they must be off.
UNDERSTOOD = {
    "peft_type", "task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "inference_mode",
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "init_lora_weights", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "fan_in_fan_out", "lora_dropout",
    "megatron_core", "qalora_group_size", "ephemeral_gpu_offload", "runtime_config",
}  # fmt: skip
# The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change the base's weights, which the adapter's files do not have.
INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterFolder:
    """A LoRA adapter in PEFT's layout, as its `adapter_config.json` describes it.

    Raises: ValueError naming file and field for another type of adapter, a missing field, or an option that Heed does
    not compute.
    """

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.folder / ADAPTER_CONFIG
        raw = read_json(path)
        expected = {"peft_type": ("LORA",), "bias": ("none", None), "init_lora_weights": INITIALISATIONS}
        for field, values in expected.items():
            if raw.get(field) not in values:
                wanted = " or ".join(map(repr, values))
                raise ValueError(f"{path}: {field} is {raw.get(field)!r}; {wanted} was expected")
        for field, value in raw.items():
            if field not in UNDERSTOOD and value:
                raise ValueError(f"{path}: {field} is {value!r}; Heed reads adapters without it")
        for field in ("r", "lora_alpha"):
            if not isinstance(raw.get(field), int | float) or raw[field] <= 0:
                raise ValueError(f"{path}: {field} is {raw.get(field)!r}; a number above 0 was expected")
        return raw

    @property
    def base(self) -> str:
        """The model that was adapted: a folder or a hub id; "" where the adapter does not say."""
        return str(self.config.get("base_model_name_or_path") or "")

    @property
    def weights(self) -> Path:
        path = self.folder / ADAPTER_WEIGHTS
        if not path.is_file():
            raise ValueError(f"{path}: no such file; weights as PEFT saves them, in safetensors, were expected")
        return path

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by its name in the base's layout."""
        with safe_open(self.weights, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        wrong = next((name for name in shapes if not name.startswith(PREFIX)), None)
        if wrong is not None:
            raise ValueError(f"{self.weights}: a tensor {wrong!r}; names that start with {PREFIX} were expected")
        return {name.removeprefix(PREFIX): shape for name, shape in shapes.items()}

    def rank(self, layer: str) -> int:
        """The rank of a layer's adapter; 0 where it has none. Raises: ValueError where tensors and config disagree."""
        shape, up = self.shapes.get(f"{layer}{A}"), self.shapes.get(f"{layer}{B}")
        if shape is None and up is None:
            return 0
        rank = int(self._of_pattern("rank_pattern", "r", layer))
        if shape is None or up is None or shape[0] != rank or up[1] != rank:
            raise ValueError(f"{self.weights}: A and B of {layer} are {shape} and {up}; rank {rank} was expected")
        return rank

    def scale(self, layer: str) -> float:
        """alpha / rank, or alpha / √rank in rank-stabilised LoRA (arXiv 2312.03732); 0 without an adapter."""
        rank = self.rank(layer)
        alpha = float(self._of_pattern("alpha_pattern", "lora_alpha", layer))
        return 0.0 if not rank else alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _of_pattern(self, patterns: str, default: str, layer: str) -> float:
        """As PEFT resolves it: the first pattern that is the whole end of the layer's name."""
        found = self.config.get(patterns) or {}
        value: float = next(
            (of for pattern, of in found.items() if re.match(rf"(.*\.)?({pattern})$", layer)), self.config[default]
        )
        return value


@dataclass(frozen=True)
class FromAdapter(Generic[AnyModel]):
    """A model with the adapters of a folder, and with the heads that the folder has.

    Raises: as `AdapterFolder`; and ValueError naming a tensor that the model has no place for, or whose shape differs.
    """

    frozen: ModelSource[AnyModel]
    folder: Path

    def build(self) -> AnyModel:
        adapter, model = AdapterFolder(self.folder), self.frozen.build()
        freeze_body(model)
        known = {f"{layer}{kind}" for layers in _layers(model).values() for layer in layers for kind in (A, B)}
        known |= {*_replaced(model)}
        unknown = next((name for name in adapter.shapes if name not in known), None)
        if unknown is not None:
            raise ValueError(
                f"{adapter.weights}: a tensor {unknown!r}; adapters of the blocks' linear maps, and a whole head that"
                f" shares no table with the embedding, were expected of a {type(model).__name__}"
            )
        for name, layers in _layers(model).items():
            ranks = [adapter.rank(layer) for layer in layers]
            if any(ranks):
                module = model.get_submodule(name)
                assert isinstance(module, nn.Linear), f"{name} is a {type(module).__name__}"
                scales = [adapter.scale(layer) for layer in layers]
                replace_map(model, name, LoRALinear(module, part_rows(module, layers), max(ranks), scales))
                self._check_shapes(adapter, module, layers)
        return model

    def _check_shapes(self, adapter: AdapterFolder, module: nn.Linear, layers: Mapping[str, int | None]) -> None:
        for layer, rows in zip(layers, part_rows(module, layers), strict=True):
            rank = adapter.rank(layer)
            for name, shape in ((f"{layer}{A}", (rank, module.in_features)), (f"{layer}{B}", (rows, rank))):
                if rank and adapter.shapes[name] != shape:
                    raise ValueError(f"{adapter.weights}: {name} is {adapter.shapes[name]}; {shape} was expected")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        adapter, model = AdapterFolder(self.folder), on_meta(self.build)
        layers_of = _layers(model)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        with safe_open(adapter.weights, "pt") as file:

            def own(theirs: str) -> Tensor:
                tensor: Tensor = file.get_tensor(f"{PREFIX}{theirs}")
                return tensor.float()

            def frozen() -> Iterator[tuple[str, Tensor]]:
                replaced = {ours: theirs for theirs, ours in _replaced(model).items() if theirs in adapter.shapes}
                for ours, tensor in self.frozen.tensors():
                    if ours not in replaced:
                        yield ours, tensor
                    elif adapter.shapes[replaced[ours]] == shapes[ours]:
                        yield ours, own(replaced[ours])
                    else:
                        raise ValueError(
                            f"{adapter.weights}: {replaced[ours]} is {adapter.shapes[replaced[ours]]};"
                            f" {shapes[ours]}, as the model has it, was expected"
                        )
                    del tensor  # before the next one is read

            def adapters() -> Iterator[tuple[str, Tensor]]:
                for name, module in adapted_maps(model).items():
                    down, up = torch.zeros(module.lora_a.shape), torch.zeros(module.lora_b.shape)
                    parts = down.split(module.rank), up.split(module.part_rows)
                    for layer, of_down, of_up in zip(layers_of[name], *parts, strict=True):
                        rank = adapter.rank(layer)
                        if rank:  # a part of a lower rank than others, or without an adapter, ends with zeros
                            of_down[:rank], of_up[:, :rank] = own(f"{layer}{A}"), own(f"{layer}{B}")
                    yield f"{name}.{DOWN}", down
                    yield f"{name}.{UP}", up

            yield from interleaved(model, frozen(), adapters())


def _layers(model: nn.Module) -> dict[str, dict[str, int | None]]:
    """The published layout's layers of each linear map, and their outputs."""
    return {
        name: {theirs.removesuffix(".weight"): rows for theirs, rows in place.parts.items()}
        for name, _, place in linear_maps(model)
    }


def _replaced(model: nn.Module) -> dict[str, str]:
    """Our names of the weights that an adapter may have whole, by those of the published layout: heads."""
    shape = model.config
    assert isinstance(shape, ModelConfig)
    family = family_of(shape, PURPOSES[type(model)])
    heads = [name for name, _ in model.named_parameters() if not name.startswith(FROZEN) and not is_adapter(name)]
    return {theirs: ours for ours in heads for theirs in family.stored(shape, ours).parts}
