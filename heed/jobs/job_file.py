"""Reads job files: TOML, its bases and `--set` overrides become a checked job, or an error that names the place."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from files.fields import remember_job
from heed.jobs.foreign_keys import KINDS, counterpart
from heed.jobs.job import BUILT_IN_JOB, JobConfig, job_type, world_at
from heed.jobs.models import take_shape
from heed.jobs.registry import registry_with
from heed.worlds.world import PlaygroundConfig, PlaygroundWorld
from stages.world import World

DEMO = "configs/jobs/demo.toml"
BASE = "base"
WITHOUT = "without"
OWN_KEYS = ("name", "note")  # not inherited: a job with its base's name would write into the base's run folder
NONE = "none"  # the value of `--set` that removes a key
_NAME = r"[\w\"'-]+(?:[ \t]*\.[ \t]*[\w\"'-]+)*"  # a dotted key
_HEADER = re.compile(rf"[ \t]*(\[\[?)[ \t]*({_NAME})[ \t]*\]\]?[ \t]*(?:#|$)")
_KEY = re.compile(rf"[ \t]*({_NAME})[ \t]*=")
_BEGINS = re.compile(r"[a-z_]+(?:\.\w+)*")  # the key that a message begins with
_NUMBER = re.compile(r"[+-]?(\.\d+|\d+\.)([eE][+-]?\d+)?")  # TOML wants digits on both sides
PLAYGROUND = "playground"  # a world that `open_world` knows by name

# What pydantic's types of errors expect; the second by its context.
TYPES = {"int": "a whole number", "float": "a number", "finite": "a finite number", "bool": "true or false"}
TYPES |= {"string": "a text", "dict": "a table", "path": "a path"}
BOUNDS = {"greater_than": "more than {gt:g}", "greater_than_equal": "at least {ge:g}", "less_than": "less than {lt:g}"}
BOUNDS |= {"less_than_equal": "at most {le:g}", "literal_error": "{expected}", "too_short": "at least {min_length}"}

AnyModel = TypeVar("AnyModel", bound=BaseModel)


def read_toml(source: Traversable, name: str) -> dict[str, Any]:
    """Reads a TOML file. Raises: ValueError naming the file, and the line where it is not TOML."""
    try:
        return tomllib.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{name}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{name}: a file was expected, not a folder") from None
    except OSError as error:
        raise ValueError(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}:{line}: UTF-8 was expected, not the byte 0x{error.object[error.start]:02x}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name}: not TOML: {error}") from None


def line_of(path: Path, key: str) -> str:
    """Returns "FILE:LINE" of the line that sets a dotted key, or else the value or table around it, in a job file or in
    its bases; the file alone if there is none.
    """
    files, file = dict[Path, dict[tuple[str, ...], int]](), path
    while file not in files and file.is_file():
        text = file.read_text(encoding="utf-8")
        files[file], base = _lines_of(text), tomllib.loads(text).get(BASE)
        file = file.parent / base if isinstance(base, str) else file
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        for file, lines in files.items():
            if (file == path or parts[0] not in OWN_KEYS) and (line := lines.get(tuple(parts[:length]))):
                return f"{file}:{line}"
    return str(path)


def _lines_of(text: str) -> dict[tuple[str, ...], int]:
    """Returns the line of each key and table of a TOML text by its path; inline tables are one value here."""
    table, lines = tuple[str, ...](), dict[tuple[str, ...], int]()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _parts(header[2])
            if header[1] == "[[":
                table = (*table, str(sum((*table, str(place)) in lines for place in range(number))))
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *_parts(key[1])), number)
    return lines


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part.strip(" \t\"'") for part in name.split("."))


def read_job_values(path: Path, inherited_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Returns a job file's values on top of those of its `base`, a path relative to the file.

    Tables are merged, anything else is replaced. A base's `name` and `note` are not inherited, nor are the dotted keys
    in `without`.
    Raises: ValueError naming the file for a base that is missing or inherits from itself, and for a key in `without`
        that the base does not have.
    """
    values = read_toml(path, str(path))
    if BASE not in values:
        return values
    base, without = values.pop(BASE), values.pop(WITHOUT, [])
    if not isinstance(base, str):
        raise ValueError(f"{line_of(path, BASE)}: base is {base!r}; the path of a job file was expected")
    chain = (*inherited_by, path.resolve())
    parent = path.parent / base
    if not parent.is_file():
        raise ValueError(f"{line_of(path, BASE)}: base {base!r}: no such file; paths are relative to the job file")
    if parent.resolve() in chain:
        cycle = " -> ".join(file.name for file in (*chain[chain.index(parent.resolve()) :], parent))
        raise ValueError(f"{line_of(path, BASE)}: base {base!r} inherits from itself: {cycle}")
    below = read_job_values(parent, chain)
    if not isinstance(without, list):
        raise ValueError(f"{line_of(path, WITHOUT)}: {WITHOUT} is {without!r}; a list of keys of the base was expected")
    for key in without:
        if not _remove(below, str(key).split(".")):
            where = f"{line_of(path, WITHOUT)}: {WITHOUT} {key!r}: base {base!r}"
            raise ValueError(f"{where} has no such key; a key of the base was expected")
    return merged({key: value for key, value in below.items() if key not in OWN_KEYS}, values)


def _remove(values: dict[str, Any], key: Sequence[str]) -> bool:
    """Remove a key of nested tables. Returns whether it was there."""
    *parents, leaf = key
    place: Any = values
    for parent in parents:
        place = _item(place, parent)
    is_there = isinstance(place, dict) and leaf in place
    if is_there:
        del place[leaf]
    return is_there


def _item(place: Any, part: str) -> Any:
    """Returns what a part of a dotted key names in a table, or by its number in a list; None if there is none."""
    if isinstance(place, dict):
        return place.get(part)
    return place[int(part)] if isinstance(place, list) and part.isdecimal() and int(part) < len(place) else None


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `below` overridden by `above`. Tables that both have are merged; anything else is replaced."""
    both = {
        key: merged(below[key], value)
        for key, value in above.items()
        if isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
    }
    return {**below, **above, **both}


@dataclass(frozen=True)
class Override:
    """One `--set`: a dotted key, and its value as written."""

    key: str
    text: str

    @classmethod
    def parse(cls, argument: str) -> "Override":
        """Parses KEY=VALUE. Raises: ValueError for anything else."""
        key, separator, text = argument.partition("=")
        if not separator or not key.strip():
            raise ValueError(f"--set {argument!r}: KEY=VALUE was expected")
        return cls(key.strip(), text.strip())

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.key.split("."))

    @property
    def removes(self) -> bool:
        """Whether the value is `none`. TOML has no such value, so the key is removed and its default holds."""
        return self.text == NONE

    @property
    def value(self) -> Any:
        """The value parsed as TOML, as a number that TOML would refuse (".1"), or else as a bare string."""
        try:
            return tomllib.loads(f"value = {self.text}")["value"]
        except tomllib.TOMLDecodeError:
            return float(self.text) if _NUMBER.fullmatch(self.text) else self.text

    def set(self, values: dict[str, Any]) -> None:
        """Set the key in a job's values. In a list of tables, the number of a table is a part of the key's path.

        Raises: ValueError if a part of the path is no section.
        """
        *parents, leaf = self.path
        place: Any = values
        for number, parent in enumerate(parents):
            if isinstance(place, dict):
                place.setdefault(parent, {})
            below = _item(place, parent)
            is_list_of_tables = isinstance(below, list) and number + 1 < len(parents)
            if not (isinstance(below, dict) or is_list_of_tables):
                last = f": the tables have the numbers 0 to {len(place) - 1}" if isinstance(place, list) else ""
                raise ValueError(f"--set {self}: {parent!r} is not a section{last}")
            place = below
        place[leaf] = self.value

    def remove(self, values: dict[str, Any]) -> bool:
        """Remove the key from a job's values. Returns whether it was there."""
        return _remove(values, self.path)

    def __str__(self) -> str:
        return repr(f"{self.key}={self.text}")


def load_job(path: Path | None, overrides: Sequence[str] = (), *, opens_models: bool = True) -> JobConfig:
    """Loads a job file (None: the built-in demo) with `--set` overrides such as "ppo.kl.coef=0.05".

    If the first stage starts from a model, the shape is read from that model. Without `opens_models`, nothing is
    downloaded if the job writes the shape, or the shape is built in or in a local folder.
    Raises: ValueError naming file, field, value and what was expected.
    """
    at, values = _places(path, overrides), job_values(path, overrides)
    if path is not None:
        remember_job(path)
    config = _job_type(at, values)
    take_shape(at, values, config.known_stages, opens_models=opens_models)
    return validated(config, values, at)


def _places(path: Path | None, overrides: Sequence[str]) -> Callable[[str], str]:
    """Returns a function that names the file of a dotted key, with its line unless `--set` gives the key."""
    name, keys = DEMO if path is None else str(path), [Override.parse(override).path for override in overrides]

    def at(key: str) -> str:
        parts = tuple(key.split("."))
        is_set = any(parts[: len(given)] == given or given[: len(parts)] == parts for given in keys)
        return name if path is None or is_set else line_of(path, key)

    return at


def job_values(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the unchecked values from a job file (None: the built-in demo), its bases and `--set` overrides.

    Raises: ValueError as `read_job_values`, and for an override that does not name a key.
    """
    name = DEMO if path is None else str(path)
    values = read_toml(files("configs").joinpath("jobs/demo.toml"), name) if path is None else read_job_values(path)
    at = _places(path, overrides)
    for override in overrides:
        _apply(at, values, Override.parse(override))
    return values


def _apply(at: Callable[[str], str], values: dict[str, Any], override: Override) -> None:
    """Set one key, or remove it if the value is "none". A key that takes "none" (`ppo.advantage.scale`) is set to it.

    Raises: ValueError as `Override.set`, and for the removal of a key that no job has.
    """
    if not override.removes:
        override.set(values)
        return
    config = _job_type(at, values)
    if any(NONE in literals_of(field.annotation) for field in fields_at(config, override.path)):
        override.set(values)
    elif not override.remove(values):
        for place, key in enumerate(override.path):
            if not fields_at(config, override.path[: place + 1]):
                raise ValueError(f"--set {override}: {unknown_key(override.path[:place], key, config)}")


def _job_type(at: Callable[[str], str], values: Mapping[str, Any]) -> type[JobConfig]:
    """Returns the job's config class, with sections for the job's custom stages and for a world that it names."""
    places, world = values.get("custom_stages", []), values.get("world")
    kind = world.get("kind") if isinstance(world, dict) else None
    if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
        return BUILT_IN_JOB  # which refuses this value, together with other wrong keys
    try:
        registry = registry_with(places)
    except ValueError as error:
        raise ValueError(f"{at('custom_stages')}: custom_stages: {error}") from None
    if not isinstance(kind, str) or kind == PLAYGROUND:
        return job_type(registry) if places else BUILT_IN_JOB
    if ":" not in kind:
        expected = f"{PLAYGROUND!r}, or a world as 'FILE.py:NAME', was expected"
        raise ValueError(f"{at('world.kind')}: world.kind is {kind!r}; {expected}")
    try:
        return job_type(registry, world_at(kind))
    except ValueError as error:
        raise ValueError(f"{at('world.kind')}: world.kind: {error}") from None


def open_world(place: str) -> World:
    """Open the world of a job file, or the playground by its name.

    Raises: ValueError if `place` is neither, or the job has no world.
    """
    if place == PLAYGROUND:
        return PlaygroundWorld(PlaygroundConfig())
    path = Path(place)
    if not place or not path.is_file():
        raise ValueError(f"gold:{place}: gold:{PLAYGROUND}, or gold:JOB.toml of a job with a world, was expected")
    world = load_job(path, []).open_world()
    if world is None:
        raise ValueError(f"{path} has no [world], so nothing scores its responses")
    return world


def validated(model: type[AnyModel], values: Mapping[str, Any], at: Callable[[str], str]) -> AnyModel:
    """Validates a config; `at` names the place of a dotted key.

    Raises: ValueError naming place, key, what was found and what was expected, for every wrong key.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = [_located(dict(problem), model, at) for problem in error.errors()]
        raise ValueError("; ".join(problems)) from None


def _located(problem: Mapping[str, Any], model: type[BaseModel], at: Callable[[str], str]) -> str:
    """Returns one validation error with its place. A message of several keys begins with the first of them."""
    key, text = _without_tags(problem["loc"], model), problem["msg"].removeprefix("Value error, ")
    begins = _BEGINS.match(text) if problem["type"] == "value_error" else None
    return f"{at('.'.join([*key, *([begins[0]] if begins else [])]))}: {explain(problem, model)}"


def explain(problem: Mapping[str, Any], model: type[BaseModel]) -> str:
    """Formats one validation error: the full key, what was expected, and what was found."""
    if problem["type"] == "extra_forbidden":
        *section, unknown = problem["loc"]
        return unknown_key(_without_tags(section, model), str(unknown), model)
    key = ".".join(_without_tags(problem["loc"], model))
    if problem["type"] == "missing":
        kinds = _kinds_at(key.split("."), model)
        return f"{key}: missing; a table with kind {kinds} was expected" if kinds else f"{key}: missing"
    message = _expected(problem) or problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("model_type", "model_attributes_type"):
        example = _example(key.split("."), problem["input"], model)
        message = f"a table{example} was expected"
        if isinstance(problem["input"], list):
            several = "; join several files into one" if len(problem["input"]) > 1 and "source" in example else ""
            message = f"one table{example} was expected, not a list{several}"
    if problem["type"] == "tuple_type":
        example = _example(key.split("."), problem["input"], model).strip()
        message = f"a list{f' [{example}]' if example else ''} was expected"
    if problem["type"] == "kind" and (kind := _foreign_kind(problem["input"])):
        message += f' (docs/algorithms.md: it is "{kind}" here)'
    simple = isinstance(problem["input"], str | int | float | bool)
    found = f", {'not' if message.endswith('expected') else 'found'} {problem['input']!r}" if simple else ""
    return (f"{key}: " if key else "") + message + found


def _expected(problem: Mapping[str, Any]) -> str:
    """Says what was expected in place of a value of another type or out of bounds; "" for other errors."""
    kind = str(problem["type"])
    if kind.endswith(("_type", "_parsing", "_from_float", "_number")):
        expected = TYPES.get(kind.partition("_")[0], "")
    else:
        expected = BOUNDS.get(kind, "").format(**problem.get("ctx", {}))
    return expected and f"{expected} was expected"


def unknown_key(section: Sequence[str], key: str, model: type[BaseModel]) -> str:
    """Says what an unknown key may stand for, or lists the known keys."""
    where = f" in [{'.'.join(section)}]" if section else ""
    known = ", ".join(sorted(name for of in _sections(section, model) for name in of.model_fields))
    return f"`{key}`: unknown key{where}; {meaning_of_key(section, key, model) or f'known keys are {known}'}"


def meaning_of_key(section: Sequence[str], key: str, model: type[BaseModel]) -> str:
    """Says what an unknown key may stand for: another project's name, or a typo; "" if no key is like it."""
    known = [name for of in _sections(section, model) for name in of.model_fields]

    def is_known(name: str) -> bool:
        return _is_key(name, section, model) or ("." in name and _is_key(name, (), model))

    if key not in known and (hint := counterpart(key, is_known)):
        return hint
    if not section and (hint := _counterpart_in_a_section(key, model)):
        return hint
    if section and key in model.model_fields and not _sections([key], model):
        return f"it is a key of the whole job: write `{key}` above the first [section]"
    if kinds := _or([f'"{kind}"' for kind in _kinds_with(key, section, model)]):
        return f"only a table of kind {kinds} has this key"
    if key in known:
        return f"only tables in a list have this key: `{'.'.join(section)} = [{{ ... }}]`"
    below = [f"`{place}`" for place in _places_of(key, section, model)]
    close = [f"`{name}`" for name in get_close_matches(key, known, n=1)]
    return f"did you mean {_or(below or close)}?" if below or close else ""


def _or(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else "".join(names)


def _counterpart_in_a_section(key: str, model: type[BaseModel]) -> str:
    """Says what Heed calls another project's key in the first section that knows it; "" if none does."""
    hints = (
        (section, counterpart(key, partial(_is_key, section=[section], model=model))) for section in model.model_fields
    )
    return next((f"in [{section}], {hint}" for section, hint in hints if hint), "")


def _is_key(name: str, section: Sequence[str], model: type[BaseModel]) -> bool:
    """Returns whether a dotted name is a key of a section."""
    return bool(fields_at(model, (*section, *name.split("."))))


def _foreign_kind(value: Any) -> str:
    """Returns Heed's name for another project's `kind`, given alone or in its table; "" if it is unknown."""
    kind = value.get("kind") if isinstance(value, Mapping) else value
    return KINDS.get(kind, "") if isinstance(kind, str) else ""


def _kinds_at(place: Sequence[str], model: type[BaseModel]) -> str:
    """Returns the kinds of table that a key may hold, in words; "" if it has no kinds."""
    return _or([f'"{kind}"' for table in _sections(place, model) for kind in _kind(table)])


def _example(place: Sequence[str], value: Any, model: type[BaseModel]) -> str:
    """Shows a value given without its table, or in a list, in the table's only required key, such as
    ` { source = "a.jsonl" }`; "" if that is unclear.
    """
    first = value[0] if isinstance(value, list) and value else value
    required = {
        name for table in _sections(place, model) for name, field in table.model_fields.items() if field.is_required()
    }
    if len(required) != 1:
        return ""
    (name,) = required
    shown = first.get(name) if isinstance(first, Mapping) else first
    return f' {{ {name} = "{shown}" }}' if isinstance(shown, str) else ""


def _kinds_with(key: str, section: Sequence[str], model: type[BaseModel]) -> list[str]:
    """Returns the kinds of a section's table that have this key."""
    return [kind for table in _sections(section, model) if key in table.model_fields for kind in _kind(table)]


def _kind(table: type[BaseModel]) -> tuple[str, ...]:
    field = table.model_fields.get("kind")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def _places_of(key: str, section: Sequence[str], model: type[BaseModel]) -> list[str]:
    """Returns the full dotted keys with this name in the tables below a section."""
    places: list[str] = []
    for field in dict.fromkeys(name for table in _sections(section, model) for name in table.model_fields):
        place = [*section, field]
        below = _sections(place, model)
        if any(key in table.model_fields for table in below):
            places.append(".".join([*place, key]))
        elif below:
            places += _places_of(key, place, model)
    return places


def fields_at(model: type[BaseModel], path: Sequence[str]) -> list[FieldInfo]:
    """Returns the fields that a dotted key names: none for an unknown key, several in a union of sections."""
    *section, key = path
    return [table.model_fields[key] for table in _sections(section, model) if key in table.model_fields]


def literals_of(annotation: Any) -> set[object]:
    """The values of the Literals in a type."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {value for part in get_args(annotation) for value in literals_of(part)}


def _without_tags(location: Sequence[str | int], model: type[BaseModel]) -> list[str]:
    """Returns the location without the tag that a discriminated union adds, which users do not write."""
    place: list[str] = []
    is_below_tag = False
    for part in location:
        is_tag = not is_below_tag and len(_sections(place, model)) > 1
        if not is_tag:
            place.append(str(part))
        is_below_tag = is_tag or (is_below_tag and str(part).isdigit())  # a list of tables
    return place


def _sections(place: Sequence[str], model: type[BaseModel]) -> list[type[BaseModel]]:
    """The config classes that a section may be; several for a union."""
    models = [model]
    for part in place:
        if not part.isdigit():
            fields = [
                section_model.model_fields[part].annotation
                for section_model in models
                if part in section_model.model_fields
            ]
            models = [section_model for field in fields for section_model in _models_in(field)]
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]
