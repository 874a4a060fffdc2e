"""The server as a process, and the command lines for links: what they say, and what they refuse in one line."""

import random
import re
import shutil
import socket
import sqlite3
import time
from contextlib import closing

import httpx
import pytest

from preferences.accounts import Accounts
from preferences.backup import backup
from preferences.database import place_of, require_store
from preferences.page.app import make_app
from preferences.page.app import serve as serve_store
from preferences.page.config import LabelingConfig
from preferences.page.site import COOKIE
from preferences.records import Message, Task
from preferences.store import LabelStore


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch, tmp_path):
    """Runs commands in an empty folder, with wide lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")


def links_in(text):
    return re.findall(r"http://127.0.0.1:\d+(/welcome/\S+)", text)


def test_every_start_leaves_one_link_for_the_first_lead(new_database, serve):
    url = new_database()
    server = serve(url)
    server.kill()
    server.start()
    server.kill()
    server.start()
    printed = links_in(server.log.read_text())
    assert len(printed) == 3
    with httpx.Client(base_url=server.address, timeout=60) as client:
        assert [client.get(link).status_code for link in printed] == [410, 410, 200]
        assert "Your key" in client.post(printed[-1]).text
    server.kill()
    server.start()
    assert len(links_in(server.log.read_text())) == 3  # somebody leads


def test_a_store_that_is_made_and_a_batch_that_is_missing_are_named(tmp_path, serve):
    path = tmp_path / "new" / "labels.sqlite"
    server = serve(str(path), 'batches = ["nope"]')
    server.kill()
    server.start()
    assert server.log.read_text().count(f"created a new label store at {path}") == 1
    assert server.log.read_text().count("that the store does not have: 'nope'; it has none yet.") == 2


def test_a_copied_store_revives_no_session_and_no_link_and_says_so(world, tmp_path, serve):
    accounts, copy = Accounts(world.url), tmp_path / "copy.sqlite"
    code, token = accounts.invite("cy", "labeler"), accounts.open_session("ann")
    for _ in range(2):  # two starts of the server
        assert accounts.end_access_of_copies(place_of(world.url)) == -1
    with closing(sqlite3.connect(world.url)) as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(world.url, copy)
    accounts.set_state("bob", "closed")
    assert accounts.session(token).name == "ann"
    accounts.close()
    copied = Accounts(copy)  # what a plain copy holds before a server opens it
    assert copied.session(token).name == "ann"
    assert [link.name for link in copied.links()] == ["cy"]
    server = serve(str(copy))
    said = "warning: this store was copied or moved since it was last served: 2 sessions and unused links have ended"
    assert server.log.read_text().startswith(said)
    assert httpx.get(f"{server.address}/answers", headers={"Cookie": f"{COOKIE}={token}"}).status_code == 303
    assert httpx.get(f"{server.address}/welcome/{code}").status_code == 410
    assert copied.account("bob").state == "new"  # as the warning says
    assert copied.end_access_of_copies(place_of(copy)) == -1  # it is served there now
    copied.close()
    backup(copy, tmp_path / "backup.sqlite")  # has none, and was not served
    restored = Accounts(tmp_path / "backup.sqlite")
    assert restored.end_access_of_copies(place_of(tmp_path / "backup.sqlite")) == -1
    restored.close()


def test_a_port_that_is_taken(heed_label, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, out, err = heed_label("serve", "--new", "--store", "labels.sqlite", "--port", port)
    assert (code, out) == (2, "")
    assert f"--port is {port}" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    code, _, err = heed_label("serve", "--new", "--store", "labels.sqlite", "--host", "192.0.2.1")
    assert (code, "--host is '192.0.2.1'" in err) == (2, True)


@pytest.mark.parametrize("command", [("serve",), ("invite", "ann"), ("erase", "ann"), ("export", "--out", "x.jsonl")])
def test_a_store_that_is_not_there_is_refused_and_not_made(heed_label, tmp_path, command):
    code, out, err = heed_label(*command, "--store", "away/labels.sqlite")
    assert (code, out, "there is no such file" in err) == (2, "", True)
    assert ("or --new to create one" in err) == (command == ("serve",))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty.sqlite").touch()
    code, out, err = heed_label(*command, "--store", "empty.sqlite")
    assert (code, out, "'empty.sqlite': the file is empty" in err) == (2, "", True)
    assert (tmp_path / "empty.sqlite").stat().st_size == 0


def make_store(path):
    with LabelStore(path) as store:
        tasks = [Task(f"t{n}", (Message("user", "?"),), ("a" * 2_000, "b" * 2_000), ("x", "y")) for n in range(500)]
        store.add_tasks(tasks, batch="main", num_labelers=2)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def no_database(path):
    path.write_text("these are no labels\n" * 1_000)


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def overwritten(path):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200_000] = random.Random(0).randbytes(200_000)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_database, "labels.sqlite: not a SQLite database; a label store was expected"),
        (cut, "labels.sqlite' is damaged"),
        (overwritten, "labels.sqlite' is damaged"),
    ],
)
def test_a_damaged_store_is_one_line(heed_label, tmp_path, damage, words):
    path = tmp_path / "labels.sqlite"
    make_store(path)
    require_store(path)
    damage(path)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    for command in (("serve", "--port", port), ("invite", "ann"), ("export", "--out", "x.jsonl")):
        code, out, err = heed_label(*command, "--store", "labels.sqlite")
        assert (code, out) == (2, "")
        assert words in err
        assert "Traceback" not in err
        assert err.count("\n") == 1


def test_a_database_server_that_is_away_is_one_line(heed_label):
    url = "postgresql://somebody:secret@127.0.0.1:1/labels"
    code, out, err = heed_label("erase", "ann", "--store", url)
    assert (code, out, "cannot be opened" in err, "secret" in err) == (2, "", True, False)


def test_links_on_the_command_line(heed_label, tmp_path):
    LabelStore(tmp_path / "labels.sqlite").close()
    store = ("--store", "labels.sqlite")
    code, out, err = heed_label("invite", "ann", *store)
    assert (code, "Send this link to ann." in out, "points to port 8100" in err) == (0, True, True)
    (path,) = links_in(out)
    code, out, err = heed_label("invite", "eve", "--lead", "--public-url", "https://labels.example.org/", *store)
    assert (code, err, "\nhttps://labels.example.org/welcome/" in out) == (0, "", True)
    (tmp_path / "label.toml").write_text('[server]\npublic_url = "https://a.test"\n')
    _, out, _ = heed_label("invite", "bob", "--config", "label.toml", *store)
    assert "\nhttps://a.test/welcome/" in out
    accounts = Accounts(tmp_path / "labels.sqlite")
    links = [(link.name, link.role, link.invited_by) for link in accounts.links()]
    assert links == [
        (name, role, "command line") for name, role in (("ann", "labeler"), ("bob", "labeler"), ("eve", "lead"))
    ]
    assert accounts.invitation(path.rpartition("/")[2]).name == "ann"
    accounts.close()
    code, _, err = heed_label("invite", "ANN ", *store)
    assert (code, "name is" in err) == (2, True)
    code, _, err = heed_label("invite", "x", "--public-url", "labels.example.org", *store)
    assert (code, "public_url" in err) == (2, True)


def test_a_store_of_an_unreleased_heed_is_answered_with_one_line(tmp_path, heed_label):
    path = tmp_path / "labels.sqlite"
    Accounts(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0008'")
    connection.close()
    code, out, err = heed_label("erase", "ann", "--store", str(path))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "an unreleased version of Heed wrote it" in err


def test_no_part_of_an_answer_waits_for_an_acknowledgement(world, serve_app):
    """Clients acknowledge after 40 ms what they do not answer, and a page is sent in two parts.

    If parts waited, no page would take less than 40 ms; on a busy machine, some of many take less than 30.
    """
    config = LabelingConfig()
    address, stop = serve_app(make_app(world.store, world.accounts, config))
    seconds = []
    with httpx.Client(base_url=address) as client:
        while len(seconds) < 20 or (min(seconds[12:]) >= 0.03 and len(seconds) < 300):
            began = time.monotonic()
            assert client.get("/sign-in").status_code == 200
            seconds.append(time.monotonic() - began)
    stop()
    # The kernel acknowledges a connection's first segments at once.
    assert min(seconds[12:]) < 0.03, seconds


def test_listening_comes_before_anything_is_announced(tmp_path):
    said = []
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ValueError, match="--port"):
        serve_store(
            tmp_path / "labels.sqlite", LabelingConfig(), host="127.0.0.1", port=taken.getsockname()[1],
            announce=said.append,
        )  # fmt: skip
    assert said == []
