"""Model directories in the Hugging Face layout: config.json, safetensors weights, tokenizer files.

A shape is written as the published family that holds it (`lm.families`), so `transformers` and the servers built on it
load a policy as it stands. A scalar model becomes the family's sequence classifier with one label (of a reward model of
several objectives, a label for each, by its name); its bias, which no preference depends on, has no place there and is
kept in config.json as `score_bias`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lm.config import ModelConfig
from lm.encoder import EncoderModel, MaskedLanguageModel, SequenceClassifier, SpanPredictor, TokenClassifier
from lm.encoder_decoder import EncoderDecoder
from lm.families import FAMILIES, Family, Stored, expect, family_of
from lm.model import SCORE, LanguageModel, ScalarModel, initial_weight
from lm.progress import note_progress
from lm.source import load, on_meta
from lm.tokenizer import Tokenizer, read_json

Weights = Mapping[str, Tensor]
Model = (
    LanguageModel
    | ScalarModel
    | MaskedLanguageModel
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
    SequenceClassifier: "sequence",
    TokenClassifier: "token",
    SpanPredictor: "span",
    EncoderModel: "body",
    EncoderDecoder: "translate",
}

# BERT as it was pretrained: a second head beside the masked words', which is left out.
_READ_AS = {"BertForPreTraining": "BertForMaskedLM"}

# What a shape of each kind is pretrained as.
PRETRAINED: dict[str, type[LanguageModel | MaskedLanguageModel | EncoderDecoder]] = {
    "decoder": LanguageModel,
    "encoder": MaskedLanguageModel,
    "encoder-decoder": EncoderDecoder,
}

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
MAX_SHARD = "5GB"
# What checkpoints carry beside a model's own tensors: tables that are computed (GPT-2's causal mask, Llama's rotary
# frequencies, BERT's position numbers), second copies of tied tensors, and heads for another purpose.
_COMPUTED = r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$|position_ids$|final_logits_bias$"
_COPIES = r"^lm_head\.weight$|^cls\.predictions\.(decoder\.|bias$)|\.embed_tokens\.weight$"
_OTHER_HEADS = r"^cls\.seq_relationship\.|^(bert\.)?pooler\."
_BODY = re.compile(r"^(transformer|bert)\.")
_LEFT_OUT = re.compile("|".join((_COMPUTED, _COPIES, _OTHER_HEADS)))
# BERT's published checkpoints name the norms' parameters as TensorFlow did.
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


def save_model(
    folder: Path,
    model: Model,
    weights: Weights,
    tokenizer: Tokenizer,
    max_shard: str = MAX_SHARD,
) -> None:
    """Write `weights` (a state dict of `model`, which may live elsewhere) and the tokenizer to `folder`.

    Weights larger than `max_shard` are cut into files of at most that size, with an index.
    """
    folder.mkdir(exist_ok=True)  # not its parents: a run folder that has disappeared must not be created again
    tokenizer.save(folder)
    config = config_to_hf(model, tokenizer)
    if isinstance(model, ScalarModel):
        config["score_bias"] = weights["bias"].tolist()
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = dict(_to_stored(family_of(model.config, PURPOSES[type(model)]), model, weights))
    for stale in folder.glob("model*.safetensors*"):  # an index beside one new file would hide it
        stale.unlink()
    shards = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard)
    for filename, names in shards.filename_to_tensors.items():
        part = {name: tensors[name] for name in names}
        save_file(part, str(folder / filename), metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def load_language_model(folder: Path, dropout: float = 0.0) -> LanguageModel:
    """The language model of a directory; errors as for `load_model`."""
    return load_model(folder, LanguageModel, dropout)


def load_scalar_model(folder: Path, dropout: float = 0.0) -> ScalarModel:
    """The reward model or value function of a directory; errors as for `load_model`."""
    return load_model(folder, ScalarModel, dropout)


def load_any(folder: Path) -> Model:
    """The model of a directory, whatever it is for. Errors as for `ModelFolder`."""
    purpose = purpose_of(folder)
    kind = next(kind for kind, name in PURPOSES.items() if name == purpose)
    return load_model(folder, cast(type[Model], kind))


def load_model(folder: Path, kind: type[AnyModel], dropout: float = 0.0) -> AnyModel:
    """The model of a directory, in fp32. Errors as for `ModelFolder`."""
    return load(ModelFolder(folder, kind, dropout))


@dataclass(frozen=True)
class ModelFolder(Generic[AnyModel]):
    """The model of a directory.

    Errors: ValueError naming the file, and the field or the names and shapes that do not fit.
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

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        _, family, raw = read_config(self.folder, PURPOSES[self.kind])
        model = on_meta(self.build)
        with open_checkpoint(self.folder, family, model) as checkpoint:
            for ours, parameter in model.named_parameters():
                yield ours, checkpoint.read(ours, parameter.shape)
        for name, buffer in model.named_buffers():  # a score's bias is the only one
            yield name, _score_bias(self.folder / CONFIG, raw, buffer.shape)


@dataclass(frozen=True)
class WithNewHead(Generic[AnyModel]):
    """The body of a directory's model under another head, whose weights are drawn unless the directory has them.

    `head` makes the new model from the shape. Errors as for `ModelFolder`.
    """

    folder: Path
    kind: type[Model]
    head: Callable[[ModelConfig], AnyModel]
    seed: int

    def build(self) -> AnyModel:
        return self.head(read_config(self.folder, PURPOSES[self.kind])[0])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        config, family, _ = read_config(self.folder, PURPOSES[self.kind])
        generator = torch.Generator().manual_seed(self.seed)
        model = on_meta(self.build)
        with open_checkpoint(self.folder, family, on_meta(ModelFolder(self.folder, self.kind).build)) as checkpoint:
            for ours, parameter in model.named_parameters():
                if checkpoint.holds(ours):
                    yield ours, checkpoint.read(ours, parameter.shape)
                else:
                    yield ours, initial_weight(ours, parameter.shape, config, generator)
        for name, buffer in model.named_buffers():
            yield name, torch.zeros(buffer.shape)


def purpose_of(folder: Path) -> str:
    """What the model of a directory is for: one of PURPOSES' values. Errors: ValueError naming file and field."""
    path = folder / CONFIG
    raw = read_json(path)
    found = [
        purpose
        for family in FAMILIES
        for purpose, name in family.classes.items()
        if family.model_type == raw.get("model_type") and _architectures(raw) == [name]
    ]
    if not found:
        raise ValueError(
            f"{path}: architectures is {raw.get('architectures')}, model_type {raw.get('model_type')!r}; a model of"
            f" {', '.join(family.model_type for family in FAMILIES)} was expected"
        )
    return found[0]


def _architectures(raw: Mapping[str, Any]) -> Any:
    """The field of config.json, in the names that families know."""
    found = raw.get("architectures")
    return [_READ_AS.get(name, name) for name in found] if isinstance(found, list) else found


def _labels(path: Path, raw: Mapping[str, Any]) -> tuple[str, ...]:
    """A classifier's labels by name, in order; one label alone is a score, whatever it is called.

    Errors: ValueError naming file and field where names and number do not fit, or two are the same.
    """
    named = raw.get("id2label") or {}
    num_labels = int(raw.get("num_labels") or len(named) or 2)  # the library's own default
    if num_labels == 1:
        return (SCORE,)
    names = named or {str(number): f"LABEL_{number}" for number in range(num_labels)}  # the library's own again
    if sorted(names) != sorted(map(str, range(num_labels))) or len(set(names.values())) != num_labels:
        raise ValueError(
            f"{path}: id2label is {named} and num_labels {num_labels}; a name of its own for each number from 0 to"
            f" {num_labels - 1} was expected"
        )
    return tuple(names[str(number)] for number in range(num_labels))


def _score_bias(path: Path, raw: Mapping[str, Any], shape: torch.Size) -> Tensor:
    """Errors: ValueError where there is not one for each label."""
    bias = torch.tensor(raw.get("score_bias", torch.zeros(shape).tolist()), dtype=torch.float32)
    if bias.shape != shape:
        wanted = f"a list of {shape[0]} numbers" if shape else "a number"
        raise ValueError(f"{path}: score_bias is {raw['score_bias']}; {wanted} was expected")
    return bias


class Checkpoint:
    """The safetensors files of a directory, mapped into memory: names and shapes at once, values when asked for.

    Errors: ValueError where there are none, or the index names a file that is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / INDEX if (folder / INDEX).is_file() else folder / WEIGHTS
        if not self.path.is_file():
            raise ValueError(
                f"{folder / WEIGHTS}: no such file; safetensors weights were expected (pickled weights are not read)"
            )
        self._files = [self.path]
        if self.path.name == INDEX:
            places = read_json(self.path).get("weight_map", {})
            self._files = sorted({folder / name for name in places.values()})
            for file in self._files:
                if not file.is_file():
                    raise ValueError(f"{file}: no such file, though {self.path} names it")

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        opened = [self._stack.enter_context(_opened(path)) for path in self._files]
        self._holder = {_modern(name): (file, name) for file in opened for name in file.keys()}  # noqa: SIM118
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._holder)

    def shape(self, name: str) -> list[int]:
        file, stored_name = self._holder[name]
        return list(file.get_slice(stored_name).get_shape())

    def tensor(self, name: str) -> Tensor:
        file, stored_name = self._holder[name]
        tensor: Tensor = file.get_tensor(stored_name)
        return tensor


def _opened(path: Path) -> Any:
    """Errors: ValueError naming a file that was cut short or is none of its kind; the library does not say which."""
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: incomplete or damaged: {error}; write or download it again") from None


def _modern(name: str) -> str:
    module, _, kind = name.rpartition(".")
    return f"{module}.{_OLD_NAMES[kind]}" if kind in _OLD_NAMES and module else name


class Reader:
    """A checkpoint's tensors under our names, read one at a time.

    The published GPT-2 was saved without its head, and so without the prefix `transformer.` before each name; of BERT
    a body alone lacks `bert.` in the same way.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family, model: nn.Module) -> None:
        config = model.config
        assert isinstance(config, ModelConfig)
        shapes = {ours: list(parameter.shape) for ours, parameter in model.named_parameters()}  # tied tensors once
        self._checkpoint, self._family, self._config = checkpoint, family, config
        self._has_prefix = any(self._holds(family.stored(config, ours)) for ours in shapes)
        _check_fit(checkpoint, {ours: self._place(ours) for ours in shapes}, shapes)

    def holds(self, ours: str) -> bool:
        return self._holds(self._place(ours))

    def read(self, ours: str, shape: Sequence[int]) -> Tensor:
        """One of our tensors in fp32, put together from its parts."""
        note_progress()
        whole, start, place = torch.empty(*shape), 0, self._place(ours)
        for name in place.parts:
            part = self._checkpoint.tensor(name)
            part = (part.T if place.transposed else part)[place.rows_before :]
            whole[start : start + len(part)] = part
            start += len(part)
        return whole

    def _place(self, ours: str) -> Stored:
        place = self._family.stored(self._config, ours)
        if self._has_prefix:
            return place
        return replace(place, parts={_BODY.sub("", name): rows for name, rows in place.parts.items()})

    def _holds(self, place: Stored) -> bool:
        return place.parts.keys() <= self._checkpoint.names


@contextmanager
def open_checkpoint(folder: Path, family: Family, model: nn.Module) -> Iterator[Reader]:
    """The weights of a directory, once they are known to be those of `model`, of which shapes alone are read.

    Errors: ValueError naming the file, and the names and shapes that do not fit.
    """
    with Checkpoint(folder) as checkpoint:
        yield Reader(checkpoint, family, model)


def _check_fit(checkpoint: Checkpoint, places: Mapping[str, Stored], shapes: Mapping[str, list[int]]) -> None:
    expected = {
        name: _part_shape(shapes[ours], rows, place)
        for ours, place in places.items()
        for name, rows in place.parts.items()
    }
    wrong = [f"{name}: expected {expected[name]}, missing" for name in sorted(set(expected) - checkpoint.names)]
    for name in sorted(checkpoint.names - set(expected)):
        if not _LEFT_OUT.search(name):
            wrong.append(f"{name}: found, not expected")
        elif name.endswith("final_logits_bias") and checkpoint.tensor(name).any():
            wrong.append(f"{name}: expected zeros, found others")
    for name in sorted(checkpoint.names & set(expected)):
        if checkpoint.shape(name) != expected[name]:
            wrong.append(f"{name}: expected {expected[name]}, found {checkpoint.shape(name)}")
    if wrong:
        raise ValueError(f"{checkpoint.path}: {len(wrong)} tensors do not fit the config: " + "; ".join(wrong[:8]))


def _part_shape(whole: list[int], rows: int | None, place: Stored) -> list[int]:
    shape = [(whole[0] if rows is None else rows) + place.rows_before, *whole[1:]]
    return shape[::-1] if place.transposed else shape


def _to_stored(family: Family, model: Model, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors and their names."""
    for ours, _ in model.named_parameters():
        place, tensor = family.stored(model.config, ours), weights[ours].detach()
        sizes = [len(tensor) if rows is None else rows for rows in place.parts.values()]
        for name, part in zip(place.parts, tensor.split(sizes), strict=True):
            unused = part.new_zeros(place.rows_before, *part.shape[1:])
            whole = torch.cat([unused, part]) if place.rows_before else part
            yield name, (whole.T if place.transposed else whole).contiguous()


def config_to_hf(model: Model, tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json` of a model."""
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
        "bos_token_id": None,
        "eos_token_id": tokenizer.end_id,
        "pad_token_id": tokenizer.pad_id,
        "dtype": "float32",
        **(labels if names else {}),
        **({"decoder_start_token_id": tokenizer.end_id} if isinstance(model, EncoderDecoder) else {}),
    }


def read_config(folder: Path, purpose: str) -> tuple[ModelConfig, Family, dict[str, Any]]:
    """Our config, the family, and the raw `config.json`; `purpose` is one of PURPOSES' values.

    Raises: ValueError naming file and field for another architecture or head, a missing field, or what we do not
    compute.
    """
    path = folder / CONFIG
    raw = read_json(path)
    family = _family_of(raw, path)
    expected = [family.classes[purpose]] if purpose in family.classes else None
    if _architectures(raw) != expected or expected is None:
        wanted = expected or f"a family with a model for the purpose {purpose!r}"
        raise ValueError(f"{path}: architectures is {raw.get('architectures')}; {wanted} was expected")
    return _config_of(family, raw, path), family, raw


def config_from_hf(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Our config from the fields of a `config.json`, whatever the model's head.

    Raises: ValueError naming the place and the field for another family, a missing field, or what we do not compute.
    """
    return _config_of(_family_of(raw, where), raw, where)


def _family_of(raw: Mapping[str, Any], where: Path | str) -> Family:
    family = next((family for family in FAMILIES if family.model_type == raw.get("model_type")), None)
    if family is None:
        known = [family.model_type for family in FAMILIES]
        raise ValueError(f"{where}: model_type is {raw.get('model_type')!r}; one of {known} was expected")
    return family


def _config_of(family: Family, raw: Mapping[str, Any], where: Path | str) -> ModelConfig:
    try:
        expect(raw, "quantization_config", None)
        return ModelConfig.model_validate(family.from_hf(raw))
    except KeyError as error:
        raise ValueError(f"{where}: field {error.args[0]!r} is missing") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {place + ': ' if place else ''}{first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
