"""CSV files: what a spreadsheet writes is read, and what is malformed is named with file, line and column."""

import csv
import gzip
from pathlib import Path

import pytest

from files.conversations import ConversationReader
from files.lines import MAX_ROW_BYTES
from files.rows import read_source
from preferences.formats.merging import collect_all
from preferences.formats.registry import read_as

HARD = 'Say "hi", please.\r\n\r\nThen, stop; \u00e9 \u4f60'


def written(path: Path, *rows: tuple[str, ...], encoding: str = "utf-8") -> Path:
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def test_rows_have_the_columns_of_the_first_line(tmp_path: Path) -> None:
    long = "word " * 100_000  # longer than Python's own limit for a cell
    rows = (("prompt", "completion"), (HARD, "4"), (long, ""))
    path = written(tmp_path / "a.csv", *rows, encoding="utf-8-sig")  # as Excel saves "CSV UTF-8"
    expected = [
        (f"{path}: line 2", {"prompt": HARD, "completion": "4"}),
        (f"{path}: line 5", {"prompt": long, "completion": ""}),
    ]
    assert list(read_source(str(path))) == expected
    assert list(read_source(str(path), max_rows=1)) == expected[:1]
    packed = tmp_path / "a.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [row for _, row in read_source(str(packed))] == [row for _, row in expected]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.csv\.gz: line \d+: not a whole gzip file"):
        list(read_source(str(packed)))


@pytest.mark.parametrize(
    ("columns", "cells", "turns"),
    [
        (("prompt", "completion"), ("2 + 2?", "4"), ["2 + 2?", "4"]),
        (("instruction", "input", "output"), ("Add.", "2 + 2", "4"), ["Add.\n\n2 + 2", "4"]),
    ],
)
def test_formats_are_recognised_by_the_columns(
    tmp_path: Path, columns: tuple[str, ...], cells: tuple[str, ...], turns: list[str]
) -> None:
    reader = ConversationReader("demonstration", "auto")
    path = written(tmp_path / "a.csv", columns, cells)
    assert [[turn["content"] for turn in reader.read(*found)] for found in read_source(str(path))] == [turns]


def test_preference_pairs(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", ("prompt", "chosen", "rejected"), ("2 + 2?", "4", "5"))
    form, rows = read_as("auto", read_source(str(path)))
    (ranking,) = collect_all(form, rows).rankings
    assert (form.name, ranking.responses, ranking.ranks) == ("trl", ("4", "5"), (1, 2))


def test_an_empty_cell_is_named_by_line_and_column(tmp_path: Path) -> None:
    reader = ConversationReader("demonstration", "auto")
    path = written(tmp_path / "a.csv", ("prompt", "completion"), ("2 + 2?", "4"), ("3 + 3?", ""))
    with pytest.raises(ValueError, match=r"a\.csv: line 3: field 'completion' is empty; text was expected"):
        _ = [reader.read(where, row) for where, row in read_source(str(path))]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"prompt,completion\na,b\n\na\n", r"line 4: column 'completion' is missing: 1 of 2 cells"),
        (b"prompt,completion\nHi, you,b\n", r"line 2: 3 cells, but 2 columns; a text with a comma"),
        (b'prompt,completion\na,"b\n\n', r"line 2: not CSV: unexpected end of data"),
        (b'prompt,completion\na,"b" c\n', r"line 2: not CSV: ',' expected after '\"'"),
        (b"prompt,\na,b\n", r"line 1: column 2 has no name"),
        (b"prompt,prompt\na,b\n", r"line 1: two columns are named 'prompt'"),
        (b"prompt;completion\na;b\n", r"line 1: columns are separated by semicolons; commas were expected"),
        (b"prompt,completion\na,\xff\n", r"line 1, or soon after: not UTF-8: invalid start byte"),
        (b"prompt,completion\na," + b"b" * (MAX_ROW_BYTES + 1), r"line 2: not CSV: field larger than field limit"),
    ],
)
def test_what_is_malformed_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.csv: {words}"):
        list(read_source(str(path)))
