"""Dataclasses to JSON and back: `record_of` reads what `as_json` wrote, with its types."""

import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

AnyRecord = TypeVar("AnyRecord")


def as_json(value: Any) -> Any:
    """Converts dataclasses, mappings and sequences to JSON's types: NaN and infinity become None, tuples lists."""
    if is_dataclass(value):
        return {entry.name: as_json(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def record_of(value: Mapping[str, Any], kind: type[AnyRecord], where: str) -> AnyRecord:
    """Makes a dataclass of a JSON object. Null becomes NaN in a float field. Keys that are not fields are ignored.

    Raises:
        ValueError: a field is missing or of another type; the message begins with `where` and names it.
    """
    return cast(AnyRecord, _read(value, kind, where, ""))


def read_record(path: Path, kind: type[AnyRecord]) -> AnyRecord:
    """Reads a dataclass from a JSON file. Raises: ValueError as `record_of`, and if the file is not a JSON object."""
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object was expected, not {type(value).__name__}")
    return record_of(value, kind, str(path))


def _read(value: Any, kind: Any, where: str, path: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        others = [other for other in arguments if other is not type(None)]
        return None if value is None else _read(value, others[0], where, path)
    if kind is float and value is None:
        return math.nan
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _read_fields(value, kind, where, path)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list) and (arguments[-1] is ... or len(arguments) == len(value)):
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        return tuple(_read(v, k, where, f"{path}[{i}]") for i, (v, k) in enumerate(zip(value, kinds, strict=True)))
    if origin in (list, Sequence) and isinstance(value, list):
        return [_read(entry, arguments[0], where, f"{path}[{i}]") for i, entry in enumerate(value)]
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {key: _read(entry, arguments[1], where, f"{path}.{key}".lstrip(".")) for key, entry in value.items()}
    if kind is Any or (isinstance(kind, type) and _is_a(value, kind)):
        return float(value) if kind is float else value
    raise ValueError(f"{where}: {path or 'the value'} is {value!r}; {getattr(kind, '__name__', kind)} was expected")


def _read_fields(value: Mapping[str, Any], kind: Any, where: str, path: str) -> Any:
    hints = get_type_hints(kind)
    values = {}
    for field in fields(kind):
        place = f"{path}.{field.name}".lstrip(".")
        if field.name in value:
            values[field.name] = _read(value[field.name], hints[field.name], where, place)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where}: {place} is missing")
    return kind(**values)


def _is_a(value: Any, kind: type) -> bool:
    """Like isinstance, but a bool is not a number, and an int is also a float."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)
