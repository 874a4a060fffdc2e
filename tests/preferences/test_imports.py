"""Imports into a store are all or nothing and name file and line, on SQLite and PostgreSQL."""

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine
from typer.testing import CliRunner

from files.rows import read_source
from heed.commands.label import label_app
from preferences.formats.exchange import export, store_found
from preferences.formats.merging import collect_all
from preferences.formats.registry import format_to_read, format_to_write
from preferences.leases import Lease
from preferences.records import Answer, Message, Task
from preferences.store import LabelStore
from tests.rows import jsonl

ROWS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "format_rows.json").read_text())
GOOD = ROWS["heed"] | {"repeat_of": ""}
ACT = GOOD["judgments"][0]


def write(path: Path, *rows: Any) -> str:
    path.write_text(jsonl(rows))
    return str(path)


def import_file(file: str, *options: str) -> str:
    """Returns why the import was refused; "" if it was not."""
    result = CliRunner().invoke(label_app, ["import", file, *options])
    assert result.exception is None or isinstance(result.exception, ValueError), repr(result.exception)
    return str(result.exception or "")


def whole(url: str) -> list[Any]:
    with LabelStore(url) as store:
        return [
            (name, store.tasks(name), store.judgments(name), store.coverage(name), store.progress(name))
            for name in store.batches()
        ]


def heed(task_id: str, **changes: Any) -> dict[str, Any]:
    return GOOD | {"task_id": task_id} | changes


def acts(*kinds: str, labeler: str = "ann", **changes: Any) -> list[dict[str, Any]]:
    empty = {"ranks": [], "ratings": [], "flags": []}
    kinds_in_order = enumerate(kinds)
    return [
        ACT | {"labeler": labeler, "revision": n, "kind": kind} | ({} if kind == "answer" else empty) | changes
        for n, kind in kinds_in_order
    ]


BAD = {
    "num_labelers": (heed("t2", num_labelers=3_000_000), "num_labelers' is 3000000; a whole number from 1 to 1000"),
    "places": (
        heed("t2", num_labelers=1, judgments=[*acts("answer"), *acts("answer", labeler="bo")]),
        "task 't2', labeler 'bo': the task wants 1 labelers, and others have judged it already",
    ),
    "revision": (heed("t2", judgments=acts("answer", revision=1)), "revision is 1, but only 0 are stored"),
    "repeat": (heed("t2", repeat_of="t9"), "task 't2': repeat_of is 't9'; an earlier task's id was expected"),
    "other responses": (heed("t2", repeat_of="t1", responses=["a", "c"]), "'t1', which has other responses; the same"),
    "milliseconds": (heed("t2", judgments=acts("answer", milliseconds=3_000_000_000)), "'milliseconds' is 3000000000"),
    "time in milliseconds": (
        heed("t2", judgments=acts("answer", created_at=1_764_150_000_000)),
        "judgments[0]: field 'created_at' is 1764150000000; seconds since the epoch, 0 to 4102444800",
    ),
    "time before 1970": (heed("t2", judgments=acts("answer", created_at=-1e18)), "field 'created_at' is -1e+18"),
    "text": (heed("t1", responses=["a", "c"]), "task 't1': field 'responses' differs from that in "),
    "quota": (heed("t1", num_labelers=3), "task 't1': num_labelers is 3, but 2 in "),
    "NUL in the id": (heed("t\0"), r"task 't\x00': task_id contains the character '\x00', which no name may contain"),
    "NUL in a name": (heed("t2", judgments=acts("answer", labeler="a\0")), r"labeler contains the character '\x00'"),
    "NUL in a batch": (heed("t2", batch="b\0"), r"batch contains the character '\x00'"),
    "long id": (heed("t" * 3_000), "task_id has 3,000 characters; at most 500 were expected"),
}


@pytest.mark.parametrize(("row", "words"), BAD.values(), ids=list(BAD))
def test_a_refused_import_leaves_the_store_as_it_was(
    row: dict[str, Any], words: str, new_database: Callable[[], str], tmp_path: Path
) -> None:
    url = new_database()
    assert import_file(write(tmp_path / "first.jsonl", heed("t0")), "--store", url) == ""
    before = whole(url)
    file = write(tmp_path / "labels.jsonl", heed("t1"), row, heed("t3", batch="other"))
    for options in (["--store", url], ["--check", "--store", url], ["--check"]):
        refusal = import_file(file, *options)
        assert refusal.startswith(f"{file}: line 2: "), refusal
        assert words in refusal
    assert whole(url) == before
    assert import_file(write(tmp_path / "labels.jsonl", heed("t1"), heed("t3", batch="other")), "--store", url) == ""
    assert len(whole(url)) == 2


def test_what_contradicts_the_store_is_refused_by_file_and_line(
    new_database: Callable[[], str], tmp_path: Path
) -> None:
    url = new_database()
    import_file(write(tmp_path / "first.jsonl", heed("t1")), "--store", url)
    before = whole(url)
    other = heed("t1", responses=["a", "c"])
    revised = heed("t1", judgments=acts("answer", ranks=[1, 2]))
    for row, words in (
        (other, "task 't1': responses is ['a', 'c'], but the store has ['a', 'b']"),
        (revised, "task 't1', labeler 'ann': ranks [1, 2] differs from the stored [2, 1]"),
    ):
        file = write(tmp_path / "labels.jsonl", heed("t0"), row)
        for options in (["--store", url], ["--check", "--store", url]):
            assert import_file(file, *options) == f"{file}: line 2: {words}"
        assert import_file(file, "--check") == ""  # it contradicts that store alone
    assert whole(url) == before


def test_ratings_that_are_not_numbers_rank_nothing_and_are_reported(
    new_database: Callable[[], str], tmp_path: Path
) -> None:
    """A Rating of "nan" used to pass the reader, and the store then refused it after adding the tasks."""
    url, row = new_database(), json.loads(json.dumps(ROWS["ultrafeedback"]))
    for completion in row["completions"][:2]:
        for annotation in completion["annotations"].values():
            annotation["Rating"] = "nan"
    file = write(tmp_path / "labels.jsonl", ROWS["ultrafeedback"], row)
    assert import_file(file, "--store", url, "--batch", "b") == ""
    ((_, tasks, judgments, *_),) = whole(url)
    assert (len(tasks), len(judgments)) == (1, 1)
    strict = import_file(file, "--check", "--strict")
    assert strict.startswith(f"{file}: line 1: completions[1]: rating is no number: truthfulness is 'N/A'")


def test_a_check_writes_nothing(new_database: Callable[[], str], tmp_path: Path) -> None:
    url, file = new_database(), write(tmp_path / "labels.jsonl", heed("t1"))
    assert import_file(file, "--check", "--store", url) == ""
    assert whole(url) == []
    assert import_file(file, "--check", "--store", str(tmp_path / "none.sqlite")) == ""
    assert import_file(file, "--check", "--store", f"sqlite:///{tmp_path / 'none.sqlite'}") == ""
    assert not (tmp_path / "none.sqlite").exists()


def test_a_full_disk_is_one_line_and_leaves_the_store_as_it_was(sqlite_tables: Path, tmp_path: Path) -> None:
    store = tmp_path / "labels.sqlite"
    shutil.copy(sqlite_tables, store)
    file = write(tmp_path / "labels.jsonl", *(heed(f"t{n}") for n in range(2_000)))

    def limit(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute("PRAGMA max_page_count = 60")  # SQLite's own message for a full disk

    event.listen(Engine, "connect", limit)
    try:
        refusal = import_file(file, "--store", str(store))
    finally:
        event.remove(Engine, "connect", limit)
    assert refusal == f"{file}: the database stored nothing of it: database or disk is full"
    assert whole(str(store)) == []


KILLED = """
import os, signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from heed.commands.label import label_app

@event.listens_for(Engine, "before_cursor_execute")
def kill(connection, cursor, statement, *_):
    if statement.startswith("INSERT INTO judgments"):
        os.kill(os.getpid(), signal.SIGKILL)

label_app(sys.argv[1:])
"""


def test_a_killed_import_leaves_the_store_as_it_was(new_database: Callable[[], str], tmp_path: Path) -> None:
    """Killed when all tasks are imported and no judgment is."""
    url, file = new_database(), write(tmp_path / "labels.jsonl", *(heed(f"t{n}") for n in range(50)))
    process = subprocess.run(
        [sys.executable, "-c", KILLED, "import", file, "--store", url], capture_output=True, text=True, check=False
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert whole(url) == []
    assert import_file(file, "--store", url) == ""
    ((_, tasks, judgments, *_),) = whole(url)
    assert (len(tasks), len(judgments)) == (50, 50)


def test_acts_that_were_taken_back_need_no_place(new_database: Callable[[], str], tmp_path: Path) -> None:
    """One open place, which ann, bo and ann again held: only the last answer takes it, in whatever order they are
    imported."""
    url, again, path = new_database(), new_database(), tmp_path / "labels.jsonl"
    said = {"client": "page", "instructions_version": "1"}
    with LabelStore(url) as store:
        store.add_tasks([Task("t", (Message("user", "q"),), ("a", "b"), ("x", "y"))], batch="b", num_labelers=1)

        def lease(labeler: str) -> Lease:
            found = store.lease(labeler, seconds=60, batch="b")
            assert found is not None
            return found

        store.submit(lease("ann"), Answer((1, 2), 5), **said)
        store.undo(store.reopened("ann", "t"), "wrong", client="page")
        store.skip(lease("ann"), "too hard", 5, **said)
        store.submit(lease("bo"), Answer((1, 2), 5), **said)
        store.undo(store.reopened("bo", "t"), "wrong", client="page")
        store.skip(lease("bo"), "too hard", 5, **said)
        store.undo(store.reopened("ann", "t"), "not so hard", client="page")
        store.submit(lease("ann"), Answer((2, 1), 5), **said)
        export(store, format_to_write("heed"), path, with_names=True)
        ranked = store.rankings("b")
    assert import_file(str(path), "--store", again) == ""
    with LabelStore(again) as store:
        assert store.rankings("b") == ranked
        assert len(store.judgments("b")) == 8


def test_every_text_comes_back_from_both_databases(new_database: Callable[[], str], tmp_path: Path) -> None:
    """Prompts, responses and notes are stored as JSON, which can hold NUL in every database; models sometimes write
    it."""
    row = heed(
        "t1", responses=["a\0", "\ufffe😀"], judgments=acts("answer", note="\0"), details='{"\\u0000": "\\u0000"}'
    )
    with LabelStore(new_database()) as store:
        found = collect_all(format_to_read("heed"), read_source(write(tmp_path / "labels.jsonl", row)))
        store_found(store, found, "")
        (stored,) = store.tasks("b")
        assert stored.task == found.tasks["t1"]
        assert stored.task.responses == ("a\0", "\ufffe😀")
        assert store.judgments("b") == found.judgments
        export(store, format_to_write("heed"), tmp_path / "again.jsonl")
    assert next(again for _, again in read_source(str(tmp_path / "again.jsonl")))["responses"] == row["responses"]


def test_half_a_surrogate_pair_is_refused(new_store: Callable[[], LabelStore]) -> None:
    """JSON that does not come from a file, such as the API's, may contain one."""
    task, store = Task("t", (Message("user", "q"),), ("a", "\ud800"), ("x", "y")), new_store()
    with pytest.raises(ValueError, match=r"task 't': responses contains '\\ud800', half of a surrogate pair"):
        store.add_tasks([task], batch="b", num_labelers=1)
    with pytest.raises(ValueError, match=r"batch contains the character '\\udfff'"):
        store.add_tasks([task], batch="\udfff", num_labelers=1)
