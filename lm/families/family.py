"""What a family of checkpoints defines: its config fields for a shape, and its name for each tensor. Heed's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from lm.config import ModelConfig

Fields = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """How a checkpoint stores one of Heed's tensors: `parts` has the name and number of rows of each part, in order.

    None: all rows. `transposed`: the checkpoint stores the matrix as (in, out), as GPT-2 does. The first `rows_before`
    rows in the checkpoint are not used: BART counts its positions from 2. Heed's numbers are the checkpoint's times
    `factor`, plus `added`. A checkpoint without this tensor has its numbers where `otherwise` says, if set. `experts`
    > 0: the checkpoint stacks the matrices (or biases) of so many experts in one tensor with one more dimension.
    `interleaved`: there, the rows of an expert's two halves alternate. `groups`: there, rows come in groups with so
    many rows of each kind; Heed has all rows of a kind, one kind after the other.
    """

    parts: Mapping[str, int | None]
    transposed: bool = False
    rows_before: int = 0
    factor: float = 1.0
    added: float = 0.0
    otherwise: "Stored | None" = None
    experts: int = 0
    interleaved: bool = False
    groups: tuple[int, ...] = ()

    def stack(self, ours: Tensor) -> Tensor:
        """Returns the stacked tensor, given Heed's matrices below one another."""
        stacked = ours.unflatten(0, (self.experts, -1))
        if self.interleaved:
            stacked = stacked.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return stacked.transpose(1, 2) if self.transposed else stacked

    def unstack(self, expert: Tensor) -> Tensor:
        """Returns Heed's matrix or bias of one expert, given its rows in the checkpoint's order."""
        return expert.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if self.interleaved else expert

    def by_kind(self, theirs: Tensor) -> Tensor:
        """Returns rows in Heed's order, given all rows in the checkpoint's."""
        if not self.groups:
            return theirs
        kinds = theirs.unflatten(0, (-1, sum(self.groups))).split(self.groups, dim=1)
        return torch.cat([kind.flatten(0, 1) for kind in kinds])

    def by_group(self, ours: Tensor) -> Tensor:
        """Returns rows in the checkpoint's order, given all rows in Heed's."""
        if not self.groups:
            return ours
        number = len(ours) // sum(self.groups)
        kinds = ours.split([number * rows for rows in self.groups])
        return torch.cat([kind.unflatten(0, (number, -1)) for kind in kinds], dim=1).flatten(0, 1)

    def read(self, theirs: Tensor) -> Tensor:
        """Returns Heed's numbers, given the checkpoint's."""
        scaled = theirs if self.factor == 1 else theirs * self.factor
        return scaled + self.added if self.added else scaled

    def write(self, ours: Tensor) -> Tensor:
        """Returns the checkpoint's numbers, given Heed's."""
        moved = ours - self.added if self.added else ours
        return moved if self.factor == 1 else moved / self.factor


class Family(Protocol):
    """A family of checkpoints."""

    @property
    def model_type(self) -> str: ...

    @property
    def classes(self) -> Mapping[str, str]:
        """The family's class name in `architectures` for each purpose that it supports."""

    def to_hf(self, config: ModelConfig) -> Fields:
        """Returns the shape's fields of `config.json`."""

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        """Returns ModelConfig's fields. Raises: KeyError for a missing field, ValueError for an unsupported value."""

    def stored(self, config: ModelConfig, ours: str, /) -> Stored:
        """Returns where the checkpoint stores a tensor. Raises: KeyError for a name that the family lacks."""


class HeedFamily:
    """Any shape, in Heed's own config fields and tensor names, which only Heed reads."""

    model_type = "heed"
    classes: ClassVar = {
        "language": "HeedForCausalLM",
        "score": "HeedForSequenceClassification",
        "masked": "HeedForMaskedLM",
        "next": "HeedForPreTraining",
        "sequence": "HeedForEncoderSequenceClassification",
        "token": "HeedForTokenClassification",
        "span": "HeedForQuestionAnswering",
        "translate": "HeedForConditionalGeneration",
    }

    def to_hf(self, config: ModelConfig) -> Fields:
        return config.model_dump(mode="json")

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        missing = [name for name, field in ModelConfig.model_fields.items() if field.is_required() and name not in raw]
        if missing:
            raise KeyError(missing[0])
        return {name: raw[name] for name in ModelConfig.model_fields if name in raw}

    def stored(self, _config: ModelConfig, ours: str) -> Stored:
        return Stored({ours: None})


def written(config: ModelConfig, names: Mapping[str, str]) -> Fields:
    """Returns fields of `config.json`, given Heed's name of each."""
    return {theirs: getattr(config, ours) for theirs, ours in names.items()}


def read(raw: Mapping[str, Any], names: Mapping[str, str]) -> Fields:
    """Undoes `written`. Raises: KeyError for a missing field."""
    return {ours: raw[theirs] for theirs, ours in names.items()}


def expect(raw: Mapping[str, Any], field: str, *values: Any) -> None:
    """Check a field. Raises: ValueError if it is present with none of these values."""
    if field in raw and raw[field] not in values:
        raise ValueError(f"{field} is {raw[field]!r}; {' or '.join(map(repr, values))} was expected")


# The sizes of most shapes, which most families call as Heed does.
SIZES = {
    name: name
    for name in (
        "vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "intermediate_size",
    )
}  # fmt: skip
# What GPT-2, BERT and BART share.
CLASSIC: Fields = {"mlp_bias": True, "attention_bias": "all", "positions": "learned", "norm": "layer"}
# Their names for activations, and Heed's.
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def activation_to_hf(config: ModelConfig) -> str:
    """Returns `transformers`' name for the MLP's activation."""
    return {"gelu_tanh": "gelu_new"}.get(config.mlp, config.mlp)
