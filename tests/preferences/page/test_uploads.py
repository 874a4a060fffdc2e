"""What a lead of many people does at once: inviting a list, and adding a file of tasks."""

import json
import re

import pytest
from fastapi.testclient import TestClient

from preferences import organizing
from preferences.page.app import make_app
from preferences.page.config import LabelingConfig
from preferences.page.security import MAX_TASKS_BYTES
from preferences.records import Message, Task

CSV = b"""\
prompt,response_a,response_b,warning
"Why, is it blue?","Air.\nReally.",Sea.,
How?,So.,So.,
Who?,I.,You.,rude
"""
EVIL = "<script>alert(1)</script>"


def row(name, **more):
    return {"task_id": name, "prompt": f"Say {name}", "responses": ["a", "b", "c"], **more}


def jsonl(*rows):
    return "\n".join(map(json.dumps, rows)).encode()


def csrf(client):
    return re.findall('name="csrf" value="([^"]+)"', client.get("/questions").text)[0]


@pytest.fixture
def eve(visit):
    return visit("eve")


def upload(client, name, content, **fields):
    data = {"csrf": csrf(client), "batch": "new", "num_labelers": "2", **fields}
    return client.post("/lead/batch/new", data=data, files={"file": (name, content)})


def store_it(client, page):
    key = re.findall('name="upload" value="([^"]+)"', page.text)[0]
    return client.post("/lead/batch/store", data={"csrf": csrf(client), "upload": key})


# ---- tasks ----


def test_a_csv_is_shown_before_it_is_stored(world, eve):
    page = upload(eve, "Export of May.CSV", CSV)
    assert page.status_code == 200, page.text
    for words in ("2 tasks for the new batch <strong>new</strong>", "2 tasks not in the store", "1 row left out"):
        assert words in page.text
    for words in (
        "2 tasks with 2 responses",
        "2 tasks for 2 labelers each",
        "1 task with a content warning",
        "Why, is",
    ):
        assert words in page.text
    assert world.store.batches() == []
    assert store_it(eve, page).url.path == "/lead"
    stored = world.store.tasks("new")
    assert [(one.task.prompt[0].content, one.num_labelers) for one in stored] == [("Why, is it blue?", 2), ("Who?", 2)]
    assert stored[0].task.responses == ("Air.\nReally.", "Sea.")
    assert world.accounts.audit_log()[0].subject == "2 tasks to new"
    again = upload(eve, "same.csv", CSV)  # repeating adds nothing
    assert "0 tasks not in the store yet" in again.text
    store_it(eve, again)
    assert len(world.store.tasks("new")) == 2


def test_rows_of_heeds_own_format_keep_what_they_say(world, eve):
    rows = row("t1"), row("t2", num_labelers=3, batch="other"), row("gold", gold_ranks=[1, 2, 3])
    page = upload(eve, "t.jsonl", jsonl(*rows))
    for words in ("1 task for 3 labelers each", "2 tasks for 2 labelers each", "1 gold task"):
        assert words in page.text
    store_it(eve, page)
    assert {one.task.task_id: one.num_labelers for one in world.store.tasks("new")} == {"t1": 2, "t2": 3, "gold": 2}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.csv", b"prompt,response_a\n,x\n", "tasks.csv: line 2: "),
        ("t.csv", b"prompt,other\nWhy?,x\n", "tasks.csv: line 2: 1 to 9 responses were expected"),
        ("t.csv", b"", "tasks.csv: "),
        ("t.jsonl", jsonl(row("t1"), row("t2", responses=["x"] * 10)), "tasks.jsonl: line 2: "),
        ("t.jsonl", jsonl(row("t1"), row("t1", responses=["x", "y"])), "tasks.jsonl: line 2: "),
        ("t.jsonl", jsonl(row("t1"), row("t2", warnning="x")), "did you mean &#39;warning&#39;?"),
        ("t.jsonl", jsonl(row("t1"), row("t2", responses=["x"])), "tasks.jsonl: line 2"),  # rated alone, not ranked
        ("t.jsonl", jsonl(row("t1", num_labelers=0)), "tasks.jsonl: line 1: "),
        ("t.jsonl", b"\xff\xfe{", "tasks.jsonl: "),
        ("t.jsonl", b"[" * 100_000, "tasks.jsonl: "),
        ("t.jsonl", b'{"task_id": "a\\u0000", "prompt": "x", "responses": ["a", "b"]}', "tasks.jsonl: line 1"),
        ("t.jsonl", jsonl(row("there", responses=["other", "texts"])), "tasks.jsonl: line 1"),
        ("t.jsonl", jsonl(row(EVIL, num_labelers=EVIL)), "&lt;script&gt;"),
        ("t.json", jsonl({"prompt": "p", "response_a": "x", "response_b": "x"}), "no prompt has two different"),
        ("t.parquet", b"PAR1", "a file whose name ends in .jsonl, .json, .csv"),
        ("t.jsonl.gz", b"\x1f\x8b", "a file whose name ends in .jsonl, .json, .csv"),
        ("../../etc/passwd", b"x", "a file whose name ends in .jsonl, .json, .csv"),
        (EVIL, b"x", "a file whose name ends in .jsonl, .json, .csv"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_named_and_nothing_is_stored(world, eve, name, content, words):
    world.add(Task("there", (Message("user", "Say there"),), ("a", "b", "c"), ("x", "y", "z")))
    page = upload(eve, name, content)
    assert page.status_code == 422
    assert words in page.text
    for secret in ("heed-upload", "/tmp", EVIL):
        assert secret not in page.text
    assert world.store.batches() == ["main"]


def test_judged_rows_are_for_the_import(eve):
    judged = [{"labeler": "zoe", "revision": 0, "kind": "answer", "ranks": [1, 2, 3]}]
    page = upload(eve, "t.jsonl", jsonl(row("t1", judgments=judged)))
    assert (page.status_code, "heed label import" in page.text) == (422, True)


def test_texts_of_a_file_are_shown_as_texts(world, eve):
    hostile = {"prompt": EVIL, "responses": {EVIL: EVIL + "1", "<b>": "</td>\u202e"}, "warning": EVIL}
    page = upload(eve, "t.jsonl", jsonl(hostile), batch=EVIL)
    assert page.status_code == 200
    assert EVIL not in page.text
    assert EVIL not in store_it(eve, page).text
    assert world.store.batches() == [EVIL]


def test_a_preview_is_its_leads_own_and_the_newest_counts(world, visit, eve):
    world.join("lea", "lead")
    first = upload(eve, "t.jsonl", jsonl(row("t1")))
    assert "out of date" in store_it(visit("lea"), first).text
    second = upload(eve, "t.jsonl", jsonl(row("t2")))
    assert "out of date" in store_it(eve, first).text
    store_it(eve, second)
    assert "out of date" in store_it(eve, second).text  # a double click
    assert [one.task.task_id for one in world.store.tasks("new")] == ["t2"]


def test_forms_that_no_page_sends(world, eve):
    fields = {"csrf": csrf(eve), "batch": "new", "num_labelers": "1"}
    file = ("t.jsonl", jsonl(row("t1")))
    for files in ({"other": file}, [("file", file), ("file", file)], {"file": (None, "text")}):
        assert eve.post("/lead/batch/new", data=fields, files=files).status_code == 400
    assert eve.post("/lead/batch/new", data=fields | {"csrf": "x"}, files={"file": file}).status_code == 403
    assert eve.post("/lead/batch/new", data=fields | {"batch": " "}, files={"file": file}).status_code == 422
    assert eve.post("/lead/batch/new", data=fields | {"batch": "\0"}, files={"file": file}).status_code == 400
    long = ("t.jsonl", b" " * MAX_TASKS_BYTES)
    assert eve.post("/lead/batch/new", data=fields, files={"file": long}).status_code == 413
    assert eve.post("/lead/batch/store", data=fields, files={"file": file}).status_code == 400
    assert world.store.batches() == []


# ---- people ----


def test_many_are_invited_at_once_and_get_a_batchs_tags(world, eve):
    world.add(Task("t1", (Message("user", "?"),), ("a", "b"), ("x", "y")), batch="medical")
    with world.store.writing() as connection:
        organizing.set_required(connection, "medical", ["doctor"], by="eve", now=1.0)
    world.accounts.set_assignment("bob", ["german"], 5)
    assert "also of medical: gives them doctor" in eve.get("/lead/people").text
    fields = {"csrf": csrf(eve), "role": "labeler", "batch": "medical"}
    page = eve.post("/lead/invite", data=fields | {"names": " zoe@example.com\r\nbob\n\nzoe@example.com\nA <i>b</i>\n"})
    assert "3 one-time links" in page.text
    assert "<i>b</i>" not in page.text
    codes = re.findall(r"/welcome/([\w-]+)", page.text)
    assert [world.accounts.invitation(code).name for code in codes] == ["zoe@example.com", "bob", "A <i>b</i>"]
    tags = {account.name: account.tags for account in world.accounts.all()}
    assert tags == {
        "ann": (),
        "eve": (),
        "bob": ("doctor", "german"),
        "zoe@example.com": ("doctor",),
        "A <i>b</i>": ("doctor",),
    }
    assert world.accounts.account("bob").daily_quota == 5
    assert world.accounts.sign_in("zoe@example.com", "") is None  # no key opens it before the link is used
    account, key = world.accounts.accept(codes[0])
    assert account.tags == ("doctor",)
    assert world.accounts.sign_in("zoe@example.com", key)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("zoe\nEVE\n", "looks like &#39;eve&#39;"),
        ("zoe\neve\n", "belongs to a lead"),
        ("zoe\nZoe\n", "looks like &#39;zoe&#39;"),
        ("zoe\n" + "x" * 65, "name"),
        ("zoe\ncommand line\n", "is reserved"),
        (" \n", "0 names; 1 to 200 were expected"),
        ("\n".join(f"n{number}" for number in range(201)), "201 names; 1 to 200 were expected"),
    ],
)
def test_a_list_with_a_mistake_invites_nobody(world, eve, names, words):
    page = eve.post("/lead/invite", data={"csrf": csrf(eve), "role": "labeler", "names": names})
    assert (page.status_code, words in page.text) == (422, True), page.text
    assert world.accounts.links() == []
    assert len(world.accounts.all()) == 3


def test_an_invited_address_signs_in_with_the_companys_account_and_keeps_its_tags(world):
    world.accounts.invite_all(["zoe@example.com"], "labeler", tags=["doctor"], by="eve")
    token = world.accounts.sign_in_with("https://login.example.com", "1", "zoe@example.com", "labeler")
    assert world.accounts.session(token).tags == ("doctor",)
    with pytest.raises(ValueError, match="taken by another account"):  # another subject with the same address
        world.accounts.sign_in_with("https://login.example.com", "2", "zoe@example.com", "labeler")
    with pytest.raises(ValueError, match="taken by another account"):  # somebody has a key
        world.accounts.sign_in_with("https://login.example.com", "3", "ann", "labeler")


# ---- who may ----


def test_every_route_of_leads_is_for_leads(world, visit):
    ann = visit("ann")
    token = csrf(ann)
    stranger = TestClient(make_app(world.store, world.accounts, LabelingConfig()), follow_redirects=False)
    routers = [getattr(one, "original_router", None) for one in ann.app.routes]
    routes = [route for router in routers if router for route in router.routes if route.path.startswith("/lead")]
    assert {"/lead/batch/new", "/lead/batch/store", "/lead/invite"} <= {one.path for one in routes}
    for route in routes:
        files = {"file": ("t.csv", CSV)} if route.path == "/lead/batch/new" else None
        for method in route.methods:
            sent = {} if method == "GET" else {"data": {"csrf": token, "name": "bob", "names": "x"}, "files": files}
            assert ann.request(method, route.path, **sent).status_code == 403, route.path
            assert stranger.request(method, route.path, **sent).status_code == 303, route.path
