"""Labelers ask leads about tasks: threads on the page and in the API, and what stays of them."""

import html
import re

import pytest

from preferences.page.config import LabelingConfig
from preferences.records import Message, Task
from preferences.store import LabelStore

PLAIN = LabelingConfig(asks_ratings=False, task_order="arrival")


def make_task(name, warning=""):
    return Task(name, (Message("user", f"Say {name}"),), (f"{name} a", f"{name} b"), ("x", "y"), warning=warning)


def hidden(text):
    return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', text))


def ask(client, text):
    page = client.get("/task")
    return client.post("/task/ask", data=hidden(page.text) | {"question": text, "rank_0": "2", "note": "half"})


def test_a_question_its_reply_and_the_end(world, visit):
    world.add(make_task("t1"), num_labelers=2)
    ann, bob, eve = visit("ann", PLAIN), visit("bob", PLAIN), visit("eve", PLAIN, has_read=False)
    page = ask(ann, "Is <b>this</b> a joke?")
    assert (page.status_code, "has not replied yet" in page.text) == (200, True)
    assert 'name="rank_0" value="2"' in page.text
    assert re.search(r'name="rank_0" value="2"[^>]* checked', page.text)
    assert ">\nhalf</textarea>" in page.text
    assert "Is &lt;b&gt;this&lt;/b&gt; a joke?" in page.text
    ask(ann, "Is <b>this</b> a joke?")  # sent twice
    assert len(world.store.threads()[0].said) == 1
    assert "joke" not in bob.get("/task").text
    assert "joke" not in bob.get("/questions").text

    page = eve.get("/questions")
    assert '<span class="count">1<span class="unseen"> without a reply</span>' in page.text
    assert "joke" in eve.get("/lead/task?task=t1").text
    fields = hidden(page.text)
    assert "joke" in eve.post("/questions/write", data=fields | {"text": "  "}).text
    page = eve.post("/questions/write", data=fields | {"text": "No. Take it literally."})
    assert ("No. Take it literally." in page.text, 'class="count"' in page.text) == (True, False)

    assert "with a reply" in ann.get("/task").text
    assert "No. Take it literally." in ann.get("/task").text
    page = ann.get("/questions")
    assert "eve" not in page.text  # who labels does not learn which lead it was
    page = ann.post("/questions/write", data=hidden(page.text) | {"resolved": "true"})
    assert ("Resolved" in page.text, 'class="count"' in page.text) == (True, False)
    page = ann.post("/questions/write", data=hidden(page.text) | {"text": "And now?"})
    assert "Waits for a reply" in page.text
    (thread,) = world.store.threads(labeler="ann")
    assert [(one.author, one.kind) for one in thread.said] == [
        ("ann", "question"), ("eve", "reply"), ("ann", "resolved"), ("ann", "question")
    ]  # fmt: skip


def test_nobody_asks_about_what_they_were_not_shown(world, visit):
    world.add(make_task("t1", warning="loud"), make_task("t2"))
    ann, bob = visit("ann", PLAIN), visit("bob", PLAIN)
    page = ann.get("/task")  # only its warning
    assert ann.post("/task/ask", data=hidden(page.text) | {"question": "?"}).status_code == 403
    other = hidden(bob.get("/task").text)
    assert ann.post("/task/ask", data=other | {"question": "?"}).status_code == 403
    page = bob.post("/task/ask", data=other | {"question": "  "})
    assert (page.status_code, "The question is empty." in page.text) == (422, True)
    bob.post("/task/ask", data=other | {"question": "Why?"})
    fields = hidden(bob.get("/questions").text)
    csrf = hidden(ann.get("/questions").text + ann.get("/answers").text + page.text)["csrf"]
    page = ann.post("/questions/write", data=fields | {"csrf": hidden(ann.get("/task").text)["csrf"], "text": "Me too"})
    assert (page.status_code, csrf != "") == (403, True)
    assert len(world.store.threads()) == 1


def test_an_erasure_empties_what_the_person_wrote(new_database, clock):
    from preferences.accounts import Accounts

    url = new_database()
    with LabelStore(url, clock=clock) as store:
        store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
        store.write_message("t1", "ann", "ann", "question", "My name is Ann. Why?")
        store.write_message("t1", "ann", "eve", "reply", "Because.")
        store.add_tasks([make_task("t2")], batch="b", num_labelers=1)
        store.write_message("t2", "ann", "ann", "question", "And this one?")
        store.write_message("t2", "bob", "bob", "question", "And for me?")
        assert (store.num_waiting(), store.num_waiting("ann")) == (2, 1)
        accounts = Accounts(url, clock=clock)
        held = accounts.held_about("ann", by="command line")
        assert [row["text"] for row in held["questions"]] == ["My name is Ann. Why?", "Because.", "And this one?"]
        assert held["questions"][0]["author"] == held["pseudonym"]
        assert "eve" not in str(held)  # other people have pseudonyms
        pseudonym = accounts.erase("ann", by="command line")
        accounts.close()
        (thread,) = store.threads(task_id="t1")
        assert thread.labeler == pseudonym
        assert [one.text for one in thread.said] == ["", "Because."]
        assert store.num_waiting() == 1  # an erased labeler can read no reply
        assert {one.labeler: one.state for one in store.threads(task_id="t2")} == {
            pseudonym: "resolved",
            "bob": "question",
        }


def test_unusable_messages_are_refused(new_database, clock):
    with LabelStore(new_database(), clock=clock) as store:
        store.add_tasks([make_task("t1")], batch="b", num_labelers=1)
        with pytest.raises(ValueError, match="no question of this labeler"):
            store.write_message("t1", "ann", "eve", "reply", "Because.")
        with pytest.raises(ValueError, match="no question of this labeler"):
            store.write_message("t9", "ann", "ann", "question", "Why?")
        with pytest.raises(ValueError, match="at most 4,000 were expected"):
            store.write_message("t1", "ann", "ann", "question", "x" * 4_001)
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            store.write_message("t1", "ann", "ann", "question", "\ud800")
        store.write_message("t1", "ann", "ann", "question", "Why\0?")
        assert html.escape(store.threads()[0].said[0].text) == "Why\0?"
        assert (store.num_waiting(), store.num_waiting("ann"), store.num_waiting("nobody")) == (1, 0, 0)
