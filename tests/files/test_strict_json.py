"""JSONL and JSON lists byte by byte: line ends, marks, packing, what JSON may not hold, and memory."""

import codecs
import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import files.strict_json
from files.rows import read_source
from tests.examples import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=5)
BLANKS = st.sampled_from([b"", b"\n", b"\r\n", b" \t\n"])


def packed(content: bytes, name: str) -> bytes:
    return gzip.compress(content) if name.endswith(".gz") else content


def read(path: Path) -> list[tuple[str, Any]]:
    return list(read_source(str(path)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_come_back_whatever_ends_them(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @examples(100)
    @given(
        rows=ROWS,
        end=st.sampled_from([b"\n", b"\r\n"]),
        mark=st.sampled_from([b"", codecs.BOM_UTF8]),
        blanks=st.lists(BLANKS, min_size=6, max_size=6),
        is_ascii=st.booleans(),
        has_last_end=st.booleans(),
    )
    def there_and_back(
        rows: list[Any], end: bytes, mark: bytes, blanks: list[bytes], is_ascii: bool, has_last_end: bool
    ) -> None:
        content, expected = mark, []
        path = tmp_path_factory.mktemp("rows") / name
        for blank, row in zip(blanks, rows, strict=False):
            content += blank
            expected.append((f"{path}: line {content.count(bytes([10])) + 1}", row))
            content += json.dumps(row, ensure_ascii=is_ascii).encode() + end
        if rows and not has_last_end:
            content = content.removesuffix(end)
        path.write_bytes(packed(content, name))
        assert read(path) == expected

    there_and_back()


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_lists_come_back_whatever_the_size_of_a_part(
    name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window that is parsed is smaller than a row here, so values are cut at every place."""

    @examples(150)
    @given(
        rows=ROWS,
        indent=st.sampled_from([None, 0, 2]),
        mark=st.sampled_from([b"", codecs.BOM_UTF8]),
        is_ascii=st.booleans(),
        size=st.integers(16, 80),  # the longest escape has 12
    )
    def there_and_back(rows: list[Any], indent: int | None, mark: bytes, is_ascii: bool, size: int) -> None:
        monkeypatch.setattr(files.strict_json, "CHUNK_BYTES", size)
        path = tmp_path_factory.mktemp("rows") / name
        text = json.dumps(rows, indent=indent, ensure_ascii=is_ascii)
        path.write_bytes(packed(mark + b" \r\n" + text.encode() + b"\n", name))
        assert read(path) == [(f"{path}: row {number}", row) for number, row in enumerate(rows, start=1)]

    there_and_back()


BAD = {
    "duplicate key": ('{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' appears twice in one object"),
    "surrogate": ('{"a": [{"b": "x\\ud800y"}]}', r"field 'a[0].b' contains \ud800, half of a surrogate pair"),
    "surrogate key": ('{"a": {"\\udc00": 1}}', r"a key of 'a' contains \udc00, half of a surrogate pair"),
    "deep": ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested more than 200 levels deep"),
    "deeper than allowed": ('{"a": ' + "[" * 201 + "]" * 201 + "}", "nested more than 200 levels deep"),
    "digits": ('{"a": ' + "9" * 6_000 + "}", "the integer 99999999... (6000 digits) does not fit 64 bits"),
    "64 bits": ('{"a": 9223372036854775808}', "the integer 9223372036854775808 does not fit 64 bits"),
    "no object": ("7", "int found; a JSON object was expected"),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
@pytest.mark.parametrize(("bad", "words"), BAD.values(), ids=list(BAD))
def test_what_rows_may_not_hold_is_named(name: str, bad: str, words: str, tmp_path: Path) -> None:
    path, is_list = tmp_path / name, ".jsonl" not in name
    content = f'[{{"a": 1}},\n{bad},\n{{"a": 2}}]' if is_list else f'{{"a": 1}}\n{bad}\n{{"a": 2}}\n'
    path.write_bytes(packed(content.encode(), name))
    with pytest.raises(ValueError, match="2: ") as refusal:
        read(path)
    assert str(refusal.value).startswith(f"{path}: {'row' if is_list else 'line'} 2: {words}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"a": 1}\n {"a": 2}]', "line 2: not JSON: Expecting ',' delimiter at column 2"),
        ('[{"a": 1},\n]', "line 2: not JSON: Expecting value at column 1"),
        ('[{"a": 1}]\n\n x', "line 3: not JSON: Extra data at column 2"),
        ('[{"a": 1},\n{"a": "b\nc"}]', "line 2: not JSON: Invalid control character at column 9"),
        ('[{"a": 1},\n{"a": "b', "line 2: not JSON: Unterminated string starting at column 7"),
        ('[{"a": 1}', "line 1: not JSON: Expecting ',' delimiter at column 10"),
    ],
)
@pytest.mark.parametrize("size", [16, 2**16])
def test_a_malformed_list_is_named_by_line_and_column(
    text: str, words: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.strict_json, "CHUNK_BYTES", size)
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not JSON") as refusal:
        read(path)
    assert str(refusal.value) == f"{path}: {words}"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_refused_with_a_hint(name: str, encoding: str, tmp_path: Path) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / name).write_bytes((mark + '[{"a": 1}]').encode(encoding))
    with pytest.raises(ValueError, match=r"line 1: the file is UTF-16 \(by its first two bytes\); save it as UTF-8"):
        read(tmp_path / name)


def test_a_mark_before_plain_text_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"One.\n\n\nTwo.\n\n\n")
    assert [row["text"] for _, row in read(tmp_path / "a.txt")] == ["One.", "Two."]


def test_nan_is_read_and_refused_where_a_number_is_needed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": NaN, "b": -Infinity}\n')
    ((_, row),) = read(tmp_path / "a.jsonl")
    assert str(row) == "{'a': nan, 'b': -inf}"


def test_a_table_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(ValueError, match=r"a\.parquet: cannot be read: "):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "start", "filler", "what", "most_megabytes"),
    [
        ("a.jsonl.gz", '{"a": "', b"a", "line 1: this line", 120),
        ("a.jsonl.gz", '{"a": [', b"[],", "line 1: this line", 120),
        ("a.json.gz", '[{"a": "', b"a", "row 1: this row", 200),
        # An empty list takes twenty times its characters.
        pytest.param("a.json.gz", '[{"a": [', b"[],", "row 1: this row", 1_000, marks=pytest.mark.nightly),
    ],
)
def test_what_unpacks_to_hundreds_of_megabytes_is_refused_in_bounded_memory(
    name: str,
    start: str,
    filler: bytes,
    what: str,
    most_megabytes: int,
    tmp_path: Path,
    refusal_and_megabytes: Callable[[Path], tuple[str, int]],
) -> None:
    path, packer = tmp_path / name, zlib.compressobj(6, zlib.DEFLATED, 31)
    with path.open("wb") as file:
        file.write(packer.compress(start.encode()))
        for _ in range(200 // len(filler)):
            file.write(packer.compress(filler * 2**20))
        file.write(packer.flush())
    assert path.stat().st_size < 2**20
    refusal, megabytes = refusal_and_megabytes(path)
    assert refusal == f"{path}: {what} is longer than 33,554,432 bytes; rows of at most that size were expected"
    assert megabytes < most_megabytes, name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{\n  "a": 1\n}\n',
            "line 1: not JSON: Expecting property name enclosed in double quotes at column 2; a",
        ),
        (
            '{"rows": [\n{"a": 1}\n]}\n',
            "line 1: not JSON: Expecting value at column 11; a whole JSON object on the line",
        ),
        ('{"a": 1}\n{"a": 1, \n', "line 2: not JSON: .* at column (9|10)"),
    ],
)
def test_what_is_missing_at_the_end_of_a_line_is_placed_on_that_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        list(read_source(str(path)))
