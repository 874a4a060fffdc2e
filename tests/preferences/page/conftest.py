"""A store with accounts, and the pages that it serves."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient

from benchmarks.label_client import LabelClient
from cluster.processes import free_port
from preferences.accounts import Accounts, Role
from preferences.page.app import listening, make_app, server_settings
from preferences.page.config import LabelingConfig
from preferences.records import Answer, Labeler, ShownTask, Skip, Task
from preferences.store import LabelStore

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).parent / "server.py"
READY_SECONDS = 90.0


def pytest_itemcollected(item: pytest.Item) -> None:
    """Pages and API do not know which database they serve; the store's own tests use both."""
    if "[postgresql" in item.name:
        item.add_marker(pytest.mark.nightly)


@pytest.fixture(autouse=True)
def _cheap_hashes(cheap_hashes: None) -> None:
    """In every test here."""


@dataclass
class World:
    """A store, its people with their keys, and a clock."""

    url: str
    clock: Any  # of tests/preferences/conftest.py
    store: LabelStore
    accounts: Accounts
    keys: dict[str, str] = field(default_factory=dict)

    def join(self, name: str, role: Role = "labeler") -> str:
        accepted = self.accounts.accept(self.accounts.invite(name, role))
        assert accepted is not None
        self.keys[name] = accepted[1]
        return accepted[1]

    def add(self, *tasks: Task, batch: str = "main", num_labelers: int = 1) -> None:
        self.store.add_tasks(tasks, batch=batch, num_labelers=num_labelers)


@pytest.fixture
def world(sqlite_tables: Path, tmp_path: Path, clock: Any) -> Iterator[World]:
    url = str(shutil.copy(sqlite_tables, tmp_path / "labels.db"))
    accounts = Accounts(url, clock=clock)
    with LabelStore(url, clock=clock) as store:
        made = World(url, clock, store, accounts)
        for name in ("ann", "bob"):
            made.join(name)
        made.join("eve", "lead")
        yield made
    accounts.close()


@pytest.fixture
def visit(world: World) -> Callable[..., TestClient]:
    """A browser without JavaScript, signed in; labelers have read the instructions."""

    def open_page(name: str, config: LabelingConfig | None = None, *, has_read: bool = True) -> TestClient:
        config = config or LabelingConfig(task_order="arrival")
        client = TestClient(make_app(world.store, world.accounts, config, clock=world.clock))
        client.post("/sign-in", data={"name": name, "key": world.keys[name]})
        if has_read:
            world.accounts.confirm_reading(name, config.version)
        return client

    return open_page


class Server:
    """A labeling server in a separate process."""

    def __init__(self, url: str, folder: Path, config: str = "asks_ratings = false\n") -> None:
        self.url, self.config, self.log = url, folder / "label.toml", folder / "server.log"
        self.config.write_text(config)
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, str(PROGRAM), self.url, str(self.port), str(self.config)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        log = self.log.open("ab")
        self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                httpx.get(f"{self.address}/sign-in")
                return
            except httpx.TransportError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(url: str, config: str = "asks_ratings = false\n") -> Server:
        server = Server(url, tmp_path, config)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.kill()


class ScriptedClock:
    """Seconds since the epoch, in whole milliseconds; only tests move it."""

    def __init__(self) -> None:
        self.milliseconds = 1_000_000_000

    def __call__(self) -> float:
        return (self.milliseconds + 0.5) / 1000  # half a millisecond, so that rounding never takes one off


@dataclass
class TakingTime:
    """A labeler whose judging takes the time that the answer says. They know a task by its id, as known labelers do."""

    labeler: Labeler
    clock: ScriptedClock
    store: LabelStore

    @property
    def name(self) -> str:
        return self.labeler.name

    def judge(self, shown: ShownTask) -> Answer | Skip:
        task_id = self.store.by_handle(self.name, shown.task_id).task_id
        said = self.labeler.judge(replace(shown, task_id=task_id))
        self.clock.milliseconds += said.milliseconds
        return said


class Running:
    """A labeling server on the loopback address, in a thread of this process; its clock stands but for `TakingTime`.

    Entered, it serves; people with their keys may join before. `around` wraps the application.
    """

    def __init__(
        self, url: str, config: LabelingConfig, *, port: int = 0, around: Callable[[Any], Any] = lambda app: app
    ) -> None:
        self.clock = ScriptedClock()
        self.store, self.accounts = LabelStore(url, clock=self.clock), Accounts(url, clock=self.clock)
        self.app = around(make_app(self.store, self.accounts, config, clock=self.clock))
        self.port, self.keys = port, dict[str, str]()

    def __enter__(self) -> "Running":
        settings = uvicorn.Config(self.app, host="127.0.0.1", port=self.port, log_level="warning", lifespan="off")
        self.server = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.address = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.accounts.close()
        self.store.close()

    def join(self, name: str, role: Role = "labeler") -> None:
        accepted = self.accounts.accept(self.accounts.invite(name, role))
        assert accepted is not None
        self.keys[name] = accepted[1]

    def client(self, labeler: Labeler) -> LabelClient:
        """Signs in and confirms the instructions."""
        client = LabelClient(self.address, TakingTime(labeler, self.clock, self.store), self.keys[labeler.name])
        client.confirm_reading()
        return client

    def get(self, name: str, path: str) -> Any:
        """Returns the API's reply to a person."""
        with httpx.Client(base_url=f"{self.address}/api", timeout=60) as client:
            token = client.post("/session", json={"name": name, "key": self.keys[name]}).json()["token"]
            return client.get(path, headers={"Authorization": f"Bearer {token}"}).json()


@pytest.fixture
def serve_app() -> Callable[[Any], tuple[str, Callable[[], None]]]:
    """Serves an application as `serve` does, in a thread of this process; returns its address and a stop function."""

    def run(app: Any) -> tuple[str, Callable[[], None]]:
        listener = listening("127.0.0.1", 0)
        server = uvicorn.Server(server_settings(app))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join()

        return f"http://127.0.0.1:{listener.getsockname()[1]}", stop

    return run


@pytest.fixture(scope="session")
def run_server() -> type[Running]:
    return Running
