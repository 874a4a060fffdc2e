"""Names of policies and judges: NAME=SPEC, or the end of the spec, made unique."""

import re
from collections.abc import Sequence
from pathlib import Path

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.+-]*)=(.+)")
_UNINFORMATIVE = ("model", "model_ema")  # the folder in which every run keeps its model
_SUFFIXES = (".gz", ".jsonl", ".json", ".parquet", ".toml")


def named_specs(specs: Sequence[str], what: str) -> list[tuple[str, str]]:
    """Returns (name, spec) of each NAME=SPEC or SPEC, in order. `what` says in error messages what they are.

    The default name is the last informative part of the spec (ppo for `runs/demo/ppo/model`). If two would get the same
    name, both use as many parts as it takes to tell them apart (demo/ppo and other/ppo).
    Raises: ValueError for a name given twice, and for identical specs.
    """
    split = [_split(spec) for spec in specs]
    taken = [name for name, _ in split if name]
    for name in taken:
        if taken.count(name) > 1:
            raise ValueError(f"{what} {name!r}: the name is used twice; names must differ")
    unnamed = [spec for name, spec in split if not name]
    for spec in unnamed:
        if unnamed.count(spec) > 1:
            raise ValueError(f"{what} {spec!r} is given twice; NAME={spec} tells two of them apart")
    derived = _derived(unnamed, set(taken), what)
    return [(name or derived[spec], spec) for name, spec in split]


def _split(spec: str) -> tuple[str, str]:
    found = _NAMED.fullmatch(spec)
    return (found[1], found[2]) if found else ("", spec)


def _derived(specs: Sequence[str], taken: set[str], what: str) -> dict[str, str]:
    parts = {spec: _parts(spec) for spec in specs}
    names = {spec: own[-1] for spec, own in parts.items()}
    for num_parts in range(2, max((len(own) for own in parts.values()), default=0) + 1):
        alike = [spec for spec in specs if _is_taken(names, spec, taken)]
        names |= {spec: "/".join(parts[spec][-num_parts:]) for spec in alike}
    for spec in specs:
        if _is_taken(names, spec, taken):
            raise ValueError(f"{what} {spec!r} would be called {names[spec]!r} like another; name it with NAME={spec}")
    return names


def _is_taken(names: dict[str, str], spec: str, taken: set[str]) -> bool:
    return names[spec] in taken or list(names.values()).count(names[spec]) > 1


def _parts(spec: str) -> list[str]:
    """Splits a spec into the parts of its name, the most informative one last; at least one."""
    place, _, fragment = spec.partition("#")
    if fragment:
        return [fragment]
    kind, separator, rest = place.partition(":")
    if separator and not rest.startswith("//"):
        # gold:WORLD and people:STORE are named by their kind; a function by its own name.
        return [kind] if kind in ("gold", "people") else [Path(kind).stem, rest]
    parts = [part for part in (rest if separator else place).split("/") if part not in ("", ".", "..", "~")]
    while len(parts) > 1 and parts[-1] in _UNINFORMATIVE:
        parts.pop()
    for suffix in _SUFFIXES:
        parts[-1:] = [part.removesuffix(suffix) or part for part in parts[-1:]]
    return parts or [spec]
