"""Backups of a label store, and restoring one.

A backup is one SQLite file, whichever database holds the store. It is the snapshot of a single transaction, so it can
be taken while labelers answer. `restore` makes a new store from it, in SQLite or PostgreSQL, and never writes to an
existing one.

Restoring an old backup must not readmit people who were shut out after it was made. So a backup holds no sessions and
no one-time links, and accounts, closures and erasures come from `current`: the store in its latest state, or a newer
backup of it. Without `current`, nobody can know who was shut out, so every account comes back closed until a lead
admits it.
"""

import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sqlalchemy import Connection, Engine, delete, func, insert, select, update

from files.atomic import PREFIX, atomic_file
from preferences import personal_data
from preferences.database import open_engines, require_store, store_file
from preferences.names import COMMAND_LINE
from preferences.schema import (
    accounts,
    audit_log,
    invitations,
    judgments,
    labelers,
    metadata,
    questions,
    sessions,
    tasks,
)

ROWS_AT_ONCE = 1_000
_LEFT_OUT = (sessions, invitations)
_COUNTED = {
    tasks.name: tasks.c.position,
    judgments.name: judgments.c.judgment_id,
    audit_log.name: audit_log.c.act_id,
    questions.name: questions.c.message_id,
}


@dataclass(frozen=True)
class Restored:
    """What a restored store holds. `num_erased` and `num_closed` count people shut out since the backup.

    If no current store was given, `num_closed` counts all accounts.
    """

    num_tasks: int
    num_judgments: int
    num_erased: int
    num_closed: int


def backup(url_or_path: str | Path, out: Path) -> tuple[int, int]:
    """Writes a store's backup to a new file. Returns the numbers of tasks and judgments in it.

    Raises: ValueError for a path that exists, a missing or damaged store, and a file that is not a label store.
    """
    _require_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _new_file(out) as path:
        _snapshot(url_or_path, path)
        with closing(sqlite3.connect(path)) as connection:
            count = "SELECT (SELECT count(*) FROM tasks), (SELECT count(*) FROM judgments)"
            num_tasks, num_judgments = connection.execute(count).fetchone()
    return num_tasks, num_judgments


def restore(path: Path, url_or_path: str | Path, *, current: str | Path = "") -> Restored:
    """Makes a new store from a backup. `current` is the latest state of the store, or a newer backup; "" if neither is
    left.

    Raises: ValueError for a target that is not new, a missing or damaged backup, and a `current` that is not a later
    state of the same store.
    """
    target = store_file(url_or_path)
    if target is not None:
        _require_new(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _new_file(target) as file:
            return _prepare(path, file, current)
    with TemporaryDirectory(prefix="heed-restore-") as folder, _opened(url_or_path) as target_engine:
        prepared = Path(folder) / "store.sqlite"
        restored = _prepare(path, prepared, current)
        with _opened(prepared) as engine, engine.connect() as source, target_engine.begin() as connection:
            _require_empty(connection, url_or_path)
            _copy_rows(source, connection)
            for table, number in _COUNTED.items():  # so that the next row gets a number above all copied ones
                sequence = func.pg_get_serial_sequence(table, number.name)
                newest = select(func.max(number)).scalar_subquery()
                connection.execute(select(func.setval(sequence, func.coalesce(newest, 1), newest.is_not(None))))
    return restored


# ---- snapshots ----


def _snapshot(url_or_path: str | Path, out: Path) -> None:
    """Copies a consistent snapshot of a store into a SQLite file, without sessions and links."""
    require_store(url_or_path)
    source = store_file(url_or_path)
    if source is None:
        with _opened(url_or_path) as engine, _opened(out) as target_engine, target_engine.begin() as target:
            snapshot = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
            with engine.connect().execution_options(**snapshot) as connection:
                _copy_rows(connection, target)
    else:
        with closing(sqlite3.connect(source)) as opened, closing(sqlite3.connect(out)) as copy:
            found = {name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            missing = sorted({*metadata.tables, "alembic_version"} - found)  # opening the copy would add them
            if missing:
                raise ValueError(f"{source}: has no table {missing[0]!r}; a label store was expected")
            opened.backup(copy)
            copy.execute("PRAGMA secure_delete = ON")
            for table in _LEFT_OUT:
                copy.execute(f"DELETE FROM {table.name}")
            copy.execute("PRAGMA user_version = 0")  # not served yet
            copy.commit()
    _close_file(out)


def _copy_rows(source: Connection, target: Connection) -> None:
    """Copies all tables except sessions and links into the empty tables of `target`."""
    for table in metadata.sorted_tables:
        if table in _LEFT_OUT:
            continue
        rows = source.execute(select(table), execution_options={"yield_per": ROWS_AT_ONCE}).mappings()
        for part in rows.partitions():
            target.execute(insert(table), [dict(row) for row in part])


@contextmanager
def _opened(url_or_path: str | Path) -> Iterator[Engine]:
    reader, writer = open_engines(url_or_path)
    try:
        yield writer
    finally:
        reader.dispose()


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yields a path in a temporary folder, because SQLite creates more files next to it; then moves it to `path`."""
    with TemporaryDirectory(prefix=PREFIX, dir=path.parent) as folder:
        made = Path(folder) / "store.sqlite"
        yield made
        with atomic_file(path) as temporary:
            shutil.move(made, temporary)


def _close_file(path: Path) -> None:
    """Moves the write-ahead log into the file, so that the file alone is the whole store."""
    with closing(sqlite3.connect(path)) as connection:
        (mode,) = connection.execute("PRAGMA journal_mode = DELETE").fetchone()
        assert mode == "delete", f"journal_mode is {mode!r}, not 'delete': is the file still open?"


def _require_new(path: Path) -> None:
    """Raises: ValueError if the file exists, or a log of a former store, which SQLite would replay into this one."""
    for found in (path, *(path.with_name(path.name + end) for end in ("-wal", "-journal"))):
        if found.exists():
            raise ValueError(f"{found}: already exists; a new path was expected")


def _require_empty(connection: Connection, url_or_path: str | Path) -> None:
    for table in metadata.sorted_tables:
        if connection.scalar(select(func.count()).select_from(table)):
            raise ValueError(f"label store {url_or_path}: table {table.name} has rows; an empty database was expected")


# ---- people ----


def _prepare(path: Path, out: Path, current: str | Path) -> Restored:
    """Copies a backup to `out` and shuts out everybody who was shut out since it was made."""
    _snapshot(path, out)
    with _opened(out) as engine:
        with engine.begin() as connection:
            if current:
                with TemporaryDirectory(prefix=PREFIX, dir=out.parent) as folder:
                    latest = Path(folder) / "current.sqlite"
                    _snapshot(current, latest)
                    with _opened(latest) as latest_engine, latest_engine.connect() as people:
                        num_erased, num_closed = _take_people(connection, people, f"label store {current}")
            else:
                num_erased, num_closed = 0, connection.execute(update(accounts).values(state="closed")).rowcount
            event = {"actor": COMMAND_LINE, "act": "restored", "subject": path.name, "created_at": time.time()}
            connection.execute(insert(audit_log).values(event))
            num_tasks, num_judgments = (
                connection.scalar(select(func.count()).select_from(table)) or 0 for table in (tasks, judgments)
            )
        personal_data.purge(engine)
    _close_file(out)
    return Restored(num_tasks, num_judgments, num_erased, num_closed)


def _take_people(connection: Connection, people: Connection, where: str) -> tuple[int, int]:
    """Repeats erasures, and takes accounts and the audit log from `people`, a later state of the same store.

    Returns how many people were erased, and how many accounts closed, since the backup.

    Raises: ValueError, beginning with `where`, if `people` is not a later state.
    """
    known = {row.pseudonym: row for row in connection.execute(select(labelers))}
    latest = {row.pseudonym: row for row in people.execute(select(labelers))}
    newest = connection.execute(select(audit_log).order_by(audit_log.c.act_id.desc()).limit(1)).one_or_none()
    is_later = all(name in latest and latest[name].is_erased >= row.is_erased for name, row in known.items())
    if newest is not None:
        same = people.execute(select(audit_log).where(audit_log.c.act_id == newest.act_id)).one_or_none()
        is_later = is_later and same == newest
    if not is_later:
        raise ValueError(f"{where}: a later state of the store that the backup was made of was expected")
    erased = [row for name, row in known.items() if latest[name].is_erased and not row.is_erased]
    for row in erased:
        personal_data.erase(connection, row.name)
    was_open = set(connection.scalars(select(accounts.c.name).where(accounts.c.state != "closed")))
    connection.execute(delete(accounts))
    later_events = select(audit_log) if newest is None else select(audit_log).where(audit_log.c.act_id > newest.act_id)
    for table, rows in (
        (labelers, [row for name, row in latest.items() if name not in known]),
        (accounts, people.execute(select(accounts)).all()),
        (audit_log, people.execute(later_events).all()),
    ):
        if rows:
            connection.execute(insert(table), [dict(row._mapping) for row in rows])
    now_closed = select(accounts.c.name).where(accounts.c.state == "closed")
    return len(erased), len(was_open.intersection(connection.scalars(now_closed)))
