"""Parquet is read as it was written, in bounded memory: a small file that unpacks to a large one is refused."""

import datetime
import decimal
import gzip
import random
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from files.rows import read_source

MEGABYTE = 10**6
Measure = Callable[[Path], tuple[str, int]]


def rows_of(path: Path) -> list[dict]:
    return [row for _, row in read_source(str(path))]


def write(path: Path, **columns: list) -> Path:
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.table(columns), path, compression="zstd")
    return path


@pytest.mark.parametrize("folder", ["", "data"])
def test_one_cell_of_100_mb(refusal_and_megabytes: Measure, tmp_path: Path, folder: str) -> None:
    path = write(tmp_path / folder / "a.parquet", prompt=["a" * 100 * MEGABYTE])
    assert path.stat().st_size < 15_000
    said, megabytes = refusal_and_megabytes(path.parent if folder else path)
    assert said == f"{path}: row 1: this row is longer than 33,554,432 bytes; rows of at most that size were expected"
    assert megabytes < 60


def test_one_cell_of_100_mb_among_others(refusal_and_megabytes: Measure, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", prompt=["b"] * 20 + ["a" * 100 * MEGABYTE] + ["b"] * 20)
    said, megabytes = refusal_and_megabytes(path)
    assert said.startswith(f"{path}: row 1, or one of the 40 after it: column 'prompt' would take 100,000,")
    assert megabytes < 60


def test_one_cell_of_40_mb_in_a_file_that_packs_badly(refusal_and_megabytes: Measure, tmp_path: Path) -> None:
    noise = [random.Random(number).randbytes(20_000).hex() for number in range(40)]
    path = write(tmp_path / "a.parquet", prompt=[*noise[:20], "a" * 40 * MEGABYTE, *noise[20:]])
    said, megabytes = refusal_and_megabytes(path)
    assert said == f"{path}: row 21: this row is longer than 33,554,432 bytes; rows of at most that size were expected"
    assert megabytes < 300


@pytest.mark.parametrize("folder", ["", "data"])
def test_twelve_rows_that_share_a_cell_of_30_mb(refusal_and_megabytes: Measure, tmp_path: Path, folder: str) -> None:
    path = write(tmp_path / folder / "a.parquet", prompt=["a" * 30 * MEGABYTE] * 12, x=list(range(12)))
    assert path.stat().st_size < 3_000
    said, megabytes = refusal_and_megabytes(path.parent if folder else path)
    assert said.startswith(f"{path}: row 9: the rows up to this one would take 270,000,")
    assert "\n" not in said
    assert megabytes < 200


def test_splits_of_a_folder(tmp_path: Path) -> None:
    for name, numbers in (("train-0", [1, 2]), ("train-1", [3]), ("test-0", [4])):
        write(tmp_path / "data" / f"{name}.parquet", number=numbers)
    rows = [(f"{tmp_path}/data/train-0.parquet: row 1", {"number": 1})]
    rows += [(f"{tmp_path}/data/train-0.parquet: row 2", {"number": 2})]
    rows += [(f"{tmp_path}/data/train-1.parquet: row 1", {"number": 3})]
    assert list(read_source(str(tmp_path))) == rows
    assert list(read_source(str(tmp_path), max_rows=1)) == rows[:1]
    assert [row for _, row in read_source(str(tmp_path), split="test")] == [{"number": 4}]
    with pytest.raises(ValueError, match="split 'none'"):
        list(read_source(str(tmp_path), split="none"))


def test_a_folder_whose_readme_gives_types(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train.parquet", number=[4])
    features = "  features:\n  - name: number\n    dtype: string\n"
    (tmp_path / "README.md").write_text(f"---\ndataset_info:\n{features}---\n")
    assert rows_of(tmp_path) == [{"number": "4"}]


def test_texts_in_lists_that_share_a_cell(refusal_and_megabytes: Measure, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", turns=[[{"role": "user", "content": "a" * MEGABYTE}] * 20] * 20)
    said, megabytes = refusal_and_megabytes(path)
    assert "the rows up to this one would take 2" in said
    assert megabytes < 200


@pytest.mark.parametrize(
    "values",
    [
        pa.array([["a" * 3 * MEGABYTE] * 20], pa.list_(pa.string(), 20)),
        pa.array([[(str(n), "a" * 3 * MEGABYTE) for n in range(20)]], pa.map_(pa.string(), pa.string())),
        pa.array([[None] * 6_000_000], pa.list_(pa.null())),
        pa.array([[True] * 6_000_000], pa.list_(pa.bool_())),
    ],
    ids=["fixed-size lists", "maps", "nulls", "truth values"],
)
def test_nested_values_of_every_kind_are_counted_as_python_holds_them(
    refusal_and_megabytes: Measure, tmp_path: Path, values: pa.Array
) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"turns": values}), path, compression="zstd")
    said, _ = refusal_and_megabytes(path)
    assert "a.parquet: row 1" in said, said


def test_a_paragraph_that_does_not_end(refusal_and_megabytes: Measure, tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    with gzip.open(path, "wb") as file:
        for _ in range(100):
            file.write(b"a" * MEGABYTE)
    said, megabytes = refusal_and_megabytes(path)
    assert (
        said
        == f"{path}: row 1: this paragraph is longer than 33,554,432 bytes; rows of at most that size were expected"
    )
    assert megabytes < 200


def test_large_but_honest(tmp_path: Path) -> None:
    """Reads rows of 3 MB, all in one group, and repeated texts."""
    rows = [{"prompt": f"{number:06d}" * 50_000, "turns": ["same"] * 3} for number in range(200)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    assert rows_of(path) == rows


def test_more_texts_in_lists_than_fit_a_dictionary(tmp_path: Path) -> None:
    rows = [{"turns": [f"hello {number} {turn} " * 20 for turn in range(3)]} for number in range(7_000)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=4_000)
    assert rows_of(path) == rows


TYPES = {
    "text": pa.string(),
    "large": pa.large_string(),
    "view": pa.string_view(),
    "bytes": pa.binary(),
    "number": pa.int64(),
    "real": pa.float64(),
    "yes": pa.bool_(),
    "price": pa.decimal128(12, 2),
    "when": pa.timestamp("us", tz="UTC"),
    "texts": pa.list_(pa.string()),
    "turns": pa.list_(pa.struct([("role", pa.string()), ("parts", pa.list_(pa.large_string()))])),
    "map": pa.map_(pa.string(), pa.string()),
    "kind": pa.dictionary(pa.int32(), pa.string()),
    "null": pa.null(),
}


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("with_dictionary", [True, False])
def test_every_type_is_read_as_arrow_reads_it(tmp_path: Path, compression: str, with_dictionary: bool) -> None:
    values = {
        "text": "a",
        "large": "b",
        "view": "c",
        "bytes": b"d",
        "number": 1,
        "real": 0.5,
        "yes": True,
        "price": decimal.Decimal("1.25"),
        "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "texts": ["x", None, "y"],
        "turns": [{"role": "user", "parts": ["p", "q"]}, None],
        "map": [("k", "v")],
        "kind": "e",
    }
    rows = [values, dict.fromkeys(TYPES), values | {"text": "other", "texts": [], "turns": []}] * 700
    table = pa.Table.from_pylist([dict.fromkeys(TYPES) | row for row in rows], schema=pa.schema(list(TYPES.items())))
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, compression=compression, use_dictionary=with_dictionary, row_group_size=900)
    assert rows_of(path) == parquet.read_table(path).to_pylist()
    assert [where for where, _ in read_source(str(path))][-1] == f"{path}: row 2100"
    packed = tmp_path / "b.parquet.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert rows_of(packed) == rows_of(path)


def test_what_datasets_encodes_is_decoded(tmp_path: Path) -> None:
    rows = [{"x": {"a": 1, "b": [1, "two"]}, "label": 1}, {"x": "text", "label": 0}]
    features = datasets.Features({"x": datasets.Json(), "label": datasets.ClassLabel(names=["no", "yes"])})
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    assert rows_of(path) == rows


def test_a_truncated_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", prompt=["a", "b"])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.parquet: cannot be read: Arrow"):
        rows_of(path)
