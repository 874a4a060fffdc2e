"""Importing files into the label store, and exporting the store to files."""

import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from files.atomic import atomic_file, atomic_folder
from files.conversations import turns_of
from files.fields import any_text, names
from files.rows import InvalidRows, Rows, read_source
from preferences.formats.annotated import by_criterion
from preferences.formats.labeling_tools import ALONE
from preferences.formats.merging import ImportedLabels, ImportedTask, collect_all
from preferences.formats.parts import Format, Report
from preferences.formats.registry import FORMATS
from preferences.recording import Import
from preferences.records import MAX_RESPONSES, MIN_RESPONSES, NO_LOCATIONS, Locations, Message, Task, named
from preferences.store import LabelStore

RESPONSE_PREFIXES = ("response_", "output_", "completion_")  # of the fields in files of saved outputs
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
    store: LabelStore, form: Format, path: Path, *, batch: str = "", criterion: str = "", with_names: bool = False
) -> tuple[Report, int]:
    """Writes a batch ("" = all batches) to `path`. Returns the report and the number of rows.

    Labelers appear under their pseudonyms, or under their names if `with_names`. With a `criterion`, its ratings take
    the place of the ranks.

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
        opened = gzip.open if suffix.endswith(".gz") else open
        with opened(temporary, "wt", encoding="utf-8") as file:
            return _write_json(file, rows) if suffix.startswith(".jsonl") else _write_list(file, list(rows))


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


# ---- new tasks ----


def read_new_tasks(source: str, batch: str, num_labelers: int) -> tuple[Import, Locations, int]:
    """Reads a file of tasks to label: rows of the format `heed`, or rows without `task_id` as `tasks_of_rows` does.

    `num_labelers` is for rows that do not say it. Returns the tasks, where each was found, and how many rows are left
    out because their responses are all the same or an earlier row has the task.

    Raises: ValueError naming file, line and field, and for a file without tasks or with judgments.
    """
    invalid = InvalidRows(source, hint="")
    rows = read_source(source, invalid=invalid)
    first = list(islice(rows, 1))
    rows = chain(first, rows)
    if first and "task_id" in first[0][1]:
        filled = ((where, {"num_labelers": num_labelers, **row}) for where, row in rows)
        read = collect_all(FORMATS["heed"], filled, invalid)
        if read.judgments:
            raise ValueError(f"{source}: has judgments, which `heed label import` stores; rows without were expected")
        return Import(batch, [*read.tasks.values()], [*read.quotas.values()], []), read.locations, 0
    tasks, num_same = tasks_of_rows(rows)
    invalid.finish()
    if not tasks:
        why = "no prompt has two different responses" if num_same else "there are no rows"
        raise ValueError(f"{source}: {why}; at least one task was expected")
    return Import(batch, tasks, [num_labelers] * len(tasks), []), NO_LOCATIONS, num_same


def tasks_of_rows(rows: Rows) -> tuple[list[Task], int]:
    """Makes one task per row. A row holds a prompt and the responses to it.

    The responses are in `responses`, a list of texts or an object {model: text}, or in fields such as `response_a` and
    `response_b`, or `output_1` and `output_2`; a single one may be in `response`. A row may have a `warning`. Returns
    the tasks, and the number of rows that are left out because all their responses are the same.

    Raises: ValueError naming file and line of a malformed row.
    """
    tasks, is_single, first = list[Task | None](), False, ""
    for where, row in rows:
        responses = _responses_of(where, row)
        if first and (len(responses) == 1) != is_single:
            one, other = ("one response", "several") if len(responses) == 1 else ("several responses", "one")
            raise ValueError(
                f"{where}: {one}, but {first} has {other}; labelers rate one response alone and rank several, so rows"
                " of one kind were expected"
            )
        is_single, first = len(responses) == 1, first or where
        tasks.append(task_of_outputs(turns_of(where, row, "prompt"), responses, content_warning(where, row)))
    return different_tasks(tasks)


def _responses_of(where: str, row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the responses by model. An unnamed model is called by its field name or its place in the list."""
    found = row.get("responses")
    if isinstance(found, list):
        found = {str(number): text for number, text in enumerate(found, 1)}
    if found is None:
        fields = [name for name in row if name.startswith(RESPONSE_PREFIXES) and row[name] is not None]
        found = {name: row[name] for name in fields or [name for name in ALONE if row.get(name) is not None][:1]}
    num_found = len(found) if isinstance(found, Mapping) else 0
    if not 1 <= num_found <= MAX_RESPONSES:
        what = names(row) if num_found == 0 else f"{num_found} responses"
        raise ValueError(
            f"{where}: 1 to {MAX_RESPONSES} responses were expected, in 'responses' (a list, or an object"
            f" {{model: text}}), in fields such as 'response_a' and 'response_b', or a single one in 'response'; found"
            f" {what}"
        )
    return {name: any_text(where, found, name) for name in found}


def content_warning(where: str, row: Mapping[str, Any]) -> str:
    return any_text(where, row, "warning") if row.get("warning") is not None else ""


def task_of_outputs(messages: Sequence[Mapping[str, str]], responses: Mapping[str, str], warning: str) -> Task | None:
    """Returns the task, or None if all of several responses are the same.

    The same prompt and responses give the same id, so repeating a command adds nothing.
    """
    by_text: dict[str, list[str]] = {}
    for source, text in responses.items():
        by_text.setdefault(text, []).append(source)
    if len(by_text) < min(len(responses), MIN_RESPONSES):
        return None
    content = json.dumps([list(map(dict, messages)), list(responses.items())])
    details: dict[str, Any] = {"from": "saved outputs"}
    if len(by_text) < len(responses):  # only then: a stored task with other details is refused
        details["policies"] = list(by_text.values())
    return Task(
        task_id=hashlib.sha256(content.encode("utf-8", "replace")).hexdigest()[:16],
        prompt=tuple(Message.of(turn) for turn in messages),
        responses=tuple(by_text),
        sources=tuple(", ".join(sources) for sources in by_text.values()),
        details=details,
        warning=warning,
    )


def different_tasks(tasks: Sequence[Task | None]) -> tuple[list[Task], int]:
    kept = {task.task_id: task for task in tasks if task is not None}
    return list(kept.values()), len(tasks) - len(kept)
