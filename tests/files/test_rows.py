"""Containers beyond those of tests/training/test_data.py: JSON lists, saved data sets, hub ids without a network."""

import gzip
import json
from pathlib import Path

import datasets
import pytest

from files.rows import read_source

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
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
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
