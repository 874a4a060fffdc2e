"""Opening the label store's database: a SQLite file, or PostgreSQL by its URL."""

import hashlib
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DatabaseError, InterfaceError, InternalError, OperationalError, TimeoutError

from files.atomic import on_network

BUSY_TIMEOUT_MILLISECONDS = 30_000
POOL_SIZE = 8
MAX_CHECKED_BYTES = 2 * 2**30  # files up to this size are checked at each start, which takes some seconds
_BEGIN = "heed_begin"
_MIGRATING = 7_243_001  # key of the migration's advisory lock; any number that only Heed uses
OLDEST_REVISION = "0009"  # earlier ones, and tables without a revision, are not read
FIRST_MIGRATION = "0017"  # the rows of earlier stores, which unreleased versions wrote, are copied


class StoreClosedError(ValueError):
    """The store cannot be opened: its database is locked, unreachable or refuses. Trying again later may succeed."""

    def __init__(self, message: str, orig: BaseException | None) -> None:
        """`orig` is the database's own error, as in SQLAlchemy's errors."""
        super().__init__(message)
        self.orig = orig


# The disk is full, or the database is locked, unreachable or refuses: trying again later may succeed.
STORE_AWAY = (OperationalError, InterfaceError, InternalError, TimeoutError, StoreClosedError)


def reason_of(error: Exception) -> str:
    """Returns the database's message in one line. SQLAlchemy's would include the statement, and so people's texts."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def open_engines(url_or_path: str | Path) -> tuple[Engine, Engine]:
    """Opens the database, and creates or updates its tables. Returns (reader, writer) engines over one pool.

    On SQLite the writer's transactions start with BEGIN IMMEDIATE, because a deferred transaction that switches from
    reading to writing may fail with SQLITE_BUSY immediately, whatever the busy_timeout.

    Raises: StoreClosedError for a database that is locked or unreachable; ValueError for an unsupported one, and for
    one that a newer or an unreleased version of Heed has written.
    """
    url = _database_url(url_or_path)
    if url.get_backend_name() == "postgresql":
        engine = create_engine(url, pool_size=POOL_SIZE, pool_pre_ping=True, hide_parameters=True)
        _open(engine)
        return engine, engine
    assert url.database is not None, "a SQLite store has a path"
    Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    reader = create_engine(url, pool_size=POOL_SIZE, hide_parameters=True)  # labels stay out of logs
    journal = "DELETE" if on_network(Path(url.database)) else "WAL"
    event.listen(reader, "connect", lambda connection, _record: _configure_connection(connection, journal))
    event.listen(reader, "begin", _begin)
    writer = reader.execution_options(**{_BEGIN: "IMMEDIATE"})
    _open(writer)
    return reader, writer


def _open(engine: Engine) -> None:
    """Migrates the database. These are the first statements sent to it, so an unusable database fails here."""
    try:
        migrate(engine)
    except DatabaseError as error:
        engine.dispose()
        if type(error) not in (DatabaseError, OperationalError):
            raise  # our own mistake, not the database's or its address's
        reason = str(error.orig).strip().partition("\n")[0]
        message = f"label store {engine.url.render_as_string()} cannot be opened: {reason}"
        if type(error) is OperationalError:
            raise StoreClosedError(message, error.orig) from error
        raise ValueError(message) from error


def require_store(url_or_path: str | Path, hint: str = "") -> None:
    """Checks that a SQLite store exists and is undamaged; creates nothing.

    Raises: ValueError if the file is missing or empty, with `hint` (how to create a store), or if it is damaged.
    """
    path = store_file(url_or_path)
    if path is None:
        return
    if not path.is_file():
        raise ValueError(f"label store {str(path)!r}: there is no such file{hint}")
    if not path.stat().st_size:
        raise ValueError(f"label store {str(path)!r}: the file is empty{hint}")
    _require_sound(path)


def create_or_check(url_or_path: str | Path) -> str:
    """Like `require_store`, but for a missing file returns the notice to print once the store is created, else "".

    An empty file counts as missing: SQLite makes a database of it.
    """
    path = store_file(url_or_path)
    if path is None or (path.exists() and path.stat().st_size):
        require_store(url_or_path)
        return ""
    return f"created a new label store at {path}"


def store_file(url_or_path: str | Path) -> Path | None:
    """Returns the file of a SQLite store, or None for a database server."""
    url = _database_url(url_or_path)
    return Path(url.database or "") if url.get_backend_name() == "sqlite" else None


def _require_sound(path: Path) -> None:
    """Raises: ValueError for a file that is not a SQLite database, or whose pages are damaged."""
    if path.stat().st_size > MAX_CHECKED_BYTES:
        return  # it would take minutes; run PRAGMA quick_check in SQLite's shell instead
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_MILLISECONDS / 1_000)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as error:
        raise ValueError(f"label store {str(path)!r} cannot be read: {error}") from error
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
            raise ValueError(f"{path}: not a SQLite database; a label store was expected") from error
        found = str(error)
    if found != "ok":
        raise ValueError(
            f"label store {str(path)!r} is damaged: {found}; a backup of it was expected".replace("\n", " ")
        )


def place_of(url_or_path: str | Path) -> int:
    """Returns a number that stands for the place of a SQLite store, its path and inode; 0 for a database server.

    A copy has another inode, unless it is on another file system and by chance, and another path, unless a disk image
    was copied as a whole.
    """
    path = store_file(url_or_path)
    if path is None:
        return 0
    return int.from_bytes(hashlib.sha256(f"{path.resolve()}\0{path.stat().st_ino}".encode()).digest()[:4]) >> 1 or 1


def require_locks(folder: Path) -> None:
    """Checks that SQLite can lock and write a database in a folder.

    Raises: ValueError if its file system has no locks.
    """
    with TemporaryDirectory(dir=folder, prefix=".locks-") as temporary:
        path = Path(temporary) / "locks.sqlite"
        try:
            with closing(sqlite3.connect(path, timeout=1.0, isolation_level=None)) as connection:
                connection.execute("BEGIN EXCLUSIVE")
                connection.execute("CREATE TABLE locks (held)")
                connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise ValueError(
                f"{folder}: labels cannot be stored there: {error}; a file system on which SQLite can lock files was"
                " expected (Lustre: mounted with -o flock; NFS: with its lock service)"
            ) from None


def migrate(engine: Engine) -> None:
    """Upgrades the database to the newest revision, one process at a time, in one transaction.

    Raises: ValueError for a revision that this version does not know.
    """
    from alembic import command  # takes half a second, so import it only when a store is opened
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    scripts = ScriptDirectory.from_config(config)
    newest = scripts.get_current_head()
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATING})"))
        config.attributes["connection"] = connection
        found = MigrationContext.configure(connection).get_current_revision()
        if found == newest:
            return
        store = f"label store {engine.url.render_as_string()}"
        is_unreleased = found < FIRST_MIGRATION if found else inspect(connection).has_table("tasks")
        if is_unreleased and (not found or found < OLDEST_REVISION or engine.dialect.name != "sqlite"):
            raise ValueError(
                f"{store}: an unreleased version of Heed wrote it (revision {found or 'none'}); this version opens"
                f" revision {OLDEST_REVISION} and later in SQLite, {FIRST_MIGRATION} and later in PostgreSQL. Export it"
                " with the version that wrote it (heed label export --names), and import that file into a new store"
            )
        if is_unreleased:
            _copy_from_unreleased(connection, lambda: command.upgrade(config, "head"))
            return
        if found is not None and found not in {script.revision for script in scripts.walk_revisions()}:
            raise ValueError(
                f"{store}: its tables have revision {found}, which this version of Heed does not know (its newest is"
                f" {newest}); a newer Heed has written it"
            )
        command.upgrade(config, "head")


def _copy_from_unreleased(connection: Connection, create_tables: Callable[[], None]) -> None:
    """Creates new tables in a SQLite store, and moves the rows of the old ones there.

    Columns that the old tables lack have defaults; what is computed from the rows is computed again.
    """
    from preferences import adjudication, search
    from preferences.rows import parts
    from preferences.schema import metadata, tasks

    connection.exec_driver_sql("DROP TABLE IF EXISTS task_words")
    objects = "SELECT type, name FROM sqlite_master WHERE sql <> '' AND name NOT LIKE 'sqlite%' ORDER BY rowid DESC"
    found = connection.execute(text(objects)).all()
    for kind, name in found:
        if kind != "table":
            connection.exec_driver_sql(f"DROP {kind} {name}")
    old = [name for kind, name in found if kind == "table"]  # each before the tables that it refers to
    for name in old:
        connection.exec_driver_sql(f"ALTER TABLE {name} RENAME TO old_{name}")
    create_tables()
    for table in metadata.sorted_tables:
        if table.name in old:
            known = {column["name"] for column in inspect(connection).get_columns(f"old_{table.name}")}
            names = ", ".join(f'"{column.name}"' for column in table.columns if column.name in known)
            rows = f"SELECT {names} FROM old_{table.name} ORDER BY rowid"
            connection.exec_driver_sql(f"INSERT INTO {table.name} ({names}) {rows}")
    for name in old:
        connection.exec_driver_sql(f"DROP TABLE old_{name}")
    if "task_texts" not in old:
        positions = list(connection.scalars(select(tasks.c.position)))
        for part in parts(positions):
            stored = select(tasks.c.position, tasks.c.prompt, tasks.c.responses).where(tasks.c.position.in_(part))
            search.index_texts(connection, [(row[0], row[1], row[2]) for row in connection.execute(stored)])
        adjudication.refresh(connection, positions)


def _database_url(url_or_path: str | Path) -> URL:
    given = str(url_or_path)
    url = make_url(given) if "://" in given else URL.create("sqlite", database=given)
    if url.get_backend_name() == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() != "sqlite":
        raise ValueError(
            f"label store: {url.render_as_string()!r} is neither SQLite nor PostgreSQL; a file path, sqlite:/// or"
            " postgresql:// expected"
        )
    if not url.database or url.database == ":memory:":
        raise ValueError("label store: a database in memory would lose its labels; a file path was expected")
    return url


def _configure_connection(connection: sqlite3.Connection, journal: str) -> None:
    connection.isolation_level = None  # SQLAlchemy's begin event starts the transactions, not the driver
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MILLISECONDS}")
    # A file system that cannot have a write-ahead log keeps the rollback journal, which is safe too, but slower.
    cursor.execute(f"PRAGMA journal_mode = {journal}")
    # FULL syncs the log at each commit, so an acknowledged label survives a power cut; NORMAL would not.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin(connection: Connection) -> None:
    mode = connection.get_execution_options().get(_BEGIN, "DEFERRED")
    connection.exec_driver_sql(f"BEGIN {mode}")
