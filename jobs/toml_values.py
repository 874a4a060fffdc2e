"""Reads a job's TOML: the file, the bases that it inherits from, and `--set` overrides."""

import tomllib
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

BASE = "base"
WITHOUT = "without"
OWN_KEYS = ("name", "note")  # a job that inherits them would write into its base's run folder


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


def apply_override(values: dict[str, Any], override: str) -> None:
    """Sets one dotted key, such as "ppo.kl_coef=0.05"; the value is TOML, or a bare string where it is not."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ValueError(f"--set {override!r}: KEY=VALUE was expected")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.strip().split(".")
    place = values
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ValueError(f"--set {override!r}: {parent!r} is not a section")
    place[leaf] = value
