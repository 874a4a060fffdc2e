"""The label store's tables, and how its database is opened.

tasks      one row a task, in order of arrival; the content never changes
leases     who is working on what, until when; rows come and go
judgments  one row an answer, append-only: triggers refuse UPDATE and DELETE
"""

import sqlite3
from pathlib import Path

from sqlalchemy import (
    DDL,
    JSON,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    UniqueConstraint,
    create_engine,
    event,
)
from sqlalchemy.engine import URL, make_url

BUSY_TIMEOUT_MILLISECONDS = 30_000
_BEGIN = "heed_begin"

metadata = MetaData()

tasks = Table(
    "tasks",
    metadata,
    Column("position", Integer, primary_key=True),  # order of arrival
    Column("task_id", String, nullable=False, unique=True),
    Column("batch", String, nullable=False),
    Column("num_labelers", Integer, nullable=False),  # how many distinct labelers are wanted
    Column("prompt", JSON, nullable=False),  # [[role, content], ...]
    Column("responses", JSON, nullable=False),
    Column("sources", JSON, nullable=False),
    Index("tasks_by_batch", "batch", "position"),
)

leases = Table(
    "leases",
    metadata,
    Column("task", ForeignKey("tasks.position"), nullable=False),
    Column("labeler", String, nullable=False),
    Column("expires_at", Float, nullable=False),  # seconds since the epoch
    PrimaryKeyConstraint("task", "labeler"),
    Index("leases_by_labeler", "labeler"),
)

judgments = Table(
    "judgments",
    metadata,
    Column("judgment_id", Integer, primary_key=True),
    Column("task", ForeignKey("tasks.position"), nullable=False),
    Column("labeler", String, nullable=False),
    Column("ranks", JSON, nullable=False),  # in canonical order, dense, 1 is best
    Column("shown_order", JSON, nullable=False),  # shown_order[i]: canonical index of the response shown at place i
    Column("flags", JSON, nullable=False),
    Column("instructions_version", String, nullable=False),
    Column("milliseconds", Integer, nullable=False),
    Column("client", String, nullable=False),
    Column("created_at", Float, nullable=False),  # seconds since the epoch
    # Also the index that finds a task's judgments.
    UniqueConstraint("task", "labeler"),
)

for _verb in ("UPDATE", "DELETE"):
    _trigger = DDL(  # type: ignore[no-untyped-call]
        f"CREATE TRIGGER judgments_refuse_{_verb.lower()} BEFORE {_verb} ON judgments "
        f"BEGIN SELECT RAISE(ABORT, 'judgments are append-only: {_verb} refused'); END"
    )
    event.listen(judgments, "after_create", _trigger.execute_if(dialect="sqlite"))


def open_engines(url_or_path: str | Path) -> tuple[Engine, Engine]:
    """Open (and where it is new, create) the database; returns (reader, writer) over one connection pool.

    The writer's transactions start with BEGIN IMMEDIATE: a deferred transaction that turns from reading to writing
    is refused with SQLITE_BUSY at once, whatever the busy_timeout.

    Raises ValueError for a database other than a SQLite file.
    """
    url = _database_url(url_or_path)
    reader = create_engine(url)
    event.listen(reader, "connect", _configure_connection)
    event.listen(reader, "begin", _begin)
    writer = reader.execution_options(**{_BEGIN: "IMMEDIATE"})
    with writer.begin() as connection:
        metadata.create_all(connection)
    return reader, writer


def _database_url(url_or_path: str | Path) -> URL:
    text = str(url_or_path)
    url = make_url(text) if "://" in text else URL.create("sqlite", database=text)
    if url.get_backend_name() != "sqlite":
        raise ValueError(f"label store: {url.render_as_string()!r} is not SQLite; a file path or sqlite:/// expected")
    if not url.database or url.database == ":memory:":
        raise ValueError("label store: a database in memory would lose its labels; a file path was expected")
    Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    return url


def _configure_connection(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # SQLAlchemy's begin event starts transactions, not the driver
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MILLISECONDS}")
    (journal_mode,) = cursor.execute("PRAGMA journal_mode = WAL").fetchone()
    assert journal_mode == "wal", f"journal_mode is {journal_mode!r}, not 'wal': is the file system a network share?"
    # FULL syncs the log at each commit, so an acknowledged label survives a power cut; NORMAL would not.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin(connection: Connection) -> None:
    mode = connection.get_execution_options().get(_BEGIN, "DEFERRED")
    connection.exec_driver_sql(f"BEGIN {mode}")
