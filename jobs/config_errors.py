"""Errors of a config, in words: the key, what was found, and what was expected."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from jobs.foreign_keys import counterpart

AnyModel = TypeVar("AnyModel", bound=BaseModel)


def validated(model: type[AnyModel], values: Mapping[str, Any], name: str) -> AnyModel:
    """Raises: ValueError naming the file and every key that is wrong, what was found, and what was expected."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(explain(dict(problem), model) for problem in error.errors())
        raise ValueError(f"{name}: {problems}") from None


def explain(problem: Mapping[str, Any], model: type[BaseModel]) -> str:
    """One validation error as: full key, what was found, what was expected."""
    if problem["type"] == "extra_forbidden":
        *section, unknown = problem["loc"]
        return _unknown_key(_without_tags(section, model), str(unknown), model)
    key = ".".join(_without_tags(problem["loc"], model))
    if problem["type"] == "missing":
        return f"{key}: missing"
    message = problem["msg"].removeprefix("Value error, ")
    simple = isinstance(problem["input"], str | int | float | bool)
    return (f"{key}: " if key else "") + message + (f", found {problem['input']!r}" if simple else "")


def _unknown_key(section: Sequence[str], key: str, model: type[BaseModel]) -> str:
    """Says what an unknown key may stand for: another project's name, a typing error, or which keys there are."""
    known = [name for found in _sections(section, model) for name in found.model_fields]
    where = f" in [{'.'.join(section)}]" if section else ""
    hint = counterpart(key, known, tuple(model.model_fields))
    if not hint:
        close = get_close_matches(key, known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(sorted(known))}"
    return f"`{key}`: unknown key{where}; {hint}"


def _without_tags(location: Sequence[str | int], model: type[BaseModel]) -> list[str]:
    """The location without the tag that a discriminated union puts into it: users do not write that."""
    place: list[str] = []
    for part in location:
        union = _sections(place, model)
        if len(union) < 2 or any(part in section.model_fields for section in union):
            place.append(str(part))
    return place


def _sections(place: Sequence[str], model: type[BaseModel]) -> list[type[BaseModel]]:
    """The config classes that a section may be; several for a union."""
    models = [model]
    for part in place:
        if not part.isdigit():
            fields = [found.model_fields[part].annotation for found in models if part in found.model_fields]
            models = [found for field in fields for found in _models_in(field)]
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _models_in(part)]
