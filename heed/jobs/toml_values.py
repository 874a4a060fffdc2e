"""Reads a job's TOML: the file, the bases that it inherits from, and `--set` overrides."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

BASE = "base"
WITHOUT = "without"
OWN_KEYS = ("name", "note")  # a job that inherits them would write into its base's run folder
NONE = "none"  # the value of `--set` that removes a key
_NUMBER = re.compile(r"[+-]?(\.\d+|\d+\.)([eE][+-]?\d+)?")  # numbers that TOML wants with digits on both sides


def read_toml(source: Traversable, name: str) -> dict[str, Any]:
    """Raises: ValueError naming the file, and the line where it is not TOML."""
    try:
        return tomllib.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{name}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name}: not TOML: {error}") from None


def read_job_values(path: Path, inherited_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A job file's values on top of those of its `base`, a path relative to the file.

    Tables are merged, anything else is replaced. A base's `name` and `note` are not inherited, nor are the dotted keys
    listed as `without`.
    Raises: ValueError naming the file for a base that is missing or inherits from itself, and for a key in `without`
        that the base does not have.
    """
    values = read_toml(path, str(path))
    if BASE not in values:
        return values
    base, without = values.pop(BASE), values.pop(WITHOUT, [])
    if not isinstance(base, str):
        raise ValueError(f"{path}: base is {base!r}; the path of a job file was expected")
    chain = (*inherited_by, path.resolve())
    parent = path.parent / base
    if not parent.is_file():
        raise ValueError(f"{path}: base {base!r}: no such file; paths are relative to the job file")
    if parent.resolve() in chain:
        cycle = " -> ".join(found.name for found in (*chain[chain.index(parent.resolve()) :], parent))
        raise ValueError(f"{path}: base {base!r} inherits from itself: {cycle}")
    below = read_job_values(parent, chain)
    if not isinstance(without, list):
        raise ValueError(f"{path}: {WITHOUT} is {without!r}; a list of keys of the base was expected")
    for key in without:
        _remove(below, key, f"{path}: {WITHOUT} {key!r}: base {base!r}")
    return merged({key: value for key, value in below.items() if key not in OWN_KEYS}, values)


def _remove(values: dict[str, Any], key: object, where: str) -> None:
    *parents, leaf = str(key).split(".")
    place: Any = values
    for parent in parents:
        place = place.get(parent) if isinstance(place, dict) else None
    if not isinstance(place, dict) or leaf not in place:
        raise ValueError(f"{where} has no such key; a key of the base was expected")
    del place[leaf]


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above`; tables that both have are merged, anything else is replaced."""
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
    def parse(cls, given: str) -> "Override":
        """Raises: ValueError for anything but KEY=VALUE."""
        key, separator, text = given.partition("=")
        if not separator or not key.strip():
            raise ValueError(f"--set {given!r}: KEY=VALUE was expected")
        return cls(key.strip(), text.strip())

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.key.split("."))

    @property
    def removes(self) -> bool:
        """Whether it says `none`. TOML has no such value: the key is removed, so that its default holds."""
        return self.text == NONE

    @property
    def value(self) -> Any:
        """The value as TOML has it, a number as people write it (".1"), or a bare string."""
        try:
            return tomllib.loads(f"value = {self.text}")["value"]
        except tomllib.TOMLDecodeError:
            return float(self.text) if _NUMBER.fullmatch(self.text) else self.text

    def set(self, values: dict[str, Any]) -> None:
        """Set the key in a job's values. Raises: ValueError where a section has another value."""
        *parents, leaf = self.path
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"--set {self}: {parent!r} is not a section")
        place[leaf] = self.value

    def remove(self, values: dict[str, Any]) -> bool:
        """Remove the key from a job's values. Returns whether it was there."""
        *parents, leaf = self.path
        place: Any = values
        for parent in parents:
            place = place.get(parent) if isinstance(place, dict) else None
        is_there = isinstance(place, dict) and leaf in place
        if is_there:
            del place[leaf]
        return is_there

    def __str__(self) -> str:
        return repr(f"{self.key}={self.text}")
