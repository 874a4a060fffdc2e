"""Reads the rows of a suite's file into items, and names every malformed row."""

from collections.abc import Callable, Mapping
from typing import Any

from evaluation.suites.suite import Item
from files.fields import kind_of, list_field, name_field, present
from files.rows import InvalidRows, read_source, valid_rows

Row = Mapping[str, Any]


def read_items(source: str, read: Callable[[str, Row], Item], *, split: str = "train") -> list[Item]:
    """Returns `read(where, row)` of all rows. `split` selects from a hub id.

    Raises: ValueError naming file, line and field of malformed rows, and both lines of a repeated id.
    """
    seen: dict[str, str] = {}

    def checked(where: str, row: Row) -> Item:
        item = read(where, row)
        first = seen.setdefault(item.item_id, where)
        if first != where:
            raise ValueError(f"{where}: the id {item.item_id!r} is already used in {first}")
        return item

    invalid = InvalidRows(source, hint="")
    rows = read_source(source, split=split, invalid=invalid)
    items = [item for _, item in valid_rows(rows, checked, invalid)]
    if not items:
        raise ValueError(f"{source}: no rows; at least one was expected")
    return items


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
