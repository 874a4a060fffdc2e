"""Stream the rows of a Parquet file, and refuse a file that would unpack to far more than its size.

A kilobyte of Parquet can hold a cell of a gigabyte, or sixty rows that share a cell of 30 MB. So sizes are checked
twice before rows become Python objects: as the file states them, and then by Arrow's offsets, while each distinct text
is in memory only once.

Does not protect against files that state false sizes: Arrow reads each page whole, whatever the file states.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from files.strict_json import MAX_ROW_BYTES, open_bytes, too_long

Row = dict[str, Any]

MAX_RATIO = 200  # of unpacked to packed bytes; for texts it is usually between 10 and 50
SMALL_BYTES = 8 * MAX_ROW_BYTES  # up to this total size, rows may have any ratio
BATCH_ROWS = 1_000
_TEXTS = ("STRING", "JSON", "ENUM", "NONE")  # logical types of byte columns that can be read as dictionaries
# Features of `datasets` that need no decoding.
_PLAIN_FEATURES = {b"Value", b"List", b"LargeList", b"Sequence", b"ClassLabel"}


class Unpacked:
    """Counts the bytes of the rows that are unpacked from `packed_bytes` bytes; None if that size is unknown."""

    def __init__(self, packed_bytes: int | None) -> None:
        self.packed_bytes, self.num_bytes = packed_bytes, 0

    def add(self, where: str, num_bytes: int) -> None:
        """Counts a row. Raises: ValueError, starting with `where`, if the row is too large, or all rows so far are too
        large for their source.
        """
        if num_bytes > MAX_ROW_BYTES:
            raise ValueError(f"{where}: {too_long('row')}")
        self.num_bytes += num_bytes
        if self.packed_bytes is not None and self.num_bytes > max(SMALL_BYTES, MAX_RATIO * self.packed_bytes):
            raise ValueError(f"{where}: {_too_much('the rows up to this one', self.num_bytes, self.packed_bytes)}")


def _too_much(what: str, num_bytes: int, packed: int) -> str:
    times = f"at most {MAX_RATIO} times the packed size was expected"
    return f"{what} would take {num_bytes:,} bytes, unpacked from {packed:,}; {times}"


def read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    """Yields (where, row) for every row.

    Raises: ValueError, naming file and row, for a row above MAX_ROW_BYTES, for rows that unpack to more than MAX_RATIO
    times the file's size, and for a file that is not Parquet.
    """
    import pyarrow
    from pyarrow import parquet

    number = 0
    unpacked = Unpacked(path.stat().st_size)
    try:
        with open_bytes(path) as file:
            stated = _stated(file)
            _require_bounded(path, stated)
            decode = _decoder(stated.schema_arrow)
            whole = parquet.ParquetFile(file, read_dictionary=_texts(stated.metadata))
            groups = range(whole.num_row_groups)  # one at a time: Arrow cannot join the dictionaries of nested texts
            for batch in (batch for group in groups for batch in whole.iter_batches(BATCH_ROWS, [group])):
                is_small = sum(map(_num_bytes, batch.columns)) <= MAX_ROW_BYTES
                pieces = [batch] if is_small else [batch.slice(row, 1) for row in range(batch.num_rows)]
                for offset, piece in enumerate(pieces, start=1):
                    unpacked.add(f"{path}: row {number + offset}", sum(map(_num_bytes, piece.columns)))
                for piece in pieces:
                    for row in decode(piece.to_pylist()):
                        number += 1
                        yield f"{path}: row {number}", row
    except (pyarrow.ArrowException, OSError, EOFError, zlib.error) as error:
        where = f"{path}: row {number + 1}" if number else str(path)
        raise ValueError(f"{where}: cannot be read: {type(error).__name__}: {error}") from error


def require_bounded(path: Path) -> None:
    """Raises: ValueError, as `read_parquet` does, for problems that show without reading rows."""
    import pyarrow

    try:
        with open_bytes(path) as file:
            _require_bounded(path, _stated(file))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def _stated(file: IO[bytes]) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(file)


def _require_bounded(path: Path, stated: Any) -> None:
    """Checks each group of rows by the sizes that the file states. Raises: ValueError naming the group's first row."""
    number = 1
    for group in map(stated.metadata.row_group, range(stated.metadata.num_row_groups)):
        where = f"{path}: row {number}" + (
            f", or one of the {group.num_rows - 1:,} after it" if group.num_rows > 1 else ""
        )
        for column in map(group.column, range(group.num_columns)):
            size, packed = column.total_uncompressed_size, column.total_compressed_size
            if size > MAX_ROW_BYTES * max(1, group.num_rows):
                raise ValueError(f"{where}: {too_long('row')}")
            # Not for numbers: a column of equal ones may well be packed to a 200th. A column of texts is not.
            if column.physical_type == "BYTE_ARRAY" and size > max(MAX_ROW_BYTES, MAX_RATIO * packed):
                raise ValueError(f"{where}: {_too_much(f'column {column.path_in_schema!r}', size, packed)}")
        number += group.num_rows


def _texts(metadata: Any) -> list[str]:
    columns = map(metadata.schema.column, range(metadata.num_columns))
    return [one.path for one in columns if one.physical_type == "BYTE_ARRAY" and one.logical_type.type in _TEXTS]


def _num_bytes(array: Any) -> int:
    """Returns the size in bytes of an array's values as Python objects, where a text that rows share counts per row."""
    import pyarrow
    from pyarrow import compute

    if isinstance(array, pyarrow.ExtensionArray):
        return _num_bytes(array.storage)
    if pyarrow.types.is_dictionary(array.type):
        lengths = compute.binary_length(array.dictionary).cast("int64")
        return compute.sum(lengths.take(array.indices)).as_py() or 0
    if pyarrow.types.is_struct(array.type):
        return sum(map(_num_bytes, array.flatten()))
    if pyarrow.types.is_map(array.type):  # `flatten` does not take dictionaries in maps
        first, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return 8 * len(array) + sum(_num_bytes(side.slice(first, end - first)) for side in (array.keys, array.items))
    if hasattr(array, "flatten"):  # lists of all kinds
        return 8 * len(array) + _num_bytes(array.flatten())
    return max(int(array.nbytes), 8 * len(array))  # a list in Python takes 8 bytes even for None


def _decoder(schema: Any) -> Callable[[list[Row]], list[Row]]:
    """Returns a function to undo the encoding by `datasets`, which stores JSON, images and more as texts and bytes."""
    kinds = set(re.findall(rb'"_type": "(\w+)"', (schema.metadata or {}).get(b"huggingface", b"")))
    if kinds <= _PLAIN_FEATURES:
        return lambda rows: rows
    import datasets  # takes seconds, so import it only if needed

    features = datasets.Features.from_arrow_schema(schema)
    return lambda rows: [features.decode_example(row) for row in rows]
