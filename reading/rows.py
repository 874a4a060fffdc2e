"""Rows of a file, a folder or a hub id, one at a time, each with the words that name its place.

Read are JSONL, JSON (a list of objects), Parquet and plain text, each also as .gz, data sets that `datasets` saved to a
folder, folders that it can load, and hub ids.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".md": "text"}
SAVED = ("dataset_dict.json", "state.json")  # what `datasets` leaves in a folder that it saved

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]  # (where, row); `where` names file and line, or file and row


def read_source(source: str, *, split: str = "train", subset: str = "", max_rows: int = 0) -> Rows:
    """Stream (where, row) of a source; hub data sets and JSONL are never held whole. `max_rows` 0 is all.

    `split` and `subset` ("" = the default one) choose within a folder or a hub id. A plain-text file gives one row a
    paragraph. Errors: ValueError naming the file, and line and column where it is not what it seems.
    """
    rows = _all_rows(source, split, subset)
    for index, row in enumerate(rows):
        if max_rows and index >= max_rows:
            return
        yield row


def _all_rows(source: str, split: str, subset: str) -> Rows:
    path = Path(source)
    kind = LOADERS.get(Path(source.removesuffix(".gz")).suffix, "")
    if kind and not path.is_file():
        raise ValueError(f"{path}: no such file")
    if kind == "json" and ".jsonl" not in path.suffixes and _starts_a_list(path):
        yield from _read_list(path)
    elif kind == "json":
        yield from _read_jsonl(path)
    elif kind or not path.is_file():
        rows = _load_files(kind, path) if kind else _load(source, split, subset)
        for number, row in enumerate(rows, start=1):
            yield f"{source}: row {number}", row
    else:
        raise ValueError(
            f"{path}: suffix {path.suffix!r}; one of {sorted(LOADERS)} (.gz allowed), a folder of a data set or a hub"
            " id was expected"
        )


def _load_files(kind: str, path: Path) -> Any:
    import datasets  # takes seconds, which those that read JSON need not wait for

    options = {"sample_by": "paragraph"} if kind == "text" else {}
    return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True, **options)


def _load(source: str, split: str, subset: str) -> Any:
    """A folder that `datasets` saved or can load, or a hub id."""
    import datasets

    try:
        if any((Path(source) / name).is_file() for name in SAVED):
            found = datasets.load_from_disk(source)
            return found[split] if isinstance(found, datasets.DatasetDict) else found
        return datasets.load_dataset(source, subset or None, split=split, streaming=True)
    except Exception as error:  # the hub's clients raise many kinds; each means the same to the user
        offline = " (HF_HUB_OFFLINE is set, so the hub was not asked)" if datasets.config.HF_HUB_OFFLINE else ""
        raise ValueError(
            f"source {source!r} is neither a file here nor a data set that the hub gave"
            f" (split {split!r}){offline}: {type(error).__name__}: {error}"
        ) from error


def _starts_a_list(path: Path) -> bool:
    start = next((line.lstrip() for line in _lines(path) if line.strip()), b"")
    return start.startswith(b"[")


def _read_list(path: Path) -> Rows:
    try:
        rows = json.loads(b"".join(_lines(path)).decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}: row {number}", _object(f"{path}: row {number}", row)


def _read_jsonl(path: Path) -> Rows:
    """Line by line rather than through `datasets`, whose parser does not say which line is malformed."""
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path}: line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
        yield where, _object(where, row)


def _object(where: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {type(row).__name__} found; a JSON object was expected")
    return row


def _lines(path: Path) -> Iterator[bytes]:
    """Errors: ValueError naming a .gz file that is cut short or is none."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            yield from file
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: not a whole gzip file: {error}") from None
