"""Starts a private PostgreSQL server in its own folder, if PostgreSQL's programs are installed."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("initdb", "postgres", "pg_isready", "createdb")
READY_SECONDS = 60.0


class PostgresServer:
    """A private server in its own folder, reachable by a socket in that folder and by no port.

    It uses PostgreSQL's default settings, so acknowledged writes are on disk.
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        self.programs, self.folder, self.num_databases = programs, folder, 0
        # PostgreSQL refuses to run as root.
        self.user = next(name for name in ("postgres", "nobody") if _exists(name)) if os.geteuid() == 0 else None
        if self.user is not None:
            shutil.chown(folder, self.user)
        self._run("initdb", "-D", str(folder / "data"), "-U", "heed", "--auth", "trust", "--no-sync")
        self.start()

    def start(self) -> None:
        self._launch()
        deadline = time.monotonic() + READY_SECONDS
        while self._run("pg_isready", "-h", str(self.folder), check=False) != 0:
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            if self.process.poll() is not None:  # a process that was killed may hold shared memory for a moment
                self._launch()
            time.sleep(0.05)

    def _launch(self) -> None:
        command = [str(self.programs / "postgres"), "-D", str(self.folder / "data"), "-k", str(self.folder), "-h", ""]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, user=self.user, cwd=self.folder)

    def kill(self) -> None:
        """Sends SIGKILL to the server and every process that it started."""
        children = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        for pid in (self.process.pid, *map(int, children)):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait()

    def new_database(self, template: str) -> str:
        """Creates a copy of a database, and returns its URL. `template1` is empty."""
        self.num_databases += 1
        name = f"labels{self.num_databases}"
        self._run("createdb", "-h", str(self.folder), "-U", "heed", "-T", template, name)
        return f"postgresql://heed@/{name}?host={self.folder}"

    def _run(self, program: str, *arguments: str, check: bool = True) -> int:
        command = [str(self.programs / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, user=self.user, cwd=self.folder, check=False)
        assert done.returncode == 0 or not check, done.stderr
        return done.returncode


def _exists(user: str) -> bool:
    return any(entry.pw_name == user for entry in pwd.getpwall())


def postgres_programs() -> Path | None:
    """Finds PostgreSQL's programs: on the PATH, or in Debian's folder per version."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if all((folder / name).exists() for name in PROGRAMS)), None)


@contextmanager
def running_postgres(programs: Path) -> Iterator[PostgresServer]:
    """Runs a server until the block ends, in a folder that other users may enter, with a path that fits a socket."""
    with tempfile.TemporaryDirectory(prefix="heed-pg-") as folder:
        server = PostgresServer(programs, Path(folder))
        try:
            yield server
        finally:
            server.stop()
