"""Reading CSV files, compressed or not, one row at a time."""

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from files.lines import MAX_ROW_BYTES, open_bytes, refuse

OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}


def read_csv(path: Path, on_unreadable: Callable[[ValueError], None] = refuse) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields (where, row) for every row after the first, whose cells name the columns. Every value is a text.

    It reads RFC 4180: commas, quotes doubled inside quotes, line breaks inside quotes. `where` names the line on which
    the row begins. Blank lines are passed over. `on_unreadable` gets the error about a row with too few or too many
    cells; unless it raises, the next row is read.

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
                raise ValueError(f"{where}: not a whole gzip file: {error}") from None
            if cells is None:
                return
            if not cells:
                continue
            if not columns:
                columns = _columns(where, cells)
                continue
            try:
                row = _row(where, columns, cells)
            except ValueError as error:
                on_unreadable(error)
            else:
                yield where, row


def _columns(where: str, cells: list[str]) -> list[str]:
    columns = [cell.strip() for cell in cells]
    for number, name in enumerate(columns, start=1):
        if not name:
            raise ValueError(f"{where}: column {number} has no name; the first line names the columns")
        if name in columns[: number - 1]:
            raise ValueError(f"{where}: two columns are named {name!r}; each name was expected once")
    for separator, separators in OTHER_SEPARATORS.items():
        if len(columns) == 1 and separator in columns[0]:
            raise ValueError(f"{where}: columns are separated by {separators}; commas were expected")
    return columns


def _row(where: str, columns: list[str], cells: list[str]) -> dict[str, str]:
    if len(cells) < len(columns):
        raise ValueError(f"{where}: column {columns[len(cells)]!r} is missing: {len(cells)} of {len(columns)} cells")
    if len(cells) > len(columns):
        raise ValueError(
            f"{where}: {len(cells)} cells, but {len(columns)} columns; a text with a comma in it must stand in quotes"
        )
    return dict(zip(columns, cells, strict=True))
