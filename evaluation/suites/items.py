"""Reads the rows of a suite's file, and names every malformed row."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from evaluation.suites.suite import Item
from files.fields import kind_of, list_field, name_field, present
from files.rows import InvalidRows, is_file_name, read_source, valid_rows

Row = Mapping[str, Any]
Found = TypeVar("Found")


def read_by_id(
    source: str, read: Callable[[str, Row], tuple[str, Found]], *, split: str = "train", subset: str = ""
) -> dict[str, Found]:
    """Returns the rows by id, where `read(where, row)` returns one's id and what it holds.

    `split` and `subset` select from a hub id.

    Raises: ValueError naming file, line and field of malformed rows, and both lines of a repeated id.
    """
    seen: dict[str, str] = {}

    def checked(where: str, row: Row) -> tuple[str, Found]:
        own_id, found = read(where, row)
        first = seen.setdefault(own_id, where)
        if first != where:
            raise ValueError(f"{where}: the id {own_id!r} is already used in {first}")
        return own_id, found

    invalid = InvalidRows(source, hint="")
    is_hub = not is_file_name(source) and not Path(source).exists()
    rows = read_source(source, split=split, subset=subset if is_hub else "", invalid=invalid)
    by_id = dict(one for _, one in valid_rows(rows, checked, invalid))
    if not by_id:
        raise ValueError(f"{source}: no rows; at least one was expected")
    return by_id


def read_items(source: str, read: Callable[[str, Row], Item], *, split: str = "train", subset: str = "") -> list[Item]:
    """Returns `read(where, row)` of all rows. Raises: ValueError as `read_by_id` does."""

    def with_id(where: str, row: Row) -> tuple[str, Item]:
        item = read(where, row)
        return item.item_id, item

    return list(read_by_id(source, with_id, split=split, subset=subset).values())


def id_field(where: str, row: Row, field: str) -> str:
    """Returns an id, which may be a text or a whole number, as text."""
    present(where, row, field)
    found = name_field(where, row, field)
    if not found:
        raise ValueError(f"{where}: field {field!r} is empty; an id was expected")
    return found


def texts_field(where: str, row: Row, field: str) -> list[str]:
    """Returns a list of texts, which may be empty ones."""
    texts = list_field(where, row, field)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"{where}: field '{field}[{index}]' is {kind_of(text)}; a string was expected")
    return texts
