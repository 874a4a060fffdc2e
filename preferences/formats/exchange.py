"""Importing files into the label store, and exporting the store to files."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from files.atomic import atomic_file, atomic_folder
from preferences.formats.annotated import by_criterion
from preferences.formats.merging import ImportedLabels, ImportedTask
from preferences.formats.parts import Format, Project, Report
from preferences.recording import Import
from preferences.records import named
from preferences.store import LabelStore

CONTAINERS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


def store_found(store: LabelStore, found: ImportedLabels, batch: str, *, only_check: bool = False) -> None:
    """Stores an import's tasks and judgments, all or none. Repeating the call changes nothing.

    If `batch` is "", each task goes to the batch that its row names. `only_check` raises the same errors and stores
    nothing.

    Raises: ValueError, naming file and line, for a task without a batch and for anything that the store refuses.
    """
    by_batch: dict[str, list[ImportedTask]] = {}
    for own in found.found_tasks:
        name = batch or own.batch
        if not name:
            where = named({(own.task.task_id, "", 0): own.where}, own.task.task_id)
            raise ValueError(f"{where} has no batch; a batch name was expected (--batch)")
        by_batch.setdefault(name, []).append(own)
    coming = [
        Import(
            name,
            [own.task for own in tasks],
            [own.quota for own in tasks],
            [judgment for own in tasks for judgment in own.judgments],
        )
        for name, tasks in by_batch.items()
    ]
    store.import_all(coming, files=found.locations, only_check=only_check)


def export(
    store: LabelStore,
    form: Format,
    path: Path,
    *,
    batch: str = "",
    criterion: str = "",
    with_names: bool = False,
) -> tuple[Report, int]:
    """Writes a batch ("" = all batches) to `path`. Returns the report and the number of rows.

    A format that has a project is written as such a folder if the path has no suffix. Labelers appear under their
    pseudonyms, or under their names if `with_names`. With a `criterion`, its ratings take the place of the ranks.

    Raises: ValueError for a batch without tasks, for a path that exists, and if nothing fits the format.
    """
    assert form.write is not None, f"{form.name} is not written"
    batches = [batch] if batch else store.batches()
    stored = [one for name in batches for one in store.tasks(name)]
    if not stored:
        raise ValueError(f"batch {batch!r} has no tasks in the store" if batch else "the store has no tasks")
    report = Report()
    judgments = [judgment for name in batches for judgment in store.judgments(name, with_names=with_names)]
    if criterion:
        stored, judgments = by_criterion(form, stored, judgments, criterion, report)
    rows = form.write(stored, judgments, report)
    if form.project is not None and form.project.files is not None and not path.suffix:
        num_rows = _write_project(path, rows, form.project, form.project.files(stored, judgments))
    else:
        num_rows = write_rows(path, rows)
    if not num_rows:
        counts = ", ".join(f"{count} x {kind}" for kind, count in report.counts().items())
        raise ValueError(f"nothing can be written as {form.name}: {counts or 'there are no judgments'}")
    report.num_rows = num_rows
    return report, num_rows


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Writes rows in the format of the path's suffix: JSONL, a JSON list or Parquet; a `datasets` folder without one.

    The path appears complete or not at all. Returns the number of rows. Without rows nothing is written.

    Raises: ValueError for another suffix, and for a path that exists.
    """
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if suffix not in ("", *CONTAINERS):
        raise ValueError(f"{path}: suffix {suffix!r}; one of {', '.join(CONTAINERS)}, or none (a folder) was expected")
    if path.exists():
        raise ValueError(f"{path}: already exists; a new path was expected")
    rows = iter(rows)
    first = list(islice(rows, 1))
    if not first:
        return 0
    rows = chain(first, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) if suffix else atomic_folder(path) as temporary:
        if suffix in ("", ".parquet"):
            return _write_table(temporary, list(rows), is_folder=not suffix)
        with _text_file(temporary, is_packed=suffix.endswith(".gz")) as file:
            return _write_json(file, rows) if suffix.startswith(".jsonl") else _write_list(file, list(rows))


def _write_project(path: Path, rows: Iterable[dict[str, Any]], project: Project, files: Mapping[str, str]) -> int:
    """Writes a folder with the rows and the project's other files; nothing without rows. Returns their number.

    Raises: ValueError for a path that exists.
    """
    if path.exists():
        raise ValueError(f"{path}: already exists; a new path was expected")
    found = list(rows)
    if not found:
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(path) as temporary:
        temporary.mkdir(exist_ok=True)
        for name, text in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_text(text, encoding="utf-8")
        return write_rows(temporary / project.rows_name, found)


@contextmanager
def _text_file(path: Path, *, is_packed: bool) -> Iterator[IO[str]]:
    with gzip.open(path, "wt", encoding="utf-8") if is_packed else path.open("w", encoding="utf-8") as file:
        yield file


def _write_json(file: IO[str], rows: Iterable[dict[str, Any]]) -> int:
    num_rows = 0
    for num_rows, row in enumerate(rows, start=1):  # noqa: B007
        file.write(json.dumps(row) + "\n")
    return num_rows


def _write_list(file: IO[str], rows: list[dict[str, Any]]) -> int:
    file.write("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    return len(rows)


def _as_columns(value: Any) -> Any:
    """Replaces a call's arguments and the tools' schemas by their JSON text: each row's have other fields, and a column
    has a single type.
    """
    if isinstance(value, Mapping):
        texts = {name for name in ("arguments", "tools") if isinstance(value.get(name), Mapping | list)}
        return {name: json.dumps(item) if name in texts else _as_columns(item) for name, item in value.items()}
    return [_as_columns(item) for item in value] if isinstance(value, list) else value


def _write_table(path: Path, rows: list[dict[str, Any]], *, is_folder: bool) -> int:
    import datasets  # takes seconds, so import it only if needed

    datasets.disable_progress_bars()  # the command has a line of its own
    table = datasets.Dataset.from_list([_as_columns(row) for row in rows])
    if is_folder:
        table.save_to_disk(str(path))
    else:
        table.to_parquet(str(path))
    return len(rows)
