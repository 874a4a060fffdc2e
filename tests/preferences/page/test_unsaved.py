"""A labeler's work survives failed saves: full disks, unreachable databases, server errors."""

import logging
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event

from preferences.accounts import Accounts
from preferences.page.app import make_app
from preferences.page.config import LabelingConfig
from preferences.records import Message, Task
from preferences.store import LabelStore
from tests.preferences.page.test_pages import form

RATED = LabelingConfig(task_order="arrival")
NOTE = "\n  two <b>lines</b>\nand " + "more, " * 300
SAID = {"rank_0": "2", "rank_1": "1", "rating_0": "3", "rating_1": "7", "flags_1": "hallucinates", "note": NOTE}


def make_task(name):
    return Task(name, (Message("user", f"Say {name}"),), (f"{name} says u", f"{name} says v"), ("u", "v"))


def require_kept(page, status=503):
    """Checks that the page shows everything entered and says that it was not saved. Returns the form to send again."""
    assert page.status_code == status, page.text
    assert "This was not saved, but nothing was lost" in page.text
    said = "Response A: rank 2, rating 3\nResponse B: rank 1, rating 7, hallucinates\nNote: \n  two &lt;b&gt;lines"
    assert said in page.text
    assert "Save again" in page.text
    return form(page)


class FullDisk:
    """A store whose disk can fill up: SQLite raises SQLITE_FULL by the file system or its own page limit."""

    def __init__(self, folder: Path) -> None:
        self.url, self.is_full = str(folder / "labels.db"), False
        self.ballast = folder / "ballast"

    def limit_pages(self, engine) -> None:
        @event.listens_for(engine, "checkout")
        def limit(connection, _record, _proxy):
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count = {pages if self.is_full else 2**30}")

    def fill(self) -> None:
        self.is_full = True

    def empty(self) -> None:
        self.is_full = False


class FullFileSystem(FullDisk):
    def limit_pages(self, engine) -> None:
        """Fills the file system."""

    def fill(self) -> None:
        with self.ballast.open("wb", buffering=0) as file:
            for size in (65_536, 4_096, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue

    def empty(self) -> None:
        self.ballast.unlink()


@contextmanager
def small_file_system(folder: Path):
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=False)
    if os.geteuid() != 0 or mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here: that takes root")
    try:
        yield FullFileSystem(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(params=["pages", "file system"])
def disk(request, tmp_path):
    if request.param == "pages":
        yield FullDisk(tmp_path)
    else:
        with small_file_system(tmp_path / "small") as found:
            yield found


@pytest.fixture
def visit(disk):
    """Signs somebody in at a server on the disk; `another()` is a second server on the same store."""
    accounts = Accounts(disk.url)
    with LabelStore(disk.url) as store:
        for one in (store, accounts):
            disk.limit_pages(one._reader)

        def sign_in(name, role="labeler"):
            accepted = accounts.accept(accounts.invite(name, role))
            accounts.confirm_reading(name, RATED.version)
            client = TestClient(make_app(store, accounts, RATED), raise_server_exceptions=False)
            client.post("/sign-in", data={"name": name, "key": accepted[1]})
            return client

        sign_in.store = store
        yield sign_in
    accounts.close()


def answer_until_full(client, disk, page):
    """Answers until the disk is full; returns how many were acknowledged, the open task's name and its page."""
    disk.fill()
    for done in range(200):
        name = f"t{done}"
        assert f"{name} says u" in page.text
        page = client.post("/task/answer", data=form(page) | SAID)
        if page.status_code != 200:
            return done, name, page
    raise AssertionError("the disk was never full")


def test_an_answer_outlives_a_full_disk(visit, disk, caplog):
    caplog.set_level(logging.CRITICAL)
    visit.store.add_tasks([make_task(f"t{n}") for n in range(200)], batch="main", num_labelers=1)
    ann = visit("ann")
    num_done, _, page = answer_until_full(ann, disk, ann.get("/task"))
    fields = require_kept(page)
    assert page.headers["retry-after"]
    fields = require_kept(ann.post("/task/answer", data=fields))  # again, and still full
    assert len(visit.store.judgments("main")) == num_done
    disk.empty()
    page = ann.post("/task/answer", data=fields)
    assert f"t{num_done + 1} says u" in page.text
    assert "Not saved" not in page.text
    assert ann.post("/task/answer", data=fields).status_code == 200  # once more: it is stored once
    acts = visit.store.judgments("main")
    assert [act.task_id for act in acts] == [f"t{n}" for n in range(num_done + 1)]
    assert (acts[-1].note, sorted(acts[-1].ratings)) == (NOTE.strip(), [3, 7])


def test_a_skip_outlives_a_full_disk(visit, disk, caplog):
    caplog.set_level(logging.CRITICAL)
    visit.store.add_tasks([make_task(f"t{n}") for n in range(200)], batch="main", num_labelers=1)
    ann = visit("ann")
    num_done, _, page = answer_until_full(ann, disk, ann.get("/task"))
    fields = form(page) | {"reason": "not “my” field" + "!" * 300}
    page = ann.post("/task/skip", data=fields)
    if page.status_code != 200:  # a skip is shorter than an answer, so there may be room for it
        assert (page.status_code, form(page, "/task/skip")["reason"]) == (503, fields["reason"])
        disk.empty()
        page = ann.post("/task/skip", data=fields)
    assert f"t{num_done + 1} says u" in page.text
    assert visit.store.judgments("main")[-1].note == fields["reason"]


def test_an_error_of_the_server_loses_nothing_either(visit, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    visit.store.add_tasks([make_task("t0"), make_task("t1")], batch="main", num_labelers=1)
    ann = visit("ann")
    fields = form(ann.get("/task")) | SAID
    with monkeypatch.context() as patch:
        patch.setattr(visit.store, "submit", lambda *_, **__: 1 / 0)
        fields = require_kept(ann.post("/task/answer", data=fields), status=500)
    assert "t1 says u" in ann.post("/task/answer", data=fields).text


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_answer_outlives_an_outage_of_postgresql(postgres, postgres_tables, serve):
    """The database is killed and comes back while the server runs: pages say so, and the form is stored once."""
    url = postgres.new_database(postgres_tables)
    accounts = Accounts(url)
    with LabelStore(url) as store:
        store.add_tasks([make_task("t0"), make_task("t1")], batch="main", num_labelers=1)
        _, key = accounts.accept(accounts.invite("ann", "labeler"))
        accounts.confirm_reading("ann", RATED.version)
        server = serve(url, 'task_order = "arrival"\n')
        with httpx.Client(base_url=server.address, follow_redirects=True, timeout=60) as ann:
            ann.post("/sign-in", data={"name": "ann", "key": key})
            fields = form(ann.get("/task")) | SAID
            postgres.kill()
            try:
                again = require_kept(ann.post("/task/answer", data=fields))
                away = ann.get("/task")
                assert (away.status_code, "What was stored is safe" in away.text) == (503, True)
                assert ann.post("/api/lease", headers={"Authorization": "Bearer x"}).status_code == 503
            finally:
                postgres.start()
            page = ann.post("/task/answer", data=again)
            assert "t1 says u" in page.text
            assert ann.post("/task/answer", data=again).status_code == 200
        assert [act.task_id for act in store.judgments("main")] == ["t0"]
    accounts.close()
