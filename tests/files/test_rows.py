"""Rows of files: containers beyond those of tests/training/test_data.py (JSON lists, saved data sets, hub ids without a
network), what a spreadsheet writes as CSV, invalid rows, which are counted, named, and refused or skipped, and what the
errors of the hub's clients come to.
"""

import csv
import gzip
import json
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from files import rows
from files.conversations import ConversationReader
from files.fields import text_field
from files.rows import OFFLINE, REFUSED, UNREACHABLE, InvalidRows, hub_reason, read_source, valid_rows
from files.strict_json import MAX_ROW_BYTES
from preferences.formats.merging import collect_all
from preferences.formats.registry import read_as
from tests.rows import jsonl

ROWS = [{"a": 1}, {"a": 2}, {"a": 3}]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_list(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "a.json"
    path.write_text("\n" + json.dumps(ROWS, indent=indent))
    expected = [(f"{path}: row {n}", row) for n, row in enumerate(ROWS, start=1)]
    assert list(read_source(str(path))) == expected
    assert list(read_source(str(path), max_rows=2)) == expected[:2]
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [row for _, row in read_source(str(packed))] == ROWS


def test_json_of_one_object_a_line_is_read_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(jsonl(ROWS))
    assert [where for where, _ in read_source(str(path))] == [f"{path}: line {n}" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", '[{"a": 1},\n{"a": }]', r"a\.json: line 2: not JSON: Expecting value at column 7"),
        ("a.json", '[{"a": 1}, 2]', r"a\.json: row 2: int found; a JSON object was expected"),
        ("a.jsonl", "[1]", r"a\.jsonl: line 1: list found; a JSON object was expected"),
        ("a.xlsx", "a,b", r"a\.xlsx: suffix '\.xlsx'; one of "),
    ],
)
def test_what_is_malformed_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        list(read_source(str(tmp_path / name)))


def test_a_label_store_is_no_file_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "labels.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("create table t (a)")
        database.commit()
    with pytest.raises(
        ValueError, match=r"; if it is a label store, `heed label export --store .*labels\.sqlite --out"
    ):
        list(read_source(str(path)))


def test_folders_that_datasets_saved_or_can_load(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    assert [row for _, row in read_source(str(tmp_path / "one"))] == ROWS
    splits = datasets.DatasetDict({"train": table, "test": table.select([2])})
    splits.save_to_disk(str(tmp_path / "several"))
    assert [row for _, row in read_source(str(tmp_path / "several"), split="test")] == ROWS[2:]
    with pytest.raises(ValueError, match=r"several.*split 'dev'"):
        list(read_source(str(tmp_path / "several"), split="dev"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "test.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    where = f"{tmp_path / 'files'}: row 1"
    assert list(read_source(str(tmp_path / "files"), split="test")) == [(where, ROWS[0])]


def test_a_hub_id_without_a_network_says_so() -> None:
    with pytest.raises(ValueError, match=r"'nobody/nothing' is neither a local file .*HF_HUB_OFFLINE is set"):
        list(read_source("nobody/nothing", subset="comparisons"))


def test_a_hub_that_does_not_answer_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[tuple[str, int], float]] = []

    def nowhere(address: tuple[str, int], timeout: float) -> None:
        asked.append((address, timeout))
        raise TimeoutError("a firewall drops all packets")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: pytest.fail("the hub's client retries"))
    monkeypatch.setattr("files.rows.getproxies", dict)
    monkeypatch.setattr(socket, "create_connection", nowhere)
    with pytest.raises(ValueError, match=f"'nobody/nothing' is neither a local file .*: {UNREACHABLE}"):
        list(read_source("nobody/nothing"))
    assert asked == [(("huggingface.co", 443), 3)]


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
    with pytest.raises(ValueError, match=r"a\.csv\.gz: line \d+: not a complete gzip file"):
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
    form, rows = read_as("auto", read_source(str(path)), str(path))
    (ranking,) = collect_all(form, rows).rankings
    assert (form.name, ranking.responses, ranking.ranks) == ("trl", ("4", "5"), (1, 2))


def test_the_index_that_pandas_writes_needs_no_name(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", ("", "prompt", "completion"), ("0", "2 + 2?", "4"))
    assert [row for _, row in read_source(str(path))] == [{"": "0", "prompt": "2 + 2?", "completion": "4"}]


def test_an_empty_cell_is_named_by_line_and_column(tmp_path: Path) -> None:
    reader = ConversationReader("demonstration", "auto")
    path = written(tmp_path / "a.csv", ("prompt", "completion"), ("2 + 2?", "4"), ("3 + 3?", ""))
    with pytest.raises(ValueError, match=r"a\.csv: line 3: field 'completion' is empty; text was expected"):
        _ = [reader.read(where, row) for where, row in read_source(str(path))]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"prompt,completion\na,b\n\na\n", r"line 4: column 'completion' is missing: 1 of 2 cells"),
        (b"prompt,completion\nHi, you,b\n", r"line 2: 3 cells, but 2 columns; a text that contains a comma"),
        (b'prompt,completion\na,"b\n\n', r"line 2: not CSV: unexpected end of data"),
        (b'prompt,completion\na,"b" c\n', r"line 2: not CSV: ',' expected after '\"'"),
        (b"prompt,\na,b\n", r"line 1: column 2 has no name"),
        (b"prompt,prompt\na,b\n", r"line 1: two columns are named 'prompt'"),
        (b"prompt;completion\na;b\n", r"line 1: columns are separated by semicolons; commas were expected"),
        (b"prompt,completion\na,\xff\n", r"line 1, or soon after: not UTF-8: invalid start byte"),
        (b"prompt,completion\na," + b"b" * (MAX_ROW_BYTES + 1), r"line 2: not CSV: field larger than field limit"),
    ],
)
def test_what_is_malformed_in_csv_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.csv: {words}"):
        list(read_source(str(path)))


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
    assert first == f"{mixed}: 6 of 12 rows are invalid ({rows.HINT}):"
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
    with pytest.raises(ValueError, match="not a complete gzip file"):
        texts(path, InvalidRows(str(path), "skip"))


def test_an_endless_source_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "COUNTED_ROWS", 10)

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


ABSENT = type("DatasetNotFoundError", (FileNotFoundError,), {})("gone")


def wrapped() -> OSError:
    """As `datasets` wraps an error of the hub's client."""
    try:
        raise ConnectionError("no route")
    except ConnectionError as cause:
        error = OSError("Couldn't reach it")
        error.__cause__ = cause
        return error


@pytest.mark.parametrize(
    ("error", "online", "offline"),
    [
        (LocalEntryNotFoundError("a\nlong story"), UNREACHABLE, OFFLINE),
        (wrapped(), UNREACHABLE, OFFLINE),
        (ABSENT, REFUSED, OFFLINE),
        (ValueError("Unknown split\n'dev'"), "ValueError: Unknown split 'dev'", "ValueError: Unknown split 'dev'"),
    ],
)
def test_an_error_has_a_reason_in_a_line(
    error: Exception, online: str, offline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert hub_reason(error) == online
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub_reason(error) == offline
