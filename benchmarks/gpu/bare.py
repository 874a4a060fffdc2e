"""The parts of pydantic that Heed's configs use, for machines without it: a rented GPU often has little besides torch.

Fields get their defaults, Heed's own validators run, and unknown or missing fields are errors. Types and ranges are not
checked; install pydantic for that. Only `benchmarks.gpu` and `tests/gpu` use this, and only if pydantic is missing.
"""

import copy
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

REQUIRED: Any = object()


class ValidationError(ValueError):
    """An invalid config."""

    def errors(self) -> list[dict[str, Any]]:
        return [{"loc": (), "msg": str(self)}]


class FieldInfo:
    """A field's default; everything else in `Field(...)` is ignored here."""

    def __init__(self, default: Any = REQUIRED, default_factory: Callable[[], Any] | None = None, **_: Any) -> None:
        self.default, self.default_factory = default, default_factory

    def is_required(self) -> bool:
        return self.default is REQUIRED and self.default_factory is None

    def make(self) -> Any:
        return self.default_factory() if self.default_factory else copy.copy(self.default)


class Info:
    """What a field's validator receives: the fields before it."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data


class Tag:
    """Names one of the tables that a field may hold."""

    def __init__(self, tag: str) -> None:
        self.tag = tag


class Discriminator:
    """Tells the tables that a field may hold apart: `tag_of` returns the tag of the one that a value stands for."""

    def __init__(self, tag_of: Callable[[Any], Any], *, custom_error_type: str, custom_error_message: str) -> None:
        self.tag_of, self.problem = tag_of, f"{custom_error_type}: {custom_error_message}"

    def table(self, union: Any, value: Any) -> Any:
        """Returns the value as the table of its tag, which is one of `union`."""
        tables = {tag.tag: table for table, tag in map(typing.get_args, typing.get_args(union))}
        tag = self.tag_of(value)
        if tag not in tables:
            raise ValidationError(f"{self.problem}, found {value!r}")
        return as_type(tables[tag], value)


class Validator:
    """A method that checks a field, or the whole config if `fields` is empty."""

    def __init__(self, method: Any, fields: tuple[str, ...], mode: str) -> None:
        self.function = method.__func__ if isinstance(method, classmethod) else method
        self.fields, self.mode = fields, mode


def field_validator(*fields: str, mode: str = "after") -> Callable[[Any], Validator]:
    return lambda method: Validator(method, fields, mode)


def model_validator(*, mode: str) -> Callable[[Any], Validator]:
    return lambda method: Validator(method, (), mode)


class BaseModel:
    """A frozen config."""

    model_config: ClassVar[Any] = {}
    model_fields: ClassVar[dict[str, FieldInfo]] = {}
    _types: ClassVar[dict[str, Any]] = {}
    _validators: ClassVar[dict[str, Validator]] = {}

    def __init_subclass__(cls, **_: Any) -> None:
        cls.model_fields, cls._validators = dict(cls.model_fields), dict(cls._validators)
        for name, annotation in inspect.get_annotations(cls).items():
            origin: Any = typing.get_origin(annotation)
            if origin is not ClassVar:
                given = cls.__dict__.get(name, REQUIRED)
                cls.model_fields[name] = given if isinstance(given, FieldInfo) else FieldInfo(given)
        cls._validators |= {name: value for name, value in vars(cls).items() if isinstance(value, Validator)}
        cls._types = {**cls._types, **inspect.get_annotations(cls)}

    def __init__(self, **given: Any) -> None:
        values: Any = given
        for validator in self._of("before"):
            values = validator.function(type(self), values)
        unknown = sorted(set(values) - set(self.model_fields))
        missing = [name for name, info in self.model_fields.items() if info.is_required() and name not in values]
        if unknown or missing:
            raise ValidationError(f"{type(self).__name__}: unknown {unknown}, missing {missing}")
        found: dict[str, Any] = {}
        for name, info in self.model_fields.items():
            found[name] = self._checked(name, values[name], found) if name in values else info.make()
        vars(self).update(found)
        itself: Any = self
        for validator in self._of("after"):
            validator.function(itself)

    def _of(self, mode: str, field: str = "") -> Iterator[Validator]:
        for validator in self._validators.values():
            if validator.mode == mode and (field in validator.fields if field else not validator.fields):
                yield validator

    def _checked(self, name: str, value: Any, before: dict[str, Any]) -> Any:
        for mode in ("before", "after"):
            for validator in self._of(mode, name):
                takes_info = len(inspect.signature(validator.function).parameters) == 3
                more = (Info(before),) if takes_info else ()
                value = validator.function(type(self), value, *more)
            if mode == "before":
                value = as_type(self._types[name], value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValidationError(f"{type(self).__name__} is frozen; {name} cannot become {value!r}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *map(repr, vars(self).items())))

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from vars(self).items()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"

    @classmethod
    def model_validate(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        new = copy.copy(self)
        vars(new).update(update)
        return new

    def model_dump(self, *, mode: str = "python") -> dict[str, Any]:
        return {name: _plain(value, mode) for name, value in vars(self).items()}


def as_type(annotation: Any, value: Any) -> Any:
    """Returns the value with lists turned into tuples and mappings into configs where the field's type asks for it."""
    kinds = (annotation, *typing.get_args(annotation))
    for kind in kinds[1:]:
        if isinstance(kind, Discriminator):
            return kind.table(kinds[1], value)
    if isinstance(value, list) and any(kind is tuple or typing.get_origin(kind) is tuple for kind in kinds):
        return tuple(value)
    configs: list[Any] = [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseModel)]
    return configs[0](**value) if configs and isinstance(value, Mapping) else value


def _plain(value: Any, mode: str) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode=mode)
    if isinstance(value, tuple):
        parts = [_plain(part, mode) for part in value]
        return parts if mode == "json" else tuple(parts)
    return value


def stand_in() -> types.ModuleType:
    """Returns a module named pydantic that contains this file's names."""
    module: Any = types.ModuleType("pydantic")
    module.BaseModel, module.ValidationError, module.ValidationInfo = BaseModel, ValidationError, Info
    module.Field, module.ConfigDict, module.FiniteFloat = FieldInfo, dict, float
    module.Tag, module.Discriminator = Tag, Discriminator
    module.StrictInt, module.StrictFloat, module.AfterValidator = int, float, lambda check: check
    module.field_validator, module.model_validator = field_validator, model_validator
    return module


def install() -> None:
    """Makes `import pydantic` use this file if pydantic is not installed."""
    if sys.modules.get("pydantic") is None and importlib.util.find_spec("pydantic") is None:
        sys.modules["pydantic"] = stand_in()
