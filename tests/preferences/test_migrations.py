"""New stores have exactly the tables of the schema; those of each revision open, and of newer versions are refused."""

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from preferences.accounts import Accounts
from preferences.adjudication import Threshold, queued
from preferences.database import open_engines
from preferences.records import Answer, Message, Task
from preferences.schema import metadata
from preferences.search import Search, find_tasks
from preferences.store import LabelStore
from reward.collect import STAGE

NEWEST = "0017"
# the full-text index, which differs between the databases and which the schema leaves out
WORDS = ("task_words", "task_texts_words")


def test_a_new_store_has_the_tables_of_the_schema(empty_database):
    reader, _ = open_engines(empty_database())
    with reader.connect() as connection:
        # DESC in an index is not compared: SQLite's reflection leaves it out.
        left_out = (*WORDS, "task_summaries_by_disagreement", "task_summaries_in_all_batches")
        is_schemas = {"include_object": lambda _, name, *__: not str(name).startswith(left_out)}
        context = MigrationContext.configure(connection, opts=is_schemas)
        found = compare_metadata(context, metadata)
        tables = [name for name in sqlalchemy.inspect(connection).get_table_names() if not name.startswith(WORDS)]
        assert context.get_current_revision() == NEWEST
    reader.dispose()
    assert found == []
    assert set(tables) == {*metadata.tables, "alembic_version"}


def test_judgments_cannot_be_changed(empty_database):
    url = empty_database()
    reader, writer = open_engines(url)
    with writer.begin() as connection:
        connection.execute(
            sqlalchemy.insert(metadata.tables["tasks"]).values(
                task_id="t", batch="b", num_labelers=1, prompt=[], responses=[], sources=[], objective="overall",
                gold_ranks=[], repeat_of="", details={},
            )
        )  # fmt: skip
        connection.execute(
            sqlalchemy.insert(metadata.tables["judgments"]).values(
                task=1, labeler="ann", revision=0, kind="answer", ranks=[1, 2], ratings=[], flags=[], note="",
                shown_order=[0, 1], instructions_version="1", milliseconds=1, client="test", created_at=1.0,
            )
        )  # fmt: skip
    for statement in ("UPDATE judgments SET labeler = 'bob'", "DELETE FROM judgments"):
        with pytest.raises(sqlalchemy.exc.DBAPIError, match="append-only"), writer.begin() as connection:
            connection.execute(sqlalchemy.text(statement))
    reader.dispose()


def contents(engine):
    with engine.connect() as connection:
        selects = {
            table.name: sqlalchemy.select(table).order_by(*table.primary_key) for table in metadata.sorted_tables
        }
        return {name: [tuple(row) for row in connection.execute(one)] for name, one in selects.items()}


RANKS = "judgment_id, task, labeler, revision, kind, '[1, 1]', ratings, flags, note, shown_order, instructions_version"
REST = "milliseconds, client, created_at, annotations"
CHANGES = {
    "tasks": ("UPDATE tasks SET prompt = '[]'", "UPDATE tasks SET num_labelers = 9", "DELETE FROM tasks"),
    "places": ("DELETE FROM places", "UPDATE places SET task = 2, place = 7", "UPDATE places SET batch = 'other'"),
    "judgments": (
        "UPDATE judgments SET ranks = '[1, 1]'",
        "UPDATE judgments SET annotations = '{}'",
        "DELETE FROM judgments",
    ),
    "questions": ("UPDATE questions SET text = '\"\"'", "UPDATE questions SET kind = 'reply'", "DELETE FROM questions"),
    "labelers": ("UPDATE labelers SET name = 'bo'", "DELETE FROM labelers"),
    "people_acts": ("UPDATE people_acts SET act = 'closed'", "DELETE FROM people_acts"),
}
REPLACEMENTS = {
    "sqlite": (
        f"INSERT OR REPLACE INTO judgments SELECT {RANKS}, {REST} FROM judgments",
        f"INSERT OR REPLACE INTO judgments SELECT 77 + {RANKS}, {REST} FROM judgments",
        "REPLACE INTO labelers SELECT pseudonym, 'bo', is_erased FROM labelers",
        "REPLACE INTO labelers SELECT 'labeler-0', name, is_erased FROM labelers WHERE name = 'ann'",
        "REPLACE INTO questions SELECT message_id, task, labeler, author, 'reply', text, created_at FROM questions",
        "REPLACE INTO people_acts SELECT act_id, 'bo', act, subject, created_at FROM people_acts",
        "INSERT OR REPLACE INTO tasks SELECT position, task_id, 'other', num_labelers, prompt, responses, sources,"
        " objective, gold_ranks, repeat_of, details, warning, handle FROM tasks",
        "INSERT OR REPLACE INTO tasks SELECT 70 + position, task_id, batch, num_labelers, prompt, responses, sources,"
        " objective, gold_ranks, repeat_of, details, warning, 'h' || handle FROM tasks",
        "REPLACE INTO places SELECT task, place, batch, original, NULL, 0, 0, 0, 0, 0, 0, '' FROM places",
        "UPDATE OR REPLACE places SET labeler = (SELECT labeler FROM places WHERE place = 0 AND task = 1)"
        " WHERE place = 1 AND task = 1",
    ),
    "postgresql": (
        f"INSERT INTO judgments SELECT {RANKS}, {REST} FROM judgments"
        " ON CONFLICT (judgment_id) DO UPDATE SET ranks = EXCLUDED.ranks",
        "TRUNCATE places",
        "TRUNCATE tasks CASCADE",
    ),
}  # fmt: skip


def test_no_statement_changes_or_replaces_what_is_stored(empty_database):
    url = empty_database()
    accounts = Accounts(url)
    accounts.invite("ann", "labeler")
    accounts.close()
    with LabelStore(url) as store:
        task = Task("t", (Message("user", "?"),), ("a", "b"), ("x", "y"))
        store.add_tasks([task], batch="b", num_labelers=2)
        lease = store.lease("ann", seconds=60, batch="b")
        store.submit(lease, Answer((1, 2), 1), client="test", instructions_version="1")
        store.write_message("t", "ann", "ann", "question", "Which one?")
    reader, writer = open_engines(url)
    before = contents(reader)
    dialect = "sqlite" if url.startswith("sqlite") else "postgresql"
    for statement in (*(one for some in CHANGES.values() for one in some), *REPLACEMENTS[dialect]):
        with pytest.raises(sqlalchemy.exc.DBAPIError, match="append-only"), writer.begin() as connection:
            connection.exec_driver_sql(statement)
        assert contents(reader) == before, statement
    reader.dispose()
    if dialect == "sqlite":  # as any program may open the file, without this package's settings
        raw = sqlite3.connect(url.removeprefix("sqlite:///"))
        for statement in REPLACEMENTS["sqlite"]:
            with pytest.raises(sqlite3.IntegrityError, match="append-only"), raw:
                raw.execute(statement)
        raw.close()
        assert contents(open_engines(url)[0]) == before


@pytest.mark.parametrize("revision", ["0001", "0008"])
def test_a_store_of_an_unreleased_heed_is_refused_in_one_line(empty_database, revision):
    url = empty_database()
    reader, writer = open_engines(url)
    with writer.begin() as connection:
        connection.execute(sqlalchemy.text(f"UPDATE alembic_version SET version_num = '{revision}'"))
    reader.dispose()
    with pytest.raises(ValueError, match=rf"unreleased version of Heed wrote it \(revision {revision}\)") as refused:
        LabelStore(url)
    assert "\n" not in str(refused.value)
    assert "heed label export --names" in str(refused.value)


STORES = Path(__file__).parent / "stores"  # which the last commit of each revision wrote
REVISIONS = [f"{number:04}" for number in range(9, int(NEWEST) + 1)]


def opened_copy(revision: str, folder: Path) -> Path:
    path = folder / f"{revision}.sqlite"
    path.write_bytes(gzip.decompress((STORES / f"{path.name}.gz").read_bytes()))
    return path


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_store_of_each_revision_opens_with_all_that_it_holds(revision: str, tmp_path: Path) -> None:
    path = opened_copy(revision, tmp_path)
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("SELECT version_num FROM alembic_version").fetchone() == (revision,)
        ranks = "SELECT task_id, name, ranks, note FROM judgments, tasks, labelers"
        joined = " WHERE task = position AND labeler = pseudonym ORDER BY judgment_id"
        before = raw.execute(ranks + joined).fetchall()
    assert len(before) == 6
    with LabelStore(path) as store, closing(Accounts(path)) as accounts:
        stored = store.judgments("main", with_names=True)
        found = [(one.task_id, one.labeler, json.dumps(list(one.ranks)), json.dumps(one.note)) for one in stored]
        assert sorted(found) == sorted(before)
        assert [one.task.task_id for one in store.tasks("main")] == ["t0", "t1", "t2", "t3", "gold"]
        assert {one.name: one.state for one in accounts.all()} == {"ann": "new", "bob": "closed", "eve": "new"}
        assert [link.name for link in accounts.links()] == ["cy"]
        # it is in use as before, and all that newer versions compute is there
        lease = store.lease("ann", seconds=60, batch="main")
        assert lease is not None
        assert lease.task_id == "t3"  # which ann has leased
        store.submit(lease, Answer((1, 2, 3), 1), client="t", instructions_version="1")
        with store.reading() as connection:
            assert [one.task_id for one in queued(connection, Threshold("main", 0.1), start=0, limit=9)] == [
                "t0",
                "t1",
                "t2",
            ]
            assert [one.task_id for one in find_tasks(connection, Search(words="Gold"), after=0, limit=9)] == ["gold"]
    reader, _ = open_engines(path)
    with reader.connect() as connection:
        is_other = {"include_object": lambda _, name, *__: not str(name).startswith((*WORDS, "task_summaries_"))}
        assert compare_metadata(MigrationContext.configure(connection, opts=is_other), metadata) == []
        assert not [name for name in sqlalchemy.inspect(connection).get_table_names() if name.startswith("old_")]
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        triggers = connection.exec_driver_sql("SELECT count(*) FROM sqlite_master WHERE type = 'trigger'").scalar()
    reader.dispose()
    assert triggers == 19


def test_a_store_from_before_the_migrations_is_refused_and_left_as_it_was(tmp_path):
    path = tmp_path / "labels.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE tasks (position INTEGER NOT NULL PRIMARY KEY, task_id VARCHAR NOT NULL)")
    connection.close()
    with pytest.raises(ValueError, match=r"unreleased version of Heed wrote it \(revision none\)"):
        LabelStore(path)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall() == [("tasks",)]
    connection.close()


def test_a_store_of_a_newer_heed_is_refused(empty_database):
    url = empty_database()
    reader, writer = open_engines(url)
    with writer.begin() as connection:
        connection.execute(sqlalchemy.text("UPDATE alembic_version SET version_num = '9999'"))
    reader.dispose()
    with pytest.raises(ValueError, match="revision 9999, which this version of Heed does not know"):
        LabelStore(url)


@pytest.mark.parametrize(("kind", "journal"), [("nfs4", "delete"), ("lustre", "delete"), ("ext4", "wal")])
def test_a_store_on_a_network_file_system_has_no_write_ahead_log(
    kind: str, journal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext3"), SimpleNamespace(mountpoint=str(tmp_path), fstype=kind)]
    monkeypatch.setattr("psutil.disk_partitions", lambda **_options: mounts)
    with LabelStore(tmp_path / "labels.sqlite") as store, store._reader.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == journal


def test_a_folder_without_locks_is_refused_before_any_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_args: Any, **_options: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("sqlite3.connect", connect)
    run: Any = SimpleNamespace(run_folder=tmp_path)
    with pytest.raises(
        ValueError, match=r"labels cannot be stored there: disk I/O error; a file system on which SQLite"
    ):
        STAGE.preflight(run, None)
    assert not list(tmp_path.iterdir())
