"""Invalid rows: all are counted, the first five are named, and a source refuses or skips them."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from files import invalid as limits
from files.fields import text_field
from files.invalid import InvalidRows, valid_rows
from files.rows import read_source


def texts(path: Path, invalid: InvalidRows) -> list[str]:
    rows = read_source(str(path), invalid=invalid)
    return [text for _, text in valid_rows(rows, lambda where, row: text_field(where, row, "text"), invalid)]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Twelve lines, of which every other one is invalid, each in another way or place."""
    bad = [
        "nonsense",
        "[1]",
        json.dumps({"text": None}),
        b"\xfc".decode("latin-1"),
        json.dumps({"text": " "}),
        '{"body": 1}',
    ]
    lines = [line for number, wrong in enumerate(bad) for line in (json.dumps({"text": f"t{number}"}), wrong)]
    path = tmp_path / "mixed.jsonl"
    path.write_bytes("\n".join(lines).encode("latin-1"))
    return path


def test_all_are_counted_and_the_first_five_are_named(mixed: Path) -> None:
    invalid = InvalidRows(str(mixed))
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole message is compared
        texts(mixed, invalid)
    first, *others = str(refused.value).splitlines()
    assert first == f"{mixed}: 6 of 12 rows are invalid ({limits.HINT}):"
    assert [line.strip() for line in others] == [
        f"{mixed}: line 2: not JSON: Expecting value at column 1",
        f"{mixed}: line 4: list found; a JSON object was expected",
        f"{mixed}: line 6: field 'text' is null; a string was expected",
        f"{mixed}: line 8: not UTF-8: invalid start byte at byte 1",
        f"{mixed}: line 10: field 'text' is empty; text was expected",
        "and 1 more",
    ]


def test_skipped_rows_are_left_out_and_counted(mixed: Path) -> None:
    invalid = InvalidRows(str(mixed), "skip")
    assert texts(mixed, invalid) == ["t0", "t1", "t2", "t3", "t4", "t5"]
    assert (invalid.num_invalid, invalid.num_rows, len(invalid.first)) == (6, 12, 5)


def test_a_source_without_any_valid_row_is_refused_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text('{"body": "x"}\n' * 9)
    for choice in ("refuse", "skip"):
        with pytest.raises(
            ValueError, match=r"line 1: field 'text' is missing; .* none of the 9 rows is valid"
        ) as all_bad:
            texts(path, InvalidRows(str(path), choice))  # type: ignore[arg-type]
        assert "line 2" not in str(all_bad.value)


def test_cells_that_are_missing_from_a_row_of_csv_count(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,1\nb\nc,1,2\nd,1\n")
    invalid = InvalidRows(str(path), "skip")
    assert texts(path, invalid) == ["a", "d"]
    assert [message.split(": ")[1] for message in invalid.first] == ["line 3", "line 4"]


def test_a_damaged_file_is_an_error_even_if_invalid_rows_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "x"}\n' * 50)[:-12])
    with pytest.raises(ValueError, match="not a whole gzip file"):
        texts(path, InvalidRows(str(path), "skip"))


def test_an_endless_source_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COUNTED_ROWS", 10)

    def endless() -> Iterator[tuple[str, dict[str, Any]]]:
        number = 0
        while True:
            number += 1
            yield f"s: row {number}", {"text": "x"} if number % 4 else {}

    invalid = InvalidRows("s")
    with pytest.raises(ValueError, match="s: 3 of the first 14 rows are invalid"):
        list(valid_rows(endless(), lambda where, row: text_field(where, row, "text"), invalid))


def test_nothing_is_yielded_after_a_row_that_is_refused() -> None:
    rows: list[tuple[str, dict[str, Any]]] = [("r1", {"text": "a"}), ("r2", {}), ("r3", {"text": "b"})]
    found = valid_rows(iter(rows), lambda where, row: text_field(where, row, "text"), InvalidRows("s"))
    assert next(found) == ("r1", "a")
    with pytest.raises(ValueError, match="r2: field 'text' is missing"):
        next(found)
