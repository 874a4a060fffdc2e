"""What a family of checkpoints answers: its spelling of a shape, and what it calls each tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lm.config import ModelConfig

Fields = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """One of our tensors as a checkpoint holds it: {name: number of rows} of the parts that its rows are cut into.

    None: all rows. `transposed` where the checkpoint keeps a matrix as (in, out), as GPT-2 does. `rows_before` rows of
    the checkpoint's table come before ours and are not used: BART counts its positions from 2.
    """

    parts: Mapping[str, int | None]
    transposed: bool = False
    rows_before: int = 0


class Family(Protocol):
    """A family of checkpoints."""

    @property
    def model_type(self) -> str: ...

    @property
    def classes(self) -> Mapping[str, str]:
        """What `architectures` calls the family's model for each purpose that it serves."""

    def to_hf(self, config: ModelConfig) -> Fields:
        """The shape's fields of `config.json`."""

    def from_hf(self, raw: Mapping[str, Any]) -> Fields:
        """The fields of ModelConfig. Errors: KeyError for a missing field, ValueError for what we do not compute."""

    def stored(self, config: ModelConfig, ours: str, /) -> Stored:
        """Where the model's tensor of this name lies. Errors: KeyError for one that the family does not have."""


def expect(raw: Mapping[str, Any], field: str, *values: Any) -> None:
    """Errors: ValueError where the field is there with a value that is none of these."""
    if field in raw and raw[field] not in values:
        raise ValueError(f"{field} is {raw[field]!r}; {' or '.join(map(repr, values))} was expected")
