"""The pages as a browser without JavaScript sees them: forms, redirects, refusals."""

import html.parser
import json
import re
import time
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient

from preferences import organizing
from preferences.accounts import Accounts
from preferences.leases import display_order
from preferences.page.app import make_app
from preferences.page.config import LabelingConfig, Screening
from preferences.page.security import PER_NAME_AND_ADDRESS, Attempts, TooManyTriesError
from preferences.records import Answer, Message, Task
from preferences.store import LabelStore

PLAIN = LabelingConfig(asks_ratings=False, task_order="arrival")


class Forms(html.parser.HTMLParser):
    """The forms of a page, as what a browser would send of them untouched."""

    def __init__(self, text):
        super().__init__()
        self.forms = {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag == "form":
            self.forms[found["action"]] = self.current = {}
        elif tag == "input" and "name" in found and found.get("type") not in ("radio", "checkbox"):
            self.current[found["name"]] = found.get("value", "")
        elif tag == "input" and "checked" in found:
            self.current[found["name"]] = found["value"]


def form(page, action="/task/answer"):
    return Forms(page.text).forms[action]


def ranks(*values):
    return {f"rank_{place}": str(rank) for place, rank in enumerate(values)}


def make_task(name, num_responses=3):
    responses = tuple(f"{name}: response {letter}" for letter in "uvwxyz"[:num_responses])
    return Task(name, (Message("user", f"Say {name}"),), responses, tuple("uvwxyz"[:num_responses]))


# ---- judging ----


def test_a_labeler_reads_judges_and_goes_on(world, visit):
    world.add(make_task("t1"), make_task("t2"))
    ann = visit("ann", has_read=False)
    page = ann.get("/")
    assert "1 is the best" in page.text
    page = ann.post("/instructions", data=form(page, "/instructions"))
    assert "t1: response" in page.text
    ratings = {f"rating_{place}": "4" for place in range(3)}
    fields = form(page) | ranks(2, 1, 1) | ratings | {"note": " fine ", "flags_1": ["hallucinates", "violent content"]}
    page = ann.post("/task/answer", data=fields)
    assert "t2: response" in page.text
    assert "You have judged 1 task." in page.text
    (judgment,) = world.store.judgments("main")
    assert [judgment.ranks[index] for index in judgment.shown_order] == [2, 1, 1]
    assert (judgment.ratings, judgment.note, judgment.client) == ((4, 4, 4), "fine", "page")
    assert judgment.flags[judgment.shown_order[1]] == ("hallucinates", "violent content")
    assert judgment.instructions_version == LabelingConfig().version


def test_who_wrote_a_response_is_nowhere_on_the_page(world, visit):
    world.add(Task("t1", (Message("user", "Hi"),), ("a", "b"), ("secret-model", "other-model"), gold_ranks=(1, 2)))
    page = visit("ann", PLAIN).get("/task")
    assert "secret-model" not in page.text
    assert "gold" not in page.text


def test_an_untouched_ranking_is_no_data(world, visit):
    world.add(make_task("t1"))
    ann = visit("ann")
    page = ann.post("/task/answer", data=form(ann.get("/task")))
    assert page.status_code == 422
    assert "Responses A, B and C have no rank." in page.text
    assert "Responses A, B and C have no rating." in page.text
    assert world.store.judgments("main") == []


def test_what_was_filled_in_survives_an_error(world, visit):
    world.add(make_task("t1"))
    ann = visit("ann", PLAIN)
    fields = form(ann.get("/task")) | {"rank_0": "3", "flags_2": "hallucinates", "note": "<b>half"}
    page = ann.post("/task/answer", data=fields)
    again = form(page)
    assert (again["rank_0"], again["flags_2"]) == ("3", "hallucinates")
    assert "&lt;b&gt;half" in page.text
    page = ann.post("/task/answer", data=again | ranks(1, 2, 3))
    assert len(world.store.judgments("main")) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (ranks(1, 2, 4), "The rank of response C is 4; it must be 1 to 3."),
        (ranks(1, 2, 0), "The rank of response C is 0; it must be 1 to 3."),
        (ranks(1, 2, "1_0"), "Response C has no rank."),
        (ranks(1, 2, "²"), "Response C has no rank."),
        (ranks(1, 2, 3) | {"flags_0": "made up"}, "“made up” is not one of the marks"),
        (ranks(1, 2, 3) | {"note": "x" * 5_000}, "The note has 5000 characters"),
    ],
)
def test_forms_that_no_browser_would_send(world, visit, fields, message):
    world.add(make_task("t1"))
    ann = visit("ann", PLAIN)
    page = ann.post("/task/answer", data=form(ann.get("/task")) | fields)
    assert (page.status_code, message in page.text) == (422, True)
    assert world.store.judgments("main") == []


def test_a_double_submit_and_the_back_button(world, visit):
    world.add(make_task("t1"), make_task("t2"))
    ann = visit("ann", PLAIN)
    fields = form(ann.get("/task"))
    assert ann.post("/task/answer", data=fields | ranks(1, 2, 3)).status_code == 200
    assert ann.post("/task/answer", data=fields | ranks(1, 2, 3)).status_code == 200  # the same again
    page = ann.post("/task/answer", data=fields | ranks(3, 2, 1))  # back, and something else
    assert page.status_code == 409
    assert "differs from the stored" in page.text
    assert len(world.store.judgments("main")) == 1


def test_a_lease_that_ran_out_and_went_to_another(world, visit):
    world.add(make_task("t1"))
    ann, bob = visit("ann", PLAIN), visit("bob", PLAIN)
    fields = form(ann.get("/task"))
    assert "Nothing to judge" in bob.get("/task").text
    world.clock.now += PLAIN.lease_seconds + 1
    assert "t1: response" in bob.get("/task").text
    page = ann.post("/task/answer", data=fields | ranks(1, 2, 3) | {"note": "so <close>", "flags_1": "hallucinates"})
    assert (page.status_code, "went to another labeler" in page.text) == (409, True)
    assert "Response B: rank 2, hallucinates\nResponse C: rank 3\nNote: so &lt;close&gt;" in page.text  # to be copied


def test_a_session_that_ended_gives_back_what_was_entered(world, visit):
    world.add(make_task("t1"))
    ann = visit("ann", PLAIN)
    fields = form(ann.get("/task")) | ranks(1, 2, 3)
    world.clock.now += 13 * 3_600
    page = ann.post("/task/answer", data=fields)
    assert (page.status_code, "Response C: rank 3" in page.text, "Sign in" in page.text) == (401, True, True)
    assert world.store.judgments("main") == []


def test_skipping_and_taking_back(world, visit):
    world.add(make_task("t1"), make_task("t2"))
    ann = visit("ann", PLAIN)
    page = ann.post("/task/skip", data=form(ann.get("/task"), "/task/skip"))
    assert (page.status_code, "A skip needs a reason" in page.text) == (422, True)
    page = ann.post("/task/skip", data=form(page, "/task/skip") | {"reason": "not my field"})
    assert "t2: response" in page.text
    page = ann.post("/task/answer", data=form(page) | ranks(1, 1, 1))
    assert "Nothing to judge" in page.text
    page = ann.get("/answers")
    assert "skipped: not my field" in page.text
    page = ann.post("/answers/undo", data=Forms(page.text).forms["/answers/undo"])  # the last form: the skip's
    assert "t1: response" in page.text
    assert [judgment.kind for judgment in world.store.judgments("main")] == ["skip", "answer", "undo"]


# ---- what is not theirs ----


def test_nobody_answers_what_they_were_not_shown(world, visit):
    world.add(make_task("t1"), make_task("t2"))
    ann, bob = visit("ann", PLAIN), visit("bob", PLAIN)
    fields = form(ann.get("/task"))
    for changed in ({"task": "t2"}, {"revision": "7"}, {"shown_at": "1"}, {"seal": "0" * 64}, {"seal": "é"}):
        page = ann.post("/task/answer", data=fields | changed | ranks(1, 2, 3))
        assert page.status_code == 403, changed
    stolen = fields | {"csrf": form(bob.get("/task"))["csrf"]}
    assert bob.post("/task/answer", data=stolen | ranks(1, 2, 3)).status_code == 403
    assert world.store.judgments("main") == []


def test_forms_of_other_sites_are_refused(world, visit):
    world.add(make_task("t1"))
    ann = visit("ann", PLAIN)
    fields = form(ann.get("/task")) | ranks(1, 2, 3)
    assert ann.post("/task/answer", data=fields | {"csrf": "0"}).status_code == 403
    assert ann.post("/task/answer", data=fields, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert world.store.judgments("main") == []


def test_pages_of_leads_are_for_leads(world, visit):
    ann = visit("ann")
    for path in ("/lead", "/lead/quality", "/lead/people", "/lead/task?task=t1"):
        assert ann.get(path).status_code == 403, path
    token = form(ann.get("/answers"), "/sign-out")["csrf"]
    for path, fields in (("/lead/invite", {"names": "x"}), ("/lead/state", {"name": "bob", "state": "closed"})):
        assert ann.post(path, data=fields | {"csrf": token}).status_code == 403, path
    assert world.accounts.account("bob").state != "closed"


def test_without_a_session_there_is_only_the_door(world):
    stranger = TestClient(make_app(world.store, world.accounts, PLAIN))
    for path in ("/", "/task", "/answers", "/instructions", "/lead"):
        assert stranger.get(path).url.path == "/sign-in", path


def test_signing_in_and_out(world):
    client = TestClient(make_app(world.store, world.accounts, PLAIN))
    page = client.post("/sign-in", data={"name": "ann", "key": "wrong"})
    assert (page.status_code, "do not match" in page.text) == (403, True)
    page = client.post("/sign-in", data={"name": "ann", "key": world.keys["ann"]})
    cookie = page.history[0].headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    client.post("/sign-out", data=form(client.get("/answers"), "/sign-out"))
    assert client.get("/task").url.path == "/sign-in"


def test_guessing_is_slowed_down(world):
    client = TestClient(make_app(world.store, world.accounts, PLAIN))
    codes = [client.post("/sign-in", data={"name": "ann", "key": str(n)}).status_code for n in range(10)]
    assert codes == [403] * 8 + [429] * 2
    page = client.post("/sign-in", data={"name": "ann", "key": world.keys["ann"]})
    assert (page.status_code, int(page.headers["retry-after"]) > 0) == (429, True)


def test_attempts_are_forgotten_in_time():
    attempts = Attempts(1)
    for _ in range(PER_NAME_AND_ADDRESS):
        attempts.reserve_sign_in("ann", "192.0.2.1")
    with pytest.raises(TooManyTriesError) as refused:
        attempts.reserve_sign_in("ann", "192.0.2.1")
    time.sleep(refused.value.wait_seconds)
    attempts.reserve_sign_in("ann", "192.0.2.1")


def test_a_one_time_link(world):
    client = TestClient(make_app(world.store, world.accounts, PLAIN))
    path = f"/welcome/{world.accounts.invite('cy', 'labeler')}"
    assert "Welcome, cy" in client.get(path).text  # looking does not use it up
    page = client.post(path)
    assert "Your key" in page.text
    assert client.get("/answers").status_code == 200
    assert client.post(path).status_code == 410
    assert client.get("/welcome/guess").status_code == 410


def test_headers(visit):
    page = visit("ann").get("/instructions")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in page.text
    assert "style=" not in page.text


def test_hostile_text_in_every_field(world, visit):
    evil = '"><script>alert(1)</script>'
    world.add(
        Task(evil, (Message("user", evil), Message("assistant", evil)), (evil, evil + "!"), (evil, evil)), batch=evil
    )
    ann, eve = visit("ann", PLAIN), visit("eve", PLAIN)
    page = ann.get("/task")
    pages = [page, ann.post("/task/answer", data=form(page) | ranks(1, 2) | {"note": evil}), ann.get("/answers")]
    pages += [eve.get("/lead"), eve.get("/lead/quality", params={"batch": evil})]
    pages += [eve.get("/lead/task", params={"task": evil}), eve.get("/lead/task", params={"task": evil + "?"})]
    for page in pages:
        assert "<script>alert" not in page.text, page.url
    assert len(world.store.judgments(evil)) == 1


# ---- screening and leading ----


def test_new_labelers_are_screened(world, visit):
    gold = [Task(f"g{n}", (Message("user", "?"),), ("good", "bad"), ("x", "y"), gold_ranks=(1, 2)) for n in range(12)]
    world.add(*gold, batch="gold", num_labelers=5)
    world.add(make_task("t1"), num_labelers=2)
    config = LabelingConfig(asks_ratings=False, screening=Screening(batch="gold", min_tasks=10))
    for name, right in (("ann", True), ("bob", False)):
        client = visit(name, config)
        page = client.get("/task")
        while "<p>good" in page.text:
            good_first = page.text.index("<p>good") < page.text.index("<p>bad")
            page = client.post("/task/answer", data=form(page) | ranks(*((1, 2) if good_first == right else (2, 1))))
        assert ("t1: response" in page.text) == right
    assert world.accounts.account("ann").state == "admitted"
    assert world.accounts.account("bob").state == "new"
    eve, token = visit("eve", config), form(visit("eve", config).get("/lead"), "/sign-out")["csrf"]
    token = form(eve.get("/lead"), "/sign-out")["csrf"]
    eve.post("/lead/state", data={"name": "bob", "state": "admitted", "csrf": token})
    assert "t1: response" in visit("bob", config).get("/task").text


def test_who_got_none_of_the_first_tasks_has_not_judged_them(world, visit):
    world.add(Task("g", (Message("user", "?"),), ("good", "bad"), ("x", "y"), gold_ranks=(1, 2)), batch="gold")
    config = LabelingConfig(asks_ratings=False, screening=Screening(batch="gold", min_tasks=2))
    ann = visit("ann", config)
    page = ann.post("/task/answer", data=form(ann.get("/task")) | ranks(1, 2))
    assert "You have judged all" in page.text
    assert "You have judged all" not in visit("bob", config).get("/task").text


def test_a_closed_screening_batch_is_not_one_that_was_judged(world, visit):
    gold = [Task(f"g{n}", (Message("user", "?"),), ("good", "bad"), ("x", "y"), gold_ranks=(1, 2)) for n in range(2)]
    world.add(*gold, batch="gold")
    config = LabelingConfig(asks_ratings=False, screening=Screening(batch="gold", min_tasks=2))
    with world.store.writing() as connection:
        organizing.set_closed(connection, "gold", is_closed=True, by="eve", now=0.0)
    page = visit("ann", config).get("/task")
    assert ("You have judged all" in page.text, "has closed all batches" in page.text) == (False, True)


def test_a_lead_sees_progress_quality_and_adjudicates(world, visit):
    world.add(make_task("t1", 2), make_task("t2", 2), num_labelers=2)
    for name, order in (("ann", (1, 2)), ("bob", (2, 1))):
        client = visit(name, PLAIN)
        page = client.get("/task")
        while "Nothing to judge" not in page.text:
            u_first = page.text.index("response u") < page.text.index("response v")
            page = client.post("/task/answer", data=form(page) | ranks(*(order if u_first else order[::-1])))
    eve = visit("eve", PLAIN)
    page = eve.get("/lead")
    assert "4 of 4 judgments; 0 of 2 tasks are open" in page.text
    page = eve.get("/lead/quality")
    assert "4 answers to 2 tasks" in page.text
    assert "0.00" in page.text  # they agree on nothing
    page = eve.get("/lead/task", params={"task": "t2"})
    assert "Adjudicate" in page.text
    # In the letters of this page: ann put u first, bob v.
    u = "A" if page.text.index("t2: response u") < page.text.index("t2: response v") else "B"
    ranked = {name: "ranks A 1, B 2" if (u == "A") == (name == "ann") else "ranks A 2, B 1" for name in ("ann", "bob")}
    for name in ("ann", "bob"):
        assert ranked[name] in page.text.split(f'<th scope="row">{name}</th>')[1].split("</tr>")[0]
    page = eve.post("/task/answer", data=form(page) | ranks(1, 1))
    assert "1 adjudication." in page.text
    assert [(r.task_id, r.labeler) for r in world.store.rankings("main")] == [
        ("t1", "ann"), ("t1", "bob"), ("t2", "eve"),
    ]  # fmt: skip


def test_a_lead_reads_every_answer_note_and_skip(world, visit):
    world.add(make_task("t1", 2), make_task("t2", 2), num_labelers=2)
    ann, bob, eve = visit("ann", PLAIN), visit("bob", PLAIN), visit("eve", PLAIN)
    page = ann.get("/task")
    assert "1 is the best" in page.text.split('id="how"')[1].split("</details>")[0]  # next to the task
    page = ann.post("/task/answer", data=form(page) | ranks(1, 2) | {"note": "<b>close</b>", "flags_0": "hallucinates"})
    assert ann.post("/task/skip", data=form(page, "/task/skip") | {"chosen_reason": "no such"}).status_code == 422
    skipped = {"chosen_reason": "It is not my field", "reason": "law"}
    ann.post("/task/skip", data=form(page, "/task/skip") | skipped)
    bob.post("/task/skip", data=form(bob.get("/task"), "/task/skip") | {"chosen_reason": "It is too upsetting"})
    found = eve.get("/lead/search?kind=any").text
    for words in (
        "&lt;b&gt;close&lt;/b&gt;",
        "hallucinates",
        "It is not my field: law",
        "It is too upsetting",
        "ranks",
    ):
        assert words in found, words
    assert "It is too upsetting" not in eve.get("/lead/search?batch=main&labeler=ann").text
    assert "&lt;b&gt;close" not in eve.get("/lead/search?batch=main&kind=skip&after=x").text
    own = [re.findall(r"ranks ([A-I] \d, [A-I] \d)", page) for page in (found, eve.get("/lead/task?task=t1").text)]
    own += [re.findall(r"ranks ([A-I] \d, [A-I] \d)", eve.get("/lead/task?task=t2").text)]
    assert (len(own[0]), own[0]) == (1, own[1] or own[2])  # the same letters on both pages
    assert ann.get("/lead/search?kind=any").status_code == 403
    assert "What labelers said" not in ann.get("/task").text


def test_an_export_says_what_it_leaves_out(world, visit):
    world.add(make_task("t1", 2), make_task("t2", 2), replace(make_task("g1", 2), gold_ranks=(1, 2)))
    world.add(replace(make_task("t1", 2), task_id="r1", repeat_of="t1"))
    ann = visit("ann", PLAIN)
    page = ann.get("/task")
    while "Nothing to judge" not in page.text:
        page = ann.post("/task/answer", data=form(page) | ranks(*((1, 1) if "t2: response" in page.text else (1, 2))))
    eve = visit("eve", PLAIN)
    page = eve.get("/lead/export?batch=main&format=trl")
    for words in ("1 row.", "tie", "gold task", "hidden repeat", "responses 1 and 2 are tied; left out"):
        assert words in page.text, words
    rows = eve.get("/lead/export/rows?batch=main&format=trl")
    assert "main.trl.jsonl" in rows.headers["content-disposition"]
    assert json.loads(rows.headers["heed-left-out"]) == {"tie": 1, "gold task": 1, "hidden repeat": 1}
    assert [json.loads(line)["prompt"][0]["content"] for line in rows.text.splitlines()] == ["Say t1"]
    report = eve.get("/lead/export/report?batch=main&format=trl").text.splitlines()
    assert [json.loads(line)["kind"] for line in report] == ["tie", "gold task", "hidden repeat"]
    assert "Nothing was left out." in eve.get("/lead/export?batch=main&format=heed").text
    for path in ("/lead/export", "/lead/export/rows", "/lead/export/report"):
        assert ann.get(f"{path}?batch=main&format=trl").status_code == 403
        assert eve.get(f"{path}?batch=main&format=nothing").status_code == 409
        assert eve.get(f"{path}?batch=nothing&format=trl").status_code == 409


def test_a_lead_invites_and_closes(world, visit):
    eve = visit("eve")
    page = eve.get("/lead/people")
    page = eve.post("/lead/invite", data=form(page, "/lead/invite") | {"names": "cy", "role": "labeler"})
    link = page.text.split("/welcome/")[1].split("<")[0]
    assert world.accounts.invitation(link).name == "cy"
    page = eve.post("/lead/invite", data=form(page, "/lead/invite") | {"names": " ", "role": "labeler"})
    assert page.status_code == 422
    token = form(page, "/sign-out")["csrf"]
    eve.post("/lead/state", data={"name": "bob", "state": "closed", "csrf": token})
    assert world.accounts.account("bob").state == "closed"
    page = eve.post("/lead/state", data={"name": "eve", "state": "closed", "csrf": token})
    assert page.status_code == 403


def test_tasks_come_in_random_order_by_default(world, visit):
    names = [f"t{number}" for number in range(10)]
    world.add(*map(make_task, names))
    config = LabelingConfig(asks_ratings=False)
    ann, found = visit("ann", config), []
    for _ in names:
        found += re.findall(r"<p>Say (t\d)", ann.get("/task").text)
        page = ann.get("/task")  # a reload, after which it is the same task
        assert f"Say {found[-1]}" in page.text
        ann.post("/task/answer", data=form(page) | ranks(1, 2, 3))
    assert sorted(found) == names != found


WARNING = "Describes <violence> & a death"


def test_a_warning_comes_first_and_time_counts_from_the_reveal(world, visit):
    warned = [replace(make_task(name), warning=WARNING) for name in ("t1", "t2")]
    world.add(*warned, make_task("t3"), num_labelers=2)
    ann, eve = visit("ann", PLAIN), visit("eve", PLAIN)
    for _ in range(2):  # a reload changes nothing
        page = ann.get("/task")
        assert "Describes &lt;violence&gt; &amp; a death" in page.text
        assert "Say t1" not in page.text
        assert "t1: response" not in page.text
        world.clock.now += 60
    revealing, skipping = form(page, "/task/reveal"), form(page, "/task/skip")
    assert ann.post("/task/answer", data=revealing | ranks(1, 2, 3)).status_code == 422
    refused = ann.post("/task/skip", data={**skipping, "chosen_reason": ""})
    assert (refused.status_code, "Say t1" in refused.text) == (422, False)
    assert world.store.judgments("main") == []
    assert visit("bob", PLAIN).post("/task/reveal", data=revealing).status_code == 403
    shown = ann.post("/task/reveal", data=revealing)
    assert "Say t1" in shown.text
    assert "Content warning: Describes" in shown.text
    world.clock.now += 5
    assert "Say t1" in ann.get("/task").text  # a reload keeps it open, and the time too
    ann.post("/task/reveal", data=revealing)
    world.clock.now += 2
    ann.post("/task/answer", data=form(ann.get("/task")) | ranks(1, 2, 3))
    page = ann.get("/task")
    assert "Say t2" not in page.text
    ann.post("/task/skip", data=form(page, "/task/skip"))
    assert "Say t3" in ann.get("/task").text
    answered, skipped = world.store.judgments("main")
    assert (answered.milliseconds, skipped.kind, skipped.note) == (7_000, "skip", "I do not want to judge this")
    history = ann.get("/answers").text
    assert "Say t2" not in history
    assert "Content warning: Describes" in history
    hidden, open_ = (eve.get(f"/lead/task?task=t1{more}").text for more in ("", "&revealed=true"))
    assert ("Say t1" in hidden, "Say t1" in open_) == (False, True)
    # Whoever takes the skip back is warned again.
    assert "Say t2" not in ann.post("/answers/undo", data=form(ann.get("/answers"), "/answers/undo")).text


def test_revealing_a_task_taken_back_shows_that_task(world, visit):
    """Even if another task was open meanwhile."""
    world.add(make_task("t1"), replace(make_task("t2"), warning=WARNING))
    ann = visit("ann", PLAIN)
    assert "Say t1" in visit("bob", PLAIN).get("/task").text
    ann.post("/task/skip", data=form(ann.get("/task"), "/task/skip"))  # t2
    world.clock.now += PLAIN.lease_seconds + 1  # so that t1 is free again
    assert "Say t1" in ann.get("/task").text
    page = ann.post("/answers/undo", data=form(ann.get("/answers"), "/answers/undo"))
    assert ("Describes" in page.text, "Say t2" in page.text) == (True, False)
    page = ann.post("/task/reveal", data=form(page, "/task/reveal"))
    assert ("Say t2" in page.text, "Say t1" in page.text) == (True, False)


def test_a_lead_exports_and_erases_a_person(world, visit):
    world.add(make_task("t1"), make_task("t2"), num_labelers=2)
    ann, eve = visit("ann", PLAIN), visit("eve", PLAIN)
    answered = form(ann.get("/task")) | ranks(1, 2, 2) | {"note": "my own words"}
    assert ann.post("/task/answer", data=answered).status_code == 200
    pseudonym = world.accounts.pseudonyms()["ann"]
    paths = ("/lead", "/lead/quality", "/lead/search?kind=any", "/lead/people", "/lead/task?task=t1")
    assert all(">ann<" in eve.get(path).text for path in paths)
    for names, whose in (("", pseudonym), ("&names=true", "ann")):
        rows = eve.get(f"/lead/export/rows?batch=main&format=rankings{names}").text
        assert json.loads(rows)["labeler"] == whose
    page = eve.get("/lead/person?name=ann")
    assert pseudonym in page.text
    held = eve.post("/lead/person/data", data=form(page, "/lead/person/data"))
    assert held.headers["content-disposition"].endswith("ann.json")
    assert held.json()["judgments"][0]["note"] == "my own words"
    erasing = form(page, "/lead/person/erase")
    assert eve.post("/lead/person/erase", data={**erasing, "typed": "Ann"}).status_code == 422
    assert world.accounts.account("ann") is not None
    assert eve.post("/lead/person/erase", data={**erasing, "name": "eve", "typed": "eve"}).status_code == 403
    done = eve.post("/lead/person/erase", data={**erasing, "typed": "ann"})
    assert f"as those of <code>{pseudonym}</code>" in done.text
    for path in paths:
        shown = eve.get(path).text
        assert "ann" not in re.findall(r"\w+", shown)
        assert "my own words" not in shown
    assert pseudonym in eve.get("/lead/quality").text
    assert ann.get("/task", follow_redirects=False).headers["location"] == "/sign-in"
    assert eve.get("/lead/person?name=ann").status_code == 409


def test_new_instructions_are_read_again(world, visit):
    world.add(make_task("t1"))
    ann = visit("ann")
    assert ann.get("/task").url.path == "/task"
    changed = LabelingConfig(instructions="# Now\n\nBe strict.")
    ann = visit("ann", changed, has_read=False)
    page = ann.get("/task")
    assert page.url.path == "/instructions"
    assert "Be strict." in page.text


def test_a_batch_that_does_not_exist_is_named_to_leads(world, visit):
    misspelt = LabelingConfig(batches=("mian", "main"))
    assert "&#39;mian&#39;, &#39;main&#39;; it has none yet." in visit("eve", misspelt).get("/lead").text
    world.add(make_task("t1"))
    assert "&#39;mian&#39;; it has &#39;main&#39;." in visit("eve", misspelt).get("/lead").text
    screened = LabelingConfig(screening=Screening(batch="gold"))
    assert "&#39;gold&#39;; it has &#39;main&#39;." in visit("eve", screened).get("/lead").text
    page = visit("ann", screened).get("/task").text
    assert ("none has been added" in page, "all of the first tasks" in page) == (True, False)
    world.add(make_task("g1"), batch="gold")
    assert "does not have" not in visit("eve", screened).get("/lead").text


def test_a_lead_configures_by_a_file(tmp_path):
    path = tmp_path / "label.toml"
    path.write_text('title = "Helpful"\nbatches = ["a"]\nflags = ["rude"]\n[screening]\nbatch = "gold"\n')
    config = LabelingConfig.load(path)
    assert (config.title, config.flags, config.screening.min_tasks) == ("Helpful", ("rude",), 10)
    path.write_text('titel = "x"\nlease_seconds = -4\n[server]\nzzz = 1\npublic_url = "x"\n')
    with pytest.raises(
        ValueError,
        match=r"label.toml: lease_seconds: Input should be greater than 0, found -4; server.public_url: 'x' was given; "
        r".*"
        r"server.zzz: unknown key; known keys are public_url, .*; titel: unknown key; did you mean title\?$",
    ):
        LabelingConfig.load(path)
    path.write_text("title = \n")
    with pytest.raises(ValueError, match=r"label.toml: .*line 1"):
        LabelingConfig.load(path)


def test_time_counts_from_when_the_task_was_given(world, visit):
    """However often it is loaded again; from the start, where the lease ran out and it was given again."""
    world.add(make_task("t1", 2), make_task("t2", 2), make_task("t3", 2))
    ann = visit("ann", PLAIN)
    ann.get("/task")
    world.clock.now += 300
    page = ann.get("/task")
    world.clock.now += 1
    page = ann.post("/task/answer", data=form(page) | ranks(1, 2))
    world.clock.now += 100_000  # the session is over as well
    ann = visit("ann", PLAIN)
    page = ann.get("/task")
    world.clock.now += 2
    page = ann.post("/task/answer", data=form(ann.get("/task")) | ranks(1, 2))
    page = ann.post("/answers/undo", data=form(ann.get("/answers"), "/answers/undo"))
    world.clock.now += 5
    fields = form(ann.get("/task"))
    ann.post("/task/answer", data=fields | ranks(1, 2))
    # An answer again includes the time of the one that was taken back.
    times = [(act.task_id, act.kind, act.milliseconds) for act in world.store.judgments("main")]
    assert times == [("t1", "answer", 301_000), ("t2", "answer", 2_000), ("t1", "undo", 0), ("t1", "answer", 306_000)]


def test_labelers_are_shown_no_ids(world, visit):
    """An id may say that a task is gold or a repeat; nothing that a labeler is sent holds one."""
    gold = replace(make_task("gold-7", 2), prompt=(Message("user", "Say x"),), gold_ranks=(1, 2), responses=("a", "b"))
    world.add(gold, replace(gold, task_id="repeat-of-gold-7", gold_ranks=(), repeat_of="gold-7"), batch="batch")
    ann = visit("ann", PLAIN)
    seen = []
    for given in ((1, 2), (2, 1)):
        page = ann.get("/task")
        fields = form(page)
        seen += [page, ann.post("/task/answer", data=fields | {"rank_0": "1"})]
        seen.append(ann.post("/task/answer", data=fields | ranks(*given)))
        seen.append(ann.post("/task/answer", data=fields | ranks(1, 1)))  # contradicts what is stored
    assert seen[-1].status_code == 409
    page = ann.get("/answers")
    assert "Take back the answer to “Say x”" in page.text
    seen += [page, ann.post("/answers/undo", data=form(page, "/answers/undo") | {"revision": "9"})]
    assert seen[-1].status_code == 409
    for page in seen:
        assert "gold" not in page.text.replace("golden", ""), page.text
        assert "repeat" not in page.text, page.text
    handles = {one.handle for one in world.store.tasks("batch")}
    assert len(handles) == 2
    assert all(len(handle) >= 16 for handle in handles)


def test_the_page_counts_what_is_left_for_this_labeler(world, visit):
    """Without what others have finished, and with a repeat only once its original is judged."""
    tasks = [make_task(f"t{number}", 2) for number in range(4)]
    world.add(*tasks, replace(tasks[0], task_id="again", repeat_of="t0"))
    ann, bob = visit("ann", PLAIN), visit("bob", PLAIN)
    assert "You have judged 0 tasks. 4 are left for you, with this one." in ann.get("/task").text
    page = ann.post("/task/answer", data=form(ann.get("/task")) | ranks(1, 2))
    assert "You have judged 1 task. 4 are left for you, with this one." in page.text
    assert "2 are left for you" in bob.get("/task").text  # one is Ann's now, one is judged, and nothing is repeated yet
    ann.post("/task/skip", data=form(ann.get("/task")) | {"reason": "too hard"})
    assert "2 are left for you" in ann.get("/task").text  # another one is Bob's now


def test_more_tasks_than_the_page_counts(world, visit, monkeypatch):
    monkeypatch.setattr("preferences.page.service.MAX_LEFT", 3)
    monkeypatch.setattr("preferences.page.labeler_pages.MAX_LEFT", 3)
    world.add(*(make_task(f"t{number}", 2) for number in range(5)))
    assert "At least 3 are left for you" in visit("ann", PLAIN).get("/task").text


def test_an_answer_taken_back_is_filled_in(world, visit):
    """Even if another task was open meanwhile, and in the order in which this labeler sees the responses."""
    world.add(make_task("t1"), make_task("t2"))
    ann = visit("ann")
    ratings = {f"rating_{place}": str(place + 2) for place in range(3)}
    first = ann.get("/task")
    ann.post("/task/answer", data=form(first) | ranks(3, 1, 2) | ratings | {"note": "hm", "flags_1": "hallucinates"})
    assert "t2: response" in ann.get("/task").text
    page = ann.post("/answers/undo", data=form(ann.get("/answers"), "/answers/undo"))
    assert "t1: response" in page.text
    assert "Your earlier answer is filled in. You took it back" in page.text
    checked = re.findall(r'name="(\w+)" value="(\w+)"[^>]* checked', page.text)
    assert checked == [("rating_0", "2"), ("rank_0", "3"), ("rating_1", "3"), ("rank_1", "1"),
                       ("flags_1", "hallucinates"), ("rating_2", "4"), ("rank_2", "2")]  # fmt: skip
    assert ">\nhm</textarea>" in page.text
    fields = form(page) | ranks(1, 2, 3) | ratings
    assert "t2: response" in ann.post("/task/answer", data=fields).text
    # Others cannot open a task by its handle.
    handle = fields["task"]
    assert "Change your answer" in ann.get(f"/task?task={handle}").text
    assert "Your earlier answer" not in visit("bob").get(f"/task?task={handle}").text


def test_an_answer_is_changed_in_place(world, visit):
    world.add(make_task("t1"))
    ann, bob = visit("ann", PLAIN), visit("bob", PLAIN)
    world.clock.now += 1
    page = ann.get("/task")
    world.clock.now += 20
    ann.post("/task/answer", data=form(page) | ranks(3, 1, 2) | {"note": "hm", "flags_1": "hallucinates"})
    path = re.search(
        r'href="(/task\?task=[^"]+)" aria-label="Change the answer to “Say t1”"', ann.get("/answers").text
    )[1]
    page = ann.get(path)
    assert "Change your answer" in page.text
    assert "It counts until you save the change." in page.text
    assert "/task/skip" not in page.text
    checked = re.findall(r'name="(\w+)" value="(\w+)"[^>]* checked', page.text)
    assert checked == [("rank_0", "3"), ("rank_1", "1"), ("flags_1", "hallucinates"), ("rank_2", "2")]
    assert "Nothing to judge" in bob.get("/task").text
    assert "Nothing to judge" in bob.get(path).text
    wrong = ann.post("/task/answer", data=form(page) | ranks(1, 2, 9))
    assert (wrong.status_code, "Change your answer" in wrong.text) == (422, True)
    world.clock.now += 5
    fields = form(page) | ranks(1, 2, 3)
    after = ann.post("/task/answer", data=fields)
    assert (after.url.path, after.text.count("Change the answer")) == ("/answers", 1)
    assert ann.post("/task/answer", data=fields).url.path == "/answers"
    first, second = world.store.judgments("main")
    assert (first.milliseconds, second.milliseconds, second.revision) == (20_000, 25_000, 1)
    assert [second.ranks[index] for index in second.shown_order] == [1, 2, 3]
    again = ann.post("/task/answer", data=fields | ranks(2, 1, 3))  # from the page before the change
    assert (again.status_code, len(world.store.judgments("main"))) == (409, 2)


def test_a_task_with_a_warning_is_changed_without_asking_again(world, visit):
    world.add(replace(make_task("t1"), warning="describes an accident"))
    ann = visit("ann", PLAIN)
    ann.post("/task/reveal", data=form(ann.get("/task"), "/task/reveal"))
    ann.post("/task/answer", data=form(ann.get("/task")) | ranks(3, 1, 2))
    path = re.search(r'href="(/task\?task=[^"]+)"', ann.get("/answers").text)[1]
    page = ann.get(path)
    assert "t1: response" in page.text
    assert ann.post("/task/answer", data=form(page) | ranks(1, 1, 1)).url.path == "/answers"
    assert [judgment.kind for judgment in world.store.judgments("main")] == ["answer", "answer"]


def test_a_task_that_was_answered_without_its_reveal_can_be_changed(world, visit):
    """As through the API, where the client decides how to show the warning."""
    world.add(replace(make_task("t1"), warning="describes an accident"))
    ann = visit("ann", PLAIN)
    lease = world.store.lease("ann", seconds=60, batch="main")
    world.store.submit(lease, Answer((1, 2, 3), 1_000), client="api", instructions_version="1")
    page = ann.get(re.search(r'href="(/task\?task=[^"]+)"', ann.get("/answers").text)[1])
    assert "t1: response" not in page.text
    page = ann.post("/task/reveal", data=form(page, "/task/reveal"))
    assert "t1: response" in page.text
    assert ann.post("/task/answer", data=form(page) | ranks(1, 1, 1)).url.path == "/answers"
    assert [judgment.ranks for judgment in world.store.judgments("main")][1] == (1, 1, 1)


def test_a_task_taken_back_waits_until_new_instructions_are_read(world, visit):
    world.add(make_task("t1"), make_task("t2"))
    ann = visit("ann", PLAIN)
    ann.post("/task/answer", data=form(ann.get("/task")) | ranks(1, 2, 3))
    page = ann.post("/answers/undo", data=form(ann.get("/answers"), "/answers/undo"))
    assert "t1: response" in page.text
    path = f"/task?task={form(page)['task']}"
    newer = PLAIN.model_copy(update={"instructions": "Prefer what is true."})
    later = visit("ann", newer, has_read=False)
    page = later.get(path)
    assert (page.url.path, "t1: response" in page.text) == ("/instructions", False)
    later.post("/instructions", data=form(page, "/instructions"))
    assert "t1: response" in later.get(path).text


def test_leads_know_tasks_by_their_first_words(world, visit):
    long = "Tell me a story about\n a fox who " + "walks " * 30
    told = replace(make_task("2d4b34274503a8a7", 2), prompt=(Message("user", long),))
    world.add(told, replace(make_task("t2", 2), warning="blood"), num_labelers=2)
    for name, best in (("ann", 0), ("bob", 1)):
        labeler = visit(name, PLAIN)
        for task_id in ("2d4b34274503a8a7", "t2"):
            if task_id == "t2":
                labeler.post("/task/reveal", data=form(labeler.get("/task"), "/task/reveal"))
            given = [1 if index == best else 2 for index in display_order(task_id, name, 2)]
            labeler.post("/task/answer", data=form(labeler.get("/task")) | ranks(*given))
    eve = visit("eve", PLAIN)
    for path in ("/lead/queue", "/lead/search?kind=any"):
        text = eve.get(path).text
        assert ">Tell me a story about a fox who walks walks walks" in text
        assert ">Content warning: blood</a>" in text
        assert ">2d4b34274503a8a7<" not in text


def test_a_lead_takes_an_adjudication_back(world, visit):
    world.add(make_task("t1", 2))
    ann, eve = visit("ann", PLAIN), visit("eve", PLAIN)
    ann.post("/task/answer", data=form(ann.get("/task")) | ranks(1, 2))
    for name in ("eve", "eve"):  # twice: the second after it was taken back
        page = eve.get("/lead/task", params={"task": "t1"})
        eve.post("/task/answer", data=form(page) | ranks(1, 1))
        assert [ranking.labeler for ranking in world.store.rankings("main")] == [name]
        page = eve.get("/answers")
        assert "Take back the adjudication of “Say t1”" in page.text
        page = eve.post("/answers/undo", data=form(page, "/answers/undo"))
        assert page.status_code == 200
        assert [ranking.labeler for ranking in world.store.rankings("main")] == ["ann"]
    kinds = [act.kind for act in world.store.judgments("main")]
    assert kinds == ["answer", "adjudication", "undo", "adjudication", "undo"]
    assert world.store.progress("main").num_judgments == 1
    assert eve.get("/lead/quality").text.count("0 adjudications") == 1


def test_answers_are_timed_by_the_server(world, visit):
    world.add(make_task("t1", 2))
    ann = visit("ann", PLAIN)
    fields = form(ann.get("/task"))
    world.clock.now += 12.5
    ann.post("/task/answer", data=fields | ranks(1, 2))
    assert world.store.judgments("main")[0].milliseconds == 12_500


def test_a_large_export_is_sent_in_parts(world, visit):
    """So memory holds the batch's texts once, and not also all the lines that are made from them."""
    texts = tuple(letter * 100_000 for letter in "uvw")
    world.add(*(Task(f"t{number}", (Message("user", "é" * 1_000),), texts, ("a", "b", "c")) for number in range(20)))
    ann = visit("ann", PLAIN)
    while "Nothing to judge" not in (page := ann.get("/task")).text:
        ann.post("/task/answer", data=form(page) | ranks(1, 2, 3))
    eve = visit("eve")
    asked = "/lead/export/rows?batch=main&format=rankings"
    with eve.stream("GET", asked) as sent:
        assert "content-length" not in sent.headers
        parts = list(sent.iter_raw())
    assert len(parts) > 10
    rows = [json.loads(line) for line in b"".join(parts).splitlines()]
    assert [row["task_id"] for row in rows] == [f"t{number}" for number in range(20)]
    assert sorted(rows[0]["responses"]) == sorted(texts)


def test_a_lead_voids_a_judgment_with_a_reason(world, visit):
    world.add(make_task("t1", 2))
    ann, eve = visit("ann", PLAIN), visit("eve", PLAIN)
    ann.post("/task/answer", data=form(ann.get("/task")) | ranks(1, 2))
    assert "1 answer to 1 task, 0 skips" in eve.get("/lead/quality").text
    fields = form(eve.get("/lead/task?task=t1"), "/lead/void")
    assert ann.post("/lead/void", data=fields | {"reason": "x"}).status_code == 403
    assert eve.post("/lead/void", data=fields | {"csrf": "x", "reason": "x"}).status_code == 403
    page = eve.post("/lead/void", data=fields | {"reason": " "})
    assert (page.status_code, "a reason was expected" in page.text) == (409, True)
    assert world.store.progress("main").num_judgments == 1
    page = eve.post("/lead/void", data=fields | {"reason": "a script <b>answered</b>"})
    assert page.url.path == "/lead/task"
    assert "a script &lt;b&gt;answered&lt;/b&gt;" in page.text
    assert "/lead/void" not in Forms(page.text).forms  # no current judgment is left
    assert "Nothing has been judged yet" in eve.get("/lead/quality").text
    assert "a lead voided it" in eve.get("/lead/search?kind=void").text
    assert "eve</td><td>voided the judgment on task &#39;t1&#39; of ann" in eve.get("/lead/people").text
    assert "a lead voided it, so it does not count: a script" in ann.get("/answers").text
    page = ann.get("/task")  # asked again, and not reminded of the voided answer
    assert "Your earlier answer" not in page.text
    assert "checked" not in page.text.partition('id="answer"')[2].partition("</form>")[0]
    ann.post("/task/answer", data=form(page) | ranks(2, 1))
    assert [one.kind for one in world.store.judgments("main")] == ["answer", "void", "answer"]
    assert world.store.progress("main").num_judgments == 1


@pytest.mark.usefixtures("cheap_hashes")
@pytest.mark.parametrize("seconds", [1_764_150_000_000.0, -1e18, 1e300, -1.0])
def test_a_batch_with_an_impossible_time_can_be_read(new_database, seconds):
    url = new_database()
    accounts = Accounts(url)
    accounts.accept(accounts.invite("eve", "lead"))
    with LabelStore(url, clock=lambda: seconds) as store:  # as imports stored it before times were checked
        store.add_tasks([make_task("t1", 2), make_task("t2", 2)], batch="main", num_labelers=2)
        for number, time_ in enumerate((seconds, 1_764_150_000.0)):
            store._clock = lambda time_=time_: time_
            how = {"client": "import", "instructions_version": ""}
            store.adjudicate(store.reopened("eve", f"t{number + 1}"), Answer((1, 2), 0), **how)
            lease = replace(store.reopened("ann", f"t{number + 1}"), expires_at=0.0)
            store.submit(lease, Answer((1, 2), 0, note="here"), **how)
        client = TestClient(make_app(store, accounts, PLAIN))
        client.cookies.set("heed_session", accounts.open_session("eve"))
        for path in ("/lead/search?batch=main&kind=any", "/lead/quality?batch=main", "/lead/task?task=t1", "/answers"):
            page = client.get(path)
            assert page.status_code == 200, (path, page.text)
            assert ("impossible time" in page.text) == ("quality" not in path)
        bearer = {"Authorization": f"Bearer {accounts.open_session('eve')}"}
        assert client.get("/api/quality/main", headers=bearer).json()["num_answers"] == 2
        form_fields = form(client.get("/lead/task?task=t1"), "/lead/void")
        assert client.post("/lead/void", data=form_fields | {"reason": "milliseconds"}).status_code == 200
        assert [one.kind for one in store.judgments("main")].count("void") == 1
    accounts.close()


def test_the_quality_page_names_who_is_below_chance(world, visit):
    world.add(*(make_task(f"t{number}", 2) for number in range(40)), num_labelers=4)
    for name, best in (("ann", 0), ("bob", 0), ("cy", 0), ("up", 1)):
        for lease in world.store.lease_many(name, 40, seconds=60, batch="main"):
            ranks_shown = tuple(1 if index == best else 2 for index in lease.order)
            world.store.submit(lease, Answer(ranks_shown, 9_000), client="test", instructions_version="1")
    page = visit("eve", PLAIN).get("/lead/quality").text
    rows = {name: page.partition(f'<tr><th scope="row">{name}</th>')[2].partition("</tr>")[0] for name in ("ann", "up")}
    assert "below chance" not in rows["ann"]
    assert "<strong>below chance</strong>" in rows["up"]
    assert re.search(r"<td>0\.67 <span class=\"interval\">0\.\d\d to 0\.\d\d</span></td>", rows["ann"])
