"""Names of policies and judges: NAME=SPEC, or what a spec ends in, made unique."""

import re
from collections.abc import Sequence
from pathlib import Path

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.+-]*)=(.+)")
_SAYS_NOTHING = ("model", "model_ema")  # the folder that every run keeps its model in
_SUFFIXES = (".gz", ".jsonl", ".json", ".parquet", ".toml")


def named_specs(specs: Sequence[str], what: str) -> list[tuple[str, str]]:
    """(name, spec) of each NAME=SPEC or SPEC, in order; `what` they are is for errors.

    Without a name a spec is called by its last part that says something (`runs/demo/ppo/model` is ppo); where two would
    be called alike, by as many parts as tell them apart (demo/ppo and other/ppo).
    Errors: ValueError for a name given twice, and for specs that are the same.
    """
    split = [_split(spec) for spec in specs]
    taken = [name for name, _ in split if name]
    for name in taken:
        if taken.count(name) > 1:
            raise ValueError(f"{what} {name!r}: two are called like that; names that differ were expected")
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
            raise ValueError(f"{what} {spec!r} would be called {names[spec]!r} like another; NAME={spec} names it")
    return names


def _is_taken(names: dict[str, str], spec: str, taken: set[str]) -> bool:
    return names[spec] in taken or list(names.values()).count(names[spec]) > 1


def _parts(spec: str) -> list[str]:
    """What a spec's names are made of, the last being the most telling; at least one."""
    place, _, fragment = spec.partition("#")
    if fragment:
        return [fragment]
    kind, separator, rest = place.partition(":")
    if separator and not rest.startswith("//"):
        # gold:WORLD, people:STORE are called by what they are; a function by its name.
        return [kind] if kind in ("gold", "people") else [Path(kind).stem, rest]
    parts = [part for part in (rest if separator else place).split("/") if part not in ("", ".", "..", "~")]
    while len(parts) > 1 and parts[-1] in _SAYS_NOTHING:
        parts.pop()
    for suffix in _SUFFIXES:
        parts[-1:] = [part.removesuffix(suffix) or part for part in parts[-1:]]
    return parts or [spec]
