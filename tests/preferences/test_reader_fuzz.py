"""Mutated rows of every format are read, reported, or refused with file and line; none is lost."""

import copy
import json
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from files.rows import read_source
from preferences.formats.exchange import store_found
from preferences.formats.merging import UNFORESEEN, ImportedLabels, collect, collect_all
from preferences.formats.parts import Format, Report, Row
from preferences.formats.registry import FORMATS, sniff
from preferences.store import LabelStore
from tests import examples

ROWS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "format_rows.json").read_text())
ROWS["heed"]["repeat_of"] = ""  # the row that it repeats would have to exist
READ = [form for form in FORMATS.values() if form.read is not None]
NUM_ROWS = round(400 * examples.share)  # per format
NUM_ROWS_OF = {"hh": 400, "heed": 200, "llmbar": 200}  # of which nearly all are refused

# The text that replaces "@n@" in the file.
RAW = [
    "9" * 6_000, "-" + "9" * 6_000, "1e999", "NaN", "-Infinity", "9223372036854775808", '"\\ud800"', '{"\\udfff": 1}',
    "[" * 100_000 + "]" * 100_000, '{"a":' * 3_000 + "1" + "}" * 3_000, '{"role": "user", "role": "user"}', "1,,",
    "tru", '"a\tb"', "\x00",
]  # fmt: skip
PLAIN = [
    None, True, False, 0, 1, -1, 2, 3, 2**31, 3_000_000_000, 2**62, 2**63 - 1, 0.5, 1e308, -0.0, "", " ", "a", "nan",
    "N/A", "inf", "1", "1e400", "9" * 500, "a" * 3_000, "\0", "a\0b", "\ud7ff", "\ufffe", "\n\nHuman:", "user",
    "unknown", "answer", "undo", [], {}, [[]], [{}], [None], [1, 2], [2, 1], [1, "a"], ["a", "b"], [True, False],
    {"role": "user"}, {"role": "user", "content": "x"}, [{"role": "user", "content": "x"}], [{"role": []}],
    [0] * 300, {"Rating": [1]}, {"Rating": {}}, {"Rating": True}, "{}", "[1]", '{"a": NaN, "a": 1}', "[" * 5_000,
]  # fmt: skip
FROM_PARQUET = [b"\xff", date(2020, 1, 2), Decimal("1.5"), (1, 2), float("nan"), float("inf"), 2**80, {1: 2}, {None}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Returns the paths of everything in a row, without the row itself."""
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def mutated(row: dict[str, Any], random: Random, hostile: list[Any]) -> dict[str, Any]:
    row = copy.deepcopy(row)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        paths = list(places(row))
        if not paths:
            return row
        *above, last = random.choice(paths)
        holder: Any = row
        for key in above:
            holder = holder[key]
        match random.randrange(6):
            case 0:
                del holder[last]
            case 1:
                holder[last] = [holder[last]]
            case 2:
                holder[last] = [copy.deepcopy(holder[last]) for _ in range(random.choice([2, 12]))]
            case 3:
                holder[last] = {"a": holder[last]}
            case _:
                holder[last] = copy.deepcopy(random.choice(hostile))
    return row


def as_text(row: dict[str, Any]) -> str:
    text = json.dumps(row)
    for number, raw in enumerate(RAW):
        text = text.replace(f'"@{number}@"', raw)
    return text


def require_told(found: ImportedLabels, second: str, num_rows: int) -> None:
    """The second row occurs somewhere in the result."""
    assert found.report.num_rows == num_rows
    assert second in found.locations.values() or any(second in warning.where for warning in found.report.warnings)


def require_refusal(error: ValueError, *wheres: str) -> None:
    assert str(error).startswith(wheres), error
    assert UNFORESEEN not in str(error), error  # the last line of defence is not what a reader leans on
    assert len(str(error)) < 1_000, "the message holds the row"


@pytest.mark.parametrize("form", READ, ids=lambda form: form.name)
def test_mutated_lines_are_read_reported_or_refused_by_file_and_line(form: Format, tmp_path: Path) -> None:
    random = Random(form.name)
    hostile = [*PLAIN, *(f"@{number}@" for number in range(len(RAW)))]
    path, good, num_refused = tmp_path / "rows.jsonl", ROWS[form.name], 0
    num_rows = NUM_ROWS_OF.get(form.name, NUM_ROWS)
    second, third = f"{path}: line 2", f"{path}: line 3"
    with LabelStore(tmp_path / "labels.sqlite") as store:
        for _ in range(num_rows):
            bad = mutated(good, random, hostile)
            path.write_text(f"{json.dumps(good)}\n{as_text(bad)}\n{json.dumps(good)}\n", encoding="utf-8")
            try:
                sniff(read_source(str(path)), str(path))
                found = collect_all(form, read_source(str(path)))
                require_told(found, second, 3)
                if form.name != "trl_unpaired":  # single responses, which no store takes
                    store_found(store, found, "" if form.name == "heed" else "b", only_check=True)
            except ValueError as error:
                # A third row that contradicts the task as the second one describes it can be at fault too.
                require_refusal(error, second, third)
                num_refused += 1
        assert store.batches() == []
    assert num_rows / 10 < num_refused < num_rows, "the mutations try nothing"


@pytest.mark.parametrize("form", READ, ids=lambda form: form.name)
def test_mutated_rows_of_tables_are_read_reported_or_refused(form: Format) -> None:
    random, good = Random(form.name), ROWS[form.name]
    for _ in range(NUM_ROWS):
        rows = [("t: row 1", good), ("t: row 2", mutated(good, random, [*PLAIN, *FROM_PARQUET])), ("t: row 3", good)]
        try:
            sniff(iter(rows), "t")
            require_told(collect_all(form, rows), "t: row 2", 3)
        except ValueError as error:
            require_refusal(error, "t: row 2", "t: row 3")


def test_what_a_reader_did_not_foresee_names_the_row_and_the_format() -> None:
    def stumble(_where: str, row: Row, _report: Report, _objective: str) -> Any:
        return row["a"] + 1

    broken = Format("broken", "", lambda _row: "", stumble, None)
    with pytest.raises(ValueError, match=r"^file: line 7: not readable as broken: TypeError: "):
        list(collect(broken, [("file: line 7", {"a": "1"})]))
