"""Stores of every age open: their contents are kept, and new stores have exactly the tables of the schema."""

import json
import sqlite3

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from preferences.database import open_engines
from preferences.records import Answer
from preferences.results import Progress
from preferences.schema import metadata
from preferences.store import LabelStore

# As stores were created before migrations existed.
FIRST_TABLES = """
CREATE TABLE tasks (
    position INTEGER NOT NULL PRIMARY KEY, task_id VARCHAR NOT NULL UNIQUE, batch VARCHAR NOT NULL,
    num_labelers INTEGER NOT NULL, prompt JSON NOT NULL, responses JSON NOT NULL, sources JSON NOT NULL);
CREATE INDEX tasks_by_batch ON tasks (batch, position);
CREATE TABLE leases (
    task INTEGER NOT NULL REFERENCES tasks (position), labeler VARCHAR NOT NULL, expires_at FLOAT NOT NULL,
    PRIMARY KEY (task, labeler));
CREATE INDEX leases_by_labeler ON leases (labeler);
CREATE TABLE judgments (
    judgment_id INTEGER NOT NULL PRIMARY KEY, task INTEGER NOT NULL REFERENCES tasks (position),
    labeler VARCHAR NOT NULL, ranks JSON NOT NULL, shown_order JSON NOT NULL, flags JSON NOT NULL,
    instructions_version VARCHAR NOT NULL, milliseconds INTEGER NOT NULL, client VARCHAR NOT NULL,
    created_at FLOAT NOT NULL, UNIQUE (task, labeler));
CREATE TRIGGER judgments_refuse_update BEFORE UPDATE ON judgments
    BEGIN SELECT RAISE(ABORT, 'judgments are append-only: UPDATE refused'); END;
CREATE TRIGGER judgments_refuse_delete BEFORE DELETE ON judgments
    BEGIN SELECT RAISE(ABORT, 'judgments are append-only: DELETE refused'); END;
"""


def test_a_store_from_before_the_migrations(tmp_path):
    path = tmp_path / "labels.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(FIRST_TABLES)
        prompt, responses, sources = (json.dumps(x) for x in ([["user", "Say a"]], ["a", "b"], ["sft", "sft"]))
        for number in (1, 2):
            values = (number, f"t{number}", "b", 2, prompt, responses, sources)
            connection.execute("INSERT INTO tasks VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        connection.execute("INSERT INTO leases VALUES (1, 'bob', 9e9)")
        judged = (1, 1, "ann", "[1, 2]", "[1, 0]", '["unclear"]', "3", 50, "page", 7.0)
        connection.execute(f"INSERT INTO judgments VALUES ({', '.join('?' * 10)})", judged)
    connection.close()
    with LabelStore(path) as store:
        (judgment,) = store.judgments("b")
        assert (judgment.labeler, judgment.ranks, judgment.note, judgment.revision) == ("ann", (1, 2), "unclear", 0)
        assert (judgment.milliseconds, judgment.created_at, judgment.kind) == (50, 7.0, "answer")
        assert store.progress("b") == Progress(num_tasks=2, num_judgments=1, num_open=2)
        assert store.lease("ann", seconds=60, batch="b").task_id == "t2"
        lease = store.lease("bob", seconds=60, batch="b")
        store.submit(lease, Answer((1, 2), 5), client="test", instructions_version="4")
        assert [ranking.labeler for ranking in store.rankings("b")] == ["ann", "bob"]
    with LabelStore(path) as store:
        assert len(store.judgments("b")) == 2


def test_a_new_store_has_the_tables_of_the_schema(empty_database):
    reader, _ = open_engines(empty_database())
    with reader.connect() as connection:
        found = compare_metadata(MigrationContext.configure(connection), metadata)
    reader.dispose()
    assert found == []


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


def test_a_store_of_a_newer_heed_is_refused(empty_database):
    url = empty_database()
    reader, writer = open_engines(url)
    with writer.begin() as connection:
        connection.execute(sqlalchemy.text("UPDATE alembic_version SET version_num = '9999'"))
    reader.dispose()
    with pytest.raises(ValueError, match="revision 9999, which this version of Heed does not know"):
        LabelStore(url)
