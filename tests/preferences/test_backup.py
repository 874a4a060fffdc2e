"""A backup is one file, made while labelers answer and restored to either database. It readmits nobody who has been
shut out since.
"""

import shutil
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from heed.cli import app
from preferences.accounts import AccountClosedError, Accounts
from preferences.backup import Restored, backup, restore
from preferences.database import open_engines, store_file
from preferences.records import Answer, Message, Task
from preferences.store import LabelStore

TASKS = [Task(f"t{n}", (Message("user", f"{n}\0?"),), ("a", "b"), ("x", "y"), details={"n": n}) for n in range(400)]
pytestmark = pytest.mark.usefixtures("cheap_hashes")


@pytest.fixture(params=["sqlite", "postgresql"])
def new_target(request: pytest.FixtureRequest, tmp_path: Path):
    """Returns a function that gives the address of a new place to restore to."""
    if request.param == "postgresql":
        server = request.getfixturevalue("postgres")
        return lambda: server.new_database("template1")
    paths = (tmp_path / "restored" / f"labels{number}.sqlite" for number in range(100))
    return lambda: str(next(paths))


class Answering(threading.Thread):
    """A labeler who answers until stopped, and records which answers were acknowledged."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(daemon=True)
        self.url, self.name = url, name
        self.acknowledged: dict[tuple[str, str], tuple[int, ...]] = {}
        self.is_over = threading.Event()

    def run(self) -> None:
        with LabelStore(self.url) as store:
            while not self.is_over.is_set() and (lease := store.lease(self.name, seconds=60, batch="main")):
                number = len(self.acknowledged)
                answer = Answer((1, 2) if number % 3 else (2, 1), number)
                store.submit(lease, answer, client="t", instructions_version="1")
                shown = dict(zip(lease.order, answer.ranks, strict=True))
                self.acknowledged[lease.task_id, self.name] = (shown[0], shown[1])


def stored_in(url: str) -> dict[tuple[str, str], tuple[int, ...]]:
    with LabelStore(url) as store:
        found = store.judgments("main")
        assert store.tasks("main")[7].task == TASKS[7]
    assert len({(one.task_id, one.labeler) for one in found}) == len(found)
    return {(one.task_id, one.labeler): one.ranks for one in found}


@pytest.mark.parametrize(
    ("new_database", "new_target"),
    [
        ("sqlite", "postgresql"),
        ("postgresql", "sqlite"),
        *(pytest.param(kind, kind, marks=pytest.mark.nightly) for kind in ("sqlite", "postgresql")),
    ],
    indirect=True,
)
def test_a_backup_under_load_has_every_acknowledged_answer(new_database, new_target, tmp_path):
    url = new_database()
    with LabelStore(url) as store:
        store.add_tasks(TASKS, batch="main", num_labelers=3)
    labelers = [Answering(url, name) for name in ("ann", "bob", "cy")]
    for labeler in labelers:
        labeler.start()
    before: list[dict[tuple[str, str], tuple[int, ...]]] = []
    try:
        for number in range(3):
            while sum(len(labeler.acknowledged) for labeler in labelers) < 40 * (number + 1):
                assert all(labeler.is_alive() for labeler in labelers)
            before.append({key: ranks for labeler in labelers for key, ranks in labeler.acknowledged.copy().items()})
            backup(url, tmp_path / f"{number}.sqlite")
        is_under_load = all(labeler.is_alive() for labeler in labelers)
    finally:
        for labeler in labelers:
            labeler.is_over.set()
        for labeler in labelers:
            labeler.join()
    assert is_under_load
    given = {key: ranks for labeler in labelers for key, ranks in labeler.acknowledged.items()}
    for number, acknowledged in enumerate(before):
        moved = tmp_path / "elsewhere" / f"{number}.sqlite"
        moved.parent.mkdir(exist_ok=True)
        shutil.move(tmp_path / f"{number}.sqlite", moved)  # the file alone is the backup
        target = new_target()
        restored = restore(moved, target)
        found = stored_in(target)
        assert (restored.num_tasks, restored.num_judgments) == (len(TASKS), len(found))
        assert acknowledged.items() <= found.items() <= given.items()
    with LabelStore(target) as store:  # the restored store is usable: numbers continue after the copied rows
        lease = store.lease("dan", seconds=60, batch="main")
        assert lease is not None
        store.submit(lease, Answer((1, 2), 1), client="t", instructions_version="1")
        store.add_tasks([Task("new", (Message("user", "?"),), ("a", "b"), ("x", "y"))], batch="more", num_labelers=1)
        assert len(store.judgments("main")) == len(found) + 1


def people_in(accounts: Accounts) -> dict[str, str]:
    return {account.name: account.state for account in accounts.all()}


def filled(url: str) -> dict[str, str]:
    """Fills a store with a lead and four labelers, each with one answer with a note. Returns their keys."""
    accounts, keys = Accounts(url), {}
    for name in ("lea", "ann", "bob", "cy", "dan"):
        accepted = accounts.accept(accounts.invite(name, "lead" if name == "lea" else "labeler"))
        assert accepted is not None
        keys[name] = accepted[1]
    with LabelStore(url) as store:
        store.add_tasks(TASKS[:9], batch="main", num_labelers=4)
        for name in ("ann", "bob", "cy", "dan"):
            lease = store.lease(name, seconds=60, batch="main")
            assert lease is not None
            store.submit(lease, Answer((1, 2), 1, note=f"note of {name}"), client="t", instructions_version="1")
    assert accounts.sign_in("bob", keys["bob"])
    accounts.invite("eve", "labeler", by="lea")
    accounts.close()
    return keys


def test_nobody_who_was_shut_out_since_the_backup_comes_back(new_database, new_target, tmp_path):
    url, old, newer = new_database(), tmp_path / "old.sqlite", tmp_path / "newer.sqlite"
    keys = filled(url)
    accounts = Accounts(url)
    token = accounts.sign_in("bob", keys["bob"])
    link = accounts.invite("fay", "labeler", by="lea")
    backup(url, old)
    accounts.erase("ann", by="lea")
    erased = accounts.audit_log()[0].subject
    accounts.set_state("bob", "closed", by="lea")
    accepted = accounts.accept(accounts.invite("cy", "labeler"))  # cy lost the key
    accounts.invite("ann", "labeler", by="lea")  # somebody new, with the same name
    accounts.revoke("fay", by="lea")
    backup(url, newer)
    events = accounts.audit_log()
    accounts.close()

    for current in (url, str(newer)):
        target = new_target()
        assert restore(old, target, current=current) == Restored(9, 4, 1, 1)
        restored = Accounts(target)
        assert people_in(restored) == {"lea": "new", "bob": "closed", "cy": "new", "dan": "new"}
        assert [restored.sign_in(name, keys[name]) for name in ("ann", "cy")] == [None, None]
        with pytest.raises(AccountClosedError):
            restored.sign_in("bob", keys["bob"])
        assert restored.sign_in("cy", accepted[1])
        assert restored.sign_in("dan", keys["dan"])
        assert (restored.session(token), restored.accept(link), restored.links()) == (None, None, [])
        assert restored.pseudonyms()["ann"] != erased
        assert (restored.audit_log()[0].action, restored.audit_log()[1:]) == ("restored", events)
        restored.close()
        with LabelStore(target) as store:
            assert {one.labeler: one.note for one in store.judgments("main")} == {
                erased: "", "bob": "note of bob", "cy": "note of cy", "dan": "note of dan",
            }  # fmt: skip
        path = store_file(target)
        if path is not None:
            assert b"note of ann" not in path.read_bytes()

    # If only an old backup is left of the store, nobody can sign in until a lead admits them.
    target = new_target()
    assert restore(old, target) == Restored(9, 4, 0, 5)
    restored = Accounts(target)
    assert set(people_in(restored).values()) == {"closed"}
    with pytest.raises(AccountClosedError):
        restored.sign_in("lea", keys["lea"])
    first = restored.invite_first_lead()
    assert first is not None
    assert restored.accept(first[1]) is not None
    restored.set_state("dan", "admitted", by=first[0])
    assert restored.sign_in("dan", keys["dan"])
    restored.close()


def test_a_current_store_that_is_older_or_another_is_refused(new_database, tmp_path):
    url, other = new_database(), new_database()
    filled(url)
    filled(other)
    backup(url, tmp_path / "old.sqlite")
    accounts = Accounts(url)
    accounts.erase("ann")
    accounts.close()
    backup(url, tmp_path / "new.sqlite")
    for current in (other, str(tmp_path / "old.sqlite")):
        with pytest.raises(ValueError, match="a later state of the store that the backup was made of was expected"):
            restore(tmp_path / "new.sqlite", tmp_path / "restored.sqlite", current=current)
        assert sorted(path.name for path in tmp_path.glob("*restored*")) == []


def test_backups_replace_nothing(new_database, tmp_path):
    url = new_database()
    filled(url)
    made = tmp_path / "made.sqlite"
    backup(url, made)
    content = made.read_bytes()
    with pytest.raises(ValueError, match=r"made.sqlite: already exists; a new path was expected"):
        backup(url, made)
    with pytest.raises(ValueError, match=r"already exists; a new path|has rows; an empty database was expected"):
        restore(made, store_file(url) or url)
    for end in ("-wal", "-journal"):  # of a store that was moved away without its log
        left = tmp_path / f"gone{end}.sqlite{end}"
        left.write_bytes(b"log")
        with pytest.raises(ValueError, match=rf"gone{end}.sqlite{end}: already exists"):
            restore(made, tmp_path / f"gone{end}.sqlite")
    assert made.read_bytes() == content
    reader, _ = open_engines(url)
    with reader.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM sessions").scalar() == 1
    reader.dispose()


def test_the_commands_say_what_they_did_in_one_line_each(tmp_path):
    store, out = tmp_path / "labels.sqlite", tmp_path / "backups" / "first.sqlite"
    filled(str(store))
    run = lambda *arguments: CliRunner().invoke(app, ["label", *map(str, arguments)])  # noqa: E731
    assert run("backup", "--store", store, "--out", out).output == f"9 tasks with 4 judgments in {out}\n"
    done = run("restore", out, "--store", tmp_path / "again.sqlite", "--current", store)
    assert done.output.splitlines() == [
        f"9 tasks with 4 judgments in {tmp_path / 'again.sqlite'}",
        "since the backup, 0 people were erased and 0 accounts closed",
    ]
    done = run("restore", out, "--store", tmp_path / "closed.sqlite")
    assert "all 5 accounts are closed" in done.output
    missing = run("restore", tmp_path / "none.sqlite", "--store", tmp_path / "other.sqlite")
    assert isinstance(missing.exception, ValueError | SystemExit)
    assert not (tmp_path / "other.sqlite").exists()
    strange = tmp_path / "strange.sqlite"
    import sqlite3

    sqlite3.connect(strange).execute("CREATE TABLE cats (name)").connection.close()
    with pytest.raises(ValueError, match=r"strange.sqlite: has no table 'accounts'; a label store was expected"):
        backup(strange, tmp_path / "strange-backup.sqlite")
