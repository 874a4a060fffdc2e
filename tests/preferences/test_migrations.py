"""New stores have exactly the tables of the schema; stores of unreleased and of newer versions are refused."""

import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from preferences.database import OLDEST_REVISION, open_engines
from preferences.schema import metadata
from preferences.store import LabelStore
from reward.collect import STAGE


def test_a_new_store_has_the_tables_of_the_schema(empty_database):
    reader, _ = open_engines(empty_database())
    with reader.connect() as connection:
        context = MigrationContext.configure(connection)
        found = compare_metadata(context, metadata)
        tables = sqlalchemy.inspect(connection).get_table_names()
        assert context.get_current_revision() == OLDEST_REVISION
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
