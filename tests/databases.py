"""Databases for the label store: SQLite files, and PostgreSQL's own server, started here where it is installed."""

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # most tests need no database, and the libraries take a second to load
    from benchmarks.postgres_server import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> "Iterator[PostgresServer]":
    from benchmarks.postgres_server import postgres_programs, running_postgres

    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL's server programs (initdb, postgres) are not installed")
    with running_postgres(programs) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Gives the URL of another empty database each time."""
    if request.param == "postgresql":
        server = request.getfixturevalue("postgres")
        return lambda: server.new_database("template1")
    paths = (f"sqlite:///{tmp_path / f'empty{number}.db'}" for number in range(1_000))
    return lambda: next(paths)


@pytest.fixture(params=["sqlite", "postgresql"])
def new_database(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Gives the URL of another database each time, its tables made. Migrating once saves most tests' time."""
    if request.param == "postgresql":
        server = request.getfixturevalue("postgres")
        template = request.getfixturevalue("postgres_tables")
        return lambda: server.new_database(template)
    source = request.getfixturevalue("sqlite_tables")
    paths = (tmp_path / f"labels{number}.db" for number in range(1_000))
    return lambda: f"sqlite:///{shutil.copy(source, next(paths))}"


@pytest.fixture
def cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are hashed with 1 MiB instead of 64 and once instead of three times: tests make and check hundreds."""
    import argon2

    from preferences import keys

    cheap = functools.partial(argon2.PasswordHasher, time_cost=1, memory_cost=1_024, parallelism=1)
    monkeypatch.setattr(keys, "PasswordHasher", cheap)


@pytest.fixture(scope="session")
def postgres_tables(postgres: "PostgresServer") -> str:
    from preferences.store import LabelStore

    url = postgres.new_database("template1")
    LabelStore(url).close()
    return url.partition("@/")[2].partition("?")[0]


class Clock:
    """Seconds since the epoch, as the test says."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()
