"""Model directories in the Hugging Face layout: config.json, safetensors weights, tokenizer files.

A shape is written as the published family that holds it (`lm.families`), so `transformers` and the servers built on it
load a policy as it stands. A scalar model becomes the family's sequence classifier with one label; its bias, which no
preference depends on, has no place there and is kept in config.json as `score_bias`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lm.config import ModelConfig
from lm.families import FAMILIES, Family, Stored, expect, family_of
from lm.model import LanguageModel, ScalarModel
from lm.tokenizer import Tokenizer, read_json

Weights = Mapping[str, Tensor]
AnyModel = TypeVar("AnyModel", LanguageModel, ScalarModel)

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
MAX_SHARD = "5GB"
# Tables that older checkpoints carry and that are computed: GPT-2's causal mask, Llama's rotary frequencies.
_COMPUTED = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")


def save_model(
    folder: Path,
    model: LanguageModel | ScalarModel,
    weights: Weights,
    tokenizer: Tokenizer,
    max_shard: str = MAX_SHARD,
) -> None:
    """Write `weights` (a state dict of `model`, which may live elsewhere) and the tokenizer to `folder`.

    Weights larger than `max_shard` are cut into files of at most that size, with an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    config = config_to_hf(model, tokenizer)
    if isinstance(model, ScalarModel):
        config["score_bias"] = float(weights["bias"])
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = dict(_to_stored(family_of(model.config), model, weights))
    shards = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard)
    for filename, names in shards.filename_to_tensors.items():
        part = {name: tensors[name] for name in names}
        save_file(part, str(folder / filename), metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def load_language_model(folder: Path, dropout: float = 0.0) -> LanguageModel:
    """The language model of a directory, in fp32.

    Errors: ValueError naming the file, and the names and shapes that do not fit.
    """
    config, family, _ = read_config(folder, "causal_class")
    with torch.device("meta"):
        model = LanguageModel(config, dropout)
    return _load(folder, family, model)


def load_scalar_model(folder: Path, dropout: float = 0.0) -> ScalarModel:
    """The reward model or value function of a directory; errors as for `load_language_model`."""
    config, family, raw = read_config(folder, "scalar_class")
    with torch.device("meta"):
        model = ScalarModel(config, dropout)
    model = _load(folder, family, model)
    model.bias.fill_(float(raw.get("score_bias", 0.0)))
    return model


def load_backbone(folder: Path, model: ScalarModel) -> None:
    """Give a scalar model the decoder of the language model in `folder`."""
    source = load_language_model(folder)
    if source.config != model.config:
        raise ValueError(f"{folder}: its shape {source.config} is not the expected {model.config}")
    model.decoder.load_state_dict(source.decoder.state_dict())


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
        opened = [self._stack.enter_context(safe_open(str(path), framework="pt")) for path in self._files]
        self._holder = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - not a dict
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._holder)

    def shape(self, name: str) -> list[int]:
        return list(self._holder[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._holder[name].get_tensor(name)
        return tensor


def _load(folder: Path, family: Family, model: AnyModel) -> AnyModel:
    """Give a model on the meta device its weights, one tensor at a time: memory for one copy and one tensor."""
    places: Mapping[str, Stored] = {ours: _place(family, model.config, ours) for ours in _own_names(model)}
    shapes = {ours: list(tensor.shape) for ours, tensor in model.state_dict().items()}
    with Checkpoint(folder) as checkpoint:
        places = _without_prefix(places, checkpoint.names)
        _check_fit(checkpoint, places, shapes, tied=_is_tied(model))
        state = {ours: _read(checkpoint, place, shapes[ours]) for ours, place in places.items()}
    if isinstance(model, ScalarModel):
        state["bias"] = torch.zeros(())
    elif _is_tied(model):
        state["head.weight"] = state["decoder.embedding.weight"]
    model.load_state_dict(state, assign=True)
    if isinstance(model, LanguageModel):
        model.tie()
    return model


def _is_tied(model: LanguageModel | ScalarModel) -> bool:
    return isinstance(model, LanguageModel) and model.config.tie_embeddings


def _own_names(model: LanguageModel | ScalarModel) -> list[str]:
    """The state dict's names that a checkpoint holds: a tied head is the embedding, the bias is in config.json."""
    left_out = {"bias", *(["head.weight"] if _is_tied(model) else [])}
    return [name for name in model.state_dict() if name not in left_out]


def _place(family: Family, config: ModelConfig, ours: str) -> Stored:
    if ours.startswith("decoder."):
        return family.stored(config, ours.removeprefix("decoder."))
    return Stored({{"head.weight": "lm_head.weight", "score.weight": "score.weight"}[ours]: None})


def _without_prefix(places: Mapping[str, Stored], names: set[str]) -> Mapping[str, Stored]:
    """The published GPT-2 was saved without its head, and so without the prefix `transformer.` before each name."""
    expected = {name for place in places.values() for name in place.parts}
    if names & expected:
        return places
    bare = {
        ours: Stored({name.partition(".")[2]: rows for name, rows in place.parts.items()}, place.transposed)
        for ours, place in places.items()
    }
    return bare if names & {name for place in bare.values() for name in place.parts} else places


def _check_fit(
    checkpoint: Checkpoint, places: Mapping[str, Stored], shapes: Mapping[str, list[int]], *, tied: bool
) -> None:
    expected = {
        name: _part_shape(shapes[ours], rows, place.transposed)
        for ours, place in places.items()
        for name, rows in place.parts.items()
    }
    extra = {name for name in checkpoint.names - set(expected) if not _COMPUTED.search(name)}
    extra -= {"lm_head.weight"} if tied else set()
    missing = set(expected) - checkpoint.names
    wrong = [f"{name}: expected {expected[name]}, missing" for name in sorted(missing)]
    wrong += [f"{name}: found, not expected" for name in sorted(extra)]
    for name in sorted(checkpoint.names & set(expected)):
        if checkpoint.shape(name) != expected[name]:
            wrong.append(f"{name}: expected {expected[name]}, found {checkpoint.shape(name)}")
    if wrong:
        raise ValueError(f"{checkpoint.path}: {len(wrong)} tensors do not fit the config: " + "; ".join(wrong[:8]))


def _part_shape(whole: list[int], rows: int | None, transposed: bool) -> list[int]:
    shape = whole if rows is None else [rows, *whole[1:]]
    return shape[::-1] if transposed else shape


def _read(checkpoint: Checkpoint, place: Stored, shape: list[int]) -> Tensor:
    """One of our tensors in fp32, put together from its parts."""
    whole, start = torch.empty(shape), 0
    for name in place.parts:
        part = checkpoint.tensor(name)
        part = part.T if place.transposed else part
        whole[start : start + len(part)] = part
        start += len(part)
    return whole


def _to_stored(family: Family, model: LanguageModel | ScalarModel, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors and their names."""
    for ours in _own_names(model):
        place, tensor = _place(family, model.config, ours), weights[ours].detach()
        sizes = [len(tensor) if rows is None else rows for rows in place.parts.values()]
        for name, part in zip(place.parts, tensor.split(sizes), strict=True):
            yield name, (part.T if place.transposed else part).contiguous()


def config_to_hf(model: LanguageModel | ScalarModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json` of a model."""
    family = family_of(model.config)
    scalar = isinstance(model, ScalarModel)
    return {
        "architectures": [family.scalar_class if scalar else family.causal_class],
        "model_type": family.model_type,
        **family.to_hf(model.config),
        "bos_token_id": None,
        "eos_token_id": tokenizer.end_id,
        "pad_token_id": tokenizer.pad_id,
        "dtype": "float32",
        **({"num_labels": 1, "id2label": {"0": "score"}, "label2id": {"score": 0}} if scalar else {}),
    }


def read_config(folder: Path, kind: str) -> tuple[ModelConfig, Family, dict[str, Any]]:
    """Our config, the family, and the raw `config.json`; `kind` is a Family's `causal_class` or `scalar_class`.

    Errors: ValueError naming file and field for another architecture or head, a missing field, or what we do not
    compute.
    """
    path = folder / CONFIG
    raw = read_json(path)
    family = next((family for family in FAMILIES if family.model_type == raw.get("model_type")), None)
    if family is None:
        known = [family.model_type for family in FAMILIES]
        raise ValueError(f"{path}: model_type is {raw.get('model_type')!r}; one of {known} was expected")
    expected = getattr(family, kind)
    if raw.get("architectures") != [expected]:
        raise ValueError(f"{path}: architectures is {raw.get('architectures')}; {[expected]} was expected")
    try:
        expect(raw, "quantization_config", None)
        return ModelConfig.model_validate(family.from_hf(raw)), family, raw
    except KeyError as error:
        raise ValueError(f"{path}: field {error.args[0]!r} is missing") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path}: {place + ': ' if place else ''}{first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
