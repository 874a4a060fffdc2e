"""Reads the inputs of a comparison: policies and judges as NAME=SPEC, and prompts with ids, categories and clusters;
says how many samples per prompt they take, and what they could show.

A policy or judge without a NAME is named after the end of its spec, and such names are made unique. A prompt is a
conversation that ends with a user's turn.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.statistics.significance import EqualityTest
from evaluation.verdicts import Clusters
from files.conversations import ConversationReader, spoken
from files.fields import name_field, names, text_field
from files.rows import InvalidRows, Row
from stages.reports.text import count_of
from training.data import DataConfig, Prompt, read_rows, read_valid

COMPARED_RESPONSES, MAX_SAMPLES = 200, 8  # responses of each policy, samples per prompt
CATEGORY_FIELDS = ("category", "kind", "dataset")  # names of the category in published prompt sets

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.+-]*)=(.+)")
_UNINFORMATIVE = ("model", "model_ema")  # every run keeps its model in a folder of this name
_SUFFIXES = (".gz", ".jsonl", ".json", ".parquet", ".toml")


def samples_per_prompt(num_prompts: int) -> int:
    """Returns the samples per prompt of a comparison whose user chose none: several if there are few prompts."""
    return max(1, min(MAX_SAMPLES, COMPARED_RESPONSES // max(1, num_prompts)))


def can_show(num_prompts: int, num_samples: int, num_clusters: int = 0) -> str:
    """Says which win rate a comparison of two policies can show, before it samples: as if all verdicts on a cluster
    (a prompt, if `num_clusters` is 0) went the same way, and as if they were independent. The truth is in between.
    """
    prompts = f"{num_prompts:,} prompts" + (f" in {num_clusters:,} clusters" if num_clusters else "")
    num_units = num_clusters or num_prompts
    detectable = EqualityTest(np.arange(num_units, dtype=np.float64) % 2, seed=0).power().detectable
    if math.isnan(detectable):
        return f"{prompts} cannot show any difference; at least 6 were expected"
    independent = 0.5 + detectable * math.sqrt(num_units / (num_prompts * num_samples))
    agreeing = f"{0.5 + detectable:.0%}"
    spread = agreeing
    if num_prompts * num_samples > num_units:
        what = "cluster" if num_clusters else "prompt"
        spread = f"{independent:.0%} to {agreeing}, the more the verdicts on a {what} agree"
    samples = count_of(num_samples, "sample")
    return f"{prompts} with {samples} each can show only a win rate above {spread} (80% power)"


def named_specs(specs: Sequence[str], what: str) -> list[tuple[str, str]]:
    """Returns (name, spec) of each NAME=SPEC or SPEC, in order. Error messages call them `what`.

    The default name is the last informative part of the spec (ppo for `runs/demo/ppo/model`). If two would get the same
    name, both use as many parts as it takes to tell them apart (demo/ppo and other/ppo).
    Raises: ValueError for a name given twice, and for identical specs.
    """
    split = [_name_and_spec(spec) for spec in specs]
    taken = [name for name, _ in split if name]
    for name in taken:
        if taken.count(name) > 1:
            raise ValueError(f"{what} {name!r}: the name is used twice; names must differ")
    unnamed = [spec for name, spec in split if not name]
    for spec in unnamed:
        if unnamed.count(spec) > 1:
            raise ValueError(f"{what} {spec!r} is given twice; NAME={spec} tells two of them apart")
    derived = _default_names(unnamed, set(taken), what)
    return [(name or derived[spec], spec) for name, spec in split]


def named_runs(specs: Sequence[str], what: str = "policy") -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Returns (name, spec) of each policy or model, and by algorithm the names of its training runs.

    A NAME with several specs is an algorithm of which several runs (seeds) are compared: NAME/1, NAME/2, in order.
    Others are named as in `named_specs`. Error messages call them `what`.
    Raises: ValueError for a run given twice, and as `named_specs` does.
    """
    split = [_name_and_spec(spec) for spec in specs]
    specs_by_name: dict[str, list[str]] = {}
    for name, spec in split:
        if name and spec in specs_by_name.setdefault(name, []):
            raise ValueError(f"{what} {name!r}: {spec} is given twice; different runs were expected")
        specs_by_name.get(name, []).append(spec)
    seeds = {name: several for name, several in specs_by_name.items() if len(several) > 1}
    others = iter(
        named_specs([whole for whole, (name, _) in zip(specs, split, strict=True) if name not in seeds], what)
    )
    named = [(f"{name}/{seeds[name].index(spec) + 1}", spec) if name in seeds else next(others) for name, spec in split]
    names = [name for name, _ in named]
    for name, spec in named:
        if name in seeds or names.count(name) > 1:
            raise ValueError(f"{what} {spec!r} would be called {name!r} like others; name it with NAME={spec}")
    return named, {
        name: [f"{name}/{number}" for number in range(1, len(several) + 1)] for name, several in seeds.items()
    }


def _name_and_spec(spec: str) -> tuple[str, str]:
    match = _NAMED.fullmatch(spec)
    return (match[1], match[2]) if match else ("", spec)


def _default_names(specs: Sequence[str], taken: set[str], what: str) -> dict[str, str]:
    parts = {spec: _name_parts(spec) for spec in specs}
    name_of = {spec: path_parts[-1] for spec, path_parts in parts.items()}
    for num_parts in range(2, max((len(path_parts) for path_parts in parts.values()), default=0) + 1):
        alike = [spec for spec in specs if _is_name_taken(name_of, spec, taken)]
        name_of |= {spec: "/".join(parts[spec][-num_parts:]) for spec in alike}
    for spec in specs:
        if _is_name_taken(name_of, spec, taken):
            raise ValueError(
                f"{what} {spec!r} would be called {name_of[spec]!r} like another; name it with NAME={spec}"
            )
    return name_of


def _is_name_taken(name_of: dict[str, str], spec: str, taken: set[str]) -> bool:
    return name_of[spec] in taken or list(name_of.values()).count(name_of[spec]) > 1


def _name_parts(spec: str) -> list[str]:
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


def read_compared_prompts(data: DataConfig, category_field: str = "", cluster_field: str = "") -> list[Prompt]:
    """Reads prompts in the rows' order, in one of the formats of docs/data.md.

    If rows have no `prompt_id`, it is the row's number, from 0. A prompt's `kind` is the row's `category_field`, which
    every row must then have; if it is "", it is the first of `category`, `kind` and `dataset` that the row has. Its
    `cluster` is the row's `cluster_field`, if that is set.
    Raises: ValueError naming file, line and field; for a repeated id or conversation, naming both lines.
    """
    prompts: list[Prompt] = []
    ids: dict[str, str] = {}
    texts: dict[tuple[tuple[str, str], ...], str] = {}
    reader = ConversationReader("prompt", data.format)
    for index, (where, row) in enumerate(read_rows(data)):
        prompt_id = id_of(where, row) if "prompt_id" in row else str(index)
        messages = reader.read(where, row)
        if prompt_id in ids:
            raise ValueError(f"{where}: prompt_id {prompt_id!r} is already used in {ids[prompt_id]}")
        if conversation_key(messages) in texts:
            raise ValueError(f"{where}: the prompt is the same as in {texts[conversation_key(messages)]}")
        ids[prompt_id] = texts[conversation_key(messages)] = where
        category = category_of(where, row, category_field)
        cluster = cluster_of(where, row, cluster_field) if cluster_field else ""
        prompts.append(Prompt(prompt_id=prompt_id, messages=tuple(messages), kind=category, cluster=cluster))
    if not prompts:
        raise ValueError(f"{data.source}: no prompts; at least one was expected")
    return prompts


def id_of(where: str, row: Mapping[str, Any]) -> str:
    """Returns the row's `prompt_id` as text. Raises: ValueError if it is neither text nor a whole number."""
    value = row["prompt_id"]
    if type(value) is int:
        return str(value)
    return text_field(where, row, "prompt_id")


def category_of(where: str, row: Mapping[str, Any], field: str) -> str:
    """Returns the row's category as text, "" if it has none. Raises: ValueError if `field` is set and missing."""
    if field and row.get(field) is None:
        raise ValueError(f"{where}: the category field {field!r} is missing; found {names(row)}")
    fields = (field,) if field else CATEGORY_FIELDS
    return next((str(row[name]) for name in fields if isinstance(row.get(name), str | int)), "")


def cluster_of(where: str, row: Mapping[str, Any], field: str) -> str:
    """Returns the row's cluster as text. Raises: ValueError if the field is missing, empty, or neither text nor a whole
    number."""
    value = row.get(field)
    if field not in row:
        raise ValueError(f"{where}: the field {field!r} to cluster by is missing; found {names(row)}")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(
            f"{where}: the field {field!r} to cluster by is {value!r}; text or a whole number was expected"
        )
    return str(value)


def with_clusters(prompts: Sequence[Prompt], data: DataConfig, field: str) -> Sequence[Prompt]:
    """Returns a job's prompts with the cluster that their row in `data` names in `field`; unchanged if that is "".

    Raises: ValueError naming file, line and field for a prompt whose row names none.
    """
    if not field:
        return prompts
    rows: dict[str, tuple[str, Row]] = {}
    invalid = InvalidRows(data.source, data.on_invalid)
    for where, row in read_valid(data, lambda _, row: row, invalid):
        prompt_id = name_field(where, row, "prompt_id") or str(invalid.num_rows - 1)  # as `stream_prompts` names it
        rows.setdefault(prompt_id, (where, row))
    return [prompt.model_copy(update={"cluster": cluster_of(*rows[prompt.prompt_id], field)}) for prompt in prompts]


def clusters_of(prompts: Iterable[Prompt]) -> Clusters:
    """Returns the first prompt, by id, of each prompt's cluster; empty if the prompts have no clusters."""
    first: dict[str, str] = {}
    clustered = sorted((prompt.cluster, prompt.prompt_id) for prompt in prompts if prompt.cluster)
    return {prompt_id: first.setdefault(cluster, prompt_id) for cluster, prompt_id in clustered}


def conversation_key(messages: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Returns a key that is equal for equal conversations; whitespace around texts is ignored."""
    return tuple((message["role"], spoken(message).strip()) for message in messages)


def by_id(prompts: Sequence[Prompt]) -> dict[str, Prompt]:
    return {prompt.prompt_id: prompt for prompt in prompts}
