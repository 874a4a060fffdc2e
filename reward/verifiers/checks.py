"""Checks that rows of data name: a kind, and its arguments."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from files.fields import objects_field, shown, text_field
from reward.verifiers import formats, instructions

KINDS: dict[str, Callable[..., bool]] = {**instructions.KINDS, **formats.KINDS}


@dataclass(frozen=True)
class Check:
    """A check of a response. `kind` is a key of KINDS; `arguments` are those of its function."""

    kind: str
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, where: str, kind: str, arguments: Mapping[str, Any]) -> "Check":
        """Validates a check. Arguments that are null count as absent, since published tables have a column for each.

        Raises: ValueError, starting with `where`, for an unknown kind and for a missing, unknown or wrong argument.
        """
        if kind not in KINDS:
            raise ValueError(f"{where}: check {shown(kind)}; one of {', '.join(KINDS)} was expected")
        given = {name: value for name, value in arguments.items() if value is not None}
        try:
            _arguments_of(kind).model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise ValueError(f"{where}: check {kind!r}: argument {name!r}: {_problem(first)}") from None
        return cls(kind, given)

    def passes(self, response: str) -> bool:
        """Returns whether the response passes. An empty one never does.

        Raises: TimeoutError if a row's regular expression takes too long.
        """
        return bool(response.strip()) and KINDS[self.kind](response, **self.arguments)


def read_checks(where: str, row: Mapping[str, Any]) -> list[Check]:
    """Reads a row's `checks`: objects with a `kind`, and its arguments next to it.

    Raises: ValueError, starting with `where`, as `Check.of` does.
    """
    checks = objects_field(where, row, "checks")
    places = [f"{where}: field 'checks[{index}]'" for index in range(len(checks))]
    return [
        Check.of(place, text_field(place, check, "kind"), {name: check[name] for name in check if name != "kind"})
        for place, check in zip(places, checks, strict=True)
    ]


@cache
def _arguments_of(kind: str) -> type[BaseModel]:
    """Returns a model that validates the keyword arguments of a kind's function by their annotations."""
    parameters = list(inspect.signature(KINDS[kind]).parameters.values())[1:]
    # By alias, since an argument may have the name of a method of BaseModel ("schema").
    fields: dict[str, Any] = {f"{one.name}_": (one.annotation, Field(alias=one.name)) for one in parameters}
    return create_model(kind, __config__=ConfigDict(extra="forbid", strict=True), **fields)


def _problem(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "it is missing"
    if error["type"] == "extra_forbidden":
        return "this kind has no such argument"
    return f"{shown(error['input'])} found: {error['msg'].removeprefix('Value error, ')}"
