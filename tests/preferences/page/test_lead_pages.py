"""What leads organize on the pages and through the API: progress, overlap, closing, tags, quotas, queue, search."""

import html
import time

import pytest

from preferences.formats.registry import FORMATS
from preferences.page.config import LabelingConfig
from preferences.page.service import EXPORTS
from preferences.records import Answer, Message, Task
from tests.preferences.page.test_pages import form, ranks

PLAIN = LabelingConfig(asks_ratings=False, task_order="arrival")
HOW = {"client": "test", "instructions_version": "1"}


def make_task(name, **fields):
    return Task(name, (Message("user", f"Say {name}"),), (f"{name} a", f"{name} b"), ("x", "y"), **fields)


def say(world, name, canonical, batch="main"):
    lease = world.store.lease(name, seconds=60, batch=batch)
    order = lease.order
    world.store.submit(lease, Answer(tuple(canonical[index] for index in order), 30_000, note="hm"), **HOW)


@pytest.fixture
def eve(visit):
    return visit("eve", PLAIN)


def posted(client, path, page="/lead", **fields):
    """Posts a form with the page's token, and returns the page that follows."""
    csrf = form(client.get(page), "/sign-out")["csrf"]
    return client.post(path, data={"csrf": csrf, **fields})


def test_progress_says_what_is_left_and_who_worked(world, eve):
    world.add(*(make_task(f"t{number}") for number in range(3)), num_labelers=2)
    say(world, "ann", (1, 2))
    page = eve.get("/lead").text
    assert "5 judgments left (no estimate yet: 1 answers in the last 14 days, 20 are needed)." in page
    assert "Hours and answers" in page
    assert '<th scope="row">ann</th><td class="number">0.0</td><td class="number">1</td>' in page


def test_progress_links_every_listed_export_with_its_description(world, eve):
    world.add(make_task("t1"))
    say(world, "ann", (1, 2))
    page = eve.get("/lead").text
    for name in EXPORTS:
        link = f"/lead/export?batch=main&amp;format={name}"
        assert (
            f'<li><a href="{link}">{name}</a>: {html.escape(FORMATS[name].description, quote=False)}</li>'
            in page.replace("&#39;", "'")
        )
        assert eve.get(html.unescape(link)).status_code == 200
    assert "The batch has nothing that this format holds." in eve.get("/lead/export?batch=main&format=edits").text


def reloaded(client, path, until_gone):
    """Opens a page until it no longer says something."""
    deadline = time.monotonic() + 60
    while until_gone in (page := client.get(path).text):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return page


def test_a_large_batchs_statistics_come_from_another_process_and_may_be_older(world, eve, monkeypatch):
    """Nobody waits: the page says that they are coming, or shows older ones. It never shows a name that was erased."""
    monkeypatch.setattr("preferences.page.quality_reports.MAX_EVENTS_HERE", 0)
    world.add(make_task("t1"), make_task("t2"), num_labelers=2)
    say(world, "ann", (1, 2))
    first = eve.get("/lead/quality").text
    assert ("The statistics are being computed" in first, "Nothing has been judged" in first) == (True, False)
    assert "1 answer to" in (first := reloaded(eve, "/lead/quality", "being computed"))
    assert "statistics as of" not in first
    say(world, "bob", (1, 2))
    older = eve.get("/lead/quality").text
    assert ("1 answer to" in older, "These are the statistics as of 1970-01-01 00:16:40 (UTC)" in older) == (True, True)
    newer = reloaded(eve, "/lead/quality", "statistics as of")
    assert ("2 answers to" in newer, '<th scope="row">bob</th>' in newer) == (True, True)
    world.accounts.erase("bob", by="command line")
    assert ("being computed" in (erased := eve.get("/lead/quality").text), "bob" in erased) == (True, False)
    erased = reloaded(eve, "/lead/quality", "being computed")
    assert ("2 answers to" in erased, "bob" in erased, "statistics as of" in erased) == (True, False, False)


def test_a_lead_widens_closes_and_reopens_a_batch(world, visit, eve):
    world.add(make_task("t1"))
    say(world, "ann", (1, 2))
    assert "Nothing to judge" in visit("bob", PLAIN).get("/task").text
    assert "0 of 1 tasks are open" in eve.get("/lead").text
    page = posted(eve, "/lead/batch/labelers", batch="main", num_labelers="2")
    assert "1 of 2 judgments; 1 of 1 tasks are open" in page.text
    page = posted(eve, "/lead/batch/closed", batch="main", closed="true")
    assert "labelers get no new tasks from this batch" in page.text
    assert "closed all batches" in visit("bob", PLAIN).get("/task").text
    assert "Reopen main" in page.text
    posted(eve, "/lead/batch/closed", batch="main", closed="false")
    assert "Say t1" in visit("bob", PLAIN).get("/task").text
    wrong = posted(eve, "/lead/batch/labelers", batch="main", num_labelers="0")
    assert wrong.status_code == 409
    assert "num_labelers is 0; 1 to 1,000 was expected" in wrong.text
    people = eve.get("/lead/people").text
    assert "closed the batch main" in people
    assert "set the labelers per task to 2 for task &#39;t1&#39;" in people


def test_a_labeler_without_the_tags_sees_why(world, visit, eve):
    world.add(make_task("t1"), make_task("t2", details={"requires": ["law"]}))
    posted(eve, "/lead/batch/tags", batch="main", tags=" German , ")
    assert "Only for labelers with german." in eve.get("/lead").text
    ann = visit("ann", PLAIN)
    assert "for people with other languages or skills" in ann.get("/task").text
    page = posted(eve, "/lead/assignment", "/lead/people", name="ann", tags="german", daily_quota="1")
    assert "german; 1 per day" in page.text
    page = ann.get("/task")
    assert "Say t1" in page.text
    assert "1 is left for you" in page.text
    page = ann.post("/task/answer", data=form(page) | ranks(1, 2))
    assert "That is all for today" in page.text
    world.clock.now += 86_400
    visit("ann", PLAIN)
    assert "No task fits you" in visit("ann", PLAIN).get("/task").text  # t2 also requires law
    eve = visit("eve", PLAIN)  # yesterday's session is over
    for fields, wrong in (({"tags": "x" * 41}, "is not a tag"), ({"daily_quota": "many"}, "a whole number")):
        page = posted(eve, "/lead/assignment", "/lead/people", name="ann", **fields)
        assert (page.status_code, wrong in page.text) == (422, True)


def test_the_configurations_quota_holds_for_everybody(world, visit):
    world.add(make_task("t1"), make_task("t2"))
    config = PLAIN.model_copy(update={"daily_quota": 1})
    ann = visit("ann", config)
    page = ann.post("/task/answer", data=form(ann.get("/task")) | ranks(1, 2))
    assert "That is all for today" in page.text


def test_changed_instructions_are_read_again(world, visit):
    world.add(make_task("t1"))
    ann = visit("ann", PLAIN)
    assert "have changed" not in ann.get("/instructions").text
    ann = visit("ann", PLAIN.model_copy(update={"instructions": "Other words"}), has_read=False)
    page = ann.get("/task")
    assert "Your earlier answers stay as they are." in page.text
    page = ann.post("/instructions", data=form(page, "/instructions"))
    assert "Say t1" in page.text


def disagree(world, *names):
    world.add(*(make_task(name) for name in names), num_labelers=2)
    for _ in names:
        say(world, "ann", (1, 2))
        say(world, "bob", (2, 1))


def test_a_lead_works_through_the_queue(world, eve):
    disagree(world, "t1", "t2", "t3")
    page = eve.get("/lead/queue?batch=main&disagreement=0.5&fewer=0")
    assert "3 tasks to adjudicate" in page.text
    page = eve.get("/lead/task?task=t2&queue=batch%3Dmain%26disagreement%3D0.5%26fewer%3D0")
    assert "3 tasks left in it" in page.text
    assert "task=t1&amp;queue=" in page.text
    assert "task=t3&amp;queue=" in page.text
    wrong = eve.post("/task/answer", data=form(page))  # no ranks
    assert "have no rank" in wrong.text
    assert "3 tasks left in it" in wrong.text
    page = eve.post("/task/answer", data=form(wrong) | ranks(1, 2))
    assert "Say t3" in page.text
    assert "2 tasks left in it" in page.text
    page = eve.post("/task/answer", data=form(page) | ranks(1, 2))
    assert "1 task to adjudicate" in page.text  # the end of the queue: its page, which still has the first
    assert "Say t1" in page.text
    assert "0 tasks to adjudicate" in eve.get("/lead/queue?disagreement=junk&fewer=-1&batch=other").text


def test_disagreement_is_only_spoken_of_where_two_have_answered(world, eve):
    world.add(make_task("t1"))
    say(world, "ann", (1, 2))
    unknown = "No task of this batch has answers of two labelers yet"
    assert unknown in eve.get("/lead/queue?batch=main").text
    alone = eve.get("/lead/queue?batch=main&fewer=2").text
    assert "1 of 1" in alone
    assert "0.00" not in alone
    world.add(make_task("t2"), num_labelers=2)
    for name in ("ann", "bob"):
        say(world, name, (1, 2))
    agreed = eve.get("/lead/queue?batch=main").text
    assert "0 tasks to adjudicate" in agreed
    assert unknown not in agreed


def test_a_lead_searches_and_changes_what_is_found(world, visit, eve):
    disagree(world, "t1", "t2")
    world.add(make_task("other thing"), batch="rest")
    assert "Nothing was found" in eve.get("/lead/search?words=nowhere").text
    page = eve.get("/lead/search?words=thing")
    assert "Say other thing" in page.text
    assert "Say t1" not in page.text
    page = eve.get("/lead/search?labeler=ann&note=hm")
    assert page.text.count('<th scope="row">ann</th>') == 2
    wrong = eve.get("/lead/search?disagreement=2")
    assert (wrong.status_code, "a number from 0 to 1" in wrong.text) == (422, True)
    assert eve.get("/lead/search?since=yesterday").status_code == 422
    assert eve.get("/lead/search?sort=odd").status_code == 422
    at = "/lead/search?batch=main"
    fields = {"query": "batch=main", "which": "ticked", "flags_task": ["t1"], "num_labelers": "3"}
    posted(eve, "/lead/tasks", at, action="labelers", **fields)
    assert [one.num_labelers for one in world.store.tasks("main")] == [3, 2]
    page = posted(eve, "/lead/tasks", at, action="archive", query="batch=main", which="all")
    assert page.text.count("archived") >= 2
    assert world.store.lease("cem", seconds=60, batch="main") is None
    posted(eve, "/lead/tasks", at, action="unarchive", query="batch=main", which="all")
    posted(eve, "/lead/tasks", at, action="tags", query="batch=main", which="all", tags="chess")
    assert world.store.lease("cem", seconds=60, batch="main") is None
    assert world.store.lease("cem", seconds=60, batch="main", tags=("chess",)).task_id == "t1"
    assert posted(eve, "/lead/tasks", at, action="archive", query="", which="ticked").status_code == 403
    found = "/lead/search?labeler=bob"
    assert "All tasks with something that this search finds" in eve.get(found).text
    posted(eve, "/lead/tasks", found, action="labelers", query="labeler=bob", which="all", num_labelers="5")
    assert [one.num_labelers for one in world.store.tasks("main")] == [5, 5]
    assert [one.num_labelers for one in world.store.tasks("rest")] == [1]
    ann = visit("ann", PLAIN)
    for path in ("/lead/search", "/lead/queue"):
        assert ann.get(path).status_code == 403
    assert posted(ann, "/lead/tasks", "/answers", action="archive", query="", which="all").status_code == 403
