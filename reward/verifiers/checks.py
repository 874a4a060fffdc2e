"""Checks that rows of data name: a kind, and its arguments. The kinds are those of `instructions`, and two of a
response's form: a regular expression and a JSON schema.
"""

import inspect
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import regex
from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import SchemaError
from jsonschema.exceptions import ValidationError as SchemaViolation
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from files.fields import objects_field, shown, text_field
from reward.verifiers import instructions

# Of computing, for one response; some patterns take exponentially long for texts that do not match.
SEARCH_SECONDS = 1.0


def _pattern(text: str) -> str:
    try:
        regex.compile(text)
    except regex.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema (draft 2020-12): {error.json_path}: {error.message}") from None
    parts = list(_subschemas(schema, Registry().resolver_with_root(DRAFT202012.create_resource(schema)), set()))
    for part in parts:
        for pattern in [*part.get("patternProperties", {}), *([part["pattern"]] if "pattern" in part else [])]:
            try:
                _pattern(pattern)
            except ValueError as error:
                raise ValueError(f"pattern {pattern!r}: {error}") from None
        if "$schema" in part and part is not schema:
            raise ValueError("$schema within the schema: it was expected at the top only")
    if all(any(name in part for part in parts) for name in ("patternProperties", "unevaluatedProperties")):
        raise ValueError("patternProperties with unevaluatedProperties: additionalProperties was expected")
    try:
        _validator(schema).is_valid(None)
    except RecursionError:
        raise ValueError("not a JSON schema: its references lead back to themselves without end") from None
    return schema


def _subschemas(schema: Any, resolver: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    """Yields a schema, those in it and those that it refers to. Raises: ValueError for a reference to nothing."""
    if not isinstance(schema, dict) or id(schema) in seen:
        return
    seen.add(id(schema))
    yield schema
    resolver = resolver.in_subresource(DRAFT202012.create_resource(schema))
    for name in ("$ref", "$dynamicRef"):
        if name in schema:
            try:
                resolved = resolver.lookup(schema[name])
            except Unresolvable:
                raise ValueError(
                    f"{name} {schema[name]!r}: a reference within the schema was expected, such as '#/$defs/name'"
                ) from None
            yield from _subschemas(resolved.contents, resolved.resolver, seen)
    for part in DRAFT202012.subresources_of(schema):
        yield from _subschemas(part, resolver, seen)


def _validator(schema: dict[str, Any]) -> Any:
    """Returns a validator for one response, whose searches for the schema's patterns take SEARCH_SECONDS together."""
    left = SEARCH_SECONDS

    def found(pattern: str, text: str) -> bool:
        nonlocal left
        if left <= 0:
            raise TimeoutError
        started = time.process_time()  # the clock of `regex`
        is_found = regex.search(pattern, text, timeout=left) is not None
        left -= time.process_time() - started
        return is_found

    def check_pattern(validator: Any, pattern: str, value: Any, _schema: Any) -> Iterator[SchemaViolation]:
        if validator.is_type(value, "string") and not found(pattern, value):
            yield SchemaViolation(f"{value!r} does not match {pattern!r}")

    def check_properties(validator: Any, parts: Any, value: Any, _schema: Any) -> Iterator[SchemaViolation]:
        for name in value if validator.is_type(value, "object") else ():
            for part in (part for pattern, part in parts.items() if found(pattern, name)):
                yield from validator.descend(value[name], part)

    def check_others(validator: Any, part: Any, value: Any, schema: Any) -> Iterator[SchemaViolation]:
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name in value if validator.is_type(value, "object") else ():
            if name not in named and not any(found(pattern, name) for pattern in patterns):
                yield from validator.descend(value[name], part)

    checks = {"pattern": check_pattern, "patternProperties": check_properties, "additionalProperties": check_others}
    # Without "$schema", with which jsonschema would take its own validator for a reference to the root.
    root = {name: value for name, value in schema.items() if name != "$schema"}
    return validators.extend(Draft202012Validator, checks)(root, registry=Registry())


def matches(response: str, *, pattern: Annotated[str, AfterValidator(_pattern)]) -> bool:
    """Whether the pattern is found in the response; `^` and `$` require it from beginning to end.

    Raises: TimeoutError if the search takes longer than SEARCH_SECONDS.
    """
    return regex.search(pattern, response, timeout=SEARCH_SECONDS) is not None


def json_schema(response: str, *, schema: Annotated[dict[str, Any], AfterValidator(_schema)]) -> bool:
    """Whether the whole response is JSON, perhaps in a code block of Markdown, and valid under the schema.

    Raises: TimeoutError if the searches for the schema's patterns take longer than SEARCH_SECONDS.
    """
    try:
        value = json.loads(instructions.without_fence(response), parse_constant=_refuse, parse_float=_finite)
        return bool(_validator(schema).is_valid(value))
    except (ValueError, ArithmeticError, RecursionError):  # also of numbers and depths that the validator cannot handle
        return False


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits} is larger than any number of double precision")
    return number


KINDS: dict[str, Callable[..., bool]] = {
    **instructions.KINDS,
    "format:regex": matches,
    "format:json_schema": json_schema,
}


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
