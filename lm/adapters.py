"""Adapters in PEFT's files: `adapter_config.json` and `adapter_model.safetensors`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from files.atomic import write_json
from lm.adapter_folder import ADAPTER_WEIGHTS, PREFIX, A, AdapterFolder, B, adaptable_maps, check_fit, places_of
from lm.config import ModelConfig
from lm.encoder import SequenceClassifier, SpanPredictor, TokenClassifier
from lm.families import Stored, family_of
from lm.hub import ADAPTER_CONFIG, hub_name
from lm.lora import (
    DOWN,
    UP,
    LoRAConfig,
    LoRALinear,
    adapted_maps,
    freeze_body,
    interleaved,
    kept_adapters,
    linear_maps,
    merged,
    part_rows,
    replace_map,
)
from lm.model import ScalarModel
from lm.source import ModelSource, on_meta
from lm.tensor_files import open_tensors
from lm.tokenizer import Tokenizer
from lm.weights import PURPOSES, Model, WithNewHead, any_folder, purpose_of, save_model

AnyModel = TypeVar("AnyModel", bound=nn.Module)
ADAPTER = "adapter"  # folder, next to the merged model's
# PEFT's names of what a model is for; it has none for predicting masked words.
TASKS = {
    "language": "CAUSAL_LM", "translate": "SEQ_2_SEQ_LM", "score": "SEQ_CLS", "sequence": "SEQ_CLS",
    "token": "TOKEN_CLS", "span": "QUESTION_ANS", "body": "FEATURE_EXTRACTION",
}  # fmt: skip


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
    """Write a trained model into folder/name. One with adapters is merged, and folder/adapter holds only them.

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
    stored, adapted, is_transposed = dict[str, Tensor](), set[str](), False
    purpose = PURPOSES[type(plain)]
    family = family_of(plain.config, purpose)
    for name, module, place in linear_maps(network):
        if not isinstance(module, LoRALinear):
            continue
        layers = [theirs.removesuffix(".weight") for theirs in place.parts]
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
    everything = {theirs.rpartition(".")[0] for name in own_names for theirs in family.stored(plain.config, name).parts}
    save_file(stored, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": TASKS[purpose],
        "base_model_name_or_path": hub_name(base) or str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": _endings(adapted, everything - adapted),
        "modules_to_save": sorted(heads) or None,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": is_transposed,
        "use_rslora": False,
        "inference_mode": True,
    }
    write_json(folder / ADAPTER_CONFIG, config)


def _endings(adapted: set[str], others: set[str]) -> list[str]:
    """The shortest ends of names by which PEFT finds the adapted maps and no other modules."""

    def ending(name: str) -> str:
        parts = name.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
        return next(end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others))

    return sorted({ending(name) for name in adapted})


@dataclass(frozen=True)
class FromAdapter(Generic[AnyModel]):
    """A model with the adapters of a folder, and with the weights that the folder has whole: heads, tables, norms.

    Raises: as `AdapterFolder`; and ValueError naming the tensors that the model has no place for, that the config
    leaves out, that are missing, or whose shapes differ.
    """

    frozen: ModelSource[AnyModel]
    folder: Path

    def build(self) -> AnyModel:
        adapter, model = AdapterFolder(self.folder), self.frozen.build()
        check_fit(adapter, model, self.frozen.new_names() if isinstance(self.frozen, WithNewHead) else set())
        freeze_body(model)
        for name, (module, layers) in adaptable_maps(model).items():
            ranks = [adapter.rank(layer) for layer in layers]
            if any(ranks):
                scales = [adapter.config.scale(layer) for layer in layers]
                replace_map(model, name, LoRALinear(module, part_rows(module, layers), max(ranks), scales))
        return model

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        adapter, model = AdapterFolder(self.folder), on_meta(self.build)
        places, maps = places_of(model), adaptable_maps(model)
        with open_tensors(adapter.weights) as file:

            def own(theirs: str) -> Tensor:
                tensor: Tensor = file.get_tensor(f"{PREFIX}{theirs}")
                return tensor.float()

            def frozen() -> Iterator[tuple[str, Tensor]]:
                for ours, tensor in self.frozen.tensors():
                    place = places.get(ours)
                    if place is None or not place.parts.keys() & adapter.shapes.keys():
                        yield ours, tensor
                    else:
                        yield ours, _with_whole_parts(tensor, place, {*adapter.shapes}, own)
                    del tensor  # before the next one is read

            def adapters() -> Iterator[tuple[str, Tensor]]:
                for name, module in adapted_maps(model).items():
                    down, up = torch.zeros(module.lora_a.shape), torch.zeros(module.lora_b.shape)
                    parts = down.split(module.rank), up.split(module.part_rows)
                    for layer, of_down, of_up in zip(maps[name][1], *parts, strict=True):
                        rank = adapter.rank(layer)
                        if rank:  # a part of a lower rank than others, or without an adapter, ends with zeros
                            of_down[:rank], of_up[:, :rank] = own(f"{layer}{A}"), own(f"{layer}{B}")
                    yield f"{name}.{DOWN}", down
                    yield f"{name}.{UP}", up

            yield from interleaved(model, frozen(), adapters())


def adapted_folder(base: Path, adapter: AdapterFolder) -> FromAdapter[Model]:
    """The model of a directory with an adapter; one that was trained under a new head brings it.

    Raises: ValueError for a base that is not for the adapter's task.
    """
    return FromAdapter(_base(base, adapter), adapter.folder)


def _base(base: Path, adapter: AdapterFolder) -> ModelSource[Model]:
    purpose, task = purpose_of(base), adapter.config.task_type
    if task is None or task == TASKS.get(purpose):
        return any_folder(base)
    heads: dict[tuple[str, str], Callable[[ModelConfig], Model]] = {
        ("language", "SEQ_CLS"): lambda shape: ScalarModel(shape, labels=adapter.labels),
    }
    for body in ("masked", "body"):
        heads |= {
            (body, "SEQ_CLS"): lambda shape: SequenceClassifier(shape, adapter.labels),
            (body, "TOKEN_CLS"): lambda shape: TokenClassifier(shape, adapter.labels),
            (body, "QUESTION_ANS"): SpanPredictor,
        }
    head = heads.get((purpose, task))
    if head is None:
        raise ValueError(
            f"{adapter.folder / ADAPTER_CONFIG}: task_type is {task!r}, and {base} is a"
            f" {any_folder(base).kind.__name__}; a model for that task was expected as base"
        )
    return WithNewHead(base, any_folder(base).kind, head, seed=0)


def _with_whole_parts(tensor: Tensor, place: Stored, names: Set[str], own: Callable[[str], Tensor]) -> Tensor:
    """The tensor, with those of its parts that an adapter has whole in place of its own."""
    sizes = [len(tensor) if rows is None else rows for rows in place.parts.values()]

    def part(theirs: str) -> Tensor:
        return (own(theirs).T if place.transposed else own(theirs))[place.rows_before :]

    before = zip(place.parts, tensor.split(sizes), strict=True)
    return torch.cat([part(theirs) if theirs in names else rows for theirs, rows in before])
