"""Rows as JSON Lines, as the tests' files of data hold them."""

import json
from collections.abc import Iterable


def jsonl(rows: Iterable[object]) -> str:
    """Returns one line of JSON per row."""
    return "".join(json.dumps(row) + "\n" for row in rows)
