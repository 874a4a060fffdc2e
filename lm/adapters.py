"""LoRA adapters in PEFT's files, `adapter_config.json` and `adapter_model.safetensors`: read, checked, and written.

Checked against PEFT 0.21 (`peft/tuners/lora/config.py`, `check_target_module_exists`, `get_pattern_key`).
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from files.atomic import write_json
from lm.config import ModelConfig
from lm.encoder import EncoderModel, SequenceClassifier, SpanPredictor, TokenClassifier
from lm.families import family_of
from lm.families.family import Family, Stored
from lm.hub import ADAPTER_CONFIG, hub_name
from lm.layers import ExpertMaps, Linear
from lm.lora import (
    DOWN,
    UP,
    LoRAConfig,
    LoRAExperts,
    LoRALinear,
    WithAdapters,
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
from lm.model import SCORE, ScalarModel
from lm.source import ModelSource, on_meta
from lm.tensor_files import open_tensors, part_shape
from lm.tokenizer import Tokenizer, read_json
from lm.weights import PURPOSES, Model, WithNewHead, any_folder, purpose_of, save_model

ADAPTER = "adapter"  # folder, next to the merged model's
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # before the base's own names
A, B = ".lora_A.weight", ".lora_B.weight"  # after them
# The parameters that stack experts in transformers 5, by Heed's names. PEFT wraps the module that holds them: "up"
# first, so the other is the outer one if both are adapted.
STACKED = {"up": "gate_up_proj", "down": "down_proj"}
# What `transformers` calls a layer's module of stacked experts, by the model's type.
OWNERS = defaultdict(
    lambda: "mlp.experts", dict.fromkeys(("granitemoe", "granitemoeshared"), "block_sparse_moe.experts")
)
# PEFT takes a mixture's modules of these names for maps of experts, so a plain or shared MLP's are targets by weight.
AS_OF_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")

# Fields that change nothing once an adapter is trained. PEFT has many more, which Heed does not support: they must be
# off.
WITHOUT_EFFECT = {
    "auto_mapping", "peft_version", "inference_mode", "fan_in_fan_out", "lora_dropout", "megatron_core",
    "qalora_group_size", "runtime_config", "eva_config", "corda_config", "loftq_config", "lora_ga_config",
}  # fmt: skip
# The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change the base's weights, which the adapter's files do not contain.
INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# PEFT's names of tasks, by Heed's purposes. PEFT has none for predicting masked words.
TASKS = {
    "language": "CAUSAL_LM", "translate": "SEQ_2_SEQ_LM", "score": "SEQ_CLS", "sequence": "SEQ_CLS",
    "token": "TOKEN_CLS", "span": "QUESTION_ANS", "body": "FEATURE_EXTRACTION",
}  # fmt: skip

AnyModel = TypeVar("AnyModel", bound=nn.Module)
Layers = dict[str, int | None]  # number of outputs by a layer's name in the base's layout; None: all of a map's


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class AdapterConfig(BaseModel):
    """The fields of `adapter_config.json` that are read: which maps have an adapter, of which rank and scale.

    Layers have the base's names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    peft_type: Literal["LORA"]
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: StrictInt = Field(ge=1)
    lora_alpha: StrictFloat = Field(gt=0, allow_inf_nan=False)
    rank_pattern: dict[Pattern, StrictInt] | None = None
    alpha_pattern: dict[Pattern, StrictFloat] | None = None
    use_rslora: bool | None = None
    bias: Literal["none"] | None = None
    init_lora_weights: bool | str | None = None
    target_modules: list[str] | Pattern | None
    target_parameters: list[str] | None = None
    exclude_modules: list[str] | Pattern | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[Pattern] | Pattern | None = None
    modules_to_save: list[Pattern] | None = None

    @classmethod
    def read(cls, path: Path) -> "AdapterConfig":
        """Reads the file. Raises: ValueError naming file, field and value for another type of adapter, a missing field,
        and an option that Heed does not support.
        """
        if not path.is_file():
            raise ValueError(f"{path}: no such file; the folder of an adapter in PEFT's layout was expected")
        raw = read_json(path)
        if raw.get("peft_type") != "LORA":  # another type has other fields, so report the type first
            raise ValueError(f"{path}: peft_type is {raw.get('peft_type')!r}; 'LORA' was expected")
        initial = raw.get("init_lora_weights")
        if (initial.lower() if isinstance(initial, str) else initial) not in INITIALISATIONS:
            known = " or ".join(map(repr, INITIALISATIONS))
            raise ValueError(
                f"{path}: init_lora_weights is {initial!r}; {known} was expected, which leave the base's weights as"
                " they are (PEFT's save_pretrained converts others, given path_initial_model_for_weight_conversion)"
            )
        for field, value in raw.items():
            if field not in cls.model_fields and field not in WITHOUT_EFFECT and value:
                raise ValueError(f"{path}: {field} is {value!r}, which Heed does not support")
        try:
            return cls.model_validate({field: raw[field] for field in cls.model_fields if field in raw})
        except ValidationError as error:
            raise ValueError(f"{path}: {_explained(error, raw)}") from None

    def rank(self, layer: str) -> int:
        """Returns the rank of a layer's adapter."""
        return _of_pattern(self.rank_pattern, self._key(layer), self.r)

    def scale(self, layer: str) -> float:
        """Returns alpha / rank, or alpha / √rank in rank-stabilised LoRA (arXiv 2312.03732)."""
        divisor = math.sqrt(self.rank(layer)) if self.use_rslora else self.rank(layer)
        return float(_of_pattern(self.alpha_pattern, self._key(layer), self.lora_alpha) / divisor)

    def targets(self, layer: str) -> bool:
        """Whether PEFT puts an adapter on the layer of this name; it ignores a file's tensors for other layers."""
        is_saved = any(re.match(rf"(^|.*\.){name}($|\..*)", layer) for name in self.modules_to_save or ())
        by_weight = self._key(layer) != layer
        if by_weight or is_saved or _names(self.exclude_modules, layer):
            return by_weight
        if isinstance(self.target_modules, str):
            return self.target_modules == "all-linear" or _names(self.target_modules, layer)
        return _names(self.target_modules, layer) and self._transforms(layer)

    def _key(self, layer: str) -> str:
        """Returns the name by which PEFT knows a layer: its weight's, if that is one of the target parameters."""
        return f"{layer}.weight" if _names(self.target_parameters, f"{layer}.weight") else layer

    def experts(self, module: str) -> dict[str, str]:
        """Returns the adapted parameters of a module of stacked experts by Heed's names, and the layers of their A and
        B in the file.
        """
        stacked = {kind: f"{module}.{name}" for kind, name in STACKED.items()}
        found = [kind for kind, name in stacked.items() if _names(self.target_parameters, name)]
        return {kind: f"{module}.base_layer" if kind != found[-1] else module for kind in found}

    def saves(self, module: str) -> bool:
        """Whether the file must have all weights of a module, listed itself or as a part of another module."""
        parts = module.split(".")
        owners = (".".join(parts[: end + 1]) for end in range(len(parts)))
        return any(owner.endswith(name) for owner in owners for name in self.modules_to_save or ())

    def _transforms(self, layer: str) -> bool:
        """Whether a layer is in `layers_to_transform`, by the first number in its name."""
        wanted, patterns = self.layers_to_transform, self.layers_pattern
        if wanted is None or wanted == []:
            return True
        listed = [patterns] if isinstance(patterns, str) else patterns
        places = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in listed or ()] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for place in places if (match := re.match(place, layer))), None)
        return found is not None and int(found[1]) in ([wanted] if isinstance(wanted, int) else wanted)


def _names(modules: str | Sequence[str] | None, layer: str) -> bool:
    """Whether `modules` names the layer: a regular expression for whole names, or a list of their endings."""
    if isinstance(modules, str):
        return re.fullmatch(modules, layer) is not None
    return any(f".{layer}".endswith(f".{name}") for name in modules or ())


def _of_pattern(values: Mapping[str, Any] | None, layer: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches the end of the layer's name, from a dot on."""
    found = (value for pattern, value in (values or {}).items() if re.match(rf"(.*\.)?({pattern})$", layer))
    return next(found, default)


def _explained(error: ValidationError, raw: Mapping[str, Any]) -> str:
    """Formats the first error: field, value, and what was expected."""
    first = error.errors()[0]
    field = str(first["loc"][0])
    if first["type"] == "missing":
        return f"{field} is missing"
    return f"{field} is {raw[field]!r}; {first['msg'].removeprefix('Value error, ')}"


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
        """A classifier's labels. PEFT stores no names, so several labels get the names of `transformers`."""
        heads = [self.shapes[name] for name in ("score.weight", "classifier.weight") if name in self.shapes]
        num_labels = heads[0][0] if heads else 1
        return (SCORE,) if num_labels == 1 else tuple(f"LABEL_{number}" for number in range(num_labels))

    def rank(self, layer: str) -> int:
        """Returns the rank of a layer's adapter; 0 if the file has none."""
        return self.config.rank(layer) if f"{layer}{A}" in self.shapes else 0


def check_fit(adapter: AdapterFolder, model: nn.Module, new: Set[str]) -> None:
    """Compare names and shapes of an adapter's tensors with the model and the adapter's config, not their values.

    `new` has Heed's names of weights that the base lacks; the adapter must have them.
    Raises: ValueError naming the tensors that do not belong in the model, that the config does not target, that are
    missing, or whose shapes differ; and for a file without any adapter.
    """
    names = adapter.shapes.keys()
    pairs, left_out = _adapter_shapes(adapter, model)
    wholes, required = _whole_shapes(adapter, model, new)
    expected = pairs | wholes
    layers = {name.removesuffix(A).removesuffix(B) for name in names & pairs.keys()}
    required |= {f"{layer}{kind}" for layer in layers for kind in (A, B)}
    wrong = [f"{name}: found, but {ADAPTER_CONFIG} does not target it" for name in sorted(names & left_out)]
    wrong += [f"{name}: found, not expected" for name in sorted(names - expected.keys() - left_out)]
    wrong += [f"{name}: expected {expected[name]}, missing" for name in sorted(required - names)]
    for name in sorted(names & expected.keys()):
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
    """Returns the shapes of A and B of all maps that the config targets, and the names of A and B of the others."""
    pairs, left_out = dict[str, list[int]](), set[str]()
    for experts in stacked_maps(adapter.config, model).values():
        E, D, F, rank = experts.maps.num_experts, experts.maps.in_features, experts.maps.out_features, experts.rank
        pairs |= {f"{experts.layer}{A}": [E * rank, D], f"{experts.layer}{B}": [F, rank * E]}
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
    """Returns the shapes of the weights that an adapter may have in full, and the names of those that it must have."""
    shapes = {ours: parameter.shape for ours, parameter in model.named_parameters()}
    wholes, required = dict[str, list[int]](), set[str]()
    for ours, place in places_of(model).items():
        wholes |= {theirs: part_shape(shapes[ours], rows, place) for theirs, rows in place.parts.items()}
        required |= {theirs for theirs in place.parts if ours in new or adapter.config.saves(theirs.rpartition(".")[0])}
    return wholes, required


def adaptable_maps(model: nn.Module) -> dict[str, tuple[nn.Linear, Layers]]:
    """Returns the linear maps that may have adapters, by Heed's names, and their layers.

    Heads (`lm.layers.Head`, `lm.layers.Fp32Linear`) compute differently, so an adapter has their full weights or none.
    """
    maps, places = dict[str, tuple[nn.Linear, Layers]](), places_of(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module) in (nn.Linear, Linear, LoRALinear):
            parts = places[f"{name}.weight"].parts
            maps[name] = module, {theirs.removesuffix(".weight"): rows for theirs, rows in parts.items()}
    return maps


class StackedMaps(NamedTuple):
    """The maps of a layer's experts that a config targets: the layer of their A and B in the file, rank and scale."""

    maps: ExpertMaps
    layer: str
    rank: int
    scale: float
    place: Stored

    def read(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Returns Heed's A and B, given PEFT's [E · rank, D] and [F, rank · E]."""
        up_EFr = up.unflatten(1, (-1, self.maps.num_experts)).permute(2, 0, 1)
        return down, torch.cat([self.place.unstack(up_Fr) for up_Fr in up_EFr])

    def write(self, down: Tensor, up: Tensor) -> dict[str, Tensor]:
        """Returns the file's tensors, given Heed's A and B."""
        up_EFr = replace(self.place, experts=self.maps.num_experts, transposed=False).stack(up)
        return {f"{self.layer}{A}": down, f"{self.layer}{B}": up_EFr.permute(1, 2, 0).flatten(1)}


def stacked_maps(config: AdapterConfig, model: nn.Module) -> dict[str, StackedMaps]:
    """Returns the maps of experts that a config targets, by Heed's names."""
    found, of_layer = dict[str, StackedMaps](), OWNERS[_family_of(model).model_type]
    for name, module, place in linear_maps(model) if config.target_parameters else ():
        if isinstance(module, ExpertMaps):
            _, _, number, *_, kind = name.split(".")
            owner = f"model.layers.{number}.{of_layer}"
            parameter, layers = f"{owner}.{STACKED[kind]}", config.experts(owner)
            if kind in layers:
                found[name] = StackedMaps(module, layers[kind], config.rank(parameter), config.scale(parameter), place)
    return found


def _family_of(model: nn.Module) -> Family:
    assert isinstance(model.config, ModelConfig)
    return family_of(model.config, PURPOSES[type(model)])


def places_of(model: nn.Module) -> dict[str, Stored]:
    """Returns where PEFT stores the weights, by Heed's names. An embedding that the head shares is left out: an adapter
    with its full weights would untie the model.
    """
    shape, family = model.config, _family_of(model)
    assert isinstance(shape, ModelConfig)
    is_tied = shape.tie_word_embeddings and hasattr(model, "head")
    names = [name for name, _ in model.named_parameters() if not is_adapter(name)]
    untied = [name for name in names if not (is_tied and name.endswith("coder.embedding.weight"))]
    prefix = "bert." if type(model) is EncoderModel else ""  # `transformers` has it only if there is a head
    return {name: _without_prefix(family.stored(shape, name), prefix) for name in untied}


def _without_prefix(place: Stored, prefix: str) -> Stored:
    return replace(place, parts={theirs.removeprefix(prefix): rows for theirs, rows in place.parts.items()})


@dataclass(frozen=True)
class FromAdapter(Generic[AnyModel]):
    """A model with a folder's adapters, and with the weights that the folder has in full: heads, embeddings, norms.

    Raises: as `AdapterFolder`, and as `check_fit`.
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
        for name, experts in stacked_maps(adapter.config, model).items():
            if f"{experts.layer}{A}" in adapter.shapes:
                replace_map(model, name, LoRAExperts(experts.maps, experts.rank, experts.scale))
        return model

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        adapter, model = AdapterFolder(self.folder), on_meta(self.build)
        places, maps, stacked = places_of(model), adaptable_maps(model), stacked_maps(adapter.config, model)
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
                    if isinstance(module, LoRAExperts):
                        down, up = stacked[name].read(*(own(f"{stacked[name].layer}{part}") for part in (A, B)))
                        yield f"{name}.{DOWN}", down
                        yield f"{name}.{UP}", up
                        continue
                    down, up = torch.zeros(module.lora_a.shape), torch.zeros(module.lora_b.shape)
                    parts = down.split(module.rank), up.split(module.part_rows)
                    for layer, of_down, of_up in zip(maps[name][1], *parts, strict=True):
                        rank = adapter.rank(layer)
                        if rank:  # a part with a lower rank than others, or without an adapter, ends with zeros
                            of_down[:rank] = own(f"{layer}{A}")
                            of_up[:, :rank] = places[f"{name}.weight"].by_kind(own(f"{layer}{B}"))
                    yield f"{name}.{DOWN}", down
                    yield f"{name}.{UP}", up

            yield from interleaved(model, frozen(), adapters())


def adapted_folder(base: Path, adapter: AdapterFolder) -> FromAdapter[Model]:
    """Returns a directory's model with an adapter; an adapter that was trained with a new head brings that head.

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
    if (head := heads.get((purpose, task))) is None:
        raise ValueError(
            f"{adapter.folder / ADAPTER_CONFIG}: task_type is {task!r}, and {base} is a"
            f" {any_folder(base).kind.__name__}; a model for that task was expected as base"
        )
    return WithNewHead(base, any_folder(base).kind, head, seed=0)


def _with_whole_parts(tensor: Tensor, place: Stored, names: Set[str], own: Callable[[str], Tensor]) -> Tensor:
    """Returns the tensor, with the parts that an adapter has in full replaced by the adapter's."""
    sizes = [len(tensor) if rows is None else rows for rows in place.parts.values()]

    def part(theirs: str) -> Tensor:
        whole = own(theirs).T if place.transposed else own(theirs)
        return place.read(place.by_kind(whole)[place.rows_before :])

    before = zip(place.parts, tensor.split(sizes), strict=True)
    return torch.cat([part(theirs) if theirs in names else rows for theirs, rows in before])


def adapted(source: ModelSource[AnyModel], lora: LoRAConfig | None, seed: int) -> ModelSource[AnyModel]:
    """Returns the source with new adapters; without a config, the source itself."""
    return source if lora is None else WithAdapters(source, lora, seed)


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
    """Write a trained model to folder/name. One with adapters is merged there, and folder/adapter has the adapters.

    `plain` is the model without adapters. `network` is the trained model; `weights` come in the order of its
    parameters. `base` is the model that was adapted.
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
    owner = OWNERS[family.model_type]
    parameters = [f"{owner}.{name}" for name in STACKED.values() if lora.targets == "experts"]
    sizes: dict[str, Any] = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha}
    stacked = stacked_maps(AdapterConfig(**sizes, target_modules=None, target_parameters=parameters), network)
    for name, experts in stacked.items():
        stored |= experts.write(kept[f"{name}.{DOWN}"], kept[f"{name}.{UP}"])
    for name, module, place in linear_maps(network):
        if not isinstance(module, LoRALinear):
            continue
        layers = [theirs.removesuffix(".weight") for theirs in place.parts]
        adapted.update(layers)
        is_transposed |= place.transposed
        downs, ups = kept[f"{name}.{DOWN}"].split(module.rank), kept[f"{name}.{UP}"].split(module.part_rows)
        for layer, down, up in zip(layers, downs, ups, strict=True):
            stored |= {f"{layer}{A}": down, f"{layer}{B}": place.by_group(up)}
    heads = set[str]()
    own_names = dict(plain.named_parameters())
    for name, tensor in kept.items():
        if name in own_names:
            (theirs,) = family.stored(plain.config, name).parts
            heads.add(theirs.rpartition(".")[0])
            stored[theirs] = tensor
    everything = {theirs.rpartition(".")[0] for name in own_names for theirs in family.stored(plain.config, name).parts}
    by_weight = {layer for layer in adapted if plain.config.num_experts and layer.endswith(AS_OF_EXPERTS)}
    parameters += [f"{end}.weight" for end in _endings(by_weight, everything - by_weight)]
    config: dict[str, Any] = {
        **sizes,
        "task_type": TASKS[purpose],
        "base_model_name_or_path": hub_name(base) or str(base),
        "target_modules": _endings(adapted - by_weight, everything - adapted | by_weight),
        "target_parameters": parameters or None,
        "modules_to_save": sorted(heads) or None,
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": is_transposed,
        "use_rslora": False,
        "inference_mode": True,
    }
    written = {f"{PREFIX}{theirs}": tensor.detach().contiguous() for theirs, tensor in stored.items()}
    save_file(written, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    write_json(folder / ADAPTER_CONFIG, config)


def _endings(adapted: set[str], others: set[str]) -> list[str]:
    """Returns the shortest endings of names with which PEFT finds the adapted maps and no other modules."""

    def ending(name: str) -> str:
        parts = name.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
        return next(end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others))

    return sorted({ending(name) for name in adapted})
