"""Errors of a config, in words: the key, what was found, and what was expected."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from heed.jobs.foreign_keys import counterpart

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
        return unknown_key(_without_tags(section, model), str(unknown), model)
    key = ".".join(_without_tags(problem["loc"], model))
    if problem["type"] == "missing":
        return f"{key}: missing"
    message = problem["msg"].removeprefix("Value error, ")
    simple = isinstance(problem["input"], str | int | float | bool)
    return (f"{key}: " if key else "") + message + (f", found {problem['input']!r}" if simple else "")


def unknown_key(section: Sequence[str], key: str, model: type[BaseModel]) -> str:
    """Says what an unknown key may stand for: another project's name, a typing error, or which keys there are."""
    known = [name for found in _sections(section, model) for name in found.model_fields]
    where = f" in [{'.'.join(section)}]" if section else ""
    hint = counterpart(key, known, tuple(model.model_fields))
    if not hint:
        below = [f"`{place}`" for place in _places_of(key, section, model)]
        close = [f"`{name}`" for name in get_close_matches(key, known, n=1)]
        hint = f"did you mean {_or(below or close)}?" if below or close else f"known here: {', '.join(sorted(known))}"
    return f"`{key}`: unknown key{where}; {hint}"


def _or(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


def _places_of(key: str, section: Sequence[str], model: type[BaseModel]) -> list[str]:
    """The keys of this name in the tables below a section, written from the top of the job."""
    found: list[str] = []
    for field in dict.fromkeys(name for table in _sections(section, model) for name in table.model_fields):
        place = [*section, field]
        below = _sections(place, model)
        if any(key in table.model_fields for table in below):
            found.append(".".join([*place, key]))
        elif below:
            found += _places_of(key, place, model)
    return found


def fields_at(model: type[BaseModel], path: Sequence[str]) -> list[FieldInfo]:
    """The fields of a config that a dotted key names: none for an unknown key, several in a union of sections."""
    *section, key = path
    return [table.model_fields[key] for table in _sections(section, model) if key in table.model_fields]


def literals_of(annotation: Any) -> set[object]:
    """The values of the Literals in a type."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {value for part in get_args(annotation) for value in literals_of(part)}


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
