"""Streaming the rows of a file, a folder or a hub id, each with its location for error messages.

It reads JSONL, JSON (a list of objects), CSV, Parquet and plain text, each also as .gz, folders that `datasets` saved
or can load, and hub ids.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from files.fields import kind_of
from files.hub_errors import hub_reason
from files.invalid import InvalidRows
from files.lines import read_jsonl, read_list, refuse, starts_a_list
from files.tables import read_csv

LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".md": "text"}
SAVED = ("dataset_dict.json", "state.json")  # files in a folder that `datasets` saved

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]  # (where, row); `where` names file and line, or file and row


def read_source(
    source: str, *, split: str = "train", subset: str = "", max_rows: int = 0, invalid: InvalidRows | None = None
) -> Rows:
    """Streams (where, row) of a source. Hub datasets, JSONL and JSON lists are never held in memory as a whole.

    `split` and `subset` ("" = the default one) select from a folder or a hub id. `max_rows` 0 means all. A plain-text
    file has one row per paragraph. `invalid` counts lines of JSON and CSV that are malformed, and they are passed over;
    without it the first one is an error.

    Raises: ValueError naming the file, and line and column where its content is malformed.
    """
    rows = _all_rows(source, split, subset, refuse if invalid is None else invalid.add_unreadable)
    yield from itertools.islice(rows, max_rows or None)  # it parses, and so counts, nothing after the last row


def is_file_name(source: str) -> bool:
    """Whether a source is named like a file that can be read, and not like a folder or a hub id."""
    return Path(source.removesuffix(".gz")).suffix in LOADERS


def _all_rows(source: str, split: str, subset: str, on_unreadable: Callable[[ValueError], None]) -> Rows:
    path = Path(source)
    kind = LOADERS.get(Path(source.removesuffix(".gz")).suffix, "")
    if kind and not path.is_file():
        raise ValueError(f"{path}: no such file")
    if kind == "json" and ".jsonl" not in path.suffixes and starts_a_list(path):
        yield from _objects(read_list(path), on_unreadable)
    elif kind == "json":
        yield from _objects(read_jsonl(path, on_unreadable), on_unreadable)
    elif kind == "csv":
        yield from read_csv(path, on_unreadable)
    elif kind or not path.is_file():
        yield from _numbered(source, _load_files(kind, path) if kind else _load(source, split, subset))
    else:
        raise ValueError(
            f"{path}: suffix {path.suffix!r}; one of {sorted(LOADERS)} (.gz allowed), a dataset folder or a hub id was"
            " expected"
        )


def _load_files(kind: str, path: Path) -> Any:
    import datasets  # takes seconds, so import it only if needed

    # utf-8-sig drops the byte order mark that Windows writes.
    options = {"sample_by": "paragraph", "encoding": "utf-8-sig"} if kind == "text" else {}
    try:
        return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True, **options)
    except Exception as error:  # see `_numbered`
        raise ValueError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def _load(source: str, split: str, subset: str) -> Any:
    """Opens a folder that `datasets` saved or can load, or a hub id."""
    import datasets

    try:
        if any((Path(source) / name).is_file() for name in SAVED):
            found = datasets.load_from_disk(source)
            return found[split] if isinstance(found, datasets.DatasetDict) else found
        return datasets.load_dataset(source, subset or None, split=split, streaming=True)
    except Exception as error:  # the hub's clients raise many kinds of errors, which mean the same to the user
        raise ValueError(
            f"source {source!r} is neither a local file nor a dataset that the hub provided"
            f" (split {split!r}): {hub_reason(error)}"
        ) from error


def _numbered(source: str, rows: Iterable[Row]) -> Rows:
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield f"{source}: row {number}", row
    except Exception as error:  # `datasets` and its readers raise many kinds of errors, which mean the same to the user
        raise ValueError(f"{source}: row {number + 1}: cannot be read: {type(error).__name__}: {error}") from error


def _objects(rows: Iterator[tuple[str, Any]], on_unreadable: Callable[[ValueError], None]) -> Rows:
    for where, row in rows:
        if isinstance(row, dict):
            yield where, row
        else:
            on_unreadable(ValueError(f"{where}: {kind_of(row)} found; a JSON object was expected"))
