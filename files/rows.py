"""Stream the rows of a file, a folder or a hub id, each with its location for error messages.

It reads JSONL, JSON (a list of objects), CSV, Parquet and plain text, each also as .gz, folders that `datasets` saved
or can load, and hub ids. Heed counts all invalid rows of a source, names the first few, and refuses or skips them.
"""

import csv
import gzip
import io
import itertools
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from files.fields import kind_of, no_such_file
from files.parquet import Unpacked, read_parquet, require_bounded
from files.strict_json import MAX_ROW_BYTES, open_bytes, read_jsonl, read_list, refuse, starts_a_list, too_long

LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".md": "text"}
SQLITE = b"SQLite format 3\0"  # how a SQLite database starts
SAVED = ("dataset_dict.json", "state.json")  # files in a folder that `datasets` saved
OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}  # in CSV; these are refused

HINT = 'on_invalid = "skip" in a job\'s source, or --on-invalid skip of heed init, leaves such rows out'
SHOWN_ROWS, KEPT_ROWS = 5, 1000  # invalid rows named in an error, and the most that are kept
LOADED_ROWS = 8  # rows that `datasets` passes on at a time from a Parquet group, which it unpacks whole
TEXT_CHARACTERS = 2**20  # characters of a plain text to read at a time
COUNTED_ROWS = 1_000_000  # the most rows read after the first refused one, to count other invalid ones

OFFLINE = "HF_HUB_OFFLINE is set, and there is no earlier download"
UNREACHABLE = "the hub cannot be reached, and there is no earlier download"
REFUSED = "there is no such repository, or you must accept its licence and run `hf auth login`"
# Names of the clients' exceptions, which several libraries define.
ABSENT = frozenset({"RepositoryNotFoundError", "GatedRepoError", "DatasetNotFoundError"})
AWAY = frozenset(
    {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError", "ConnectTimeout"}
)

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]  # (where, row); `where` names file and line, or file and row
OnInvalid = Literal["refuse", "skip"]
AnyRow = TypeVar("AnyRow")
Item = TypeVar("Item")


class InvalidRows:
    """Counts the invalid rows of one source, and keeps the messages about the first KEPT_ROWS of them.

    `hint` says how to leave such rows out; "" where nobody can.
    """

    def __init__(self, source: str, on_invalid: OnInvalid = "refuse", hint: str = HINT) -> None:
        self.source, self.on_invalid, self.hint = source, on_invalid, hint
        self.num_rows = self.num_invalid = 0
        self.messages: list[str] = []
        self._last_row = 0  # where counting stops once a row has been refused

    def add(self, error: ValueError) -> None:
        """Counts the row that `error` is about."""
        if not self.num_invalid and self.on_invalid == "refuse":
            self._last_row = self.num_rows + COUNTED_ROWS
        self.num_invalid += 1
        if len(self.messages) < KEPT_ROWS:
            self.messages.append(str(error))

    def add_unreadable(self, error: ValueError) -> None:
        """Counts a row that could not even be parsed, so `valid_rows` never sees it."""
        self.num_rows += 1
        self.add(error)

    def forget(self) -> None:
        """Resets the counts, after rows that are not going to be used."""
        self.num_rows = self.num_invalid = 0
        self.messages.clear()

    @property
    def first(self) -> list[str]:
        return self.messages[:SHOWN_ROWS]

    @property
    def are_refused(self) -> bool:
        return bool(self.num_invalid) and self.on_invalid == "refuse"

    @property
    def has_counted_enough(self) -> bool:
        return self.are_refused and self.num_rows >= self._last_row

    def finish(self) -> None:
        """Raises: ValueError that names the first invalid rows, if they are refused or if no row is valid."""
        if not self.num_invalid or (self.on_invalid == "skip" and self.num_invalid < self.num_rows):
            return
        skips = f" ({self.hint})" if self.hint and self.on_invalid == "refuse" else ""
        if self.num_invalid == 1:
            raise ValueError(f"{self.first[0]}{skips}")
        if self.num_invalid == self.num_rows > SHOWN_ROWS:  # most often the same mistake in all of them
            raise ValueError(f"{self.first[0]} (and none of the {self.num_rows:,} rows is valid)")
        count = f"{self.num_invalid:,} of {'the first ' if self.has_counted_enough else ''}{self.num_rows:,} rows"
        more = self.num_invalid - len(self.first)
        lines = [f"{self.source}: {count} are invalid{skips}:", *self.first, *([f"and {more:,} more"] if more else [])]
        raise ValueError("\n  ".join(lines))


def valid_rows(
    rows: Iterator[tuple[str, AnyRow]], read: Callable[[str, AnyRow], Item], invalid: InvalidRows
) -> Iterator[tuple[str, Item]]:
    """Yields (where, `read(where, row)`) for every row for which `read` raises no ValueError.

    After a refused row it yields nothing more, but keeps reading to count the other invalid rows.

    Raises: ValueError as `InvalidRows.finish` does.
    """
    for where, row in rows:
        invalid.num_rows += 1
        try:
            item = read(where, row)
        except ValueError as error:  # a mistake in the file, with its line
            invalid.add(error)
        else:
            if not invalid.are_refused:
                yield where, item
        if invalid.has_counted_enough:
            break
    invalid.finish()


def read_source(
    source: str, *, split: str = "train", subset: str = "", max_rows: int = 0, invalid: InvalidRows | None = None
) -> Rows:
    """Streams (where, row) of a source. Hub datasets, JSONL and JSON lists are never held in memory as a whole.

    `split` and `subset` ("" = the default one) select from a folder or a hub id. `max_rows` 0 means all. A plain-text
    file has one row per paragraph. Malformed lines of JSON and CSV are counted in `invalid` and skipped;
    without `invalid`, the first one is an error.

    Raises: ValueError naming the file, and line and column where its content is malformed.
    """
    rows = _all_rows(source, split, subset, refuse if invalid is None else invalid.add_unreadable)
    yield from itertools.islice(rows, max_rows or None)  # rows after the last one are neither parsed nor counted


def is_file_name(source: str) -> bool:
    """Whether a source is named like a file that can be read, and not like a folder or a hub id."""
    return Path(source.removesuffix(".gz")).suffix in LOADERS


def _all_rows(source: str, split: str, subset: str, on_unreadable: Callable[[ValueError], None]) -> Rows:
    path = Path(source)
    kind = LOADERS.get(Path(source.removesuffix(".gz")).suffix, "")
    if kind and not path.is_file():
        raise ValueError(f"{path}: {no_such_file(path)}")
    if kind == "json" and ".jsonl" not in path.suffixes and starts_a_list(path):
        yield from _objects(read_list(path), on_unreadable)
    elif kind == "json":
        yield from _objects(read_jsonl(path, on_unreadable), on_unreadable)
    elif kind == "csv":
        yield from read_csv(path, on_unreadable)
    elif kind == "parquet":
        yield from read_parquet(path)
    elif kind == "text":
        yield from _read_paragraphs(path)
    elif not path.is_file():
        yield from _load(source, split, subset)
    else:
        hint = ""
        with path.open("rb") as file:
            is_database = file.read(len(SQLITE)) == SQLITE
        if is_database:
            hint = f"; if it is a label store, `heed label export --store {path} --out FILE` writes its labels as rows"
        raise ValueError(
            f"{path}: suffix {path.suffix!r}; one of {sorted(LOADERS)} (.gz allowed), a dataset folder or a hub id"
            f" was expected{hint}"
        )


def _load(source: str, split: str, subset: str) -> Rows:
    """Returns the rows of a folder that `datasets` saved or can load, or of a hub id."""
    import datasets

    files = [path for path in sorted(Path(source).rglob("*")) if path.is_file()]  # none for a hub id
    for path in files:
        if path.suffix == ".parquet":
            require_bounded(path)
    unpacked = Unpacked(sum(path.stat().st_size for path in files) if files else None)
    require_hub(source, f"source {source!r} is neither a local file nor a dataset that the hub provided")
    try:
        if any((Path(source) / name).is_file() for name in SAVED):
            dataset = datasets.load_from_disk(source)
            chosen = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
            return _numbered(source, chosen, unpacked)
        builder = datasets.load_dataset_builder(source, subset or None)
        if local_files := _local_parquet(builder, split):
            return itertools.chain.from_iterable(map(read_parquet, local_files))
        if hasattr(builder.config, "batch_size"):  # Parquet; the default is the size of the first row group
            builder.config.batch_size = LOADED_ROWS
        return _numbered(source, builder.as_streaming_dataset(split=split), unpacked)
    except Exception as error:  # the hub's clients raise many kinds of errors, which mean the same to the user
        raise ValueError(
            f"source {source!r} is neither a local file nor a dataset that the hub provided"
            f" (split {split!r}): {hub_reason(error)}"
        ) from error


def require_hub(source: str, what: str) -> None:
    """Raise ValueError, which begins with `what`, if a source is no path, was never downloaded, and the hub does not
    answer within three seconds: its clients would try for half a minute.
    """
    from huggingface_hub import constants

    was_downloaded = Path(constants.HF_HUB_CACHE, f"datasets--{source.replace('/', '--')}").exists()
    if Path(source).exists() or constants.HF_HUB_OFFLINE or was_downloaded or getproxies():
        return
    try:
        hub = urlsplit(constants.ENDPOINT)
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=3).close()
    except OSError as error:
        raise ValueError(f"{what}: {UNREACHABLE}") from error


def _local_parquet(builder: Any, split: str) -> list[Path]:
    """Returns the Parquet files of a split in a local folder, which `read_parquet` reads in less memory; [] for other
    data, and for a folder whose README says to which types `datasets` should convert the columns.
    """
    if builder.name != "parquet" or builder.info.features:
        return []
    paths = [Path(name) for name in (builder.config.data_files or {}).get(split, [])]
    return paths if all(path.is_file() for path in paths) else []


def _numbered(source: str, rows: Iterable[Row], unpacked: Unpacked) -> Rows:
    iterator = iter(rows)
    for number in itertools.count(1):
        where = f"{source}: row {number}"
        try:
            row = next(iterator, None)
        except Exception as error:  # `datasets` and its readers raise many kinds of errors, all with the same meaning
            raise ValueError(f"{where}: cannot be read: {type(error).__name__}: {error}") from error
        if row is None:
            return
        unpacked.add(where, _num_bytes(row))
        yield where, row


def _num_bytes(value: Any) -> int:
    """Returns roughly the number of characters and bytes in a value of JSON's types."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_bytes, value.values()))
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 8


def _read_paragraphs(path: Path) -> Rows:
    """Yields (where, row) for every paragraph of a plain text. Raises: ValueError naming file and row."""
    rest, number = "", 0
    try:
        # utf-8-sig drops the byte order mark that Windows writes.
        with open_bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
            while chunk := text.read(TEXT_CHARACTERS):
                *whole, rest = (rest + chunk).split("\n\n")
                for paragraph in filter(None, (one.strip("\n") for one in whole)):
                    number += 1
                    yield f"{path}: row {number}", {"text": paragraph}
                if len(rest) > MAX_ROW_BYTES:
                    raise ValueError(f"{path}: row {number + 1}: {too_long('paragraph')}")
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: row {number + 1}: cannot be read: {type(error).__name__}: {error}") from error
    if last := rest.strip("\n"):
        yield f"{path}: row {number + 1}", {"text": last}


def _objects(rows: Iterator[tuple[str, Any]], on_unreadable: Callable[[ValueError], None]) -> Rows:
    for where, row in rows:
        if isinstance(row, dict):
            yield where, row
        else:
            on_unreadable(ValueError(f"{where}: {kind_of(row)} found; a JSON object was expected"))


def read_csv(path: Path, on_unreadable: Callable[[ValueError], None] = refuse) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields (where, row) for every row after the first, whose cells name the columns. Every value is a string.

    It reads RFC 4180: commas, quotes doubled inside quotes, line breaks inside quotes. `where` names the line on which
    the row begins. Blank lines are skipped. The first of several columns may have no name, like the index that pandas
    writes; its key is "". `on_unreadable` gets the error about a row with too few or too many cells; unless it raises,
    the next row is read.

    Raises: ValueError naming the file and the line, and the column where there is one.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    # utf-8-sig drops the byte order mark that Excel writes.
    with open_bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        columns: list[str] = []
        while True:
            where = f"{path}: line {reader.line_num + 1}"
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise ValueError(f"{where}: not CSV: {error}") from None
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}, or soon after: not UTF-8: {error.reason}") from None
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(f"{where}: not a complete gzip file: {error}") from None
            if cells is None:
                return
            if not cells:
                continue
            if not columns:
                columns = _csv_columns(where, cells)
                continue
            try:
                row = _csv_row(where, columns, cells)
            except ValueError as error:
                on_unreadable(error)
            else:
                yield where, row


def _csv_columns(where: str, cells: list[str]) -> list[str]:
    columns = [cell.strip() for cell in cells]
    for number, name in enumerate(columns, start=1):
        if not name and (number > 1 or len(columns) == 1):
            raise ValueError(f"{where}: column {number} has no name; the first line names the columns")
        if name in columns[: number - 1]:
            raise ValueError(f"{where}: two columns are named {name!r}; each name was expected once")
    for separator, separators in OTHER_SEPARATORS.items():
        if len(columns) == 1 and separator in columns[0]:
            raise ValueError(f"{where}: columns are separated by {separators}; commas were expected")
    return columns


def _csv_row(where: str, columns: list[str], cells: list[str]) -> dict[str, str]:
    if len(cells) < len(columns):
        raise ValueError(f"{where}: column {columns[len(cells)]!r} is missing: {len(cells)} of {len(columns)} cells")
    if len(cells) > len(columns):
        raise ValueError(
            f"{where}: {len(cells)} cells, but {len(columns)} columns; a text that contains a comma needs quotes"
        )
    return dict(zip(columns, cells, strict=True))


def hub_reason(error: BaseException) -> str:
    """Returns why the hub provided nothing; for an unknown error, its type and text."""
    from huggingface_hub import constants  # takes a moment, and only errors need it

    names = {type(one).__name__ for one in _causes(error)}
    if constants.HF_HUB_OFFLINE and names & {*ABSENT, *AWAY}:
        return OFFLINE
    if names & ABSENT:
        return REFUSED
    if names & AWAY:
        return UNREACHABLE
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _causes(error: BaseException) -> list[BaseException]:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    return causes
