"""Checks of a response's form: a regular expression, a JSON schema."""

import json
from collections.abc import Callable
from typing import Annotated, Any

import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from pydantic import AfterValidator
from referencing import Registry

from reward.verifiers.instructions import without_fence

SEARCH_SECONDS = (
    1.0  # of computing, for one response; some patterns take exponentially long for texts that do not match
)


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
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise ValueError(f"$ref {reference!r}: a reference within the schema was expected, such as '#/$defs/name'")
    return schema


def _references(part: Any) -> list[str]:
    if isinstance(part, dict):
        own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
        return own + [found for value in part.values() for found in _references(value)]
    return [found for value in part for found in _references(value)] if isinstance(part, list) else []


def matches(response: str, *, pattern: Annotated[str, AfterValidator(_pattern)]) -> bool:
    """Whether the pattern is found in the response; `^` and `$` require it from beginning to end.

    Raises: TimeoutError if the search takes longer than SEARCH_SECONDS.
    """
    return regex.search(pattern, response, timeout=SEARCH_SECONDS) is not None


def json_schema(response: str, *, schema: Annotated[dict[str, Any], AfterValidator(_schema)]) -> bool:
    """Whether the whole response is JSON, perhaps in a code block of Markdown, and valid under the schema."""
    try:
        value = json.loads(without_fence(response), parse_constant=_refuse)
        return Draft202012Validator(schema, registry=Registry()).is_valid(value)
    except (ValueError, ArithmeticError, RecursionError):  # also of numbers and depths that the validator cannot handle
        return False


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


KINDS: dict[str, Callable[..., bool]] = {"format:regex": matches, "format:json_schema": json_schema}
