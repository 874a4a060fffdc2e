"""The folder of an evaluation: writing it and reading it.

    evaluate.json       settings: models, algorithms with several runs, suites with their data, judge and baseline,
                        each with its hash; seed, rows of saved answers that are unused, versions
    items.parquet       suite, item_id, group, cluster, messages and data (as JSON)
    answers.parquet     suite, model, item_id, answer: what a model answered, or the part of it that was scored
    values.parquet      suite, model, item_id, measure, value, failure
    report.json         every number of the report (`EvaluationReport`)
    report.html         the report; `heed report FOLDER` writes it again

Answers are cached next to the folder (answers.sqlite), so an interrupted evaluation continues.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.evaluate.statistics import SuiteStatistics, Value
from evaluation.suites.suite import Item, Scored
from files.atomic import atomic_file, write_json
from files.parquet import read_parquet
from files.records import as_json, record_of
from stages.reports.run_folder import parse_object
from stages.reports.text import clean_json

SETTINGS, REPORT = "evaluate.json", "report.json"
ITEMS, ANSWERS, VALUES = "items.parquet", "answers.parquet", "values.parquet"
COLUMNS = {
    ITEMS: ("suite", "item_id", "group", "cluster", "messages", "data"),
    ANSWERS: ("suite", "model", "item_id", "answer"),
    VALUES: ("suite", "model", "item_id", "measure", "value", "failure"),
}

Settings = dict[str, Any]


@dataclass(frozen=True)
class ReportedMeasure:
    """A measure of a suite, for readers of the report."""

    name: str
    description: str
    higher_is_better: bool


@dataclass(frozen=True)
class Contamination:
    """How many of a suite's items share words with a model's training data, and the measures on the other items.

    `files` are the data, with the number of rows read. `unread` were recorded by the run but could not be read.
    """

    model: str
    files: Mapping[str, int]
    unread: tuple[str, ...]
    num_items: int
    item_ids: tuple[str, ...]
    clean: tuple[Value, ...]


@dataclass(frozen=True)
class SuiteReport:
    """All results on one suite."""

    suite: str
    title: str
    source: str
    measures: tuple[ReportedMeasure, ...]
    statistics: SuiteStatistics
    contamination: tuple[Contamination, ...]


@dataclass(frozen=True)
class EvaluationReport:
    """Every number of an evaluation, in the order of its models and suites."""

    models: tuple[str, ...]
    suites: tuple[SuiteReport, ...]
    settings: Mapping[str, Any]


def is_evaluation(folder: Path) -> bool:
    """Returns whether a folder holds an evaluation."""
    return (folder / SETTINGS).is_file()


def write_evaluation(
    folder: Path,
    settings: Settings,
    items: Mapping[str, Sequence[Item]],
    scored: Mapping[str, Mapping[str, Mapping[str, Scored]]],
) -> None:
    """Write the rows of an evaluation into an existing folder. `scored` are by suite, model and item id."""
    item_rows = [
        (
            suite,
            item.item_id,
            item.group,
            item.cluster,
            json.dumps([dict(message) for message in item.messages], ensure_ascii=False),
            data_json(suite, item),
        )
        for suite, suite_items in items.items()
        for item in suite_items
    ]
    rows = [
        (suite, model, row)
        for suite, models in scored.items()
        for model, model_rows in models.items()
        for row in model_rows.values()
    ]
    answer_rows = [(suite, model, row.item_id, row.answer) for suite, model, row in rows]
    value_rows = [
        *(
            (suite, model, row.item_id, name, value, "")
            for suite, model, row in rows
            for name, value in row.values.items()
        ),
        *((s, m, row.item_id, name, math.nan, why) for s, m, row in rows for name, why in row.failures.items()),
    ]
    for name, table in ((ITEMS, item_rows), (ANSWERS, answer_rows), (VALUES, value_rows)):
        _write(folder / name, table)
    write_json(folder / SETTINGS, clean_json(json.loads(json.dumps(settings))))


def data_json(suite: str, item: Item) -> str:
    """Returns an item's `data` as JSON. Raises: ValueError naming suite and item for what JSON cannot hold."""
    try:
        return json.dumps(as_json(item.data), ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"suite {suite!r}: item {item.item_id!r}: `data` is no JSON: {error}") from None


def _write(path: Path, rows: Sequence[tuple[Any, ...]]) -> None:
    import pyarrow
    from pyarrow import parquet

    names = COLUMNS[path.name]
    kinds = [pyarrow.float64() if name == "value" else pyarrow.string() for name in names]
    table = pyarrow.table(
        [pyarrow.array([row[place] for row in rows], kind) for place, kind in enumerate(kinds)], list(names)
    )
    with atomic_file(path) as temporary:
        parquet.write_table(table, temporary)


@dataclass(frozen=True)
class EvaluationFolder:
    """A finished evaluation, read. Answers and values are by (suite, model, item id); failures are texts."""

    name: str
    report: EvaluationReport
    items: Sequence[tuple[str, Item]]
    answers: Mapping[tuple[str, str, str], str]
    values: Mapping[tuple[str, str, str], Mapping[str, float | str]]


def read_settings(folder: Path) -> Settings:
    """Raises: ValueError naming the file if there is none, or it is no JSON object."""
    path = folder / SETTINGS
    if not path.is_file():
        raise ValueError(f"{path}: no such file; the folder of an evaluation was expected")
    return parse_object(path.read_text(encoding="utf-8", errors="replace"), str(path))


def read_evaluation(folder: Path, name: str) -> EvaluationFolder:
    """Raises: ValueError naming a file that is absent or malformed."""
    read_settings(folder)
    path = folder / REPORT
    if not path.is_file():
        raise ValueError(f"{path}: no such file; the folder of a finished evaluation was expected")
    settings = parse_object(path.read_text(encoding="utf-8", errors="replace"), str(path))
    items = [
        (row["suite"], Item(row["item_id"], json.loads(row["messages"]), row["group"], data=json.loads(row["data"])))
        for row in _rows(folder / ITEMS)
    ]
    values: dict[tuple[str, str, str], dict[str, float | str]] = {}
    for row in _rows(folder / VALUES):
        values.setdefault((row["suite"], row["model"], row["item_id"]), {})[row["measure"]] = (
            row["failure"] or row["value"]
        )
    answers = {(row["suite"], row["model"], row["item_id"]): row["answer"] for row in _rows(folder / ANSWERS)}
    return EvaluationFolder(name, record_of(settings, EvaluationReport, str(path)), items, answers, values)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    rows = [row for _, row in read_parquet(path)]
    expected = COLUMNS[path.name]
    if rows and tuple(rows[0]) != expected:
        raise ValueError(f"{path}: found columns {', '.join(rows[0])}; expected {', '.join(expected)}")
    return rows
