"""Adapters in PEFT's files: `adapter_config.json` and `adapter_model.safetensors`."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from files.atomic import write_json
from lm.families import family_of
from lm.hub import hub_name
from lm.lora import DOWN, UP, LoRAConfig, LoRALinear, add_adapters, interleaved, kept_adapters, linear_maps, merged
from lm.source import ModelSource, on_meta
from lm.tokenizer import Tokenizer
from lm.weights import PURPOSES, Model, save_model

AnyModel = TypeVar("AnyModel", bound=nn.Module)
ADAPTER = "adapter"  # folder, next to the merged model's
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # before the base's own names
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
            stored[f"{PREFIX}{layer}.lora_A.weight"] = down.detach().contiguous()
            stored[f"{PREFIX}{layer}.lora_B.weight"] = up.detach().contiguous()
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


@dataclass(frozen=True)
class FromAdapter(Generic[AnyModel]):
    """TEMPORARY"""

    frozen: ModelSource[AnyModel]
    folder: Path

    def build(self) -> AnyModel:
        import json

        raw = json.loads((self.folder / ADAPTER_CONFIG).read_text())
        model = self.frozen.build()
        names = {n for n in load_file(self.folder / ADAPTER_WEIGHTS)}
        targets = "all" if any("mlp" in n for n in names) else "attention"
        return add_adapters(model, LoRAConfig(rank=raw["r"], alpha=raw["lora_alpha"], targets=targets))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        model = on_meta(self.build)
        found = load_file(self.folder / ADAPTER_WEIGHTS)

        def ads():
            for name, module, place in linear_maps(model):
                if not isinstance(module, LoRALinear):
                    continue
                layers = [t.removesuffix(".weight") for t in place.parts]
                yield f"{name}.{DOWN}", torch.cat([found[f"{PREFIX}{l}.lora_A.weight"] for l in layers])
                yield f"{name}.{UP}", torch.cat([found[f"{PREFIX}{l}.lora_B.weight"] for l in layers])

        yield from interleaved(
            model,
            ((n, found[f"{PREFIX}score.weight"] if n == "score.weight" else t) for n, t in self.frozen.tensors()),
            ads(),
        )
