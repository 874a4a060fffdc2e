"""An adapter's folder in PEFT's layout, and whether its tensors fit a model and the adapter's own config."""

from collections.abc import Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import nn

from lm.adapter_config import AdapterConfig
from lm.config import ModelConfig
from lm.encoder import EncoderModel
from lm.families import Stored, family_of
from lm.hub import ADAPTER_CONFIG
from lm.linear import Linear
from lm.lora import LoRALinear, is_adapter, part_rows
from lm.model import SCORE
from lm.tensor_files import open_tensors, part_shape
from lm.weights import PURPOSES

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # before the base's own names
A, B = ".lora_A.weight", ".lora_B.weight"  # after them

Layers = dict[str, int | None]  # outputs by name of a layer in the base's layout; None: all of a map's


@dataclass(frozen=True)
class AdapterFolder:
    """A LoRA adapter in PEFT's layout. Raises: as `AdapterConfig.read`; ValueError for missing or damaged weights."""

    folder: Path

    @cached_property
    def config(self) -> AdapterConfig:
        return AdapterConfig.read(self.folder / ADAPTER_CONFIG)

    @property
    def weights(self) -> Path:
        path = self.folder / ADAPTER_WEIGHTS
        if not path.is_file():
            raise ValueError(f"{path}: no such file; weights as PEFT saves them, in safetensors, were expected")
        return path

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Shape of each tensor, by its name in the base's layout."""
        with open_tensors(self.weights) as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        wrong = next((name for name in shapes if not name.startswith(PREFIX)), None)
        if wrong is not None:
            raise ValueError(f"{self.weights}: a tensor {wrong!r}; names that start with {PREFIX} were expected")
        return {name.removeprefix(PREFIX): shape for name, shape in shapes.items()}

    @property
    def labels(self) -> tuple[str, ...]:
        """A classifier's labels. PEFT keeps no names, so several are called what `transformers` calls them."""
        heads = [self.shapes[name] for name in ("score.weight", "classifier.weight") if name in self.shapes]
        num_labels = heads[0][0] if heads else 1
        return (SCORE,) if num_labels == 1 else tuple(f"LABEL_{number}" for number in range(num_labels))

    def rank(self, layer: str) -> int:
        """The rank of a layer's adapter; 0 where the file has none."""
        return self.config.rank(layer) if f"{layer}{A}" in self.shapes else 0


def check_fit(adapter: AdapterFolder, model: nn.Module, new: Set[str]) -> None:
    """Compare names and shapes of an adapter's tensors with the model and with the adapter's config; none is read.

    `new` are our names of weights that the base does not have: the adapter must have them.
    Raises: ValueError naming the tensors that have no place, that the config leaves out, that are missing, or whose
    shapes differ; and for an adapter of nothing.
    """
    found = adapter.shapes.keys()
    pairs, left_out = _adapter_shapes(adapter, model)
    wholes, required = _whole_shapes(adapter, model, new)
    expected = pairs | wholes
    layers = {name.removesuffix(A).removesuffix(B) for name in found & pairs.keys()}
    required |= {f"{layer}{kind}" for layer in layers for kind in (A, B)}
    wrong = [f"{name}: found, but {ADAPTER_CONFIG} does not target it" for name in sorted(found & left_out)]
    wrong += [f"{name}: found, not expected" for name in sorted(found - expected.keys() - left_out)]
    wrong += [f"{name}: expected {expected[name]}, missing" for name in sorted(required - found)]
    for name in sorted(found & expected.keys()):
        if adapter.shapes[name] != expected[name]:
            wrong.append(f"{name}: expected {expected[name]}, found {adapter.shapes[name]}")
    if wrong:
        raise ValueError(
            f"{adapter.weights}: {len(wrong)} tensors do not fit the base model (a {type(model).__name__};"
            f" {ADAPTER_CONFIG} names {adapter.config.base_model_name_or_path}): {'; '.join(wrong[:3])}"
        )
    if not layers:
        raise ValueError(f"{adapter.weights}: no adapter; tensors named *{A} and *{B} were expected")


def _adapter_shapes(adapter: AdapterFolder, model: nn.Module) -> tuple[dict[str, list[int]], set[str]]:
    """Shapes of A and B of all maps that the config targets; the names of the others."""
    pairs, left_out = dict[str, list[int]](), set[str]()
    for module, layers in adaptable_maps(model).values():
        for layer, rows in zip(layers, part_rows(module, layers), strict=True):
            rank = adapter.config.rank(layer)
            pair = {f"{layer}{A}": [rank, module.in_features], f"{layer}{B}": [rows, rank]}
            if adapter.config.targets(layer):
                pairs |= pair
            else:
                left_out |= pair.keys()
    return pairs, left_out


def _whole_shapes(adapter: AdapterFolder, model: nn.Module, new: Set[str]) -> tuple[dict[str, list[int]], set[str]]:
    """Shapes of the weights that an adapter may have whole; the names of those that it must have."""
    shapes = {ours: parameter.shape for ours, parameter in model.named_parameters()}
    wholes, required = dict[str, list[int]](), set[str]()
    for ours, place in places_of(model).items():
        wholes |= {theirs: part_shape(shapes[ours], rows, place) for theirs, rows in place.parts.items()}
        required |= {theirs for theirs in place.parts if ours in new or adapter.config.saves(theirs.rpartition(".")[0])}
    return wholes, required


def adaptable_maps(model: nn.Module) -> dict[str, tuple[nn.Linear, Layers]]:
    """The linear maps that may have adapters, by our names, and their layers.

    Heads compute in their own ways (`lm.head`, `lm.linear.Fp32Linear`): an adapter has them whole, or not at all.
    """
    found, places = dict[str, tuple[nn.Linear, Layers]](), places_of(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module) in (nn.Linear, Linear, LoRALinear):
            parts = places[f"{name}.weight"].parts
            found[name] = module, {theirs.removesuffix(".weight"): rows for theirs, rows in parts.items()}
    return found


def places_of(model: nn.Module) -> dict[str, Stored]:
    """Where PEFT has our weights, by our names. A table that the head shares is left out: an adapter that has it whole
    would untie the model.
    """
    shape = model.config
    assert isinstance(shape, ModelConfig)
    family = family_of(shape, PURPOSES[type(model)])
    is_tied = shape.tie_word_embeddings and hasattr(model, "head")
    names = [name for name, _ in model.named_parameters() if not is_adapter(name)]
    untied = [name for name in names if not (is_tied and name.endswith("coder.embedding.weight"))]
    prefix = "bert." if type(model) is EncoderModel else ""  # `transformers` has it only where there is a head
    return {name: _without_prefix(family.stored(shape, name), prefix) for name in untied}


def _without_prefix(place: Stored, prefix: str) -> Stored:
    return replace(place, parts={theirs.removeprefix(prefix): rows for theirs, rows in place.parts.items()})
