"""Model directories in the Hugging Face layout: config.json, safetensors weights, tokenizer files.

A shape is written as the published family that covers it (`lm.families`), so `transformers` and servers built on it can
load a policy directly. A scalar model becomes the family's sequence classifier with one label; a reward model
with several objectives has one label per objective, with its name. The bias, which no preference depends on, has no
place there and is kept in config.json as `score_bias`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from files.atomic import write_json
from lm.config import ModelConfig
from lm.encoder import (
    EncoderDecoder,
    EncoderModel,
    MaskedLanguageModel,
    NextSentenceModel,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)
from lm.families import FAMILIES, NOT_COVERED, family_of
from lm.families.family import Family, Stored, expect
from lm.hub import refuse_adapter
from lm.model import SCORE, LanguageModel, ScalarModel, initial_weight
from lm.source import Rows, load, load_for_inference, on_meta, rows_of
from lm.tensor_files import SCORE_BIAS, open_checkpoint, write_tensors
from lm.tokenizer import GENERATION_CONFIG, Tokenizer, read_json

Weights = Mapping[str, Tensor]
Model = (
    LanguageModel
    | ScalarModel
    | MaskedLanguageModel
    | NextSentenceModel
    | SequenceClassifier
    | TokenClassifier
    | SpanPredictor
    | EncoderModel
    | EncoderDecoder
)
AnyModel = TypeVar("AnyModel", bound=Model)

PURPOSES: dict[type[nn.Module], str] = {
    LanguageModel: "language",
    ScalarModel: "score",
    MaskedLanguageModel: "masked",
    NextSentenceModel: "next",
    SequenceClassifier: "sequence",
    TokenClassifier: "token",
    SpanPredictor: "span",
    EncoderModel: "body",
    EncoderDecoder: "translate",
}

# Pretrained BERT has a second head in addition to that for masked words; only `NextSentenceModel` reads it.
_READ_AS = {"BertForPreTraining": "BertForMaskedLM", "HeedForPreTraining": "HeedForMaskedLM"}
_READ_AS |= {"T5WithLMHeadModel": "T5ForConditionalGeneration"}  # its name until 2020

# The model as which each kind of shape is pretrained.
PRETRAINED: dict[str, type[LanguageModel | MaskedLanguageModel | EncoderDecoder]] = {
    "decoder": LanguageModel,
    "encoder": MaskedLanguageModel,
    "encoder-decoder": EncoderDecoder,
}

CONFIG = "config.json"
MAX_FILE_BYTES = 5_000_000_000


def save_model(
    folder: Path,
    model: Model,
    weights: Weights | Iterable[tuple[str, Tensor]],
    tokenizer: Tokenizer,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `weights` and the tokenizer to `folder`.

    `weights` are a state dict of `model`, or an iterable of names and tensors; then memory holds one file's tensors at
    a time. Weights of more than `max_file_bytes` are split into files of at most that size, with an index. Only the
    config and the names of `model` are read.
    """
    folder.mkdir(exist_ok=True)  # not its parents: a run folder that has disappeared must not be created again
    if isinstance(model, ScalarModel | SequenceClassifier):
        tokenizer = tokenizer.with_distinct_pad()
    tokenizer.save(folder)
    if isinstance(model, EncoderDecoder):  # transformers reads this file, not config.json, where a decoder starts
        starts = {"decoder_start_token_id": tokenizer.target_start_id, **tokenizer.generation_config()}
        write_json(folder / GENERATION_CONFIG, starts)
    config = config_to_hf(model, tokenizer)
    missing = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}

    def own() -> Iterator[tuple[str, Tensor]]:
        for ours, tensor in weights.items() if isinstance(weights, Mapping) else weights:
            if ours not in missing:  # another name of a tied weight
                continue
            missing.remove(ours)
            if ours == SCORE_BIAS:
                config["score_bias"] = tensor.tolist()
            else:
                yield ours, tensor.detach()
            del tensor  # before the next one is made
        assert not missing, f"no weights of {sorted(missing)} were given"

    write_tensors(folder, stored_tensors(model, own()), max_file_bytes)
    write_json(folder / CONFIG, config)


def stored_tensors(
    model: Model, weights: Iterable[tuple[str, Tensor]], *, untied: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yields a model's weights under the names and in the shapes of its published family.

    `untied`: a head that shares the embedding's matrix is also yielded, under its own name.
    """
    family = family_of(model.config, PURPOSES[type(model)])
    head, is_tied = "head.weight", model.config.tie_word_embeddings
    for ours, tensor in weights:
        yield from to_stored(family.stored(model.config, ours), tensor)
        if untied and is_tied and ours == "decoder.embedding.weight":
            loose = model.config.model_copy(update={"tie_word_embeddings": False})
            yield from to_stored(family.stored(loose, head), tensor)
        del tensor  # before the next one is made


def load_writer(folder: Path) -> LanguageModel | EncoderDecoder:
    """Load a decoder, or an encoder-decoder, on the device that `lm.source` chooses.

    Raises: ValueError as `ModelFolder.check`.
    """
    if purpose_of(folder) == "translate":
        return load_for_inference(ModelFolder(folder, EncoderDecoder))
    return load_for_inference(ModelFolder(folder, LanguageModel))


def load_any(folder: Path) -> Model:
    """Loads the model of a directory, whatever its purpose. Raises: as `ModelFolder`."""
    return load(any_folder(folder))


def load_model(folder: Path, kind: type[AnyModel]) -> AnyModel:
    """Loads the model of a directory, in fp32. Raises: as `ModelFolder`."""
    return load(ModelFolder(folder, kind))


@dataclass(frozen=True)
class ModelFolder(Generic[AnyModel]):
    """The model of a directory.

    Raises: ValueError naming the file, and the field or the names and shapes that do not fit.
    """

    folder: Path
    kind: type[AnyModel]
    dropout: float = 0.0

    def build(self) -> AnyModel:
        config, _, raw = read_config(self.folder, PURPOSES[self.kind])
        build: Callable[..., AnyModel] = self.kind
        has_labels = issubclass(self.kind, ScalarModel | SequenceClassifier | TokenClassifier)
        labels = {"labels": _labels(self.folder / CONFIG, raw)} if has_labels else {}
        return build(config, dropout=self.dropout, **labels)

    def check(self) -> None:
        """Compare the names and shapes of the tensors, not their values, with the config. Raises: as the class."""
        _, family, _ = read_config(self.folder, PURPOSES[self.kind])
        with open_checkpoint(self.folder, family, on_meta(self.build)):
            pass

    def tensors(self, rows: Rows | None = None) -> Iterator[tuple[str, Tensor]]:
        _, family, raw = read_config(self.folder, PURPOSES[self.kind])
        model = on_meta(self.build)
        with open_checkpoint(self.folder, family, model) as checkpoint:
            for ours, parameter in model.named_parameters():
                if rows is None or ours in rows:
                    yield ours, checkpoint.read(ours, parameter.shape, rows[ours] if rows else None)
            for name, buffer in model.named_buffers():
                own = rows[name] if rows and name in rows else None
                if name == SCORE_BIAS and (rows is None or own):
                    yield name, rows_of(_score_bias(self.folder / CONFIG, raw, buffer.shape), own)
                elif rows is None or own:
                    yield name, checkpoint.read(name, buffer.shape, own)


def any_folder(folder: Path) -> "ModelFolder[Model]":
    """Returns the model of a directory, whatever its purpose. Raises: as `purpose_of`."""
    purpose = purpose_of(folder)
    kind = next(kind for kind, name in PURPOSES.items() if name == purpose)
    return ModelFolder(folder, cast(type[Model], kind))


@dataclass(frozen=True)
class WithNewHead(Generic[AnyModel]):
    """A directory's model with another head, whose weights are drawn from `seed` unless the directory has them, or with
    other blocks at its end (`ModelConfig.with_blocks`).

    `head` makes the new model from its shape. `is_new` names weights that are drawn even if the directory has some of
    that name; those of added blocks always are. Raises: as `ModelFolder` and `ModelConfig.with_blocks`.
    """

    folder: Path
    kind: type[Model]
    head: Callable[[ModelConfig], AnyModel]
    seed: int
    is_new: Callable[[str], bool] = lambda _name: False
    dropped: int = 0
    added: int = 0

    @cached_property
    def start(self) -> ModelConfig:
        """The directory's shape."""
        return read_config(self.folder, PURPOSES[self.kind])[0]

    def build(self) -> AnyModel:
        return self.head(self.start.with_blocks(self.dropped, self.added))

    def new_names(self) -> set[str]:
        """Returns the names of the weights that the directory does not have."""
        _, family, _ = read_config(self.folder, PURPOSES[self.kind])
        with open_checkpoint(self.folder, family, on_meta(ModelFolder(self.folder, self.kind).build)) as checkpoint:
            names = [name for name, _ in on_meta(self.build).named_parameters()]
            return {name for name in names if self._is_drawn(name) or not checkpoint.holds(name)}

    def _is_drawn(self, name: str) -> bool:
        start = self.start
        _, _, block = name.partition("encoder.blocks." if start.kind == "encoder" else "decoder.blocks.")
        return int(block.partition(".")[0]) >= start.num_hidden_layers - self.dropped if block else self.is_new(name)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        _, family, _ = read_config(self.folder, PURPOSES[self.kind])
        generator = torch.Generator().manual_seed(self.seed)
        model = on_meta(self.build)
        config = model.config
        with open_checkpoint(self.folder, family, on_meta(ModelFolder(self.folder, self.kind).build)) as checkpoint:
            for ours, parameter in model.named_parameters():
                if self._is_drawn(ours) or not checkpoint.holds(ours):
                    yield ours, initial_weight(ours, parameter.shape, config, generator)
                else:
                    yield ours, checkpoint.read(ours, parameter.shape)
            for name, buffer in model.named_buffers():
                is_new = name == SCORE_BIAS or self._is_drawn(name) or not checkpoint.holds(name)
                yield name, torch.zeros(buffer.shape) if is_new else checkpoint.read(name, buffer.shape)


def purpose_of(folder: Path) -> str:
    """Returns the purpose of a directory's model: one of PURPOSES' values. Raises: ValueError naming file and field."""
    path = folder / CONFIG
    raw = _read_raw(folder)
    purposes = [
        purpose
        for family in FAMILIES
        for purpose, name in family.classes.items()
        if family.model_type == raw.get("model_type") and _architectures(raw) == [name]
    ]
    if not purposes:
        raise ValueError(
            f"{path}: architectures is {raw.get('architectures')}, model_type {raw.get('model_type')!r}; a model of"
            f" {', '.join(family.model_type for family in FAMILIES)} was expected"
        )
    return purposes[0]


def _architectures(raw: Mapping[str, Any]) -> Any:
    """Returns `architectures` of config.json, in the names that families use."""
    names = raw.get("architectures")
    return [_READ_AS.get(name, name) for name in names] if isinstance(names, list) else names


def _labels(path: Path, raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a classifier's labels, in order; a single label is a score, whatever its name.

    Raises: ValueError naming file and field if names and their number do not match, or if two names are equal.
    """
    named = raw.get("id2label") or {}
    num_labels = int(raw.get("num_labels") or len(named) or 2)  # the default of transformers
    if num_labels == 1:
        return (SCORE,)
    names = named or {str(number): f"LABEL_{number}" for number in range(num_labels)}  # also their default
    if sorted(names) != sorted(map(str, range(num_labels))) or len(set(names.values())) != num_labels:
        raise ValueError(
            f"{path}: id2label is {named} and num_labels {num_labels}; a name of its own for each number from 0 to"
            f" {num_labels - 1} was expected"
        )
    return tuple(names[str(number)] for number in range(num_labels))


def _score_bias(path: Path, raw: Mapping[str, Any], shape: torch.Size) -> Tensor:
    """Reads the bias of a score. Raises: ValueError unless there is one per label."""
    bias = torch.tensor(raw.get("score_bias", torch.zeros(shape).tolist()), dtype=torch.float32)
    if bias.shape != shape:
        wanted = f"a list of {shape[0]} numbers" if shape else "a number"
        raise ValueError(f"{path}: score_bias is {raw['score_bias']}; {wanted} was expected")
    return bias


def to_stored(place: Stored, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the checkpoint's names and tensors for one of Heed's tensors."""
    if place.experts:
        yield next(iter(place.parts)), place.stack(tensor).contiguous()
        return
    tensor = place.by_group(tensor)
    sizes = [len(tensor) if rows is None else rows for rows in place.parts.values()]
    for name, part in zip(place.parts, tensor.split(sizes), strict=True):
        unused = part.new_zeros(place.rows_before, *part.shape[1:])
        whole = torch.cat([unused, part]) if place.rows_before else part
        yield name, place.write(whole.T if place.transposed else whole).contiguous()


def config_to_hf(model: Model, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the contents of a model's `config.json`."""
    family = family_of(model.config, PURPOSES[type(model)])
    names: tuple[str, ...] = getattr(model, "labels", ())
    labels = {
        "num_labels": len(names),
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
    return {
        "architectures": [family.classes[PURPOSES[type(model)]]],
        "model_type": family.model_type,
        **family.to_hf(model.config),
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.end_id,
        "pad_token_id": tokenizer.pad_id if tokenizer.pad else None,
        "dtype": "float32",
        **(labels if names else {}),
        **({"decoder_start_token_id": tokenizer.target_start_id} if isinstance(model, EncoderDecoder) else {}),
    }


def read_config(folder: Path, purpose: str) -> tuple[ModelConfig, Family, dict[str, Any]]:
    """Returns Heed's config, the family, and the raw `config.json`; `purpose` is one of PURPOSES' values.

    Raises: ValueError naming file and field for another architecture or head, a missing field, or an unsupported
    feature.
    """
    path = folder / CONFIG
    raw = _read_raw(folder)
    family = _family_of(raw, path)
    expected = [family.classes[purpose]] if purpose in family.classes else None
    names = raw.get("architectures") if purpose == "next" else _architectures(raw)
    if names != expected or expected is None:
        wanted = expected or f"a family with a model for the purpose {purpose!r}"
        raise ValueError(f"{path}: architectures is {raw.get('architectures')}; {wanted} was expected")
    return _config_of(family, raw, path), family, raw


def config_from_hf(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns Heed's config from the fields of a `config.json`, whatever the model's head.

    Raises: ValueError naming the place and the field for another family, a missing field, or an unsupported feature.
    """
    return _config_of(_family_of(raw, where), raw, where)


def _read_raw(folder: Path) -> dict[str, Any]:
    refuse_adapter(folder)
    return read_json(folder / CONFIG)


def _family_of(raw: Mapping[str, Any], where: Path | str) -> Family:
    family = next((family for family in FAMILIES if family.model_type == raw.get("model_type")), None)
    if family is None:
        known = [family.model_type for family in FAMILIES]
        kind = raw.get("model_type")
        reason = NOT_COVERED.get(str(kind))
        why = f", {reason}" if reason else ""
        raise ValueError(f"{where}: model_type is {kind!r}{why}; one of {known} was expected")
    return family


def _config_of(family: Family, raw: Mapping[str, Any], where: Path | str) -> ModelConfig:
    try:
        if quantized := raw.get("quantization_config"):
            expect({"quantization_config": quantized.get("quant_method")}, "quantization_config", "mxfp4")
        return ModelConfig.model_validate(family.from_hf(raw))
    except KeyError as error:
        raise ValueError(f"{where}: field {error.args[0]!r} is missing") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {place + ': ' if place else ''}{first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
